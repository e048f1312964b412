"""Floating-point arithmetic, exact and approximate, and conversions (``cvt``).

sm_75 lacks min and max of float16, .NaN and .xorsign of any type, and ``cvt`` of bfloat16, tf32,
.relu and packed pairs: the tables of `NEWER` are for sm_80 and sm_90. The emulator lacks .ftz of
float16.
"""

from __future__ import annotations

import numpy as np
from support.golden.elementwise import Instruction, Table, comparison, paired_comparison
from support.golden.values import (
    UNSIGNED,
    awkward_floats,
    floats,
    integers,
    joined,
    pairs,
    products_below_normal,
    quotients_below_normal,
    random_bits,
    random_numbers,
)

from cupyattn.runtime.arch import arch_of

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_COMPARISONS = (
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
)  # fmt: skip


def _instructions(result: str, *opcodes: str) -> tuple[Instruction, ...]:
    return tuple(Instruction(opcode, result) for opcode in opcodes)


def _some(dtype: type, values: list[float]) -> np.ndarray:
    return np.array(values, dtype)


def _few(dtype: type) -> np.ndarray:
    """The values of which all pairs are tried."""
    info = np.finfo(dtype)
    tiny, eps = float(info.smallest_normal), float(info.eps)
    positive = [
        0.0, 1.0, 1 + eps, 1 - eps / 2, eps, eps / 2, eps / 2 * (1 + eps), 1.5, 3.0, tiny,
        tiny / 2, tiny * eps, tiny * (1 - eps), float(info.max), float(info.max) / 2, np.inf,
    ]  # fmt: skip
    return np.array([*positive, *(-x for x in positive), np.nan], dtype)


def _two(seed: int, dtype: type, exponents: int, count: int = 60) -> tuple[np.ndarray, ...]:
    few = _few(dtype)[[0, 1, 3, 5, 8, 9, 10, 13, 15, 16, 17, 18, 22, 25, 27, 31, 32]]
    bits = UNSIGNED[np.dtype(dtype).itemsize]
    return joined(
        pairs(few, few),
        tuple(random_numbers(seed + i, count, dtype, exponents) for i in range(2)),
        tuple(random_bits(seed + 2 + i, count, bits).view(dtype) for i in range(2)),
    )


def _near_ties(seed: int, count: int) -> tuple[np.ndarray, ...]:
    """Products and addends whose sum lies next to a tie of float32 and of float64.

    a b is near 1 with 48 bits; c moves it to where the float64 sum a b + c rounds onto a tie of
    float32 that the exact sum misses by less than 2^-53: rounding twice goes wrong.
    """
    odd = (random_bits(seed, count, np.uint32) >> np.uint32(9) | np.uint32(1)).astype(np.float64)
    a = (1 + odd * 2.0**-23).astype(np.float32)
    b = np.where(np.arange(count) % 2, 1 + 2.0**-23, 1 - 2.0**-24).astype(np.float32)
    c = (np.where(np.arange(count) % 3, 1, -1) * 2.0 ** -(24 + np.arange(count) % 40)).astype(
        np.float32
    )
    tie = _some(np.float32, [1 + 2.0**-12]), _some(np.float32, [1 + 2.0**-12])
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is a tie; addends too small for float64 break it
    small = np.array([0, 2.0**-80, -(2.0**-80), 2.0**-149, -(2.0**-149), 2.0**-54], np.float32)
    return joined((a, b, c), pairs(*tie, small))


def _three_f32() -> tuple[np.ndarray, ...]:
    few = _few(np.float32)
    a, b = products_below_normal(27, 60)
    small = (a * np.float32(2.0**44), b * np.float32(2.0**-68))  # up to 2^-150: added to 2^-126
    return joined(
        pairs(few[[0, 1, 9, 10, 15, 16, 17, 32]], few[[0, 1, 10, 15, 16, 18, 32]],
              few[[0, 1, 5, 9, 13, 15, 16, 26, 31, 32]]),
        _near_ties(20, 96),
        (a, b, np.zeros_like(a)),
        (*small, np.where(small[1] < 0, few[9], -few[9])),
        tuple(random_numbers(21 + i, 60, np.float32, 20) for i in range(3)),
        tuple(random_bits(24 + i, 60, np.uint32).view(np.float32) for i in range(3)),
    )  # fmt: skip


