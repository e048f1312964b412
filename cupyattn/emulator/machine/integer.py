"""Integer instructions over lanes, where NumPy's operators do not do what PTX does."""

import numpy as np

from cupyattn.emulator.machine.lanes import Array

_U4, _U8 = np.uint32, np.uint64


def _bits(a: Array) -> int:
    return 8 * a.dtype.itemsize


def pack_pair(low: Array, high: Array) -> Array:
    """Return 32 bits made of two halves (``mov.b32 d, {low, high}``)."""
    return low.astype(_U4) | high.astype(_U4) << _U4(16)


def shift_left(a: Array, amount: Array) -> Array:
    """Shift; an amount of the width or more gives 0 (``shl``)."""
    width = _bits(a)
    amount = np.asarray(amount)
    shifted = a << np.minimum(amount, width - 1).astype(a.dtype)
    return np.where(amount >= width, a.dtype.type(0), shifted)


def shift_right(a: Array, amount: Array) -> Array:
    """Shift, arithmetic for signed dtypes; large amounts give 0 or the sign (``shr``)."""
    width = _bits(a)
    amount = np.asarray(amount)
    shifted = a >> np.minimum(amount, width - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return shifted
    return np.where(amount >= width, a.dtype.type(0), shifted)


def divide(a: Array, b: Array) -> Array:
    """Divide towards zero; by zero gives all ones, as the hardware does (``div``)."""
    zero = b == 0
    quotient = (a - np.fmod(a, np.where(zero, b.dtype.type(1), b))) // np.where(
        zero, b.dtype.type(1), b
    )
    return np.where(zero, ~a.dtype.type(0), quotient)


def remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of `a`; by zero gives `a` (``rem``)."""
    zero = b == 0
    return np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b)))


def multiply_high(a: Array, b: Array) -> Array:
    """Return the upper half of the double-width product (``mul.hi``)."""
    width = _bits(a)
    if width < 64:
        wide = np.dtype(f"{a.dtype.kind}{width // 4}")
        product = np.multiply(a, b, dtype=wide)
        return (product >> wide.type(width)).astype(a.dtype)
    low32 = _U8(0xFFFFFFFF)
    half = _U8(32)
    x, y = a.view(_U8), b.view(_U8)
    xl, xh, yl, yh = x & low32, x >> half, y & low32, y >> half
    middle = xh * yl + ((xl * yl) >> half)
    carry = (middle & low32) + xl * yh
    high = xh * yh + (middle >> half) + (carry >> half)
    if a.dtype.kind == "i":  # two's complement: subtract the other operand where one is negative
        high = high - np.where(a < 0, y, _U8(0)) - np.where(b < 0, x, _U8(0))
    return high.view(a.dtype)


def multiply_24(a: Array, b: Array, high: bool) -> Array:
    """Multiply the low 24 bits; bits 0-31 or 16-47 of the product (``mul24``)."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    shift = a.dtype.type(8)
    product = np.multiply((a << shift) >> shift, (b << shift) >> shift, dtype=wide)
    return (product >> wide(16 if high else 0)).astype(a.dtype)


def add_saturated(a: Array, b: Array) -> Array:
    """Add with the result clamped to int32 (``add.sat.s32``)."""
    return np.clip(np.add(a, b, dtype=np.int64), -(2**31), 2**31 - 1).astype(np.int32)


def subtract_saturated(a: Array, b: Array) -> Array:
    """Subtract with the result clamped to int32 (``sub.sat.s32``)."""
    return np.clip(np.subtract(a, b, dtype=np.int64), -(2**31), 2**31 - 1).astype(np.int32)


