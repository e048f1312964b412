"""Conversions between types, with PTX's rounding modes and saturation (``cvt``)."""

from typing import Any

import numpy as np

from cupyattn.emulator.machine.floating import round_directed, round_single

__all__ = [
    "HALF_TO_FLOAT",
    "bfloat_to_float",
    "double_to_single",
    "float_to_bfloat",
    "float_to_half",
    "float_to_int",
    "half_to_float",
    "int_saturated",
    "int_to_float",
    "nearest_half",
    "round_to_integral",
]

Array = Any

# float32 of every float16: looking up is faster than NumPy's conversion
HALF_TO_FLOAT = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
HALF_TO_FLOAT.setflags(write=False)

_INTEGRAL: dict[str, Any] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def half_to_float(bits: Array) -> Array:
    """Return float32 from the bits of float16: exact."""
    return HALF_TO_FLOAT.take(bits)


def float_to_half(x: Array, mode: str) -> Array:
    """Round float32 or float64 to float16 and return its bits."""
    x = np.asarray(x)
    nearest = x.astype(np.float16)
    if mode != "rn":
        back = nearest.astype(x.dtype)
        if mode == "rm":
            wrong, towards = back > x, np.float16(-np.inf)
        elif mode == "rp":
            wrong, towards = back < x, np.float16(np.inf)
        else:
            wrong, towards = np.abs(back) > np.abs(x), np.float16(0)
        nearest = np.where(wrong, np.nextafter(nearest, towards), nearest)
    return nearest.view(np.uint16)


def nearest_half(x: Array) -> Array:
    """Round float32 to float16, to nearest even, and return its bits."""
    return float_to_half(x, "rn")


def bfloat_to_float(bits: Array) -> Array:
    """Return float32 from the bits of bfloat16: exact."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat(x: Array, mode: str) -> Array:
    """Round float32 to bfloat16 (``rn`` or ``rz``) and return its bits."""
    bits = np.asarray(x).view(np.uint32)
    if mode == "rn":
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    else:
        rounded = bits >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def round_to_integral(x: Array, mode: str) -> Array:
    """Round a float to an integral value (``rni``, ``rzi``, ``rmi``, ``rpi``)."""
    return _INTEGRAL[mode](x)


def float_to_int(x: Array, dtype: str, mode: str) -> Array:
    """Convert a float to an integer dtype, clamping to its range.

    NaN gives 0; from float64 or to a 64-bit integer it gives the highest bit (PTX ISA, cvt).
    """
    x = np.asarray(x)
    target = np.dtype(dtype)
    limits = np.iinfo(target)
    value = _INTEGRAL[mode](x.astype(np.float64))
    top = float(limits.max) if target.itemsize < 8 else float(2 ** (63 + (target.kind == "u")))
    low, high = value <= float(limits.min), value >= top
    inside = np.where(low | high | np.isnan(value), 0.0, value)
    result = inside.astype(target)
    result = np.where(low, target.type(limits.min), np.where(high, target.type(limits.max), result))
    if x.dtype.itemsize == 8 or target.itemsize == 8:
        bits = 1 << (8 * target.itemsize - 1)
        nan = np.asarray(bits, f"u{target.itemsize}").view(target)
        result = np.where(np.isnan(value), nan, result)
    return result


def int_to_float(x: Array, dtype: str, mode: str) -> Array:
    """Convert an integer to float32 or float64."""
    x = np.asarray(x)
    if mode == "rn":
        return x.astype(dtype)
    value = x.astype(np.float64)
    if x.dtype.itemsize == 8:  # 53 bits may not do: round to odd, keeping a sticky bit
        magnitude = np.where(x < 0, ~x.view(np.uint64) + np.uint64(1), x.view(np.uint64))
        high = magnitude >> np.uint64(11) << np.uint64(11)
        sticky = np.where(magnitude == high, np.uint64(0), np.uint64(1 << 11))
        odd = (high | sticky).astype(np.float64)
        small = magnitude < np.uint64(1 << 53)
        value = np.copysign(np.where(small, magnitude.astype(np.float64), odd), value)
    if dtype == "f8":
        if x.dtype.itemsize == 8:
            raise NotImplementedError("cvt to f64 from 64-bit integers: .rn only")
        return value
    return round_directed(value, mode)


def double_to_single(x: Array, mode: str, ftz: bool) -> Array:
    """Round float64 to float32."""
    return round_single(np.asarray(x), mode, ftz)


def int_saturated(x: Array, dtype: str) -> Array:
    """Convert between integer dtypes, clamping to the range of the target (``cvt.sat``)."""
    x = np.asarray(x)
    limits = np.iinfo(dtype)
    low = max(limits.min, np.iinfo(x.dtype).min)
    high = min(limits.max, np.iinfo(x.dtype).max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(dtype)
