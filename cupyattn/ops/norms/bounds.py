r"""How far a right kernel may be from `norm` and `norm_backward`.

With u = 2^-24, n items in a row of mean m and mean square deviation v, D the largest |x - m|, X the
largest |x|. A sum of n items takes at most h(n) additions, one behind the other: a thread adds up
to 32 items, or n / 256 of longer rows, and merging threads and warps takes 32 more.

Forward, layer norm (cuda_src/norms/moments.cuh). Sums are taken about a pivot, itself the mean of
items of the row, which errs by h u X: so it lies within P = D + h u X of the mean, and items within
D + P of it. A difference from the pivot rounds by u (D + P), their mean errs by (h + 4) u (D + P),
and the difference from both parts of the mean by e = (h + 6) u (D + P). The squares about the
pivots of threads are at most 2 (v + P^2) in the mean, and moving the pivot doubles that at most:

    |v' - v| <= 4 (h + 8) u (v + P^2)

rsqrt.approx errs by 2 units in the last place, 4 u, and the sum of v' and eps rounds. RMS norm has
no pivot: its mean of squares errs by (h + 4) u of itself. Both multiply and add three times more.

Backward, from the statistics as given. n = (x - mean) rstd errs by 2 u |n|, g = dout (offset + w)
by 2 u |g|, a mean of terms by (h + 6) u of the mean of their sizes; dx = rstd (g - G - n C) +
dtotal adds four roundings of its largest partial result. A sum over R rows takes at most R
additions and a few for CTAs and warps: (R + 16) u of the sum of the sizes. Layer norm takes from n
its mean c, which errs by l = (h + 6) u times the mean of |(x - mean) rstd|, so all n of a row by l
more; and from C the product c G, which errs by l G, and twice by (h + 6) u |c| G: in the sum of g n
before, and in G.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupyattn.ops.norms.reference import Float64, column_sum, norm, norm_backward, row_mean, terms
from cupyattn.runtime.precision import TINY32, U32, precision_of


def additions(items: int) -> float:
    """h(n) of the module's docstring."""
    return min(items, 32 + items / 256) + 32


def norm_bound(
    x: NDArray[Any],
    weight: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    *,
    dtype: DTypeLike,
    centred: bool,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[Float64, Float64, Float64]:
    """Error bounds of out, mean and rstd; x is what is normalised, the sum where there is one.

    Parameters
    ----------
    x, weight, bias, centred, eps, weight_offset
        As in `norm`, already rounded to dtype.
    dtype : dtype or str
        float16, float32 or bfloat16, which out is rounded to.
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


def norm_backward_bound(
    dout: NDArray[Any],
    x: NDArray[Any],
    dtotal: NDArray[Any] | None = None,
    weight: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    mean: NDArray[Any] | None = None,
    rstd: NDArray[Any] | float = 1.0,
    *,
    dtype: DTypeLike,
    weight_offset: float = 0.0,
) -> tuple[Float64, Float64 | None, Float64 | None]:
    """Error bounds of dx, dweight and dbias; the arguments are those of `norm_backward`."""
    gradients = norm_backward(
        dout, x, dtotal, weight, bias, mean, rstd, weight_offset=weight_offset
    )
    precision = precision_of(dtype)
    items, rows = x.shape[-1], x.size // max(x.shape[-1], 1)
    with np.errstate(all="ignore"):
        dout, normal, g, rstd = map(np.abs, terms(dout, x, weight, mean, rstd, weight_offset))
        h = additions(items) + 6
        raw = np.zeros(x.shape)  # before c is taken from it
        if mean is not None:
            raw = (x.astype(np.float64) - mean[..., None]) * rstd[..., None]
        lost = h * U32 * row_mean(np.abs(raw))[..., None]
        shift = h * U32 * np.abs(row_mean(raw))[..., None]
        if weight is not None:  # of an offset that the weight nearly cancels
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
