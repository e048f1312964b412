"""Linear and its backward on NumPy arrays in float32: products by BLAS, the rest in blocks.

`cupyattn.ops.linear.reference` defines the functions, and computes float64 arrays. All others are
converted to float32, which is exact, and multiplied by a float32 BLAS. A weight of 16 bits or of
codes is decoded a block at a time, unless `kept_weights` has a copy of it. The bounds are
`cupyattn.ops.linear.bounds.cpu_linear_bound` and `cpu_linear_backward_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupyattn.ops.activations import cpu as activations
from cupyattn.ops.activations import reference as exact_activations
from cupyattn.ops.linear.reference import (
    GATES,
    LinearGrads,
    _halves,
    dequantised_rows,
    int8_sums,
    rotated,
    with_expanded_scales,
)
from cupyattn.ops.linear.row_formats import QuantizedRows
from cupyattn.ops.linear.weight_formats import QuantizedWeight
from cupyattn.runtime.outputs import widened
from cupyattn.runtime.precision import Float32, Float64

_DECODED, _DECODED_FOR_MANY_ROWS = 2**17, 2**22
"""Items of a weight that are decoded at a time. The first fit a core's cache with their codes; many
rows of x take so long that memory does not matter."""
_SUMS = 2**22
"""Items of x w in memory at a time."""
_SMALL, _ALIGNMENT = 2**18, 64
"""Bytes: smaller arrays have memory of their own, others are parts of larger pieces."""
_SMALL_MATRIX = 2**12
"""Items up to which all matrices of a batch are converted at once: a call of NumPy takes longer."""
_FEW_ROWS = 16
"""Up to so many rows of x, BLAS takes the weight as the left operand sooner."""


class HugePages:
    """Makes large NumPy arrays in memory of huge pages, of which NumPy asks for 4 MiB or more.

    Products with one row read weights of 425 MB in 34 ms from it, and in 48 ms from arrays of 1 to
    7 MB of their own (Xeon with AVX-512, a shared core, 2026-11-28).

    Parameters
    ----------
    piece : int
        Bytes that are allocated at a time, or more for a larger array.
    """

    def __init__(self, piece: int = 2**26) -> None:
        self._piece = piece
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array in C order."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL:
            return np.empty(shape, dtype)
        if self._used + size + _ALIGNMENT > len(self._memory):
            self._memory = np.empty(max(size + _ALIGNMENT, self._piece), np.uint8)
            self._used = 0
        start = self._used + -(self._memory.ctypes.data + self._used) % _ALIGNMENT
        self._used = start + size
        return self._memory[start : self._used].view(dtype).reshape(shape)


class KeptWeights:
    """float32 copies of 16-bit weights, made when a product first needs them.

    The weights must not change while the copies are in use.

    Parameters
    ----------
    limit : int
        The most bytes of all copies. Weights beyond it are converted in every product.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._memory = HugePages()
        self._copies: dict[tuple[object, ...], tuple[Float32, NDArray[Any]]] = {}
        """Each copy with its weight: memory that is kept has no other array later."""

    def copy_of(self, rows: NDArray[Any]) -> Float32 | None:
        """Return the copy of a weight (N, K), or None where the limit leaves no room for one."""
        key = rows.__array_interface__["data"], rows.shape, rows.strides, rows.dtype
        if key in self._copies:
            return self._copies[key][0]
        if self.nbytes + 4 * rows.size > self.limit:
            return None
        copy = self._memory.empty(rows.shape, np.float32)
        copy[...] = widened(rows)
        self._copies[key] = copy, rows
        self.nbytes += copy.nbytes
        return copy

    def forget(self) -> None:
        """Drop all copies."""
        self._copies.clear()
        self._memory = HugePages()
        self.nbytes = 0


_kept: ContextVar[KeptWeights | None] = ContextVar("kept_weights", default=None)


@contextmanager
def kept_weights(copies: KeptWeights) -> Iterator[None]:
    """Let products within the block use and make copies of 16-bit weights."""
    token = _kept.set(copies)
    try:
        yield
    finally:
        _kept.reset(token)