def _f32_unary() -> Table:
    opcodes = [
        f"{root}.{mode}{ftz}.f32"
        for root in ("rcp", "sqrt")
        for mode in _ROUNDINGS
        for ftz in ("", ".ftz")
    ]
    opcodes += [f"{root}{ftz}.f32" for root in ("abs", "neg") for ftz in ("", ".ftz")]
    values = floats(5, np.float32, 100, 30)
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    properties = tuple(
        Instruction(
            f"testp.{what}.f32",
            "b32",
            text=f"{{.reg .pred p; testp.{what}.f32 p, %1; selp.u32 %0, 1, 0, p;}}",
        )
        for what in tests
    )
    return Table("f32_unary", ("f32",), (values,), _instructions("f32", *opcodes) + properties)


def _f32_binary() -> Table:
    opcodes = [
        f"{root}.{mode}{ftz}.f32"
        for root in ("add", "sub", "mul", "div")
        for mode in _ROUNDINGS
        for ftz in ("", ".ftz")
    ]
    opcodes += [f"{root}.rn.sat.f32" for root in ("add", "mul")]
    opcodes += [f"{root}{ftz}.f32" for root in ("min", "max") for ftz in ("", ".ftz")]
    opcodes += ["copysign.f32"]
    return Table(
        "f32_binary",
        ("f32", "f32"),
        joined(
            _two(30, np.float32, 20, 50),
            products_below_normal(34, 40),
            quotients_below_normal(35, 40),
        ),
        _instructions("f32", *opcodes)
        + tuple(comparison(f"setp.{name}.f32") for name in _COMPARISONS)
        + tuple(comparison(f"setp.{name}.ftz.f32") for name in ("eq", "lt", "geu")),
    )


def _f32_ternary() -> Table:
    opcodes = [f"fma.{mode}{ftz}.f32" for mode in _ROUNDINGS for ftz in ("", ".ftz")]
    opcodes += ["fma.rn.sat.f32", "fma.rn.ftz.sat.f32"]
    return Table("f32_fma", ("f32",) * 3, _three_f32(), _instructions("f32", *opcodes))


def _f64() -> tuple[Table, Table]:
    opcodes = [*(f"{root}.rn.f64" for root in ("add", "sub", "mul", "div")), "min.f64", "max.f64"]
    binary = Table(
        "f64_binary",
        ("f64", "f64"),
        _two(40, np.float64, 40, 30),
        _instructions("f64", *opcodes) + tuple(comparison(f"setp.{n}.f64") for n in ("lt", "neu")),
    )
    few = _few(np.float64)[[0, 1, 5, 11, 13, 16, 18, 32]]
    operands = joined(
        pairs(few, few, few[::2]),
        tuple(random_numbers(44 + i, 30, np.float64, 30) for i in range(3)),
    )
    return binary, Table("f64_fma", ("f64",) * 3, operands, _instructions("f64", "fma.rn.f64"))


def _half_arguments(seed: int) -> np.ndarray:
    exponents = random_bits(seed + 2, 40, np.uint16) * 2.0**-12 * 1.6 - 25.6  # of subnormal powers
    return np.concatenate([floats(seed, np.float16, 60, 8), exponents.astype(np.float16)])


