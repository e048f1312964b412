r"""Error bounds of the kernels of both norms, relative to `norm` and `norm_backward`.

Let u = 2^-24, and let a row have n items with mean m and mean square deviation v. D is the largest
|x - m| and X the largest |x|. A sum of n items takes at most h(n) dependent additions: a thread
adds up to 32 items, or n / 256 items of a longer row, and merging threads and warps takes 32 more.

Forward, layer norm (cuda_src/norms/moments.cuh). Sums are taken about a pivot. The pivot is itself
a mean of items of the row and errs by h u X. It is within P = D + h u X of the mean, and items are
within D + P of it. A difference from the pivot rounds by u (D + P), the mean of the differences
errs by (h + 4) u (D + P), and the difference from both parts of the mean by e = (h + 6) u (D + P).
The mean of the squares about the pivots of threads is at most 2 (v + P^2). Moving the pivot at most
doubles it:

    |v' - v| <= 4 (h + 8) u (v + P^2)

rsqrt.approx errs by 2 units in the last place, 4 u, and the sum of v' and eps rounds. RMS norm has
no pivot: its mean of squares has a relative error of (h + 4) u. Both norms then round three more
products and sums.

Backward, from the given statistics. n = (x - mean) rstd errs by 2 u |n|, g = dout (offset + w) by
2 u |g|, and a mean of terms by (h + 6) u times the mean of their absolute values. dx = rstd (g - G
- n C) + dtotal adds four roundings of its largest partial result. A sum over R rows takes at most R
additions and a few for CTAs and warps: it errs by (R + 16) u times the sum of absolute values.
Layer norm subtracts from n its mean c, which errs by l = (h + 6) u times the mean of |(x - mean)
rstd|; so every n of a row errs by l more. It subtracts from C the product c G, which errs by l G,
and twice by (h + 6) u |c| G: once in the sum of g n before, once in G.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.ops.norms.reference import Float64, column_sum, norm, norm_backward, row_mean, terms
from cupyattn.runtime.precision import TINY32, U32, precision_of


def additions(items: int) -> float:
    """Return h(n) of the module's docstring."""
    return min(items, 32 + items / 256) + 32


