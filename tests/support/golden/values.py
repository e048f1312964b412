"""Operands of the golden vectors: the special numbers of each type, and random bits.

Inputs are made anew wherever they are needed, so they must be the same everywhere: they come from
the raw words of PCG64, which NumPy keeps stable, not from the distributions of its Generator, which
may change.
"""

from __future__ import annotations

from itertools import product

import numpy as np

UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}

_INF, _NAN = np.inf, np.nan

# What rounds, ties, saturates, overflows or underflows in some conversion or operation.
_COMMON = [
    0.0, 1.0, 0.5, 1.5, 2.5, 3.5, 0.25, 0.75, 2.0, 3.0, 0.3, 7.0, 127.0, 127.5, 128.0, 128.5,
    255.0, 255.5, 256.0, 2047.0, 2049.0, 32767.0, 32768.0, 65504.0, 2.0**-14, 2.0**-24,
    1.5 * 2.0**-24, 2.5 * 2.0**-24, _INF,
]  # fmt: skip
_F32 = [
    32767.5, 32768.5, 65519.996, 65520.0, 65535.0, 65535.5, 65536.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11,
    1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-23, 1 - 2.0**-24, 0.5 - 2.0**-25, 0.5 + 2.0**-24,
    2.0**-25, 2.0**-25 * (1 + 2.0**-23), 2.0**-14 - 2.0**-25, 8388607.5, 8388608.0, 16777215.0,
    16777217.0, 2147483520.0, 2.0**31, 4294967040.0, 2.0**32, 2.0**63, 2.0**63 - 2.0**39, 2.0**64,
    2.0**64 - 2.0**40, 2.0**-126, 2.0**-126 - 2.0**-149, 2.0**-127, 2.0**-149, 3 * 2.0**-149,
    3.4028234663852886e38,
]  # fmt: skip
_F64 = [
    *_F32, 2147483647.0, 2147483647.5, 2147483648.5, 4294967295.0, 4294967295.5, 2.0**53 - 0.5,
    2.0**53 + 2, 2.0**63 - 1024, 2.0**64 - 2048, 1 + 2.0**-24, 1 + 3 * 2.0**-24,
    1 + 2.0**-24 + 2.0**-52, 1 + 2.0**-11 + 2.0**-52, 65519.99999, 2.0**128 - 2.0**103,
    2.0**128 - 2.0**103 - 2.0**75, 2.0**-150, 2.0**-150 * (1 + 2.0**-52), 2.0**-149 * 1.5,
    2.0**-126 * (1 - 2.0**-23), 2.0**-126 * (1 - 2.0**-24 - 2.0**-53), 2.0**-126 * (1 - 2.0**-24),
    2.0**-126 * (1 - 2.0**-24 + 2.0**-53), 2.0**-126 * (1 - 2.0**-25 - 2.0**-53),
    2.0**-126 * (1 - 2.0**-25), 2.0**-126 * (1 - 2.0**-25 + 2.0**-53), 2.0**-126 * (1 - 2.0**-53),
    2.0**-1022, 2.0**-1074, 1.7976931348623157e308,
]  # fmt: skip


def random_bits(seed: int, count: int, dtype: type) -> np.ndarray:
    """Return `count` unsigned integers of `dtype`, all bits random."""
    raw = np.random.PCG64(seed).random_raw(count)
    return (raw >> np.uint64(64 - 8 * np.dtype(dtype).itemsize)).astype(dtype)


def random_numbers(seed: int, count: int, dtype: type, exponents: int) -> np.ndarray:
    """Return floats of both signs, the magnitudes spread evenly over 2^+-`exponents`."""
    raw = random_bits(seed, count, np.uint64)
    fraction = 1 + (raw >> np.uint64(12)).astype(np.float64) * 2.0**-52
    exponent = (raw & np.uint64(0xFFF)).astype(np.int64) % (2 * exponents) - exponents
    sign = np.where(raw & np.uint64(0x800), -1.0, 1.0)
    return np.ldexp(sign * fraction, exponent).astype(dtype)


def awkward_floats(dtype: type) -> np.ndarray:
    """Return the edges of a float dtype, positive and negative, and NaN."""
    listed = {2: _COMMON, 4: _COMMON + _F32, 8: _COMMON + _F64}[np.dtype(dtype).itemsize]
    positive: np.ndarray = np.array(listed, np.float64).astype(dtype)
    return np.concatenate([positive, -positive, np.array([_NAN], dtype)])


def floats(seed: int, dtype: type, count: int = 64, exponents: int = 12) -> np.ndarray:
    """Return edges, random bits and random numbers of ordinary size."""
    size = np.dtype(dtype).itemsize
    anything: np.ndarray = random_bits(seed, count, UNSIGNED[size]).view(dtype)
    ordinary = random_numbers(seed + 1, count, dtype, exponents)
    return np.concatenate([awkward_floats(dtype), anything, ordinary])


def integers(seed: int, dtype: type, count: int = 40) -> np.ndarray:
    """Return bit patterns: edges of every width up to that of `dtype`, and random ones."""
    bits = 8 * np.dtype(dtype).itemsize
    top = 2**bits
    edges = {0, 1, 2, 3, 7, 100, top - 1, top - 2, top - 100}
    for width in (7, 8, 11, 12, 15, 16, 23, 24, 25, 31, 32, 53, 54, 63, 64):
        if width <= bits:
            edges |= {(2**width + by) % top for by in (-1, 0, 1)}
            edges |= {(-(2**width) + by) % top for by in (-1, 0, 1)}
    if bits > 24:
        edges |= {2**24 + 3, 2**25 + 2, 2**25 + 6, top - 2**24 - 3}  # ties of float32
    return np.concatenate([np.array(sorted(edges), dtype), random_bits(seed, count, dtype)])


def products_below_normal(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 factors whose products are up to 2^-23 below 2^-126, the smallest normal.

    Whether rounding makes such a product normal depends on the grid that it is rounded to.
    """
    raw = random_bits(seed, 2 * count, np.uint32).reshape(2, count) * 2.0**-32
    b = (0.5 + raw[0] / 2).astype(np.float32)
    target = 2.0**-126 * (1 - raw[1] * 2.0**-23)
    return (target / b).astype(np.float32), np.where(np.arange(count) % 2, b, -b)


def quotients_below_normal(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 numbers and divisors, quotients as those of `products_below_normal`."""
    raw = random_bits(seed, 2 * count, np.uint32).reshape(2, count) * 2.0**-32
    b = (1 + raw[0]).astype(np.float32)
    a = (b.astype(np.float64) * 2.0**-126 * (1 - raw[1] * 2.0**-23)).astype(np.float32)
    a[:2], b[:2] = 2.0**-126 * (2 - 2.0**-23), 2.0  # the closest quotient to 2^-126 that there is
    return np.where(np.arange(count) % 2, a, -a), b


def pairs(*lists: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return every combination of the items of several lists, as one array per list."""
    rows = list(product(*(range(len(items)) for items in lists)))
    return tuple(
        items[index] for items, index in zip(lists, np.array(rows, np.intp).T, strict=True)
    )


def joined(*parts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Return several tuples of operands, concatenated."""
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