def _f16() -> tuple[Table, ...]:
    arithmetic = [f"{root}.rn{sat}" for root in ("add", "sub", "mul") for sat in ("", ".sat")]
    fused = ("fma.rn", "fma.rn.sat")
    two, two_more = _two(50, np.float16, 8), _two(60, np.float16, 8)
    few = _few(np.float16)[::3]
    three = joined(
        pairs(few[:8], few[:8], few),
        tuple(random_numbers(70 + i, 90, np.float16, 6) for i in range(3)),
    )
    order = np.argsort(random_bits(9, len(three[0]), np.uint32), kind="stable")

    def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.stack([low, high], axis=1).view(np.uint32)[:, 0]

    pair_two = tuple(packed(x, y[::-1]) for x, y in zip(two, two_more, strict=True))
    pair_three = tuple(packed(x, x[order]) for x in three)
    return (
        Table(
            "f16_binary",
            ("f16", "f16"),
            two,
            _instructions("f16", *(f"{opcode}.f16" for opcode in arithmetic))
            + tuple(comparison(f"setp.{name}.f16") for name in _COMPARISONS),
        ),
        Table("f16_fma", ("f16",) * 3, three, _instructions("f16", *(f"{f}.f16" for f in fused))),
        Table(
            "f16x2_binary",
            ("f16x2", "f16x2"),
            pair_two,
            _instructions("f16x2", *(f"{opcode}.f16x2" for opcode in arithmetic))
            + tuple(paired_comparison(f"setp.{name}.f16x2") for name in _COMPARISONS)
            + _instructions("f16x2", "set.gt.f16x2.f16x2", "set.neu.f16x2.f16x2"),
        ),
        Table(
            "f16x2_fma",
            ("f16x2",) * 3,
            pair_three,
            _instructions("f16x2", *(f"{f}.f16x2" for f in fused)),
        ),
        Table(
            "f16_unary",
            ("f16",),
            (_half_arguments(55),),
            _instructions("f16", "abs.f16", "neg.f16", "ex2.approx.f16", "tanh.approx.f16"),
        ),
        Table(
            "f16x2_unary",
            ("f16x2",),
            (packed(_half_arguments(55), _half_arguments(56)[::-1]),),
            _instructions(
                "f16x2", "abs.f16x2", "neg.f16x2", "ex2.approx.f16x2", "tanh.approx.f16x2"
            ),
        ),
    )


def _approximate() -> tuple[Table, Table]:
    grid = np.linspace(-4, 4, 129)
    exponents = np.linspace(-150, 130, 141)  # of 2^x, down to where it underflows
    angles = np.linspace(-100 * np.pi, 100 * np.pi, 121)
    scales = random_numbers(80, 120, np.float64, 120)
    values = np.concatenate([grid, exponents, angles, scales, [1e-30, 1.5 * 2.0**-128]])
    unary = [
        f"{root}.approx{ftz}.f32"
        for root in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos")
        for ftz in ("", ".ftz")
    ]
    operands = np.concatenate([awkward_floats(np.float32), values.astype(np.float32)])
    divide = [f"div.{kind}{ftz}.f32" for kind in ("approx", "full") for ftz in ("", ".ftz")]
    return (
        Table(
            "f32_approximate",
            ("f32",),
            (operands,),
            _instructions("f32", *unary, "tanh.approx.f32"),
        ),
        Table(
            "f32_approximate_division",
            ("f32", "f32"),
            joined(
                _two(90, np.float32, 20),
                pairs(_some(np.float32, [1.5, -(2.0**127), np.inf, 0.0, 2.0**-140]),
                      _some(np.float32, [2.0**126, 2.0**126.5, -(2.0**127), 2.0**-127])),
            ),
            _instructions("f32", *divide),
        ),
    )  # fmt: skip


FLOATING = (_f32_unary(), _f32_binary(), _f32_ternary(), *_f64(), *_f16(), *_approximate())


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


_FEW_BFLOATS = np.array(
    [0, 1, 0x7F, 0x80, 0x3B00, 0x3B80, 0x3F00, 0x3F7F, 0x3F80, 0x3F81, 0x3FC0, 0x4040, 0x7E80,
     0x7F7F, 0x7F80, 0x7FC0], np.uint16,
)  # fmt: skip


def _bfloats(seed: int, count: int, exponents: int) -> np.ndarray:
    """Bits of bfloat16: any, and numbers of ordinary size."""
    numbers = random_numbers(seed, count, np.float32, exponents).view(np.uint32) >> np.uint32(16)
    return np.concatenate([random_bits(seed + 1, count, np.uint16), numbers.astype(np.uint16)])