def norm_bound(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    dtype: DTypeLike,
    centred: bool,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[Float64, Float64, Float64]:
    """Return error bounds of out, mean and rstd; with a residual, x is the rounded sum.

    Parameters
    ----------
    x, weight, bias, centred, eps, weight_offset
        Arguments of `norm`, already rounded to dtype.
    dtype : dtype or str
        The dtype of out: float16, float32 or bfloat16.
    """
    out, _, mean, rstd = norm(
        x, None, weight, bias, centred=centred, eps=eps, weight_offset=weight_offset
    )
    items, h = x.shape[-1], additions(x.shape[-1])
    with np.errstate(all="ignore"):
        rows = x.astype(np.float64)
        deviations = rows - mean[..., None]
        square = (deviations**2).sum(axis=-1) / max(items, 1)
        if centred:
            largest = np.abs(deviations).max(axis=-1, initial=0.0)
            pivot = largest + h * U32 * np.abs(rows).max(axis=-1, initial=0.0)
            mean_error = (h + 6) * U32 * (largest + pivot)
            square_error = 4 * (h + 8) * U32 * (square + pivot**2)
        else:
            mean_error = np.zeros_like(square)
            square_error = (h + 4) * U32 * square
        square_error = square_error + 2 * U32 * (square + eps) + (items + 2) * TINY32
        low = 1 / np.sqrt(np.maximum(square + eps - square_error, 0.0))
        high = 1 / np.sqrt(square + eps + square_error)
        rstd_error = np.maximum(low - rstd, rstd - high) * (1 + 4 * U32) + 4 * U32 * rstd
        mean_stored = mean_error + U32 * np.abs(mean)
        size = np.abs(deviations)
        error = mean_error[..., None] * (rstd + rstd_error)[..., None]
        error = error + size * rstd_error[..., None] + 3 * U32 * size * rstd[..., None]
        if weight is not None:
            factor = np.abs(weight_offset + weight.astype(np.float64))
            roundings = U32 * (abs(weight_offset) + np.abs(weight.astype(np.float64)))
            error = error * (factor + roundings) + size * rstd[..., None] * (
                roundings + U32 * factor
            )
        error = error + TINY32 * (2 + rstd[..., None])
        if bias is not None:
            error = error + U32 * np.abs(out)
        out_error = error + precision_of(dtype).store(out)
    return out_error, np.where(np.isnan(mean), 0.0, mean_stored), rstd_error


def normed_sum_bound(
    x: np.ndarray,
    residual: np.ndarray,
    scale: np.ndarray | None = None,
    *,
    weight: np.ndarray,
    eps: float,
    weight_offset: float = 0.0,
) -> Float64:
    """Return the error bound of a float32 sum of x and `scale` times the RMS norm of a residual.

    The norm errs as `norm_bound` in float32. The product with the scale and the sum round once
    each, by u of what is found.
    """
    normed, *_ = norm(residual, None, weight, centred=False, eps=eps, weight_offset=weight_offset)
    error, *_ = norm_bound(
        residual,
        weight,
        dtype="float32",
        centred=False,
        eps=eps,
        weight_offset=weight_offset,
    )
    factor = 1.0 if scale is None else np.abs(scale.astype(np.float64))
    term = factor * (np.abs(normed) + error)
    total = np.abs(x.astype(np.float64)) + term
    return factor * error + U32 * (term + total) + 2 * TINY32


def norm_backward_bound(
    dout: np.ndarray,
    x: np.ndarray,
    dtotal: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    mean: np.ndarray | None = None,
    rstd: np.ndarray | float = 1.0,
    *,
    dtype: DTypeLike,
    weight_offset: float = 0.0,
) -> tuple[Float64, Float64 | None, Float64 | None]:
    """Return error bounds of dx, dweight and dbias; arguments as for `norm_backward`."""
    gradients = norm_backward(
        dout, x, dtotal, weight, bias, mean, rstd, weight_offset=weight_offset
    )
    precision = precision_of(dtype)
    items, rows = x.shape[-1], x.size // max(x.shape[-1], 1)
    with np.errstate(all="ignore"):
        dout, normal, g, rstd = map(np.abs, terms(dout, x, weight, mean, rstd, weight_offset))
        h = additions(items) + 6
        raw = np.zeros(x.shape)  # n before its mean is subtracted
        if mean is not None:
            raw = (x.astype(np.float64) - mean[..., None]) * rstd[..., None]
        lost = h * U32 * row_mean(np.abs(raw))[..., None]
        shift = h * U32 * np.abs(row_mean(raw))[..., None]
        if weight is not None:  # larger than |g| if the weight nearly cancels the offset
            g = np.maximum(g, dout * (abs(weight_offset) + np.abs(weight.astype(np.float64))))
        n = max(items, 1)
        flushed = (items + 4) * TINY32 / n
        product = (g * normal).sum(axis=-1, keepdims=True) / n + flushed
        plain = g.sum(axis=-1, keepdims=True) / n if mean is not None else 0.0
        inner = g + plain + normal * product
        error = (6 * g + h * plain + (h + 4) * normal * product + 4 * inner) * U32
        error = error + lost * product + (lost + 2 * shift) * normal * plain
        error = rstd[..., None] * (error + flushed * (1 + normal)) + TINY32
        if dtotal is not None:
            error = error + U32 * (rstd[..., None] * inner + np.abs(dtotal.astype(np.float64)))
        dx = error + precision.store(gradients[0])
        sums: list[Float64 | None] = []
        of_each = dout * ((rows + 16) * U32 * normal + lost), dout * ((rows + 16) * U32)
        for gradient, terms_error in zip(gradients[1:], of_each, strict=True):
            if gradient is None:
                sums.append(None)
                continue
            rounded = column_sum(terms_error) + (rows + 1) * TINY32
            sums.append(rounded + precision.store(gradient))
    return dx, sums[0], sums[1]