@np.errstate(all="ignore")
def linear(
    x: NDArray[Any] | QuantizedRows,
    w: NDArray[Any] | QuantizedWeight,
    b: NDArray[Any] | None,
    residual: NDArray[Any] | None,
    out: NDArray[Any],
    preactivation: NDArray[Any] | None,
    *,
    activation: str | None,
) -> None:
    """Write activation(x w + b) + residual into out, and x w + b into preactivation."""
    kind = GATES.get(activation or "", activation)
    bias = None if b is None else widened(b)
    quantised = x if isinstance(x, QuantizedRows) else None
    items = x if quantised is None else quantised.codes
    rows_x, rows_residual, rows_out, rows_z = map(_as_rows, (items, residual, out, preactivation))
    step = max(_SUMS // max(w.shape[1], 1), 1)
    for first in range(0, len(rows_x), step):
        part = slice(first, first + step)
        if quantised is None:
            sums = product(widened(rows_x[part]), w)
        else:
            sums = _int8_product(rows_x[part], quantised.scales.reshape(-1)[part], w)
        height = min(max(activations.BLOCK // max(w.shape[1], 1), 1), len(sums))
        scratch = None if kind is None else activations.scratch_of(kind, height * w.shape[1])
        for row in range(0, len(sums), height):
            z = sums[row : row + height]
            at = slice(first + row, first + row + len(z))
            if bias is not None:
                z += bias
            if rows_z is not None:
                rows_z[at] = z
            result = z
            if activation in GATES:
                gate, up = _halves(z)
                result = _activated(gate, kind, scratch)
                result *= up
            elif kind is not None:
                result = _activated(z, kind, scratch)
            if rows_residual is not None:
                result += widened(rows_residual[at])
            rows_out[at] = result


@np.errstate(all="ignore")
def matmul(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return a b in float32, of float64 arrays in float64, and of int8 in int32.

    Other dtypes are converted one member of a batch at a time if matrices are large. A float64 BLAS
    is exact for int8: products are at most 2^14, and sums of 2^38 of them fit.
    """
    if a.dtype in (np.float32, np.float64):
        return np.asarray(a @ b)
    matrices = a.ndim > 1 and b.ndim > 1
    if not matrices or max(math.prod(each.shape[-2:]) for each in (a, b)) < _SMALL_MATRIX:
        return _converted_product(a, b)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = np.empty(
        (*batch, a.shape[-2], b.shape[-1]), np.int32 if a.dtype == np.int8 else np.float32
    )
    a, b = (np.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (a, b))
    for member in np.ndindex(batch):
        result[member] = _converted_product(a[member], b[member])
    return result


def _converted_product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    if a.dtype == np.int8:
        return np.asarray(a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32)
    return np.asarray(widened(a) @ widened(b))


@np.errstate(all="ignore")
def linear_backward(
    dout: NDArray[Any],
    x: NDArray[Any],
    w: NDArray[Any] | QuantizedWeight,
    b: NDArray[Any] | None,
    *,
    activation: str | None,
    preactivation: NDArray[Any] | None,
) -> LinearGrads:
    """Return the gradients dx, dw (None for a quantised w) and db (None without b) in float32."""
    rows_x, dz = widened(_as_rows(x)), widened(_as_rows(dout))
    if activation is not None:
        z = None if preactivation is None else widened(_as_rows(preactivation))
        if z is None:
            z = product(rows_x, w)
            if b is not None:
                z += widened(b)
        dz = _preactivation_gradient(dz, z, activation)
    dx = product(dz, w.T).reshape(x.shape)
    db = dz.sum(axis=0, dtype=np.float64) if b is not None else None
    dw = None if isinstance(w, QuantizedWeight) else rows_x.T @ dz
    return LinearGrads(dx, dw, db)


def _preactivation_gradient(dout: Float32, z: Float32, activation: str) -> Float32:
    """Return the gradient with respect to z = x w + b, both halves of it for a gated activation."""
    dz = np.empty(z.shape, np.float32)
    if activation not in GATES:
        activations.activation_backward(dout, z, dz, kind=activation)
        return dz
    activations.gated_backward(dout, *_halves(z), *_halves(dz), kind=GATES[activation])
    return dz


def _activated(z: Float32, kind: str | None, scratch: Float64 | None) -> Float32:
    """Return the activation of a block; the reference's where the block is not finite."""
    assert kind is not None
    result = activations.value(z, kind, scratch)
    if not np.isfinite(result).all():
        result = exact_activations.activation(z, kind).astype(np.float32)
    return result


def product(x: Float32, w: NDArray[Any] | QuantizedWeight) -> Float32:
    """Return x (M, K) times w (K, N) in float32, as a new array."""
    if isinstance(w, QuantizedWeight):
        return _quantised_product(x, w)
    copies = _kept.get()
    if copies is not None and w.dtype != np.float32:
        copy = copies.copy_of(w.T)
        w = w if copy is None else copy.T
    if w.dtype == np.float32:
        return _multiplied(x, w)
    inner, columns = w.shape
    if w.strides[1] < w.strides[0]:  # rows of w are contiguous: sum over some at a time
        result = np.zeros((len(x), columns), np.float32)
        for rows in _parts(x, inner, columns):
            result += _multiplied(x[:, rows], widened(w[rows]))
        return result
    result = np.empty((len(x), columns), np.float32)
    for some in _parts(x, columns, inner):
        result[:, some] = _multiplied(x, widened(w.T[some]).T)
    return result


def _int8_product(codes: NDArray[Any], scales: Float32, w: Any) -> Float32:
    """Return the product of int8 rows and an int8 weight, as kernels round it."""
    sums: Float32 = int8_sums(codes, w.codes).astype(np.float32)
    sums *= scales[:, None]
    sums *= w.scales[:, 0]
    return sums


def _quantised_product(x: Float32, weight: QuantizedWeight) -> Float32:
    weight = with_expanded_scales(weight)
    if weight.rotation is not None:
        plain = replace(weight, rotation=None)
        if weight.transposed:
            return rotated(_quantised_product(x, plain))
        return _quantised_product(rotated(x), plain)
    rows = _parts(x, weight.outer, weight.inner)
    if weight.transposed:
        result = np.zeros((len(x), weight.inner), np.float32)
        for some in rows:
            result += _multiplied(x[:, some], dequantised_rows(weight, some))
        return result
    result = np.empty((len(x), weight.outer), np.float32)
    for some in rows:
        result[:, some] = _multiplied(x, dequantised_rows(weight, some).T)
    return result


def _parts(x: Float32, count: int, width: int) -> Iterator[slice]:
    """Yield slices of the `count` rows of a weight, whose `width` items are decoded at a time."""
    items = _DECODED if len(x) <= _FEW_ROWS else _DECODED_FOR_MANY_ROWS
    step = max(items // max(width, 1), 1)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _multiplied(x: Float32, w: Float32) -> Float32:
    """Return x w of float32 arrays."""
    if 1 < len(x) <= _FEW_ROWS and w.strides[0] < w.strides[1]:
        return np.ascontiguousarray((w.T @ x.T).T)
    return x @ w


def _as_rows(array: Any) -> Any:
    """Return an array, or None, as a view of rows."""
    if array is None or array.ndim == 2:
        return array
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
