"""Activations of NumPy arrays: float32 arithmetic in blocks, and tables for 16-bit arrays.

`cupyattn.ops.activations.reference` defines the functions. A block with a result that is not finite
is computed by it, so that NaN, infinities and overflows are its. So are float64 arrays.

16-bit arrays have 65,536 different items. An activation or derivative of them is a table that the
reference computes once: `activation` gives its results bit by bit.

gelu is max(x, 0) - |x| Phi(-|x|), and Phi(-a) = exp(-a^2 / 2) R(a). R is a quotient of polynomials
of degrees 4 and 5 whose coefficients are positive: the minimax fit in relative error, 2**-27.3, for
0 <= a <= 14.5. Beyond, the exponential is 0 in float32. The second term is computed in float64, so
that gelu errs by less than one unit in the last place. `cupyattn.ops.activations.bounds` derives
the errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.activations import reference
from cupyattn.runtime.outputs import round_into, widened
from cupyattn.runtime.precision import TINY32, Float32, Float64

_FLOAT32 = np.dtype(np.float32)
BLOCK = 2**14
"""Items computed at a time: the float64 arrays of a block fit a core's second cache."""

_NUMERATOR = (
    0.5000000029387082,
    0.43827617672300834,
    0.18322046901226655,
    0.04062806398341022,
    0.004115482876698849,
)
_DENOMINATOR = (
    1.0,
    1.6744373329178233,
    1.2024438592035807,
    0.46943172621205287,
    0.10184590411449307,
    0.010315865933807981,
)
_TAIL = np.array([(*_NUMERATOR, 0.0), _DENOMINATOR])
"""The coefficients of R: those of each polynomial, the constant first."""
_TAIL_TIMES_SIZE = np.array([(0.0, *_NUMERATOR), _DENOMINATOR])
"""The coefficients of a R(a)."""
_LINEAR, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715 * 2 * math.sqrt(2 / math.pi)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_LOWEST = -88.0
"""The least exponent: exp(88) is finite in float32, and its reciprocal below 2**-126."""
_SUBNORMAL = -12.9
"""From here on down gelu is below 2**-118."""
_FLAT = 12.0
"""Beyond this |x| the derivative of gelu_tanh is 0 or 1 in float32."""


@np.errstate(all="ignore")
def activation(x: NDArray[Any], out: NDArray[Any], *, kind: str) -> None:
    """Write the activation of x into out, which is x or does not overlap it."""
    if x.dtype != np.float32:
        table = _table(kind, x.dtype, x.dtype)
        for block, into in _blocks(x, out):
            into[...] = _looked_up(table, block)
        return
    scratch = scratch_of(kind, min(x.size, BLOCK))
    for block, into in _blocks(x, out):
        result = value(block, kind, scratch)
        if not np.isfinite(result).all():
            result = _rounded(reference.activation(block, kind))
        into[...] = result


@np.errstate(all="ignore")
def activation_backward(
    dout: NDArray[Any], x: NDArray[Any], dx: NDArray[Any], *, kind: str
) -> None:
    """Write the gradient with respect to an activation's input into dx."""
    scratch = scratch_of(kind, min(x.size, BLOCK))
    for dout_block, block, into in _blocks(dout, x, dx):
        result = _derivative(block, kind, scratch)
        result *= widened(dout_block)
        if not np.isfinite(result).all():
            result = _rounded(reference.activation_backward(dout_block, block, kind))
        into[...] = result


@np.errstate(all="ignore")
def gated(gate: NDArray[Any], up: NDArray[Any], out: NDArray[Any], *, kind: str) -> None:
    """Write the activation of gate, times up, into out."""
    scratch = scratch_of(kind, min(gate.size, BLOCK))
    for gate_block, up_block, into in _blocks(gate, up, out):
        result = _value(gate_block, kind, scratch)
        result *= widened(up_block)
        if not np.isfinite(result).all():
            result = _rounded(reference.gated(gate_block, up_block, kind))
        into[...] = result


@np.errstate(all="ignore")
def gated_backward(
    dout: NDArray[Any],
    gate: NDArray[Any],
    up: NDArray[Any],
    dgate: NDArray[Any],
    dup: NDArray[Any],
    *,
    kind: str,
) -> None:
    """Write the gradients with respect to gate and up into dgate and dup."""
    scratch = scratch_of(kind, min(gate.size, BLOCK))
    for dout_block, gate_block, up_block, *into in _blocks(dout, gate, up, dgate, dup):
        wide = widened(dout_block)
        results = [_derivative(gate_block, kind, scratch), _value(gate_block, kind, scratch)]
        for result in results:
            result *= wide
        results[0] *= widened(up_block)
        if not all(np.isfinite(result).all() for result in results):
            exact = reference.gated_backward(dout_block, gate_block, up_block, kind)
            results = [_rounded(each) for each in exact]
        for target, result in zip(into, results, strict=True):
            target[...] = result


def scratch_of(kind: str, items: int) -> Float64 | None:
    """Return memory in which `value` and `derivative` compute blocks of up to `items` items."""
    return np.ones((_TAIL.shape[1] + 2, items)) if kind == "gelu" else None


