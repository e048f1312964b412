"""Linear, its backward, and quantisation in NumPy.

Products are in float64, with one exception: if all arrays are float32, a float32 BLAS computes
them, which takes a CPU half as long, and everything between the products is computed from their
float32 results. A quantised weight counts as an array of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.ops.activations.reference import activation as activation_of
from cupyattn.ops.activations.reference import activation_derivative
from cupyattn.ops.linear.row_formats import QuantizedRows, quantized_rows
from cupyattn.ops.linear.weight_formats import (
    FORMATS,
    NF4_CODEBOOK,
    ROTATION,
    TABLE,
    QuantizedWeight,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.outputs import widened
from cupyattn.runtime.precision import flushed

NF4_THRESHOLDS = (NF4_CODEBOOK[1:] + NF4_CODEBOOK[:-1]) * np.float32(0.5)
"""The code of a number is the count of thresholds below it, as in bitsandbytes."""

_TINY = np.float32(2.0**-126)


def quantize(w: np.ndarray, kind: str, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of rows w (N, K): "nf4", "int8" or "int4".

    A block that is not finite becomes NaN: its scale is NaN. So does an "int4" block whose scale
    exceeds float16. Subnormal numbers are 0.
    """
    rows, inner = w.shape
    x = flushed(w.astype(np.float32, order="C")).reshape(rows, inner // block_size, block_size)
    with np.errstate(all="ignore"):
        codes, scales = _QUANTISERS[kind](x)
    return codes.reshape(rows, -1), scales


def hadamard_sums(x: np.ndarray) -> np.ndarray:
    """Return x H, with H of 64 rows and entries of 1 and -1, for each block of the last axis.

    Sums and differences of items 1, 2, 4, 8, 16 and 32 apart; subnormal float32 results are 0.
    """
    v = x.copy()
    blocks = x.shape[-1] // ROTATION
    with np.errstate(all="ignore"):
        for distance in (1 << stage for stage in range(ROTATION.bit_length() - 1)):
            halves = v.reshape(*x.shape[:-1], blocks * (ROTATION // 2 // distance), 2, distance)
            a, b = halves[..., 0, :], halves[..., 1, :]
            v = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
            if v.dtype == np.float32:
                v = flushed(v)
    return v


def rotated(x: np.ndarray) -> np.ndarray:
    """Return blocks of 64 items of the last axis times the orthogonal matrix H / 8."""
    v = hadamard_sums(flushed(x) if x.dtype == np.float32 else x) * x.dtype.type(0.125)
    return flushed(v) if x.dtype == np.float32 else v


_LEAST_ABSMAX = np.float32(2.0**-100)


def quantize_rows(x: np.ndarray, rotation: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes of rows, and their scales: `cupyattn.quantize_rows` defines both."""
    wide = flushed(widened(x))
    v = wide if rotation is None else hadamard_sums(wide)
    with np.errstate(all="ignore"):
        absmax = np.abs(v).max(axis=-1)
        finite, small = np.isfinite(absmax), absmax < _LEAST_ABSMAX
        coded = finite & ~small
        usable = np.where(coded, absmax, np.float32(1))
        steps = np.float32(127 if rotation is None else 8 * 127)
        scales = np.where(
            coded, usable / steps, np.where(finite, np.float32(0), np.float32(np.nan))
        )
        codes = np.rint(v * (np.float32(127) / usable)[..., None])
        codes = np.where(coded[..., None], codes, 0).astype(np.int8)
    return codes, scales.astype(np.float32)


def nest_scales(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes of absmax, (span, offset) of each group of codes, and the numbers of codes.

    "nf4_nested" has 256 even steps within each group; a group that is not finite becomes NaN.
    """
    size, half = FORMATS["nf4_nested"].group or 0, np.float32(127.5)
    flat = flushed(absmax.reshape(-1))
    padded = np.pad(flat, (0, -len(flat) % size), mode="edge").reshape(-1, size)
    with np.errstate(all="ignore"):
        low, high = padded.min(axis=-1), padded.max(axis=-1)
        finite = np.isfinite(low) & np.isfinite(high)  # their sum may not be
        low, high = (np.where(finite, each, np.float32(np.nan)) for each in (low, high))
        offset = flushed(low * np.float32(0.5)) + flushed(high * np.float32(0.5))
        span = np.maximum(flushed(high - offset), flushed(offset - low))
        share = _quotient(flushed(padded - offset[:, None]), span)
        codes = np.rint(flushed(share * half) + half)
        codes = np.clip(np.where(np.isnan(codes), 0, codes), 0, 255).astype(np.uint8)
    table = np.arange(-255, 256, 2, dtype=np.float32) / np.float32(255)
    assert len(table) == TABLE
    return (
        codes.reshape(-1)[: len(flat)].reshape(absmax.shape),
        np.stack([span, offset], axis=-1),
        table,
    )


def expand_scales(
    scales: np.ndarray, super_scales: np.ndarray, scale_table: np.ndarray
) -> np.ndarray:
    """Return the absmax of all rows' blocks in float32, rounded as in bitsandbytes."""
    above = super_scales.repeat(FORMATS["nf4_nested"].group or 0, axis=0)[: scales.size]
    with np.errstate(all="ignore"):
        products = flushed(flushed(scale_table)[scales.reshape(-1)] * flushed(above[:, 0]))
        return flushed(products + flushed(above[:, 1])).reshape(scales.shape)


def dequantize(
    kind: str,
    codes: np.ndarray,
    scales: np.ndarray,
    super_scales: np.ndarray | None,
    block_size: int,
) -> np.ndarray:
    """Return the rows (N, K) of a quantised weight as numbers in float32."""
    rows = len(codes)
    with np.errstate(all="ignore"):
        if kind == "int8":
            w = codes.reshape(rows, -1, block_size) * scales[..., None]
            return _flushed_like(w, scales).reshape(rows, -1)
        pairs = _pairs(kind == "nf4").take(codes, mode="clip")  # "clip" is three times as fast
        w = pairs.view(np.float32).reshape(rows, -1, block_size)
        if kind == "nf4":
            w *= scales[..., None]
            w = _flushed_like(w, scales)
        elif kind == "int4":
            scale, zero = _columns(scales)
            w -= zero
            w *= scale
        elif kind == "q4_1":
            scale, offset = _columns(scales)
            w *= scale
            w += offset
        elif super_scales is not None:
            repeats = scales.shape[1] // super_scales.shape[1]
            own, above = _columns(scales), _columns(super_scales.repeat(repeats, axis=1))
            w *= above[0] * own[0]
            w -= above[1] * own[1]
        else:
            raise ValueError(f"{kind} has super_scales")
    return w.reshape(rows, -1)


def _nf4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    absmax = _absmax(x)
    normal, q = _quotient(x, absmax), np.zeros(x.shape, np.uint8)
    for threshold in NF4_THRESHOLDS:
        q += normal > threshold
    return q[..., ::2] << 4 | q[..., 1::2], absmax


def _int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = flushed(_absmax(x) / np.float32(127))
    return np.rint(_quotient(x, scale)).astype(np.int8), scale


def _int4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = x.min(axis=-1, initial=0), x.max(axis=-1, initial=0)
    step = (high - low) / np.float32(15)
    stored = np.where(np.isfinite(_absmax(x)), step, np.float32(np.nan)).astype(np.float16)
    scale = stored.astype(np.float32)
    zero = np.minimum(np.rint(_quotient(np.float32(0) - low[..., None], scale)), np.float32(15))
    q = np.clip(np.rint(_quotient(x, scale)) + zero, 0, 15).astype(np.uint8)
    return q[..., ::2] | q[..., 1::2] << 4, np.stack([stored, zero[..., 0].astype(np.float16)], -1)


_QUANTISERS = {"nf4": _nf4, "int8": _int8, "int4": _int4}


def _absmax(x: np.ndarray) -> np.ndarray:
    absmax = np.abs(x).max(axis=-1)
    return np.where(np.isfinite(absmax), absmax, np.float32(np.nan))


def _quotient(x: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Return x / divisors, a divisor for each row; 0 unless that is above 0."""
    usable = (divisors > 0)[..., None]
    return np.where(usable, x / np.where(usable, divisors[..., None], np.float32(1)), np.float32(0))


def _flushed_like(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return products of scales with subnormal ones replaced by 0."""
    tiny = (np.abs(scales) < _TINY * 16) & (scales != 0)
    return flushed(w) if tiny.any() else w


def _columns(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two numbers of each block as float32, with an axis for its weights."""
    wide = pair.astype(np.float32)
    return wide[..., :1], wide[..., 1:]


@cache
def _pairs(nf4: bool) -> np.ndarray:
    """Return the two numbers of each byte, (256,): two float32 as one item, in the order of K."""
    byte = np.arange(256)
    high, low = byte >> 4, byte & 15
    if nf4:
        both = NF4_CODEBOOK[np.stack([high, low], axis=1)]
    else:
        both = np.stack([low, high], axis=1).astype(np.float32)
    return both.view(np.uint64)[:, 0]


_BLOCK_ITEMS = 2**22  # of a weight, dequantised at a time


def with_expanded_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the "nf4" weight that equals an "nf4_nested" one, and any other weight as it is."""
    if weight.scale_table is None or weight.super_scales is None:
        return weight
    return QuantizedWeight(
        "nf4",
        weight.codes,
        expand_scales(*map(np.asarray, (weight.scales, weight.super_scales, weight.scale_table))),
        block_size=weight.block_size,
        transposed=weight.transposed,
    )


def dequantised_rows(weight: QuantizedWeight, rows: slice = slice(None)) -> np.ndarray:
    """Return rows of the arrays as float32 weights (rows, K)."""
    weight = with_expanded_scales(weight)
    above = weight.super_scales
    arrays = weight.codes[rows], weight.scales[rows], None if above is None else above[rows]
    return dequantize(weight.format, *arrays, weight.block_size)


_CODEBOOK_ROUNDING = 0.67
# Roundings to float16 between the arrays and a weight on tensor cores. Each loses up to 2^-11.
# "nf4": the codebook (at most 0.67 of that), the scale, which is float32, and their product.
# "int8": scale and product. "int4": the zero point's fraction times the scale, and the weight.
# "q4_1" and "q4_k": one fused multiply-add.
_ROUNDINGS = {"nf4": 2 + _CODEBOOK_ROUNDING, "int8": 2, "int4": 2, "q4_1": 1, "q4_k": 1}
_HALF = 2.0**-11
_SMALLEST_HALF = 2.0**-25


def _cancelling_terms(weight: QuantizedWeight) -> np.ndarray:
    """Return the sum of the absolute terms of each weight, in float64 (rows, K)."""
    exact = weight
    if weight.format == "int4":
        scales = np.stack([abs(weight.scales[..., 0]), -abs(weight.scales[..., 1])], axis=-1)
        exact = replace(weight, scales=scales)
    elif weight.format == "q4_1":
        exact = replace(weight, scales=abs(weight.scales))
    elif weight.super_scales is not None:
        signs = np.array([1, -1], np.float16)
        exact = replace(weight, super_scales=abs(weight.super_scales) * signs)
    return np.abs(dequantised_rows(exact).astype(np.float64))


def _steps(weight: QuantizedWeight) -> np.ndarray:
    """Return how far weights of neighbouring codes are apart, in float64 (rows, K).

    It is 0 for the formats without a shift.
    """
    scale_alone = np.array([1, 0], np.float16)
    ones = replace(weight, codes=np.full_like(weight.codes, 0x11))
    if weight.super_scales is not None:
        ones = replace(ones, super_scales=weight.super_scales * scale_alone)
    elif weight.format in ("int4", "q4_1"):
        ones = replace(ones, scales=weight.scales * scale_alone)
    else:
        return np.zeros(())
    return np.abs(dequantised_rows(ones).astype(np.float64))


def quantised_product(a: np.ndarray, weight: QuantizedWeight, dtype: DTypeLike) -> np.ndarray:
    """Return a @ weight with sums in `dtype`."""
    a, weight = a.astype(dtype, copy=False), with_expanded_scales(weight)
    if weight.rotation is not None:
        plain = replace(weight, rotation=None)
        if weight.transposed:
            return rotated(quantised_product(a, plain, dtype))
        return quantised_product(rotated(a), plain, dtype)
    out = np.zeros((*a.shape[:-1], weight.shape[1]), dtype)
    for rows in _row_blocks(weight):
        values = dequantised_rows(weight, rows).astype(dtype, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            if weight.transposed:
                out += a[..., rows] @ values
            else:
                out[..., rows] = a @ values.T
    return out


_EXACT_TERMS = 2**24 // 127**2
"""Products of codes up to 127 whose sum float32 holds exactly."""


def int8_sums(codes: np.ndarray, weight_codes: np.ndarray) -> np.ndarray:
    """Return the exact sums of products of codes (M, K) and (N, K), as float64 (M, N).

    A float32 BLAS adds up as many as are exact.
    """
    sums = np.zeros((len(codes), len(weight_codes)))
    for first in range(0, codes.shape[1], _EXACT_TERMS):
        part = slice(first, first + _EXACT_TERMS)
        a, b = (each[:, part].astype(np.float32) for each in (codes, weight_codes))
        sums += a @ b.T
    return sums


def int8_product(rows: QuantizedRows, weight: QuantizedWeight) -> np.ndarray:
    """Return the product of int8 rows and an int8 weight (K, N) in float64."""
    sums = int8_sums(_as_rows(np.asarray(rows.codes)), np.asarray(weight.codes))
    with np.errstate(all="ignore"):
        product = sums * rows.scales.reshape(-1, 1).astype(np.float64)
        product = product * weight.scales[:, 0].astype(np.float64)
    return product.reshape(*rows.shape[:-1], product.shape[-1])


def _row_blocks(weight: QuantizedWeight) -> Iterator[slice]:
    """Yield the rows of the arrays, some at a time."""
    step = max(_BLOCK_ITEMS // weight.inner, 1)
    for first in range(0, weight.outer, step):
        yield slice(first, min(first + step, weight.outer))


class LinearGrads(NamedTuple):
    """Gradients of linear's inputs, each of its input's shape.

    As ``grads=``, a field that is None, the default, asks for a new array.

    Attributes
    ----------
    dx : array (..., K)
        Gradient with respect to x.
    dw : array (K, N)
        Gradient with respect to w, summed over all rows of x; (K, 2 N) for a gated activation.
    db : array (N,), or None
        Gradient with respect to b, summed over all rows of x; None without b.
    """

    dx: Array | None = None
    dw: Array | None = None
    db: Array | None = None


GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Gated activations, each with the activation that it applies to its gate."""


def linear(
    x: np.ndarray | QuantizedRows,
    w: np.ndarray | QuantizedWeight,
    b: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    activation: str | None = None,
    activations: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return activation(x w + b) + residual, and x w + b.

    Parameters
    ----------
    x, w, b, residual : numpy.ndarray
        The arguments of `cupyattn.linear`.
    activation : str, optional
        The activation, as for `cupyattn.linear`.
    activations : {None, "int8"}
        "int8" quantises x: the result is the exact product of its codes and scales.

    Examples
    --------
    >>> x, w = np.array([[1.0, 2.0]]), np.eye(2)
    >>> linear(x, w, np.ones(2), residual=x, activation="relu")
    (array([[3., 5.]]), array([[2., 3.]]))
    """
    if activations is not None and not isinstance(x, QuantizedRows):
        assert isinstance(w, QuantizedWeight)
        codes, scales = quantize_rows(x, w.rotation)
        x = quantized_rows(codes, scales, w.rotation, scales.dtype)
    preactivation = _product(x, w)
    if b is not None:
        preactivation = preactivation + b.astype(preactivation.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation in GATES:
            gate, up = _halves(preactivation)
            out = activated(gate, GATES[activation]) * up
        else:
            out = activated(preactivation, activation)
        if residual is not None:
            out = out + residual.astype(out.dtype)
    return out, preactivation


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a b in float64, and of int8 in int64."""
    wide = np.int64 if a.dtype == np.int8 else np.float64
    return np.asarray(np.matmul(a.astype(wide), b.astype(wide)))


def linear_backward(
    dout: np.ndarray,
    x: np.ndarray,
    w: np.ndarray | QuantizedWeight,
    b: np.ndarray | None = None,
    *,
    activation: str | None = None,
    preactivation: np.ndarray | None = None,
) -> LinearGrads:
    """Return the gradients dx, dw (None for a quantised w) and db (None without b).

    Parameters
    ----------
    dout, x, w, b, preactivation : numpy.ndarray
        The arguments of `cupyattn.linear_backward`.
    activation : str, optional
        The activation, as for `cupyattn.linear_backward`.
    """
    if activation is not None and preactivation is None:
        _, preactivation = linear(x, w, b)
    dz = preactivation_gradient(dout, preactivation, activation)
    rows_x, rows_dz = _as_rows(x), _as_rows(dz)
    dx = _product(dz, w.T).reshape(x.shape)
    db = rows_dz.sum(axis=0, dtype=np.float64) if b is not None else None
    dw = None if isinstance(w, QuantizedWeight) else _product(rows_x.T, rows_dz)
    return LinearGrads(dx, dw, db)


def preactivation_gradient(
    dout: np.ndarray, preactivation: np.ndarray | None, activation: str | None
) -> np.ndarray:
    """Return the gradient with respect to x w + b, both halves of it for a gated activation."""
    dtype = _dtype(dout)
    dout = dout.astype(dtype)
    if activation is None or preactivation is None:
        return dout
    with np.errstate(over="ignore", invalid="ignore"):
        z = preactivation.astype(dtype)
        if activation not in GATES:
            return dout * activated_slope(z, activation)
        gate, up = _halves(z)
        kind = GATES[activation]
        halves = dout * up * activated_slope(gate, kind), dout * activated(gate, kind)
        return np.concatenate(halves, axis=-1)


def activated(z: np.ndarray, kind: str | None) -> np.ndarray:
    """Return the activation of z, or z without an activation."""
    return z if kind is None else activation_of(z, kind).astype(z.dtype, copy=False)


def activated_slope(z: np.ndarray, kind: str | None) -> np.ndarray:
    """Return the derivative of the activation at z."""
    return np.ones_like(z) if kind is None else activation_derivative(z, kind).astype(z.dtype)


def _product(a: np.ndarray | QuantizedRows, b: np.ndarray | QuantizedWeight) -> np.ndarray:
    if isinstance(a, QuantizedRows):
        assert isinstance(b, QuantizedWeight)
        return int8_product(a, b)
    if isinstance(b, QuantizedWeight):
        return quantised_product(a, b, _dtype(a))
    dtype = _dtype(a, b)
    with np.errstate(over="ignore", invalid="ignore"):
        return a.astype(dtype, copy=False) @ b.astype(dtype, copy=False)


def _dtype(*arrays: np.ndarray) -> type[np.floating]:
    every = all(array.dtype == np.float32 for array in arrays)
    return np.float32 if every else np.float64


def _as_rows(array: np.ndarray) -> np.ndarray:
    columns = array.shape[-1]
    rows = int(np.prod(array.shape[:-1], dtype=np.int64))
    return array.reshape(rows, columns)


def _halves(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    columns = z.shape[-1] // 2
    return z[..., :columns], z[..., columns:]
