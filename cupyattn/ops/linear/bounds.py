"""Error bounds of linear's kernels relative to the reference, for every element.

The bounds hold for kernels that read inputs of their dtype, multiply exactly or with one rounding,
accumulate in float32 in any order, apply the activation to the float32 sum, and round once at the
store. u32 = 2**-24; u_in and u_out are those of `cupyattn.ops.attention.bounds`, which derives that
a sum of n terms errs by n u32. Eight more terms cover the bias, sums of partial sums, and terms of
second order. A factor of two on tensor cores covers their truncation: they multiply float16, and
from sm_80 on bfloat16 too. A product of two of either is exact in float32, so that the bounds of
both differ only in the unit roundoff: 2^-11 of float16, 2^-8 of bfloat16.

Forward, with z = x w + b:

    dz = t (K + 8) u32 (|x| |w| + |b|) + tiny            t = 2 on tensor cores, 1 otherwise
    df = L dz + ef(|z| + dz)                          L: the activation's steepest slope
    |out - ref| <= df + u32 (|f(z)| + |residual|) + u_out |ref| + tiny
    |preactivation - ref| <= dz + u_out |z| + tiny

A gated activation multiplies f(gate) with up: its error is df |up| + (|f(gate)| + df) d_up +
u32 |f(gate) up|.

ef is the error of computing f in float32, and es that of computing f': see
`cupyattn.ops.activations.bounds`.

Backward, with dz = dout f'(preactivation) and e the error of that:

    e = |dout| (es + S |preactivation's error|) + 2 u32 |dz| + u_in |dz| + tiny
    |dx - ref| <= e |w|^T + t (N + 8) u32 (|dz| + e) |w|^T + u_out |ref| + tiny
    |dw - ref| <= |x|^T e + t (M + 8) u32 |x|^T (|dz| + e) + u_out |ref| + tiny
    |db - ref| <= sum e + (M + 8) u32 sum (|dz| + e) + u_out |ref| + tiny

- u_in = u_out is the rounding of dz to the dtype that tensor cores read; 0 for float32.
- A preactivation that is recomputed errs by dz of the forward, and by u_out |z| if it is kept in
  the dtype. S is the steepest slope of f'. It is at most 0.8 for all activations but relu, whose
  derivative jumps at 0: there all of |dout| is uncertain.
- For a quantised weight, w is the exact number of each code. Kernels multiply with weights that err
  by ew (`weight_error`: on tensor cores up to 3 2^-11 |w| in float16, and about 2^-8 |w| in
  bfloat16). It adds |x| ew to dz, and (|dz| + e) ew^T to dx.
- For a rotated weight, both products are those of the rotated x and w: x H / 8 errs by ex = 7 u32
  sum |x| / 8 of its block of 64, and by its rounding to the dtype, which adds ex (|w| + ew) to dz.
  dx is rounded to the dtype, then rotated: its errors and 7 u32 |dx| add up over a block, times 1 /
  8, and it is rounded again.
- A product of int8 rows and an int8 weight has an exact sum. Its conversion to float32, two scales
  and the bias round once each: dz = 5 u32 (|s sx sw| + |b|) + tiny. Codes and scales are exact,
  because every device has the same ones.
- An accumulated gradient is added before the rounding: u32 of both terms, and u_out of the sum.

On NumPy arrays (`cupyattn.ops.linear.cpu`), results of every dtype are those of float32 arrays,
rounded once: sums in any order, and activations that err by at most as much as a kernel's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.ops.activations.bounds import activation_error, derivative_error
from cupyattn.ops.linear.reference import (
    _CODEBOOK_ROUNDING,
    _HALF,
    _ROUNDINGS,
    _SMALLEST_HALF,
    GATES,
    LinearGrads,
    _cancelling_terms,
    _steps,
    activated,
    activated_slope,
    dequantised_rows,
    linear,
    linear_backward,
    rotated,
    with_expanded_scales,
)
from cupyattn.ops.linear.row_formats import QuantizedRows
from cupyattn.ops.linear.weight_formats import ROTATION, QuantizedWeight
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of


def weight_error(weight: QuantizedWeight, dtype: DTypeLike) -> np.ndarray:
    """Return the error bound of a kernel's weights, in float64, of the weight's shape.

    In float32 arithmetic, weights are computed with at most as many roundings as in the reference.
    On tensor cores float16 weights have `_ROUNDINGS` of the weight itself. For "q4_k", scale and
    offset are rounded too, before they cancel each other. An underflow loses 2^-25 in each rounding
    of a scale, times a code of at most 15 ("int8" keeps 128 times its scale). Skinny kernels add up
    codes and shifts separately: if these cancel, the roundings of both sums remain.

    On tensor cores bfloat16 weights are computed in float32 and rounded once. The codebook of "nf4"
    is in float16. Formats with a shift have a shift of 128 more scales, of which two roundings
    remain.
    """
    weight = with_expanded_scales(weight)
    values = np.abs(dequantised_rows(weight).astype(np.float64))
    terms = _cancelling_terms(weight)
    name = _name(dtype)
    if name == "float16":
        errors = (1 + _HALF) * _ROUNDINGS[weight.format] * _HALF * values + 32 * _SMALLEST_HALF
        errors += 2 * (weight.inner + 16) * U32 * terms
        if weight.format == "q4_k":
            errors += _HALF * terms
    else:
        errors = 4 * U32 * terms
    if name == "bfloat16":
        if weight.format == "nf4":
            errors += _CODEBOOK_ROUNDING * _HALF * values
        errors += 2 * U32 * 128 * _steps(weight)
        errors += precision_of(dtype).store(values + errors)
    return errors if weight.transposed else errors.T


STEEPEST = {None: 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "relu": 1.0}
STEEPEST_SLOPE = 0.8
_MORE_TERMS = 8


def linear_bound(
    x: Any,
    w: Any,
    b: Any = None,
    residual: Any = None,
    *,
    activation: str | None = None,
    activations: str | None = None,
    dtype: DTypeLike,
) -> tuple[Float64, Float64]:
    """Return error bounds of `linear`, for out and for the preactivation.

    Parameters
    ----------
    x, w, b, residual : floats
        Already rounded to dtype; or w is a `QuantizedWeight`, and x perhaps `QuantizedRows`.
    activation : str, optional
        The activation of `linear`.
    activations : {None, "int8"}
        "int8": the bounds are relative to the exact product of the codes and scales of x and w.
    dtype : dtype or str
        float16, float32 or bfloat16: the dtype of the results.

    Returns
    -------
    out_bound : (..., N) float64
    preactivation_bound : (..., W) float64
    """
    b, residual = map(_float64, (b, residual))
    precision = precision_of(dtype)
    kind = GATES.get(activation or "", activation)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if activations is not None or isinstance(x, QuantizedRows):
            out, z = linear(x, w, b, residual, activation=activation, activations=activations)
            dz = _int8_error(z, w, b)
        elif isinstance(w, QuantizedWeight) and w.rotation is not None and w.transposed:
            z, dz = _rotated_product(x, w, dtype)
            out = z if residual is None else z + residual
        else:
            x, x_error, w, w_error = _exact_operands(x, w, dtype)
            out, z = linear(x, w, b, residual, activation=activation)
            dz = _preactivation_error(x, x_error, w, w_error, b, dtype)
        at_gate = z[..., : out.shape[-1]], dz[..., : out.shape[-1]]
        error, magnitude = _value_error(kind, *at_gate), np.abs(activated(at_gate[0], kind))
        if activation in GATES:
            up, d_up = z[..., out.shape[-1] :], dz[..., out.shape[-1] :]
            error = error * np.abs(up) + (magnitude + error) * d_up + U32 * magnitude * np.abs(up)
            magnitude = magnitude * np.abs(up)
        if residual is not None:
            error = error + U32 * (magnitude + np.abs(residual))
        return error + precision.store(out), dz + precision.store(z)


def _value_error(kind: str | None, z: Float64, dz: Float64) -> Float64:
    """Return the error of f(z) for a z that errs by dz."""
    if kind is None:
        return dz
    computing = np.maximum(activation_error(z, kind), activation_error(z + dz, kind))
    error: Float64 = STEEPEST[kind] * dz + computing
    return error


def _exact_weight(w: Any, dtype: DTypeLike) -> tuple[Float64, Float64]:
    """Return a weight, and the error of the weight that kernels multiply with."""
    if not isinstance(w, QuantizedWeight):
        return _float64(w), np.zeros(())
    exact = dequantised_rows(w).astype(np.float64)
    return exact if w.transposed else exact.T, weight_error(w, dtype)


def _exact_operands(x: Any, w: Any, dtype: DTypeLike) -> tuple[Float64, Any, Float64, Float64]:
    """Return x and its error, and w and its error; both are rotated for a rotated weight."""
    x, x_error = _float64(x), np.zeros(())
    if isinstance(w, QuantizedWeight) and w.rotation is not None:
        x_error = _rotation_error(x) + precision_of(dtype).store(x := rotated(x))
        w = replace(w, rotation=None)
    return x, x_error, *_exact_weight(w, dtype)


def _rotated_product(x: Any, w: QuantizedWeight, dtype: DTypeLike) -> tuple[Float64, Float64]:
    """Return the product with the transpose of a rotated weight, and its error before the store.

    Kernels round it to the dtype, then rotate it back.
    """
    plain = replace(w, rotation=None)
    product, error = linear(_float64(x), plain)[0], linear_bound(x, plain, dtype=dtype)[0]
    return rotated(product), _sums_of_blocks(error) / 8 + _rotation_error(np.abs(product) + error)


def _rotation_error(x: Float64) -> Float64:
    """Return the error of sums of 64 items in float32, times 1 / 8."""
    return (7 * U32 / 8) * _sums_of_blocks(np.abs(x)) + ROTATION * TINY32


def _sums_of_blocks(x: Float64) -> Float64:
    sums = x.reshape(*x.shape[:-1], x.shape[-1] // ROTATION, ROTATION).sum(axis=-1, keepdims=True)
    return np.broadcast_to(sums, (*sums.shape[:-1], ROTATION)).reshape(x.shape)


def _int8_error(z: Float64, w: QuantizedWeight, b: Any) -> Float64:
    """Return the error of z = s sx sw + b of exact sums, codes and scales."""
    bias = 0.0 if b is None else np.abs(b)
    error: Float64 = 5 * U32 * (np.abs(z - (0.0 if b is None else b)) + bias)
    return error + TINY32 * (1 + np.abs(w.scales[:, 0].astype(np.float64)))


def _preactivation_error(
    x: Any, x_error: Any, w: Any, w_error: Any, b: Any, dtype: DTypeLike
) -> Float64:
    terms = _rounding_of_sum(x.shape[-1], dtype)
    bias = 0.0 if b is None else np.abs(b)
    error: Float64 = terms * (np.abs(x) @ np.abs(w) + bias) + TINY32 * (x.shape[-1] + 1)
    if w_error.ndim:
        error = error + (1 + terms) * (np.abs(x) @ w_error)
    if x_error.ndim:
        error = error + (1 + terms) * (x_error @ (np.abs(w) + w_error))
    return error


def _name(dtype: DTypeLike) -> str:
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


def _rounding_of_sum(terms: int, dtype: DTypeLike) -> float:
    """Return the error of a sum relative to the sum of absolute values."""
    truncation = 1 if _name(dtype) == "float32" else 2
    return truncation * (terms + _MORE_TERMS) * U32


def matmul_bound(a: Any, b: Any, *, dtype: DTypeLike) -> Float64:
    """Return error bounds of `matmul`: as `linear_bound` without a bias, and 0 for int8.

    Parameters
    ----------
    a, b : floats or integers
        Already rounded to dtype.
    dtype : dtype or str
        float16, float32, bfloat16 or int8.
    """
    a, b = map(_float64, (a, b))
    exact = np.asarray(a @ b)
    if _name(dtype) == "int8":
        return np.zeros(exact.shape)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        error: Float64 = _rounding_of_sum(a.shape[-1], dtype) * (np.abs(a) @ np.abs(b))
        return error + TINY32 * (a.shape[-1] + 1) + precision_of(dtype).store(exact)


def linear_backward_bound(
    dout: Any,
    x: Any,
    w: Any,
    b: Any = None,
    *,
    activation: str | None = None,
    preactivation: Any = None,
    given: LinearGrads | None = None,
    dtype: DTypeLike,
) -> LinearGrads:
    """Return error bounds of `linear_backward`, for each gradient.

    Parameters
    ----------
    dout, x, w, b, preactivation : floats
        Already rounded to dtype; or w is a `QuantizedWeight`. Without a preactivation, kernels
        recompute it.
    activation : str, optional
        The activation of `linear`.
    given : LinearGrads, optional
        The arrays that gradients are added to: the bound is then that of the sums.
    dtype : dtype or str
        float16, float32 or bfloat16: the dtype of the results.
    """
    dout, b, z = map(_float64, (dout, b, preactivation))
    quantised = isinstance(w, QuantizedWeight)
    is_rotated = quantised and w.rotation is not None
    x, x_error, w, w_error = _exact_operands(x, w, dtype)
    precision = precision_of(dtype)
    exact = linear_backward(dout, x, w, b, activation=activation, preactivation=z)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if activation is None:
            dz, e = np.abs(dout), np.zeros_like(dout)
        else:
            dpre = np.zeros(())
            if z is None:
                _, z = linear(x, w, b)
                dpre = _preactivation_error(x, x_error, w, w_error, b, dtype) + precision.store(z)
            dz, e = _preactivation_gradient_error(dout, z, dpre, activation)
            e = e + 2 * U32 * dz + TINY32
        if _name(dtype) != "float32" and activation is not None:
            e = e + precision.store(dz)
        dz, e = _as_rows(dz), _as_rows(e)
        abs_x = np.abs(_as_rows(x))
        total = dz + e
        over_rows = _rounding_of_sum(len(dz), dtype)
        over_columns = _rounding_of_sum(dz.shape[1], dtype)
        dx_error = (e + over_columns * total) @ np.abs(w).T
        if quantised:
            exact = exact._replace(dw=None)
            dx_error += (1 + over_columns) * (total @ w_error.T)
        dx_error = dx_error.reshape(x.shape)
        if is_rotated:
            dx = np.asarray(exact.dx)
            dx_error += precision.store(np.abs(dx) + dx_error) + TINY32 * sum(w.shape)
            dx_error = _sums_of_blocks(dx_error) / 8 + _rotation_error(np.abs(dx) + dx_error)
            exact = exact._replace(dx=rotated(dx))
        errors = LinearGrads(
            dx_error,
            abs_x.T @ (e + over_rows * total),
            None if b is None else (e + over_rows * total).sum(axis=0),
        )
        bounds: list[Float64 | None] = []
        for name, error, gradient in zip(LinearGrads._fields, errors, exact, strict=True):
            target = None if given is None else getattr(given, name)
            if gradient is None:
                bounds.append(None)
                continue
            if target is not None:
                target = _float64(target)
                error = error + U32 * (abs(gradient) + abs(target))
                gradient = gradient + target
            stored = precision.store(np.asarray(gradient))
            bounds.append(error + TINY32 * (sum(w.shape) + len(dz)) + stored)
    return LinearGrads(*bounds)


def _preactivation_gradient_error(
    dout: Float64, z: Float64, dpre: Float64, activation: str
) -> tuple[Float64, Float64]:
    """Return the size of the gradient with respect to z, and its error for a z that errs."""
    dout = np.abs(dout)
    kind = GATES.get(activation, activation)
    columns = dout.shape[-1]
    gate = z[..., :columns]
    d_gate = np.broadcast_to(dpre, z.shape)[..., :columns]
    slope = np.abs(activated_slope(gate, kind))
    uncertain = _slope_uncertainty(kind, gate, d_gate)
    es = np.maximum(derivative_error(gate, kind), derivative_error(gate + d_gate, kind))
    es = es + uncertain
    if activation not in GATES:
        return dout * slope, dout * es
    up = np.abs(z[..., columns:])
    d_up = np.broadcast_to(dpre, z.shape)[..., columns:]
    value, d_value = np.abs(activated(gate, kind)), _value_error(kind, gate, d_gate)
    sizes = dout * up * slope, dout * value
    errors = dout * (up * es + d_up * (slope + es)), dout * d_value
    return np.concatenate(sizes, axis=-1), np.concatenate(errors, axis=-1)


def _slope_uncertainty(kind: str, z: Float64, dz: Float64) -> Float64:
    """Return the error of f' for a z that errs by dz."""
    if kind == "relu":
        return np.where((np.abs(z) <= dz) & (dz > 0), 1.0, 0.0)
    return STEEPEST_SLOPE * dz


