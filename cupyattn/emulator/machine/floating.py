"""Floating-point instructions and conversions (``cvt``) over lanes: exact rounding, flush to zero.

float32 results are computed in float64 where a single float32 operation would not do. Rounding
twice can go wrong in two ways, and both are handled by rounding the float64 to odd first (S. Boldo,
G. Melquiond, "Emulation of a FMA and correctly rounded sums", 2008): a tie that the first rounding
made, and directed rounding of a sum that was inexact.

``.ftz`` judges a result rounded to 24 bits as if exponents had no end: one that rounds up to the
smallest normal number only on the coarse grid of the subnormal ones is flushed, as on an H200.

A NaN result is NumPy's, its payload not PTX's canonical one.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from cupyattn.emulator.machine.lanes import Array

_F4, _F8, _F2 = np.dtype("f4"), np.dtype("f8"), np.dtype("f2")
_MIN_NORMAL = np.asarray(np.float32(2.0**-126))
_LOW_BITS = np.asarray(np.uint64((1 << 29) - 1))  # of float64, below the last bit of float32
_HALFWAY = np.asarray(np.uint64(1 << 28))
_TINY = np.asarray(np.float64(2.0**-126))
_EDGE = np.asarray(np.float64(2.0**-126 * (1 - 2.0**-25)))  # what 24 bits round up to normal
_SCALE = np.asarray(np.float64(2.0**64))
_UPPER = np.uint32(0xFFFF0000)  # a bfloat16 in a float32, or the second of a pair
_LARGEST = {"f16": np.float32(65504), "bf16": np.float32(2.0**128 - 2.0**119 - 2.0**119 / 2)}


def _only_zeros_besides(marked: Array, x: Array) -> bool:
    """Tell whether all numbers but those marked, none of them zero, are zeros.

    Then there is nothing to flush. To look costs half of a multiplication by booleans.
    """
    count = np.count_nonzero(marked)
    return count == marked.size or count == np.count_nonzero(x)


def flush(x: Array) -> Array:
    """Replace subnormal float32 numbers by zeros of their sign (``.ftz``)."""
    normal = np.abs(x) >= _MIN_NORMAL
    if _only_zeros_besides(normal, x):
        return x
    return x * normal.astype(_F4)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN gives 0 (``.sat``)."""
    one, zero = x.dtype.type(1), x.dtype.type(0)
    return np.fmin(np.fmax(x, zero), one) + zero


def _sum_error(a: Array, b: Array, total: Array) -> Array:
    """Return a + b - total exactly (Knuth's TwoSum)."""
    part = total - a
    return (a - (total - part)) + (b - part)


def _to_odd(value: Array, error: Array) -> Array:
    """Round to odd: where `value` is inexact and even, move it one step towards the exact value."""
    value = np.asarray(value)
    bits = value.view(np.int64)
    step = np.where((error > 0) == (value > 0), 1, -1)
    adjust = (error != 0) & ((bits & 1) == 0) & np.isfinite(value)
    moved = (bits + step).view(_F8)
    moved = np.where(value == 0, np.copysign(5e-324, error), moved)
    return np.where(adjust, moved, value)


def round_directed(value: Array, mode: str) -> Array:
    """Round float64, exact or rounded to odd, to float32 towards ``rz``, ``rm`` or ``rp``."""
    return _directed(np.asarray(value), _F4, mode)


def _directed(value: Array, dtype: np.dtype, mode: str) -> Array:
    nearest = value.astype(dtype)
    back = nearest.astype(value.dtype)
    if mode == "rm":
        wrong, towards = back > value, -np.inf
    elif mode == "rp":
        wrong, towards = back < value, np.inf
    else:
        wrong, towards = np.abs(back) > np.abs(value), 0
    return np.where(wrong, np.nextafter(nearest, dtype.type(towards)), nearest)


def round_single(value: Array, mode: str, ftz: bool) -> Array:
    """Round float64, exact or rounded to odd, to float32; with `ftz` flush subnormal results."""
    nearest, value = mode == "rn", np.asarray(value)
    result = value.astype(_F4) if nearest else round_directed(value, mode)
    if ftz:
        scaled = value * _SCALE  # out of reach of the subnormal numbers
        kept = np.abs(scaled.astype(_F4) if nearest else round_directed(scaled, mode))
        tiny = (np.abs(value) < _TINY) & (kept < _MIN_NORMAL * np.float32(_SCALE))
        result = np.where(tiny, np.copysign(np.float32(0), result), result)
    return result


