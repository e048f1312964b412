"""``cvt``: the forms that sm_75 has (no bfloat16, tf32, .relu or packed pairs: they need sm_80)."""

from __future__ import annotations

import numpy as np
from support.golden.elementwise import Instruction, Table
from support.golden.values import floats, integers

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_BITS = {"16": "b16", "32": "b32", "64": "b64", "8": "b32"}


def _register(kind: str) -> str:
    return kind if kind[0] == "f" else _BITS[kind[1:]]


def _convert(to: str, of: str, *modifiers: str) -> Instruction:
    return Instruction(".".join(("cvt", *modifiers, to, of)), _register(to))


def _holds(to: str, of: str) -> bool:
    """Tell whether every value of one integer type is one of another."""
    if to[0] == of[0]:
        return int(to[1:]) >= int(of[1:])
    return of[0] == "u" and int(to[1:]) > int(of[1:])


def _to_integers(of: str) -> list[Instruction]:
    plain = [_convert(to, of, mode) for mode in _INTEGRAL for to in _INTEGERS]
    return [*plain, *(_convert(to, of, "rni", "sat") for to in ("s8", "u16"))]


def _from_f32() -> Table:
    instructions = [_convert("f16", "f32", mode) for mode in ("rn", "rz", "rm", "rp")]
    for mode in ("rn", "rz"):
        instructions += [
            _convert("f16", "f32", mode, *modifiers)
            for modifiers in (("ftz",), ("sat",), ("ftz", "sat"))
        ]
    instructions += [
        _convert("f32", "f32", *modifiers) for modifiers in (("ftz",), ("sat",), ("ftz", "sat"))
    ]
    for mode in _INTEGRAL:
        instructions += [
            _convert("f32", "f32", mode, *modifiers)
            for modifiers in ((), ("ftz",), ("sat",), ("ftz", "sat"))
        ]
    instructions += [_convert("f64", "f32", *modifiers) for modifiers in ((), ("ftz",), ("sat",))]
    instructions += _to_integers("f32")
    instructions += [
        _convert(to, "f32", mode, "ftz")
        for mode in ("rmi", "rpi")
        for to in ("s8", "u16", "s32", "u32", "s64", "u64")
    ]
    return Table("cvt_f32", ("f32",), (floats(1, np.float32, 48),), tuple(instructions))


def _from_f16() -> Table:
    instructions = [
        _convert("f32", "f16"),
        _convert("f32", "f16", "ftz"),
        _convert("f32", "f16", "sat"),
        _convert("f64", "f16"),
        _convert("f16", "f16", "sat"),
        *(_convert("f16", "f16", mode) for mode in _INTEGRAL),
        *_to_integers("f16"),
    ]
    return Table("cvt_f16", ("f16",), (floats(2, np.float16, 48, 10),), tuple(instructions))


def _from_f64() -> Table:
    instructions = [_convert(to, "f64", mode) for to in ("f16", "f32") for mode in _ROUNDINGS]
    instructions += [
        _convert("f32", "f64", "rn", "ftz"),
        *(_convert("f32", "f64", mode, "ftz") for mode in ("rz", "rm", "rp")),
        _convert("f32", "f64", "rn", "sat"),
        _convert("f16", "f64", "rn", "sat"),
        *(_convert("f64", "f64", mode) for mode in _INTEGRAL),
        *_to_integers("f64"),
    ]
    return Table("cvt_f64", ("f64",), (floats(3, np.float64, 32, 40),), tuple(instructions))


def _from_integers(size: int) -> Table:
    kinds = {2: ("u8", "s8", "u16", "s16"), 4: ("u32", "s32"), 8: ("u64", "s64")}[size]
    dtype = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    instructions = []
    for of in kinds:
        instructions += [_convert(to, of, mode) for to in ("f16", "f32") for mode in _ROUNDINGS]
        # The emulator has float64 from 64-bit integers to nearest only.
        instructions += [_convert("f64", of, mode) for mode in _ROUNDINGS[: 1 if size == 8 else 4]]
        instructions += [_convert("f32", of, "rn", "sat")]
        for to in _INTEGERS:
            instructions.append(_convert(to, of))
            if not _holds(to, of):  # ptxas refuses .sat where nothing can saturate
                instructions.append(_convert(to, of, "sat"))
    name = f"cvt_b{8 * size}"
    return Table(name, (f"b{8 * size}",), (integers(4, dtype, 32),), tuple(instructions))


CONVERSIONS = (
    _from_f32(),
    _from_f16(),
    _from_f64(),
    _from_integers(2),
    _from_integers(4),
    _from_integers(8),
)
