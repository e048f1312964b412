"""Conversions (``cvt``) of the emulator against exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from support.ptx import apply
from support.rounding import RNG, TINY, floats, round_exact, to_half, to_single


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
    want = [
        round_exact(Fraction(float(x)), "rn", 8, -133, float(2.0**128 * (1 - 2.0**-8)), np.float32)
        for x in values[keep]
    ]
    np.testing.assert_array_equal(back[keep].astype("f8"), want)
    assert np.isnan(back[np.isnan(values)]).all()


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