def _bfloat_operands(count: int, seed: int) -> tuple[np.ndarray, ...]:
    """Combinations of a few, and random ones; the third is sometimes far below the product."""
    few = np.concatenate([_FEW_BFLOATS, _FEW_BFLOATS | np.uint16(0x8000)])
    lists = [few, few] if count == 2 else [few[::3], few[1::3], few[::2]]
    others = tuple(_bfloats(seed + 2 * i, 200, 60 if i == 2 else 12) for i in range(count))
    return joined(pairs(*lists), others)


def _packed(*halves: np.ndarray) -> np.ndarray:
    return np.stack(halves, axis=1).view(np.uint32)[:, 0]


def _newer_conversions() -> tuple[Table, ...]:
    values = floats(6, np.float32, 96, 30)
    upper = (random_bits(11, 60, np.uint16).astype(np.uint32) << np.uint32(16)) & np.uint32(
        0x7FFFFFFF
    )
    near = np.array([0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0xFFFF], np.uint32)
    ties = (upper[:, None] + near).ravel().view(np.float32)  # of bfloat16
    values = np.concatenate([values, ties, -ties])
    modifiers = [
        (mode, *relu, *finite)
        for mode in ("rn", "rz")
        for relu in ((), ("relu",))
        for finite in ((), ("satfinite",))
    ]
    packed = tuple(
        Instruction(".".join(("cvt", *some, f"{kind}x2", "f32")), f"{kind}x2")
        for kind in ("f16", "bf16")
        for some in modifiers
    )
    alone = tuple(
        Instruction(".".join(("cvt", *some, kind, "f32")), kind)
        for kind in ("f16", "bf16")
        for some in modifiers
    )
    every = np.arange(1 << 16, dtype=np.uint16)[::23]
    back = (Instruction("cvt.f32.bf16", "f32"),)
    return (
        Table("cvt_pairs", ("f32", "f32"), (values, values[::-1]), packed, arch_of(80)),
        Table("cvt_newer", ("f32",), (values,), alone, arch_of(80)),
        Table("cvt_bf16", ("bf16",), (every,), back, arch_of(80)),
    )


def _newer_arithmetic() -> tuple[Table, ...]:
    two, three = _bfloat_operands(2, 100), _bfloat_operands(3, 110)
    pair_two = tuple(_packed(x, x[::-1]) for x in two)
    pair_three = tuple(_packed(x, x[::-1]) for x in three)
    halves = _two(120, np.float16, 8)
    extrema = [f"{root}{nan}" for root in ("min", "max") for nan in ("", ".NaN")]
    fused = ("fma.rn", "fma.rn.relu")
    sums = ("add.rn", "sub.rn", "mul.rn")
    approximate = ("ex2.approx.ftz", "tanh.approx")
    one = np.concatenate([_bfloats(130, 100, 7), _FEW_BFLOATS])

    def table(
        name: str, kind: str, operands: tuple[np.ndarray, ...], opcodes: list[str], arch: int = 80
    ) -> Table:
        found = _instructions(kind, *(f"{opcode}.{kind}" for opcode in opcodes))
        return Table(name, (kind,) * len(operands), operands, found, arch_of(arch))

    return (
        table("bf16_binary", "bf16", two, extrema),
        table("bf16x2_binary", "bf16x2", pair_two, extrema),
        table("bf16_fma", "bf16", three, [*fused]),
        table("bf16x2_fma", "bf16x2", pair_three, [*fused]),
        table("bf16x2_unary", "bf16x2", (_packed(one, one[::-1]),), ["neg", "abs"]),
        table("bf16_sums", "bf16", two, [*sums], 90),
        table("bf16x2_sums", "bf16x2", pair_two, [*sums], 90),
        table("bf16_approximate", "bf16", (one,), [*approximate], 90),
        table("f16_extrema", "f16", halves, extrema),
        table("f32_extrema", "f32", _two(125, np.float32, 20), [*extrema, "min.ftz.NaN"]),
        table("f16_fma_relu", "f16", tuple(x[:400] for x in (*halves, halves[0][::-1])), [*fused]),
    )


NEWER = (*_newer_conversions(), *_newer_arithmetic())

CONVERSIONS = (
    _from_f32(),
    _from_f16(),
    _from_f64(),
    _from_integers(2),
    _from_integers(4),
    _from_integers(8),
)
