"""Floating-point arithmetic, comparisons and conversions against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.ptx import apply

RNG = np.random.default_rng(2)
TINY = float(np.finfo(np.float32).smallest_normal)


def floats(count: int = 300, spread: int = 40) -> np.ndarray:
    """Random float32 of many magnitudes, then the special ones."""
    values = RNG.standard_normal(count) * 2.0 ** RNG.integers(-spread, spread, count)
    edges = [0.0, -0.0, 1.0, -1.0, 1 + 2**-23, TINY, -TINY, 2**-149, -(2**-140), 3.0e38, 65504.0,
             np.inf, -np.inf, np.nan]  # fmt: skip
    return np.concatenate([values, edges]).astype(np.float32)


def round_exact(
    value: Fraction, mode: str, precision: int, smallest: int, largest: float, dtype: type
) -> float:
    """Round a rational to a binary format, by definition."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, smallest)
    steps = value / unit
    low = math.floor(steps)
    rest = steps - low
    if mode == "rz":
        mode = "rm" if value > 0 else "rp"
    if mode == "rm":
        n = low
    elif mode == "rp":
        n = low + (rest > 0)
    else:
        n = low + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1))
    result = n * unit
    if abs(result) > Fraction(largest):
        towards_zero = (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
        return math.copysign(largest if towards_zero else math.inf, value)
    return float(dtype(float(result)))


def to_single(value: Fraction, mode: str = "rn") -> float:
    return round_exact(value, mode, 24, -149, float(np.finfo(np.float32).max), np.float32)


def to_half(value: Fraction, mode: str = "rn") -> float:
    return round_exact(value, mode, 11, -24, 65504.0, np.float16)


def finite(*arrays: np.ndarray) -> np.ndarray:
    return np.logical_and.reduce([np.isfinite(a) for a in arrays])


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
    "rcp": lambda a: 1 / a,
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", list(EXACT))
def test_rounding(name: str, mode: str) -> None:
    count = {"fma": 3, "rcp": 1}.get(name, 2)
    operands = [floats() for _ in range(count)]
    for i, operand in enumerate(operands):
        RNG.shuffle(operand)
        if i:  # close magnitudes, where sums cancel
            operand[:100] = -operands[0][:100] * np.float32(1 + 2**-20)
    refs = ", ".join(f"${i}" for i in range(count))
    got = apply(f"{name}.{mode}.f32 $d, {refs}", "f32", "f4", *(("f32", x) for x in operands))
    checked = 0
    for values, result in zip(zip(*operands, strict=True), got, strict=False):
        if not all(np.isfinite(values)) or (name in ("div", "rcp") and values[-1] == 0):
            continue
        want = to_single(EXACT[name](*(Fraction(float(v)) for v in values)), mode)
        assert float(result) == want, (name, mode, values, float(result), want)
        checked += 1
    assert checked > 200


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_sqrt(mode: str) -> None:
    a = np.abs(floats())
    a[:50] = (np.arange(50, dtype="f4") + 3000) ** 2  # exact roots
    got = apply(f"sqrt.{mode}.f32 $d, $0", "f32", "f4", ("f32", a))
    for x, result in zip(a, got, strict=True):
        if not np.isfinite(x):
            continue
        square = Fraction(float(x))
        nearest = np.sqrt(x)  # correctly rounded
        below = Fraction(float(nearest)) ** 2 > square
        above = Fraction(float(nearest)) ** 2 < square
        want = nearest
        if mode in ("rz", "rm") and below:
            want = np.nextafter(nearest, np.float32(0))
        if mode == "rp" and above:
            want = np.nextafter(nearest, np.float32(np.inf))
        assert result == want, (x, mode)


def test_fma_rounds_once() -> None:
    # a * b + c lies just above or below the middle of two float32: through float64 it would tie
    a = np.float32(1 + 2**-12)
    product = Fraction(float(a)) ** 2  # 1 + 2^-11 + 2^-24: a tie in float32
    below, above = np.float32(-(2.0**-90)), np.float32(2.0**-90)
    got = apply("fma.rn.f32 $d, $0, $1, $2", "f32", "f4",
                ("f32", np.full(2, a)), ("f32", np.full(2, a)),
                ("f32", np.array([below, above])))  # fmt: skip
    assert [float(x) for x in got] == [
        to_single(product + Fraction(float(c))) for c in (below, above)
    ]
    assert got[0] != got[1]


def test_fma_random_ties() -> None:
    # c chosen so that the exact sum sits near the middle of two float32
    a = RNG.integers(2**23, 2**24, 500).astype("f4")
    b = RNG.integers(2**23, 2**24, 500).astype("f4")
    c = (RNG.standard_normal(500) * 2.0 ** RNG.integers(-30, 30, 500)).astype("f4")
    got = apply("fma.rn.f32 $d, $0, $1, $2", "f32", "f4", ("f32", a), ("f32", b), ("f32", c))
    want = [
        to_single(Fraction(float(x)) * int(y) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(want, "f4"))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_double(name: str) -> None:
    count = 3 if name == "fma" else 2
    operands = [floats().astype("f8") * (1 + 2.0**-40) for _ in range(count)]
    refs = ", ".join(f"${i}" for i in range(count))
    got = apply(f"{name}.rn.f64 $d, {refs}", "f64", "f8", *(("f64", x) for x in operands))
    for values, result in zip(zip(*operands, strict=True), got, strict=False):
        if all(np.isfinite(values)):
            assert result == float(EXACT[name](*(Fraction(float(v)) for v in values)))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("packed", [False, True])
def test_half(name: str, packed: bool) -> None:
    count = 3 if name == "fma" else 2
    with np.errstate(over="ignore"):
        operands = [floats(400, 10).astype("f2") for _ in range(count)]
    for x in operands:
        RNG.shuffle(x)
    refs = ", ".join(f"${i}" for i in range(count))
    rounding = ".rn" if name == "fma" else ""
    if packed:
        inputs = [("b32", x.view("u4")) for x in operands]
        got = apply(f"{name}{rounding}.f16x2 $d, {refs}", "b32", "u4", *inputs).view("f2")
    else:
        inputs = [("b16", x.view("u2")) for x in operands]
        got = apply(f"{name}{rounding}.f16 $d, {refs}", "b16", "u2", *inputs).view("f2")
    for values, result in zip(zip(*operands, strict=True), got, strict=False):
        if all(np.isfinite(values)):
            want = to_half(EXACT[name](*(Fraction(float(v)) for v in values)))
            assert float(result) == want, (values, result, want)


def test_pairs_of_bfloat16_are_rounded_once() -> None:
    """fma alone: also sums that float64 does not hold, and ties that their rest breaks."""
    bits = np.random.default_rng(7).integers(0, 2**16, (3, 800), dtype=np.uint16)
    bits[:, :600] = bits[:, :600] & 0x83FF | 0x3C00  # of one size: they cancel, and tie
    bits[:, :8] = np.array(
        [
            [0x4300, 0x4301, 0x3F80, 0x7F7F, 0x3F80, 0x3F81, 0x0001, 0x3F80],
            [0x3F80, 0xBF80, 0x3F80, 0x7F7F, 0x3B80, 0x3B80, 0x3F00, 0x0001],
            [0xC308, 0x43FF, 0xBF80, 0x0000, 0x3F81, 0x0001, 0x0000, 0x3F80],
        ]
    )
    inputs = [("b32", each.view("u4")) for each in bits]
    got = apply("fma.rn.bf16x2 $d, $0, $1, $2", "b32", "u4", *inputs, target=80).view("u2")
    *operands, results = (each.view(ml_dtypes.bfloat16).astype(float) for each in (*bits, got))
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    for *values, result in zip(*operands, results, strict=True):
        if np.isfinite(values).all():
            exact = EXACT["fma"](*map(Fraction, values))
            assert result == round_exact(exact, "rn", 8, -133, largest, np.float32), values


def test_flush_to_zero() -> None:
    tiny, normal = np.float32(2.0**-130), np.float32(2.0**-126)
    a = np.array([tiny, -tiny, normal, normal, 1.0], "f4")
    b = np.array([1.0, 1.0, 1.0, 0.25, 2.0], "f4")
    got = apply("mul.ftz.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(
        got.view("u4"), np.array([0, -0.0, normal, 0, 2], "f4").view("u4")
    )
    got = apply("mul.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, a * b)
    got = apply("add.ftz.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", np.full(5, normal)))
    np.testing.assert_array_equal(got[:2], [normal, normal])  # the input is a zero already
    got = apply("max.ftz.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", np.full(5, -1, "f4")))
    np.testing.assert_array_equal(got, [0, 0, normal, normal, 1])
    got = apply("setp.gt.ftz.f32 $d, $0, 0f00000000", "pred", "u4", ("f32", a))
    np.testing.assert_array_equal(got, [0, 0, 1, 1, 1])
    # flushed through a register that is known to be clean
    got = apply("{ .reg .f32 t; mul.ftz.f32 t, $0, $1; add.ftz.f32 $d, t, 0f00000000; }",
                "f32", "f4", ("f32", a), ("f32", b))  # fmt: skip
    np.testing.assert_array_equal(got, [0, 0, normal, 0, 2])


def test_min_max() -> None:
    a = np.array([1, -0.0, 0.0, np.nan, 2, np.nan, -np.inf], "f4")
    b = np.array([2, 0.0, -0.0, 3, np.nan, np.nan, np.inf], "f4")
    got = apply("max.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, np.array([2, 0, 0, 3, 2, np.nan, np.inf], "f4"))
    assert not np.signbit(got[1]) and not np.signbit(got[2])
    got = apply("min.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, np.array([1, 0, 0, 3, 2, np.nan, -np.inf], "f4"))
    assert np.signbit(got[1]) and np.signbit(got[2])
    h = np.array([1, 5, -3, 2], "f2"), np.array([2, 4, -2, 2], "f2")
    got = apply(
        "max.f16x2 $d, $0, $1", "b32", "u4", ("b32", h[0].view("u4")), ("b32", h[1].view("u4")),
        target=80,
    )  # fmt: skip
    np.testing.assert_array_equal(got.view("f2"), np.array([2, 5, -2, 2], "f2"))


def test_sign_operations_and_saturation() -> None:
    a, b = floats(), floats()[::-1].copy()
    for name, want in (("neg", -a), ("abs", np.abs(a))):
        got = apply(f"{name}.f32 $d, $0", "f32", "f4", ("f32", a))
        np.testing.assert_array_equal(got, want)
    got = apply("copysign.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, np.copysign(b, a))
    got = apply("add.sat.f32 $d, $0, 0f00000000", "f32", "f4", ("f32", a))
    np.testing.assert_array_equal(got, np.where(np.isnan(a), 0, np.clip(a, 0, 1)))
    for what, want in (("finite", np.isfinite(a)), ("notanumber", np.isnan(a)),
                       ("subnormal", (np.abs(a) < TINY) & (a != 0))):  # fmt: skip
        got = apply(f"testp.{what}.f32 $d, $0", "pred", "u4", ("f32", a))
        np.testing.assert_array_equal(got != 0, want)


COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "f16", "f64"])
@pytest.mark.parametrize("operator", [*COMPARE, *(f"{name}u" for name in COMPARE), "num", "nan"])
def test_comparison(operator: str, kind: str) -> None:
    values = np.array([-1, 0, 1, np.nan, np.inf])
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    unordered = np.isnan(a) | np.isnan(b)
    if operator == "num":
        want = ~unordered
    elif operator == "nan":
        want = unordered
    elif operator in COMPARE:
        want = COMPARE[operator](a, b) & ~unordered
    else:
        want = COMPARE[operator[:-1]](a, b) | unordered
    dtype = {"f32": "f4", "f16": "f2", "f64": "f8"}[kind]
    register = {"f32": "f32", "f16": "b16", "f64": "f64"}[kind]
    x, y = a.astype(dtype), b.astype(dtype)
    if kind == "f16":
        x, y = x.view("u2"), y.view("u2")
    got = apply(f"setp.{operator}.{kind} $d, $0, $1", "pred", "u4", (register, x), (register, y))
    np.testing.assert_array_equal(got != 0, want)


def test_set_instructions() -> None:
    a, b = np.array([1, 2, 3, np.nan], "f4"), np.array([1, 3, 2, 1], "f4")
    got = apply("set.lt.f32.f32 $d, $0, $1", "f32", "f4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, [0, 1, 0, 0])
    got = apply("set.eq.u32.f32 $d, $0, $1", "b32", "u4", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, [0xFFFFFFFF, 0, 0, 0])
    h = a.astype("f2").view("u4"), b.astype("f2").view("u4")
    got = apply("set.ge.f16x2.f16x2 $d, $0, $1", "b32", "u4", ("b32", h[0]), ("b32", h[1]))
    np.testing.assert_array_equal(got.view("f2"), [1, 0, 1, 0])


APPROXIMATIONS = {
    "ex2.approx.ftz": np.exp2, "lg2.approx.ftz": np.log2, "rcp.approx.ftz": lambda x: 1 / x,
    "rsqrt.approx.ftz": lambda x: 1 / np.sqrt(x), "sqrt.approx": np.sqrt, "sin.approx": np.sin,
    "cos.approx.ftz": np.cos, "tanh.approx": np.tanh, "rcp.rn": lambda x: 1 / x,
}  # fmt: skip


@pytest.mark.parametrize("name", list(APPROXIMATIONS))
def test_special_functions(name: str) -> None:
    a = np.concatenate([RNG.uniform(-20, 20, 200), RNG.uniform(0, 1e4, 50)]).astype("f4")
    if "sqrt" in name or "lg2" in name:
        a = np.abs(a)
    got = apply(f"{name}.f32 $d, $0", "f32", "f4", ("f32", a))
    with np.errstate(all="ignore"):
        want = APPROXIMATIONS[name](a.astype("f8")).astype("f4")
    np.testing.assert_allclose(got, want, rtol=2**-23)
    special = np.array([0.0, np.inf, -np.inf, np.nan, -1.0, 2.0**-130], "f4")
    got = apply(f"{name}.f32 $d, $0", "f32", "f4", ("f32", special))
    flushed = np.where(np.abs(special) < TINY, 0, special) if "ftz" in name else special
    with np.errstate(all="ignore"):
        want = APPROXIMATIONS[name](flushed.astype("f8")).astype("f4")
    np.testing.assert_array_equal(got, want)


def test_half_special_functions() -> None:
    a = RNG.uniform(-4, 4, 64).astype("f2")
    got = apply("tanh.approx.f16x2 $d, $0", "b32", "u4", ("b32", a.view("u4"))).view("f2")
    np.testing.assert_array_equal(got, np.tanh(a.astype("f8")).astype("f2"))
    got = apply("ex2.approx.f16 $d, $0", "b16", "u2", ("b16", a.view("u2"))).view("f2")
    np.testing.assert_array_equal(got, np.exp2(a.astype("f8")).astype("f2"))


def test_half_to_float_is_exact_for_every_half() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    got = apply("cvt.f32.f16 $d, $0", "f32", "f4", ("b16", bits))
    sign = np.where(bits >> 15, -1.0, 1.0)
    exponent, mantissa = bits >> 10 & 31, (bits & 1023).astype("f8")
    value = np.where(
        exponent == 0,
        mantissa * 2.0**-24,
        (1 + mantissa / 1024) * 2.0 ** (exponent.astype("f8") - 15),
    )
    value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value) * sign
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_float_to_half(mode: str) -> None:
    bits = np.arange(0, 0x7C00, 7, dtype=np.uint16)
    half = bits.view("f2").astype("f4")
    above = np.nextafter(bits.view("f2"), np.float16(np.inf)).astype("f4")
    middle = (half + above) / 2
    values = np.concatenate([half, middle, np.nextafter(middle, np.float32(0)),
                             np.nextafter(middle, np.float32(1e9)), -middle])  # fmt: skip
    values = np.concatenate([values, np.array([65519.99, 65520, 1e6, 2**-25, 2**-26], "f4")])
    got = apply(f"cvt.{mode}.f16.f32 $d, $0", "b16", "u2", ("f32", values)).view("f2")
    keep = np.isfinite(values)
    want = [to_half(Fraction(float(x)), mode) for x in values[keep]]
    np.testing.assert_array_equal(got[keep].astype("f8"), want)


def test_bfloat() -> None:
    values = floats()
    bits = apply("cvt.rn.bf16.f32 $d, $0", "b16", "u2", ("f32", values), target=80)
    back = apply("cvt.f32.bf16 $d, $0", "f32", "f4", ("b16", bits), target=80)
    keep = np.isfinite(values)
    want = [to_bfloat(Fraction(float(x))) for x in values[keep]]
    np.testing.assert_array_equal(back[keep].astype("f8"), want)
    assert np.isnan(back[np.isnan(values)]).all()


def to_bfloat(value: Fraction) -> float:
    largest = float(2.0**128 * (1 - 2.0**-8))
    return round_exact(value, "rn", 8, -133, largest, np.float32)


def bfloats(count: int, seed: int, spread: int) -> np.ndarray:
    """Bits of bfloat16: numbers of many magnitudes, some next to a tie when added, and edges."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal(count) * 2.0 ** rng.integers(-spread, spread, count)).astype(
        "f4"
    )
    edges = np.array([0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1,
                      0x3F80, 0xBF80, 0x3B80, 0x3B00], np.uint16)  # fmt: skip
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return rng.permutation(np.concatenate([bits, np.tile(edges, 1 + count // 60)]))


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


_SUMS: dict[str, Callable[..., Any]] = {
    "fma.rn": lambda a, b, c: a * b + c,
    "add": lambda a, b: a + b,
    "sub.rn": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


@pytest.mark.parametrize(
    ("operation", "target"), [("fma.rn", 80), ("add", 90), ("sub.rn", 90), ("mul", 90)]
)
@pytest.mark.parametrize("paired", [False, True])
def test_bfloat_arithmetic_rounds_once(operation: str, target: int, paired: bool) -> None:
    count = 3 if operation == "fma.rn" else 2
    operands = [bfloats(400, seed, 70 if seed == 2 else 20) for seed in range(count)]
    operands = [bits[: min(map(len, operands)) // 2 * 2] for bits in operands]
    kind, stored = ("b32", np.uint32) if paired else ("b16", np.uint16)
    registers = ", ".join(f"${i}" for i in range(count))
    opcode = f"{operation}.bf16{'x2' * paired}"
    given = [(kind, bits.view(stored)) for bits in operands]
    bits = apply(f"{opcode} $d, {registers}", kind, stored, *given, target=target).view(np.uint16)
    got = widened(bits)
    numbers = [widened(x) for x in operands]
    with np.errstate(all="ignore"):
        rough = _SUMS[operation](*(x.astype("f8") for x in numbers)).astype("f4")
    finite = np.logical_and.reduce([np.isfinite(x) for x in numbers])
    for i in np.flatnonzero(finite):
        exact = _SUMS[operation](*(Fraction(float(n[i])) for n in numbers))
        assert got[i] == to_bfloat(exact), (i, [n[i] for n in numbers])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(rough))
    np.testing.assert_array_equal(got[~finite], rough[~finite])
    zero = finite & (got == 0) & (rough == 0)
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(rough[zero]))


@pytest.mark.parametrize("paired", [False, True])
def test_bfloat_extrema(paired: bool) -> None:
    kind, stored = ("b32", np.uint32) if paired else ("b16", np.uint16)
    a, b = (bfloats(200, seed, 20)[:200] for seed in (5, 6))
    a[:4], b[:4] = [0, 0x8000, 0x7FC0, 0x7FC0], [0x8000, 0, 0x3F80, 0x7FFF]
    x, y = widened(a), widened(b)
    for root, function, sign in (("min", np.fmin, True), ("max", np.fmax, False)):
        for nan in (False, True):
            text = f"{root}{'.NaN' * nan}.bf16{'x2' * paired} $d, $0, $1"
            given = ((kind, a.view(stored)), (kind, b.view(stored)))
            got = widened(apply(text, kind, stored, *given, target=80).view(np.uint16))
            want = np.where(nan & (np.isnan(x) | np.isnan(y)), np.nan, function(x, y))
            np.testing.assert_array_equal(got, want)
            assert (np.signbit(got[:2]) == sign).all()
    for root, function in (("neg", np.negative), ("abs", np.abs)):
        text = f"{root}.bf16{'x2' * paired} $d, $0"
        got = widened(apply(text, kind, stored, (kind, a.view(stored)), target=80).view(np.uint16))
        np.testing.assert_array_equal(got, function(x))


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_conversions(kind: str, relu: bool, finite: bool) -> None:
    edges = [
        65504,
        65519,
        65520,
        1e5,
        -1e5,
        3.38e38,
        3.3953e38,
        3.4e38,
        -3.4e38,
        1 + 2**-9,
        2**-134,
    ]
    high = np.concatenate([floats(), np.array(edges, "f4")])
    low = high[::-1].copy()
    modifiers = ".relu" * relu + ".satfinite" * finite
    text = f"cvt.rn{modifiers}.{kind}x2.f32 $d, $0, $1"
    got = apply(text, "b32", np.uint32, ("f32", high), ("f32", low), target=80)
    alone = apply(
        f"cvt.rn{modifiers}.{kind}.f32 $d, $0", "b16", np.uint16, ("f32", high), target=80
    )
    np.testing.assert_array_equal(got >> 16, alone)
    np.testing.assert_array_equal((got & 0xFFFF)[::-1], alone)
    back = alone.view(np.float16).astype("f4") if kind == "f16" else widened(alone)
    largest = 65504.0 if kind == "f16" else float(2.0**128 * (1 - 2.0**-8))
    for value, result in zip(high, back, strict=True):
        if np.isnan(value):
            assert np.isnan(result)
            continue
        want = float(value)
        if np.isfinite(value):
            rounded = to_half if kind == "f16" else to_bfloat
            want = rounded(Fraction(want))
        if finite:
            want = min(max(want, -largest), largest)
        assert result == (max(want, 0.0) if relu else want), value


def test_approximate_functions_of_bfloat() -> None:
    bits = bfloats(200, 9, 3)[:200]
    x = widened(bits).astype("f8")
    for text, function in (("ex2.approx.ftz", np.exp2), ("tanh.approx", np.tanh)):
        for kind, stored in (("b16", np.uint16), ("b32", np.uint32)):
            opcode = f"{text}.bf16{'x2' * (kind == 'b32')}"
            result = apply(f"{opcode} $d, $0", kind, stored, (kind, bits.view(stored)), target=90)
            got = widened(result.view(np.uint16))
            with np.errstate(over="ignore"):
                want = function(x).astype("f4")
            np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-126)


@pytest.mark.parametrize("kind", ["s32", "u32", "s8", "u16", "s64", "u64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer(kind: str, mode: str) -> None:
    values = np.concatenate(
        [floats(100, 35), np.arange(-8, 8, 0.5), [2.0**31, 2.0**63, -(2.0**63), 1e30]]
    )
    values = values.astype("f4")
    bits = int(kind[1:])
    register = f"b{max(bits, 16)}"
    got = apply(
        f"cvt.{mode}.{kind}.f32 $d, $0", register, f"u{max(bits, 16) // 8}", ("f32", values)
    )
    low = -(1 << (bits - 1)) if kind[0] == "s" else 0
    high = (1 << (bits - (kind[0] == "s"))) - 1
    integral = {"rni": lambda x: round(x), "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for x, result in zip(values.tolist(), got.tolist(), strict=True):
        if math.isnan(x):
            want = 1 << 63 if bits == 64 else 0
        elif math.isinf(x):
            want = high if x > 0 else low
        else:
            want = max(low, min(high, integral[mode](x)))
        assert result == want & ((1 << max(bits, 16)) - 1), x


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u8"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float(kind: str, mode: str) -> None:
    bits = int(kind[1:])
    width = max(bits, 16)
    raw = [
        int.from_bytes(RNG.bytes(bits // 8), "little") >> int(RNG.integers(bits))
        for _ in range(200)
    ]
    raw += [
        0,
        1,
        (1 << bits) - 1,
        1 << (bits - 1),
        (1 << (bits - 1)) + 1,
        (1 << bits) - 129 & ((1 << bits) - 1),
    ]
    values = np.array(raw, f"u{width // 8}")
    got = apply(f"cvt.{mode}.f32.{kind} $d, $0", "f32", "f4", (f"b{width}", values))
    for x, result in zip(raw, got, strict=True):
        number = x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x
        assert float(result) == to_single(Fraction(number), mode), number


def test_integer_conversions() -> None:
    a = RNG.integers(0, 2**32, 200).astype("u4")
    got = apply("cvt.s64.s32 $d, $0", "b64", "u8", ("b32", a))
    np.testing.assert_array_equal(got.view("i8"), a.view("i4"))
    got = apply("cvt.u16.u32 $d, $0", "b16", "u2", ("b32", a))
    np.testing.assert_array_equal(got, a.astype("u2"))
    got = apply("cvt.s32.s8 $d, $0", "b32", "u4", ("b32", a))
    np.testing.assert_array_equal(got.view("i4"), a.astype("u1").view("i1"))
    got = apply("cvt.sat.u8.s32 $d, $0", "b32", "u4", ("b32", a))
    np.testing.assert_array_equal(got, np.clip(a.view("i4"), 0, 255))
    got = apply("cvt.sat.s16.u32 $d, $0", "b32", "u4", ("b32", a))
    np.testing.assert_array_equal(got, np.minimum(a, 32767))


def test_float_conversions() -> None:
    a = floats()
    doubles = a.astype("f8") * (1 + 2.0**-40)
    for mode in ("rn", "rz", "rm", "rp"):
        got = apply(f"cvt.{mode}.f32.f64 $d, $0", "f32", "f4", ("f64", doubles))
        for x, result in zip(doubles, got, strict=True):
            if np.isfinite(x):
                assert float(result) == to_single(Fraction(float(x)), mode)
    got = apply("cvt.f64.f32 $d, $0", "f64", "f8", ("f32", a))
    np.testing.assert_array_equal(got, a.astype("f8"))
    for mode, function in (
        ("rni", np.rint),
        ("rzi", np.trunc),
        ("rmi", np.floor),
        ("rpi", np.ceil),
    ):
        got = apply(f"cvt.{mode}.f32.f32 $d, $0", "f32", "f4", ("f32", a))
        np.testing.assert_array_equal(got, function(a))
    got = apply("cvt.ftz.sat.f32.f32 $d, $0", "f32", "f4", ("f32", a))
    np.testing.assert_array_equal(
        got, np.where(np.isnan(a), 0, np.clip(np.where(np.abs(a) < TINY, 0, a), 0, 1))
    )
    pair = ("f32", a), ("f32", a[::-1])
    got = apply("cvt.rn.f16x2.f32 $d, $0, $1", "b32", "u4", *pair, target=80)
    with np.errstate(over="ignore"):
        want = np.stack([a[::-1], a], 1).astype("f2")
    np.testing.assert_array_equal(got.view("f2").reshape(-1, 2), want)