def _float64(array: Any) -> Any:
    return None if array is None else np.asarray(array, np.float64)


def _as_rows(array: Float64) -> Float64:
    rows = int(np.prod(array.shape[:-1], dtype=np.int64))
    return array.reshape(rows, array.shape[-1])


def cpu_linear_bound(
    x: Any,
    w: Any,
    b: Any = None,
    residual: Any = None,
    *,
    activation: str | None = None,
    activations: str | None = None,
    dtype: DTypeLike,
) -> tuple[Float64, Float64]:
    """Return error bounds of `linear` on NumPy arrays; parameters as for `linear_bound`."""
    options: Any = {"activation": activation, "activations": activations}
    errors = linear_bound(x, w, b, residual, **options, dtype="float32")
    transposed = isinstance(w, QuantizedWeight) and w.transposed and w.rotation is not None
    if transposed:
        x = _float64(x)
    elif activations is None and not isinstance(x, QuantizedRows):
        x, w = _exact_operands(x, w, "float32")[::2]
    exact = linear(x, w, *map(_float64, (b, residual)), **options)
    return _rounded(exact[0], errors[0], dtype), _rounded(exact[1], errors[1], dtype)


def cpu_matmul_bound(a: Any, b: Any, *, dtype: DTypeLike) -> Float64:
    """Return error bounds of `matmul` on NumPy arrays; parameters as for `matmul_bound`."""
    if _name(dtype) == "int8":
        return matmul_bound(a, b, dtype=dtype)
    error = matmul_bound(a, b, dtype="float32")
    return _rounded(_float64(a) @ _float64(b), error, dtype)


def cpu_linear_backward_bound(
    dout: Any,
    x: Any,
    w: Any,
    b: Any = None,
    *,
    activation: str | None = None,
    preactivation: Any = None,
    dtype: DTypeLike,
) -> LinearGrads:
    """Return error bounds of the backward on NumPy arrays, as for `linear_backward_bound`."""
    given: dict[str, Any] = {"activation": activation, "preactivation": preactivation}
    errors = linear_backward_bound(dout, x, w, b, **given, dtype="float32")
    given["preactivation"] = _float64(preactivation)
    dout, x, b = map(_float64, (dout, x, b))
    w = w if isinstance(w, QuantizedWeight) else _float64(w)
    exact = linear_backward(dout, x, w, b, **given)
    pairs = zip(exact, errors, strict=True)
    return LinearGrads(*(e if e is None else _rounded(value, e, dtype) for value, e in pairs))


def _rounded(exact: Any, error: Any, dtype: DTypeLike) -> Float64:
    """Return the bound of a float32 result that is rounded to dtype."""
    precision = precision_of(dtype)
    if precision.u_out == U32:
        return np.asarray(error, np.float64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        bound: Float64 = error + precision.store(np.abs(exact) + error)
    return bound
