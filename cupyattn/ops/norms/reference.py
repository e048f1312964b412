"""Layer norm and RMS norm over the last axis, and their gradients, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.runtime.precision import Float64

Results = tuple[Float64, Float64 | None, Float64, Float64]
Gradients = tuple[Float64, Float64 | None, Float64 | None]


def norm(
    x: np.ndarray,
    residual: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    inner_weight: np.ndarray | None = None,
    *,
    centred: bool,
    eps: float,
    weight_offset: float = 0.0,
    inner_eps: float = 0.0,
    inner_offset: float = 0.0,
) -> Results:
    """Normalise rows: layer norm if `centred`, RMS norm otherwise.

    Parameters
    ----------
    x, residual : (..., N) floats
        Their sum is rounded to x's dtype and then normalised.
    weight, bias : (N,) floats
    scale : (N,) floats, optional
        Factors of the residual.
    inner_weight : (N,) floats, optional
        Weight of an RMS norm of the residual, before it is scaled and added.
    centred : bool
        Whether the mean is subtracted.
    eps : float
        Added to the mean square.
    weight_offset : float
        Added to the weight.
    inner_eps, inner_offset : float
        The same of the residual's norm.

    Returns
    -------
    out : (..., N) float64
    total : (..., N) float64, or None
        The rounded sum, None without residual.
    mean : (...) float64
        NaN for rows with a NaN or an infinity; 0 without `centred`, and for rows without items.
    rstd : (...) float64
        1 / sqrt(mean square + eps) of the row minus its mean.

    Examples
    --------
    >>> out, _, mean, rstd = norm(np.array([1.0, 3.0]), centred=True, eps=0.0)
    >>> out, float(mean), float(rstd)
    (array([-1.,  1.]), 2.0, 1.0)
    """
    if residual is not None and inner_weight is not None:
        residual, *_ = norm(
            residual, None, inner_weight, centred=False, eps=inner_eps, weight_offset=inner_offset
        )
    with np.errstate(all="ignore"):
        total = None if residual is None else rounded_sum(x, residual, scale)
        rows = x.astype(np.float64) if total is None else total
        mean = np.zeros(rows.shape[:-1])
        if centred:
            mean = row_mean(rows)
            mean = np.where(np.isfinite(mean), mean, np.nan)
        rows = rows - mean[..., None]
        rstd = 1 / np.sqrt(row_mean(rows**2) + eps)
        out = rows * rstd[..., None]
        if weight is not None:
            out = out * (weight_offset + weight.astype(np.float64))
        if bias is not None:
            out = out + bias
    return out, total, mean, rstd


def rounded_sum(x: np.ndarray, residual: np.ndarray, scale: np.ndarray | None = None) -> Float64:
    """Return x + residual, or x + scale * residual, rounded to the dtype of x."""
    added = residual.astype(np.float64)
    total = x.astype(np.float64) + (added if scale is None else scale * added)
    if total.itemsize > x.itemsize:  # kernels add in float32, and round that
        total = total.astype(np.float32).astype(x.dtype)
    return total.astype(np.float64)


def norm_backward(
    dout: np.ndarray,
    x: np.ndarray,
    dtotal: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    mean: np.ndarray | None = None,
    rstd: np.ndarray | float = 1.0,
    *,
    weight_offset: float = 0.0,
) -> Gradients:
    """Return the gradients of `norm`, from the statistics that it returned.

    Parameters
    ----------
    dout : (..., N) floats
        Gradient with respect to out.
    x : (..., N) floats
        The rows that were normalised: with a residual, the sum.
    dtotal : (..., N) floats, optional
        Gradient with respect to total.
    weight, bias : (N,) floats, optional
        With a bias, there is a dbias. Its items are not read.
    mean, rstd : (...) floats
        Results of `norm`, possibly rounded. For RMS norm mean is None.
    weight_offset : float
        The offset that `norm` was given.

    Returns
    -------
    dx : (..., N) float64
    dweight, dbias : (N,) float64
        dweight is None without weight, dbias without bias.
    """
    with np.errstate(all="ignore"):
        dout, normal, g, rstd = terms(dout, x, weight, mean, rstd, weight_offset)
        inner = g - normal * row_mean(g * normal)[..., None]
        if mean is not None:
            inner = inner - row_mean(g)[..., None]
        dx = rstd[..., None] * inner
        if dtotal is not None:
            dx = dx + dtotal
        dweight = None if weight is None else column_sum(dout * normal)
        dbias = None if bias is None else column_sum(dout)
    return dx, dweight, dbias


def terms(
    dout: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray | None,
    mean: np.ndarray | None,
    rstd: Any,
    weight_offset: float,
) -> tuple[Float64, Float64, Float64, Float64]:
    """Return dout, the normalised rows, the gradient with respect to them, and rstd, in float64.

    The normalised rows are centred again, which corrects a mean that was rounded to float32.
    """
    dout, rows = dout.astype(np.float64), x.astype(np.float64)
    rstd = np.asarray(rstd, np.float64)
    if mean is not None:
        rows = rows - mean[..., None]
    normal = rows * rstd[..., None]
    if mean is not None:
        normal = normal - row_mean(normal)[..., None]
    g = dout if weight is None else dout * (weight_offset + weight.astype(np.float64))
    return dout, normal, g, rstd


def column_sum(rows: Float64) -> Float64:
    """Sum over all axes but the last."""
    result: Float64 = (
        rows.reshape(-1, rows.shape[-1]).sum(axis=0) if rows.size else np.zeros(rows.shape[-1])
    )
    return result


def row_mean(rows: Float64) -> Float64:
    """Mean over the last axis, 0 of no items."""
    result: Float64 = rows.sum(axis=-1) / max(rows.shape[-1], 1)
    return result
