"""Floating-point arithmetic and comparisons of the emulator against exact arithmetic."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from support.ptx import apply
from support.rounding import RNG, TINY, floats, to_half, to_single


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