def fma_single(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float32, rounded once to nearest even.

    float64 holds the product of float32 numbers exactly.
    """
    product, addend = np.multiply(a, b, dtype=_F8), c.astype(_F8)
    total = product + addend
    suspect = (total.view(np.uint64) & _LOW_BITS) == _HALFWAY
    suspect |= np.abs(total) < _TINY  # subnormal float32 has fewer bits: ties elsewhere
    return _settled(total, product, addend, suspect).astype(_F4)


def fma_single_ftz(a: Array, b: Array, c: Array) -> Array:
    """Return `fma_single` with subnormal results flushed."""
    product, addend = np.multiply(a, b, dtype=_F8), c.astype(_F8)
    total = product + addend
    total = _settled(total, product, addend, (total.view(np.uint64) & _LOW_BITS) == _HALFWAY)
    result = total.astype(_F4)
    normal = np.abs(total) >= _EDGE
    return result if np.count_nonzero(normal) == normal.size else result * normal


def _settled(total: Array, product: Array, c: Array, suspect: Array) -> Array:
    """Return float64 that rounds to float32 as product + c does, of which `total` is the sum.

    That is `total`, unless it may be a tie where the exact sum is none.
    """
    if np.count_nonzero(suspect):
        error = _sum_error(product, c, total)
        wrong = suspect & (error != 0)
        if np.count_nonzero(wrong):
            return np.where(wrong, _to_odd(total, error), total)
    return total


def _add_directed(a: Array, b: Array, mode: str, ftz: bool) -> Array:
    """Return the sum of two float64 in float32, rounded in a direction."""
    total = a + b
    if mode == "rm":  # a sum that cancels is -0 (IEEE 754-2019, 6.3)
        total = np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
    return round_single(_to_odd(total, _sum_error(a, b, total)), mode, ftz)


def add_directed(a: Array, b: Array, mode: str, ftz: bool) -> Array:
    """Return a + b in float32, rounded in a direction."""
    return _add_directed(np.asarray(a).astype(_F8), np.asarray(b).astype(_F8), mode, ftz)


def multiply_directed(a: Array, b: Array, mode: str, ftz: bool) -> Array:
    """Return a * b in float32, rounded in a direction."""
    return round_single(np.multiply(a, b, dtype=_F8), mode, ftz)


def fma_directed(a: Array, b: Array, c: Array, mode: str, ftz: bool) -> Array:
    """Return a * b + c in float32, rounded once in a direction."""
    product = np.multiply(a, b, dtype=_F8)
    return _add_directed(product, np.asarray(c).astype(_F8), mode, ftz)


def divide_directed(a: Array, b: Array, mode: str, ftz: bool) -> Array:
    """Return a / b in float32, rounded in a direction."""
    a8, b8 = np.asarray(a).astype(_F8), np.asarray(b).astype(_F8)
    quotient = a8 / b8
    # only a quotient that float32 holds can hide a remainder, and then q * b is exact
    rest = (a8 - quotient * b8) * np.sign(b8)
    hidden = (quotient.astype(_F4).astype(_F8) == quotient) & np.isfinite(b8)
    return round_single(_to_odd(quotient, np.where(hidden, rest, 0.0)), mode, ftz)


def sqrt_directed(a: Array, mode: str, ftz: bool) -> Array:
    """Return the square root in float32, rounded in a direction; it is never subnormal."""
    a8 = np.asarray(a).astype(_F8)
    root = np.sqrt(a8)
    hidden = root.astype(_F4).astype(_F8) == root
    odd = _to_odd(root, np.where(hidden, a8 - root * root, 0.0))
    return round_single(odd, mode, ftz)


def _flush_inexact(result: Array, function: Callable[..., Array], a: Array, b: Array) -> Array:
    """Flush float32 results; look at 24 bits of those that may have been rounded up to normal."""
    size = np.abs(result)
    safe = size > _MIN_NORMAL
    if _only_zeros_besides(safe, result):
        return result
    doubtful = size == _MIN_NORMAL
    if np.count_nonzero(doubtful):
        wide = function(a, b, dtype=_F8)  # close enough: no quotient is next to the edge
        result = np.where(doubtful & (np.abs(wide) < _EDGE), result.dtype.type(0) * result, result)
        return flush(result)
    return result * safe.astype(_F4)


def multiply_flushed(a: Array, b: Array) -> Array:
    """Return a * b in float32, to nearest, with subnormal results flushed."""
    return _flush_inexact(np.multiply(a, b), np.multiply, a, b)


def divide_flushed(a: Array, b: Array) -> Array:
    """Return a / b in float32, to nearest, with subnormal results flushed."""
    return _flush_inexact(np.divide(a, b), np.divide, a, b)


def divide_approximately(a: Array, b: Array) -> Array:
    """Return a / b as ``div.approx``: a times the reciprocal of b, which is 0 beyond 2^126."""
    large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(large, a * np.copysign(np.float32(0), b), np.divide(a, b))


def through_double(function: Callable[..., Array], *operands: Array) -> Array:
    """Apply a NumPy function in float64 and round to float32: the ``.approx`` instructions."""
    return function(*(np.asarray(x).astype(_F8) for x in operands)).astype(_F4)


def exp2_single(x: Array) -> Array:
    """Return 2 to the power of x in float32."""
    return through_double(np.exp2, x)


def reciprocal(x: Array) -> Array:
    """Return 1 / x."""
    return 1.0 / x


def reciprocal_sqrt(x: Array) -> Array:
    """Return 1 / sqrt(x)."""
    return 1.0 / np.sqrt(x)


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float64, rounded once; lane by lane in exact arithmetic."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product_is_finite = np.isfinite(a) & np.isfinite(b)  # though float64 may not hold it
    result = np.where(product_is_finite & np.isinf(c), c, a * b + c)
    exact = product_is_finite & np.isfinite(c)
    for i in np.ndindex(result.shape):
        if exact[i]:
            value = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            if value:
                try:
                    result[i] = float(value)
                except OverflowError:
                    result[i] = np.inf if value > 0 else -np.inf
    return result


def fma_half(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float16, rounded once (float64 holds enough bits for that)."""
    return (np.multiply(a, b, dtype=_F8) + c).astype(_F2)


def _extremum(a: Array, b: Array, smaller: bool, nan: bool) -> Array:
    if nan:
        result = np.minimum(a, b) if smaller else np.maximum(a, b)
    else:
        result = np.fmin(a, b) if smaller else np.fmax(a, b)
    if np.count_nonzero(result) != result.size:  # -0 is smaller than +0
        unsigned = f"u{result.dtype.itemsize}"
        x, y = np.asarray(a).view(unsigned), np.asarray(b).view(unsigned)
        mixed = (a == b) & (x != y)  # equal numbers of different bits: zeros of both signs
        if np.count_nonzero(mixed):
            result = np.where(mixed, result.dtype.type(-0.0 if smaller else 0.0), result)
    return result


def minimum(a: Array, b: Array, nan: bool = False) -> Array:
    """Return the smaller number; NaN only if both are, or with `nan` if one is (``min``)."""
    return _extremum(a, b, True, nan)


def maximum(a: Array, b: Array, nan: bool = False) -> Array:
    """Return the larger number; NaN only if both are, or with `nan` if one is (``max``)."""
    return _extremum(a, b, False, nan)


def unpack_halves(x: Array) -> Array:
    """View packed pairs (u32) as float16, with a last axis of two."""
    return np.ascontiguousarray(np.asarray(x)[..., None]).view(_F2)


def pack_halves(x: Array) -> Array:
    """Pack float16 with a last axis of two into u32."""
    return np.ascontiguousarray(x.astype(_F2, copy=False)).view(np.uint32)[..., 0]


def unpack_bfloats(x: Array) -> Array:
    """Return packed pairs (u32) of bfloat16 as float32, with a last axis of two."""
    bits = np.asarray(x)
    pair = np.empty((*bits.shape, 2), np.uint32)
    pair[..., 0] = bits << np.uint32(16)
    pair[..., 1] = bits & _UPPER
    return pair.view(_F4)


def pack_bfloats(x: Array) -> Array:
    """Round float32 with a last axis of two to bfloat16, and pack them into u32."""
    return np.ascontiguousarray(float_to_bfloat(x, "rn")).view(np.uint32)[..., 0]


def minimum_bfloats(a: Array, b: Array) -> Array:
    """Return packed pairs of the smaller numbers (``min.bf16x2``)."""
    return pack_bfloats(minimum(unpack_bfloats(a), unpack_bfloats(b)))


def maximum_bfloats(a: Array, b: Array) -> Array:
    """Return packed pairs of the larger numbers (``max.bf16x2``)."""
    return pack_bfloats(maximum(unpack_bfloats(a), unpack_bfloats(b)))


def fma_bfloat(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of bfloat16 as float32, rounded to odd: bfloat16 then rounds it as once."""
    product, addend = np.multiply(a, b, dtype=_F8), c.astype(_F8)
    total = product + addend
    exact = _to_odd(total, _sum_error(product, addend, total))
    single = _directed(exact, _F4, "rz")
    inexact = (single.astype(_F8) != exact) & np.isfinite(exact)
    return (single.view(np.uint32) | inexact).view(_F4)


def relu(x: Array) -> Array:
    """Replace negative numbers and -0 by 0; NaN stays (``.relu``)."""
    return np.where(x <= 0, x.dtype.type(0), x)


def clamp_finite(x: Array, kind: str) -> Array:
    """Clamp float32 to the range of ``f16`` or ``bf16``; NaN stays (``.satfinite``)."""
    largest = _LARGEST[kind]
    return np.clip(x, -largest, largest)


def testp(x: Array, what: str) -> Array:
    """Test a property of a number (``testp``)."""
    normal = np.asarray(np.finfo(x.dtype).smallest_normal)
    size = np.abs(x)
    if what == "finite":
        return np.isfinite(x)
    if what == "infinite":
        return np.isinf(x)
    if what == "number":
        return ~np.isnan(x)
    if what == "notanumber":
        return np.isnan(x)
    if what == "normal":  # zeros count as normal
        return np.isfinite(x) & ((size >= normal) | (size == 0))
    return (size < normal) & (size > 0)  # subnormal


# float32 of every float16: looking up is faster than NumPy's conversion
HALF_TO_FLOAT = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
HALF_TO_FLOAT.setflags(write=False)

_INTEGRAL: dict[str, np.ufunc] = {
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
    rounded = x.astype(_F2) if mode == "rn" else _directed(x, _F2, mode)
    return rounded.view(np.uint16)


def nearest_half(x: Array) -> Array:
    """Round float32 to float16, to nearest even, and return its bits."""
    return float_to_half(x, "rn")


def nearest_halves(high: Array, low: Array) -> Array:
    """Round float32 to float16, to nearest even, and return packed pairs."""
    pair = np.empty((*np.broadcast_shapes(high.shape, low.shape), 2), _F2)
    pair[..., 0] = low
    pair[..., 1] = high
    return pair.view(np.uint32)[..., 0]


def finite_halves(high: Array, low: Array) -> Array:
    """Return `nearest_halves` with 65504 instead of what is above."""
    return nearest_halves(clamp_finite(high, "f16"), clamp_finite(low, "f16"))


def _nearest_upper(x: Array) -> Array:
    """Round float32 to bfloat16, to nearest even: the upper half of the bits returned."""
    bits = np.asarray(x).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return np.where(np.isnan(x), np.uint32(0x7FFF0000), bits + (even + np.uint32(0x7FFF)))


def nearest_bfloats(high: Array, low: Array) -> Array:
    """Round float32 to bfloat16, to nearest even, and return packed pairs."""
    return (_nearest_upper(high) & _UPPER) | (_nearest_upper(low) >> np.uint32(16))


def finite_bfloats(high: Array, low: Array) -> Array:
    """Return `nearest_bfloats` with the largest finite number instead of what is above."""
    return nearest_bfloats(clamp_finite(high, "bf16"), clamp_finite(low, "bf16"))


def bfloat_to_float(bits: Array) -> Array:
    """Return float32 from the bits of bfloat16: exact."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat(x: Array, mode: str) -> Array:
    """Round float32 to bfloat16 (``rn`` or ``rz``) and return its bits."""
    if mode == "rn":
        return (_nearest_upper(x) >> np.uint32(16)).astype(np.uint16)
    rounded = np.asarray(x).view(np.uint32) >> np.uint32(16)
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
    return value if dtype == "f8" else round_directed(value, mode)


def int_saturated(x: Array, dtype: str) -> Array:
    """Convert between integer dtypes, clamping to the range of the target (``cvt.sat``)."""
    x = np.asarray(x)
    limits = np.iinfo(dtype)
    low = max(limits.min, np.iinfo(x.dtype).min)
    high = min(limits.max, np.iinfo(x.dtype).max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(dtype)
