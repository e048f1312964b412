"""Linear and its backward in NumPy.

In float64, but where all arrays are float32: then the products are those of a float32 BLAS, which
takes a CPU half as long, and what is between them is computed from their float32 results. A
quantised weight counts as one of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyattn.ops.activations.reference import activation as activation_of
from cupyattn.ops.activations.reference import activation_derivative
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.reference_quantised import quantised_product
from cupyattn.runtime.arrays import Array


class LinearGrads(NamedTuple):
    """Gradients of linear's inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., K)
        Of the input.
    dw : array (K, N)
        Of the weight, summed over all rows of x; (K, 2 N) for a gated activation.
    db : array (N,), or None
        Of the bias, likewise; None without one.
    """

    dx: Array = None
    dw: Array = None
    db: Array | None = None


GATES = {"swiglu": "silu", "geglu": "gelu"}
"""What a gated activation does to its gate."""


def linear(
    x: np.ndarray,
    w: np.ndarray | QuantizedWeight,
    b: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    activation: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return activation(x w + b) + residual, and x w + b.

    Parameters
    ----------
    x, w, b, residual : numpy.ndarray
        As of `cupyattn.linear`.
    activation : str, optional
        Likewise.

    Examples
    --------
    >>> x, w = np.array([[1.0, 2.0]]), np.eye(2)
    >>> linear(x, w, np.ones(2), residual=x, activation="relu")
    (array([[3., 5.]]), array([[2., 3.]]))
    """
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


def linear_backward(
    dout: np.ndarray,
    x: np.ndarray,
    w: np.ndarray | QuantizedWeight,
    b: np.ndarray | None = None,
    *,
    activation: str | None = None,
    preactivation: np.ndarray | None = None,
) -> LinearGrads:
    """Return the gradients dx, dw (None of a quantised w) and, where there is a b, db.

    Parameters
    ----------
    dout, x, w, b, preactivation : numpy.ndarray
        As of `cupyattn.linear_backward`.
    activation : str, optional
        Likewise.
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
    """Return the gradient with respect to x w + b; for a gated activation that of both halves."""
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
    """Return the activation of z, which no activation leaves as it is."""
    return z if kind is None else activation_of(z, kind).astype(z.dtype, copy=False)


def activated_slope(z: np.ndarray, kind: str | None) -> np.ndarray:
    """Return the derivative of the activation at z."""
    return np.ones_like(z) if kind is None else activation_derivative(z, kind).astype(z.dtype)


def _product(a: np.ndarray, b: np.ndarray | QuantizedWeight) -> np.ndarray:
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
