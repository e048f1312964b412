"""Quantised weights in NumPy: what their codes stand for, and products with them.

Neither needs the whole weight at once: rows of the arrays are taken a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.reference_quantisation import dequantize, expand_scales

_BLOCK_ITEMS = 2**22  # of a weight that are dequantised at a time


def with_expanded_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight of "nf4" for one of "nf4_nested", and any other as it is."""
    if weight.scale_table is None or weight.super_scales is None:
        return weight
    return QuantizedWeight(
        "nf4",
        weight.codes,
        expand_scales(weight.scales, weight.super_scales, weight.scale_table),
        block_size=weight.block_size,
        transposed=weight.transposed,
    )


def dequantised_rows(weight: QuantizedWeight, rows: slice = slice(None)) -> np.ndarray:
    """Return rows of the arrays as float32 weights (rows, K)."""
    weight = with_expanded_scales(weight)
    above = weight.super_scales
    arrays = weight.codes[rows], weight.scales[rows], None if above is None else above[rows]
    return dequantize(weight.format, *arrays, weight.block_size)


# Roundings to float16 between the arrays and a weight on tensor cores, each of which loses 2^-11:
# of NF4's codebook (0.67 of that at the most), of a scale in float32, and of the product of the
# two; of int4 that of the zero point's fraction times the scale, and of the weight; of one fused
# multiply-add.
_ROUNDINGS = {"nf4": 2.67, "int8": 2, "int4": 2, "q4_1": 1, "q4_k": 1}
_HALF = 2.0**-11
_SMALLEST_HALF = 2.0**-25


def weight_error(weight: QuantizedWeight, *, tensor_cores: bool) -> np.ndarray:
    """Return how far a kernel's weights may be from the exact ones, in float64, of its shape.

    In float32 arithmetic they are formed with as many roundings as in the reference, or fewer. On
    tensor cores they are float16: `_ROUNDINGS` of the weight itself; of "q4_k" scale and offset are
    rounded too, before they cancel each other. What underflows loses 2^-25 in each rounding: of a
    scale, times a code of at most 15 ("int8" keeps 128 times its scale). Kernels for few rows add
    up codes and shifts apart: where these cancel, the roundings of both sums are left.
    """
    weight = with_expanded_scales(weight)
    values = np.abs(dequantised_rows(weight).astype(np.float64))
    terms = _cancelling_terms(weight)
    if tensor_cores:
        errors = (1 + _HALF) * _ROUNDINGS[weight.format] * _HALF * values + 32 * _SMALLEST_HALF
        errors += 2 * (weight.inner + 16) * 2.0**-24 * terms
        if weight.format == "q4_k":
            errors += _HALF * terms
    else:
        errors = 4 * 2.0**-24 * terms
    return errors if weight.transposed else errors.T


def _cancelling_terms(weight: QuantizedWeight) -> np.ndarray:
    """Return the size of what a weight is the sum of, in float64 (rows, K)."""
    exact = weight
    if weight.format == "int4":
        scales = np.stack([np.abs(weight.scales[..., 0]), -np.abs(weight.scales[..., 1])], axis=-1)
        exact = replace(weight, scales=scales)
    elif weight.format == "q4_1":
        exact = replace(weight, scales=np.abs(weight.scales))
    elif weight.super_scales is not None:
        signs = np.array([1, -1], np.float16)
        exact = replace(weight, super_scales=np.abs(weight.super_scales) * signs)
    return np.abs(dequantised_rows(exact).astype(np.float64))


def quantised_product(a: np.ndarray, weight: QuantizedWeight, dtype: DTypeLike) -> np.ndarray:
    """Return a @ weight, added up in `dtype`."""
    a, weight = a.astype(dtype, copy=False), with_expanded_scales(weight)
    out = np.zeros((*a.shape[:-1], weight.shape[1]), dtype)
    for rows in _row_blocks(weight):
        values = dequantised_rows(weight, rows).astype(dtype, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            if weight.transposed:
                out += a[..., rows] @ values
            else:
                out[..., rows] = a @ values.T
    return out


def _row_blocks(weight: QuantizedWeight) -> Iterator[slice]:
    """Yield the rows of the arrays, some at a time."""
    step = max(_BLOCK_ITEMS // weight.inner, 1)
    for first in range(0, weight.outer, step):
        yield slice(first, min(first + step, weight.outer))
