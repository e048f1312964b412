"""The quantised storage of a KV cache: integers with a scale for each token and head.

    int8   value = q * scale,            scale = max|x| / 127,  q = round(x / scale)
    int4   value = (nibble - 8) * scale, scale = max|x| / 7,    nibble = 8 + round(x / scale)

The maximum is that of the D items of one token and key-value head. Two nibbles share a byte: item
2 i is its low one, item 2 i + 1 its high one. Rounding is to nearest, ties to even. All is float32
arithmetic that flushes subnormal numbers to 0, as the kernels do, which equal this bit for bit:

- a scale that would be below 2**-126 is 0, and so are all its values;
- of items that are not all finite the scale is not finite either (inf, or NaN if there is a NaN),
  and the integers are those of 0: what is read back is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyattn.runtime.precision import TINY32, U32

LARGEST = {8: 127, 4: 7}
"""The integer that a head's largest item is stored as, by the bits of an item."""
STORED_BITS = {"int8": 8, "uint8": 4}
"""Bits of an item, by the dtype of the array that it is stored in."""
OFFSET = 8
"""The number that is added to an integer of 4 bits, so that a nibble has no sign."""


def quantise(x: ArrayLike, bits: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Store x (..., D) in 8 or 4 bits an item.

    Returns
    -------
    stored : (..., D) int8, or (..., D / 2) uint8
    scales : (...) float32

    Examples
    --------
    >>> stored, scales = quantise([[-7.0, 3.0, 2.5, 0.0]], 4)
    >>> scales, stored & 15, stored >> 4
    (array([1.], dtype=float32), array([[ 1, 10]], dtype=uint8), array([[11,  8]], dtype=uint8))
    """
    with np.errstate(over="ignore"):
        items = np.asarray(x).astype(np.float32)
    items = np.where(np.abs(items) < TINY32, np.float32(0), items)
    largest = np.float32(LARGEST[bits])
    with np.errstate(invalid="ignore", divide="ignore", under="ignore"):
        scales = np.max(np.abs(items), axis=-1, initial=0) / largest
        scales = np.where(scales < TINY32, np.float32(0), scales)
        quotients = items / scales[..., None]
    usable = np.isfinite(scales) & (scales > 0)
    integers = np.rint(np.where(usable[..., None], quotients, 0)).astype(np.int8)
    if bits == 8:
        return integers, scales
    nibbles = (integers + OFFSET).astype(np.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales


def dequantise(stored: NDArray[Any], scales: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the values (..., D) of what `quantise` has stored; its dtype says how.

    Examples
    --------
    >>> dequantise(np.array([[127, -64]], np.int8), np.array([0.5], np.float32))
    array([[ 63.5, -32. ]])
    """
    integers = stored.astype(np.float64)
    if STORED_BITS[stored.dtype.name] == 4:
        shape = (*stored.shape[:-1], 2 * stored.shape[-1])
        nibbles = np.stack((stored & 15, stored >> 4), axis=-1).reshape(shape)
        integers = nibbles.astype(np.float64) - OFFSET
    with np.errstate(invalid="ignore"):
        return integers * np.asarray(scales, np.float64)[..., None]


def quantisation_bound(
    x: ArrayLike, bits: int, *, error: ArrayLike = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How far dequantised values may be from x (..., D), and the scales from x's exact ones.

    `error` (broadcast to x) is how far from x that may be which is quantised: a rotation in float32
    errs. With e its maximum over a head and M the largest integer, the maximum errs by e and its
    division rounds once (u32), so that the scale errs by e / M + u32 scale. An integer is at most
    half from its quotient, whose size is at most M and which rounds once: |value - quantised| <=
    scale (1/2 + M u32). Below 127 * 2**-126 everything may have become 0.
    """
    exact = np.abs(np.asarray(x, np.float64))
    off = np.broadcast_to(np.asarray(error, np.float64), exact.shape)
    largest = LARGEST[bits]
    worst = np.max(off, axis=-1, initial=0)
    scale = np.max(exact, axis=-1, initial=0) / largest
    scale_error = worst / largest + 2 * U32 * scale + TINY32
    values = (scale + scale_error)[..., None] * (0.5 + 2 * largest * U32)
    return off + values + largest * TINY32, scale_error