def funnel_shift(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    """Shift the 64-bit value high:low and take its upper (left) or lower half (``shf``)."""
    value = np.asarray(low).astype(_U8) | (np.asarray(high).astype(_U8) << _U8(32))
    amount = np.asarray(amount).astype(_U8)
    amount = np.minimum(amount, _U8(32)) if clamp else amount & _U8(31)
    if left:
        return ((value << amount) >> _U8(32)).astype(_U4)
    return (value >> amount).astype(_U4)


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any bitwise function of three inputs; bit 4a + 2b + c of `table` is its value (``lop3``)."""
    result: Array = np.zeros((), _U4)
    for i in range(8):
        if table >> i & 1:
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result = result | term
    return result


def _prmt_source(mode: str, first: Array, i: Array) -> Array:
    """Return which byte goes to byte `i` (PTX ISA, prmt, table of modes)."""
    if mode == "f4e":
        return first + i
    if mode == "b4e":
        return (first - i) & _U8(7)
    if mode == "rc8":
        return first
    if mode == "ecl":
        return np.maximum(first, i)
    if mode == "ecr":
        return np.minimum(first, i)
    return (first & _U8(1)) * _U8(2) + (i & _U8(1))  # rc16


def permute_bytes(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """Pick 4 of the 8 bytes of b:a (``prmt``); `mode` as in PTX, "" for the general form."""
    value = np.asarray(a).astype(_U8) | (np.asarray(b).astype(_U8) << _U8(32))
    selector = np.asarray(selector).astype(_U8)
    result: Array = _U8(0)
    first = selector & _U8(3)
    for i in range(4):
        if mode == "":
            pick = selector >> _U8(4 * i)
            source, replicate = pick & _U8(7), (pick & _U8(8)) != 0
        else:
            replicate = np.False_
            source = _prmt_source(mode, first, _U8(i))
        byte = value >> (source * _U8(8)) & _U8(255)
        sign = np.where(byte & _U8(128), _U8(255), _U8(0))
        byte = np.where(replicate, sign, byte)
        result = result | (byte << _U8(8 * i))
    return result.astype(_U4)


def _field_mask(dtype: np.dtype, length: Array) -> Array:
    width = 8 * dtype.itemsize
    ones = (dtype.type(1) << np.minimum(length, dtype.type(width - 1))) - dtype.type(1)
    return np.where(length >= width, ~dtype.type(0), ones)


def bit_field_extract(a: Array, position: Array, length: Array) -> Array:
    """Extract a bit field, sign-extended for signed dtypes (``bfe``)."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    width = _bits(a)
    value = np.asarray(a).view(unsigned)
    position = np.asarray(position).astype(unsigned) & unsigned.type(255)
    length = np.asarray(length).astype(unsigned) & unsigned.type(255)
    mask = _field_mask(unsigned, length)
    field = shift_right(value, position) & mask
    if a.dtype.kind == "i":
        top = np.minimum(position + length - unsigned.type(1), unsigned.type(width - 1))
        sign = (shift_right(value, top) & unsigned.type(1)) != 0
        # bits above the end of the value are copies of its sign as well
        reach = shift_right(~unsigned.type(0) + value * unsigned.type(0), position) & mask
        field = np.where((length > 0) & sign, field | ~mask | (mask & ~reach), field)
    return field.view(a.dtype)


def bit_field_insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """Insert the low bits of `a` into `b` (``bfi``)."""
    dtype = np.asarray(b).dtype
    position = np.asarray(position).astype(dtype) & dtype.type(255)
    length = np.asarray(length).astype(dtype) & dtype.type(255)
    mask = shift_left(_field_mask(dtype, length), position)
    return (np.asarray(b) & ~mask) | (shift_left(np.asarray(a), position) & mask)


def popcount(a: Array) -> Array:
    """Count the ones, as u32 (``popc``)."""
    value = np.asarray(a).astype(_U8)
    value = value - (value >> _U8(1) & _U8(0x5555555555555555))
    twos = _U8(0x3333333333333333)
    value = (value & twos) + (value >> _U8(2) & twos)
    value = (value + (value >> _U8(4))) & _U8(0x0F0F0F0F0F0F0F0F)
    return ((value * _U8(0x0101010101010101)) >> _U8(56)).astype(_U4)


def _highest_one(value: Array) -> Array:
    """Return the index of the highest one of an unsigned array, 64-bit safe; 0 for 0."""
    value = np.asarray(value).astype(_U8)
    high = value >> _U8(32)
    upper = high != 0
    word = np.where(upper, high, value).astype(np.float64)  # exact: below 2^32
    exponent = np.frexp(np.maximum(word, 1.0))[1] - 1
    return exponent + np.where(upper, 32, 0)


def count_leading_zeros(a: Array) -> Array:
    """Count the zeros above the highest one, as u32 (``clz``)."""
    width = _bits(a)
    return np.where(a == 0, width, width - 1 - _highest_one(a)).astype(_U4)


def find_msb(a: Array, as_shift: bool) -> Array:
    """Return the position of the highest bit that is no sign bit, ~0 if none (``bfind``)."""
    width = _bits(a)
    value = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    value = np.asarray(value).view(f"u{a.dtype.itemsize}")
    position = _highest_one(value)
    if as_shift:
        position = width - 1 - position
    return np.where(value == 0, _U4(0xFFFFFFFF), position.astype(_U4))


def reverse_bits(a: Array) -> Array:
    """Reverse the order of the bits (``brev``)."""
    a = np.asarray(a)
    swapped = a.byteswap()  # then reverse inside every byte
    unit = a.dtype.type
    for shift, pattern in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        mask = unit(int.from_bytes(bytes([pattern]) * a.dtype.itemsize, "little"))
        swapped = (swapped >> unit(shift) & mask) | ((swapped & mask) << unit(shift))
    return swapped


def dot_bytes(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool) -> Array:
    """Add the dot product of four bytes to `c` (``dp4a``)."""
    return _dot(a, b, c, a_signed, b_signed, 8, 8, 0)


def dot_halves(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool, high: bool) -> Array:
    """Add the dot product of two 16-bit and two 8-bit integers to `c` (``dp2a``)."""
    return _dot(a, b, c, a_signed, b_signed, 16, 8, 16 if high else 0)


def _dot(
    a: Array,
    b: Array,
    c: Array,
    a_signed: bool,
    b_signed: bool,
    a_bits: int,
    b_bits: int,
    skip: int,
) -> Array:
    def element(x: Array, bits: int, shift: int, signed: bool) -> Array:
        value = np.asarray(x).astype(np.int64) >> shift & ((1 << bits) - 1)
        if signed:
            value = value - ((value >> (bits - 1)) << bits)
        return value

    total = np.asarray(c).astype(np.int64)
    for i in range(32 // a_bits):
        total = total + element(a, a_bits, a_bits * i, a_signed) * element(
            b, b_bits, skip + b_bits * i, b_signed
        )
    return (total & 0xFFFFFFFF).astype(_U4)
