"""``cvt``: every pair of types, rounding mode and saturation."""

from __future__ import annotations

from cupyattn.emulator.codegen.generator import CodeGenerator, Lowering
from cupyattn.emulator.ptx.model import Instruction, operand_dtype

_FLOATS = ("f16", "bf16", "f32", "f64")
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")
_MODIFIERS = (*_ROUNDINGS, "ftz", "sat", "satfinite", "relu")
_SINGLE = {"f16": "f4", "bf16": "f4", "f32": "f4", "f64": "f8"}  # what a float is read as


def _read_float(gen: CodeGenerator, x: Instruction, operand: str, kind: str) -> str:
    """Return an expression for a float operand as float32 (float64 for f64)."""
    if kind == "f16":
        return f"half_to_float({gen.value(operand, 'u2')})"
    if kind == "bf16":
        return f"bfloat_to_float({gen.value(operand, 'u2')})"
    value = gen.value(operand, _SINGLE[kind])
    if kind == "f32" and "ftz" in x.parts and operand not in gen.clean:
        return f"flush({value})"
    return value


def _limited(x: Instruction, value: str, kind: str) -> str:
    """Return an expression with the limits of ``.satfinite`` and ``.relu``."""
    if "satfinite" in x.parts:
        value = f"clamp_finite({value}, {kind!r})"
    return f"relu({value})" if "relu" in x.parts else value


def _write_float(gen: CodeGenerator, x: Instruction, target: str, value: str, kind: str) -> None:
    """Round `value` (float32 or float64) to `kind`, saturate, and assign it."""
    rounding = next((p for p in x.parts if p in _ROUNDINGS), "rn")
    saturate = "sat" in x.parts
    if kind in ("f16", "bf16"):
        if saturate:
            value = f"saturate({value})"
        value = _limited(x, value, kind)
        name = "float_to_half" if kind == "f16" else "float_to_bfloat"
        gen.assign(target, f"{name}({value}, {rounding!r})", "u2")
        return
    if saturate:
        value = f"saturate({value})"
    gen.assign(target, value, _SINGLE[kind])


def _float_to_float(gen: CodeGenerator, x: Instruction, to: str, of: str) -> None:
    rounding = next((p for p in x.parts if p in _ROUNDINGS), "rn")
    value = _read_float(gen, x, x.operands[1], of)
    if rounding.endswith("i"):
        value = f"round_to_integral({value}, {rounding!r})"
        if to == "f16":
            gen.assign(x.operands[0], f"float_to_half({value}, 'rn')", "u2")
            return
    if to == "f64":
        value = f"np.asarray({value}).astype(f8)"
    elif to == "f32" and of == "f64":
        value = f"round_single({value}, {rounding!r}, {'ftz' in x.parts})"
    _write_float(gen, x, x.operands[0], value, to)


def _pair(gen: CodeGenerator, x: Instruction) -> None:
    """``cvt.f16x2.f32 d, high, low``."""
    kind = x.parts[-2].removesuffix("x2")
    rounding = next((p for p in x.parts if p in _ROUNDINGS), "rn")
    high, low = (
        _limited(x, _read_float(gen, x, operand, "f32"), kind) for operand in x.operands[1:3]
    )
    kind = "half" if kind == "f16" else "bfloat"
    parts = ", ".join(f"float_to_{kind}({v}, {rounding!r})" for v in (low, high))
    gen.assign(x.operands[0], f"pack(({parts}), u4, 16)", "u4")


def _convert(gen: CodeGenerator, x: Instruction) -> None:
    to, of = x.parts[-2:]
    if unknown := [part for part in x.parts[1:-2] if part not in _MODIFIERS]:
        raise gen.unsupported(x, f".{unknown[0]}")
    if "satfinite" in x.parts and (of != "f32" or "f16" not in to):
        raise gen.unsupported(x, f".satfinite of {to} from {of}")
    if to in ("f16x2", "bf16x2") and of == "f32":
        _pair(gen, x)
        return
    known = (*_FLOATS, *("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"))
    if to not in known or of not in known:
        raise gen.unsupported(x)
    target, operand = x.operands
    rounding = next((p for p in x.parts if p in _ROUNDINGS), "rn")
    if to in _FLOATS and of in _FLOATS:
        _float_to_float(gen, x, to, of)
    elif of in _FLOATS:
        dtype = operand_dtype(to)
        if not rounding.endswith("i"):
            raise gen.unsupported(x, "a float to an integer without .rni, .rzi, .rmi or .rpi")
        value = _read_float(gen, x, operand, of)
        gen.assign(target, f"float_to_int({value}, {dtype!r}, {rounding!r})", dtype)
    elif to in _FLOATS:
        value = gen.value(operand, operand_dtype(of))
        if to == "bf16" or (to == "f64" and rounding != "rn" and of in ("u64", "s64")):
            raise gen.unsupported(x)
        if to == "f16":  # through float64, exact for what does not overflow float16
            value = f"np.asarray({value}).astype(f8)"
        else:
            value = f"int_to_float({value}, {_SINGLE[to]!r}, {rounding!r})"
        _write_float(gen, x, target, value, to)
    else:
        dtype = operand_dtype(to)
        value = gen.value(operand, operand_dtype(of))
        if "sat" in x.parts:
            gen.assign(target, f"int_saturated({value}, {dtype!r})", dtype)
        else:
            if operand_dtype(of) != dtype:  # a wider register extends by the sign of the target
                value = f"{value}.astype({dtype})"
            gen.assign(target, value, dtype)


LOWERINGS: dict[str, Lowering] = {"cvt": _convert}