def value(x: Float32, kind: str, scratch: Float64 | None) -> Float32:
    """Return the activation of a float32 block; NaN where x is infinite."""
    if kind == "relu":
        return np.maximum(x, np.float32(0))
    if kind == "gelu":
        above, below, exponential = _tail(x, _TAIL_TIMES_SIZE, scratch)
        below *= exponential
        above /= below
        result = np.maximum(x, np.float32(0)) - above.astype(np.float32)
        if x.min(initial=0) < _SUBNORMAL:  # subnormal numbers have few digits: 0 instead
            result[np.abs(result) < TINY32] = 0
        return result
    t = np.negative(x) if kind == "silu" else _negative_logit(x)
    np.exp(t, out=t)
    t += np.float32(1)
    return np.divide(x, t, out=t)


def derivative(x: Float32, kind: str, scratch: Float64 | None) -> Float32:
    """Return the derivative of an activation at each item of a float32 block."""
    if kind == "relu":
        return np.where(np.isnan(x), x, x > 0).astype(np.float32)
    if kind == "gelu":
        q, below, exponential = _tail(x, _TAIL, scratch)
        below *= exponential
        q /= below
        positive = (x > 0).astype(np.float64)
        q *= 1 - 2 * positive  # p is q, or 1 - q for x above 0
        q += positive
        change = np.multiply(x, _DENSITY, dtype=np.float64)
        change /= exponential
        q += change
        return q.astype(np.float32)
    if kind == "silu":
        x = np.maximum(x, np.float32(_LOWEST))
        t = np.negative(x)
    else:
        x = np.minimum(np.maximum(x, np.float32(-_FLAT)), np.float32(_FLAT))
        t = np.minimum(_negative_logit(x), np.float32(-_LOWEST))
    np.exp(t, out=t)
    p = t + np.float32(1)
    np.divide(np.float32(1), p, out=p)
    t *= p  # 1 - p
    t *= p
    if kind == "gelu_tanh":
        slope = x * x
        slope *= np.float32(3 * _CUBIC)
        slope += np.float32(_LINEAR)
        t *= slope
    t *= x
    return np.add(p, t, out=p)


def _tail(x: Float32, terms: Float64, scratch: Float64 | None) -> tuple[Float64, Float64, Float64]:
    """Return the polynomials of R at |x|, and exp(x**2 / 2)."""
    assert scratch is not None
    powers, both = scratch[:-2, : x.size], scratch[-2:, : x.size]  # powers[0] stays 1
    np.copyto(powers[1], np.abs(x).reshape(-1))
    for power in range(2, len(powers)):
        np.multiply(powers[power - 1], powers[1], out=powers[power])
    np.matmul(terms, powers, out=both)
    half = np.multiply(powers[2], 0.5, out=powers[2])
    above, below = both.reshape(2, *x.shape)
    return above, below, np.exp(half, out=half).reshape(x.shape)


def _negative_logit(x: Float32) -> Float32:
    """Return -z of gelu's tanh form x / (1 + exp(-z))."""
    z = x * x
    z *= np.float32(-_CUBIC)
    z -= np.float32(_LINEAR)
    z *= x
    return z


def _value(x: NDArray[Any], kind: str, scratch: Float64 | None) -> Float32:
    """Return the activation of a block of any dtype, in float32."""
    if x.dtype == np.float32:
        return value(x, kind, scratch)
    return _looked_up(_table(kind, x.dtype, np.dtype(np.float32)), x)


def _derivative(x: NDArray[Any], kind: str, scratch: Float64 | None) -> Float32:
    """Return the derivative at a block of any dtype, in float32."""
    if x.dtype == np.float32:
        return derivative(x, kind, scratch)
    return _looked_up(_table(kind, x.dtype, _FLOAT32, derivative=True), x)


def _looked_up(table: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """Return the items of a table for each item of a 16-bit array."""
    return table.take(x.view(np.uint16).astype(np.intp), mode="clip")


@cache
def _table(kind: str, dtype: np.dtype, out: np.dtype, derivative: bool = False) -> NDArray[Any]:
    """Return the activation, or its derivative, of all 65,536 numbers of a 16-bit dtype."""
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    exact = (reference.activation_derivative if derivative else reference.activation)(x, kind)
    return _rounded(exact, out)


def _rounded(exact: Float64, dtype: np.dtype = _FLOAT32) -> NDArray[Any]:
    return round_into(None, exact, dtype)


def _blocks(*arrays: NDArray[Any]) -> Iterator[list[NDArray[Any]]]:
    """Yield views of arrays of one shape, of at most `BLOCK` items, as matrices."""
    if arrays[0].ndim < 2 or all(array.flags.c_contiguous for array in arrays):
        arrays = tuple([array.reshape(1, -1) for array in arrays])
    rows, columns = arrays[0].shape[-2:]
    step = min(columns, BLOCK) or 1
    height = max(BLOCK // step, 1)
    for lead in np.ndindex(arrays[0].shape[:-2]):
        for row in range(0, rows, height):
            for column in range(0, columns, step):
                at = (*lead, slice(row, row + height), slice(column, column + step))
                yield [array[at] for array in arrays]
