"""Error bounds of the kernels of cross-entropy, for every element.

Letters as in `softmax.bounds`, which bounds lse and log l. The kernel computes

    loss = log l + (1 - e) (m - x_y) + e (m - mean(x)) + z lse^2

Each difference errs by 4 u times its operands, mean(x) by (n + 4) u mean|x|, and the square by
twice lse's own error E times |lse|. The sums err by 4 u times the absolute values of their terms.
The mean of n losses errs by (n + 4) u times the mean of their absolute values, in addition to the
errors of the losses.

The backward is given lse. The exponent of a weight exp(x - lse) errs by 4 u (|x| + |lse|) + 12 u,
of which u |lse| is the rounding of lse to float32; the other terms have relative errors of 4 u.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.linear.bounds import linear_backward_bound, linear_bound
from cupyattn.ops.losses.reference import (
    LinearCrossEntropyGrads,
    _float64,
    cross_entropy,
    cross_entropy_backward,
    reduced,
    spread,
)
from cupyattn.ops.softmax.bounds import QUIET, log_sum_bound, logsumexp_bound, weight_error
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of


def linear_cross_entropy_bound(
    x: np.ndarray, w: np.ndarray, labels: np.ndarray, *, dtype: DTypeLike, **options: Any
) -> tuple[Float64, Float64]:
    """Return error bounds of both results of `linear_cross_entropy` without a reduction."""
    logits = _float64(x) @ _float64(w)
    each = {**options, "reduction": "none"}
    _, lse = cross_entropy(logits, labels, **each)
    largest = linear_bound(x, w, dtype=dtype)[0].max(axis=-1)
    loss_bound, lse_bound = cross_entropy_bound(logits, labels, **each)
    moved = 2 * largest + 2 * options.get("z_loss", 0.0) * (np.abs(lse) + largest) * largest
    ignored = labels == options.get("ignore_index", -100)
    return np.where(ignored, 0.0, 1.01 * (loss_bound + moved)), 1.01 * (lse_bound + largest)


def linear_cross_entropy_backward_bound(
    dloss: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    labels: np.ndarray,
    lse: np.ndarray,
    *,
    dtype: DTypeLike,
    chunks: int,
    **options: Any,
) -> LinearCrossEntropyGrads:
    """Return error bounds of `linear_cross_entropy_backward` in `chunks`, without a reduction."""
    exact_x, exact_w = _float64(x), _float64(w)
    logits = exact_x @ exact_w
    arguments = (dloss, logits, labels, lse)
    options = {**options, "reduction": "none"}
    dlogits = cross_entropy_backward(*arguments, **options)
    slope = np.abs(cross_entropy_backward(*arguments, **{**options, "label_smoothing": 0.0}))
    share = np.abs(_float64(dloss))[..., None] * (np.arange(logits.shape[-1]) == labels[..., None])
    error = 1.01 * cross_entropy_backward_bound(*arguments, dtype=dtype, **options)
    error += 2.02 * (slope + share) * linear_bound(x, w, dtype=dtype)[0].max(axis=-1, keepdims=True)
    rounded = linear_backward_bound(dlogits, exact_x, exact_w, dtype=dtype)
    dx = rounded.dx + 1.01 * error @ np.abs(exact_w).T
    flat = np.abs(exact_x).reshape(-1, x.shape[-1]).T
    dw = rounded.dw + 1.01 * flat @ error.reshape(-1, logits.shape[-1])
    total = flat @ np.abs(dlogits).reshape(-1, logits.shape[-1])
    dw += chunks * precision_of(dtype).store(total)
    return LinearCrossEntropyGrads(dx, dw)


def cross_entropy_bound(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Float64, Float64]:
    """Return error bounds of both results of `cross_entropy` in float32, from its arguments.

    Infinite losses have infinite bounds.
    """
    x, labels = np.asarray(logits, np.float64), np.asarray(labels)
    vocabulary, e = x.shape[-1], label_smoothing
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": e}
    options |= {"z_loss": z_loss, "reduction": "none"}
    losses, lse = cross_entropy(x, labels, **options)
    with np.errstate(**QUIET):
        lse_bound = logsumexp_bound(x)
        m = np.max(x, axis=-1, initial=-np.inf)
        inside = (labels >= 0) & (labels < vocabulary)
        target = np.take_along_axis(x, np.where(inside, labels, 0)[..., None], axis=-1)[..., 0]
        mean = x.sum(axis=-1) / vocabulary if e else np.zeros(m.shape)
        size = np.abs(x).sum(axis=-1) / vocabulary if e else np.zeros(m.shape)
        error = log_sum_bound(x) + 4 * U32 * (1 - e) * (np.abs(m) + np.abs(target))
        error += e * ((vocabulary + 4) * U32 * size + 4 * U32 * np.abs(m))
        error += z_loss * (2 * np.abs(lse) * lse_bound + lse_bound**2 + 4 * U32 * lse**2)
        terms = np.abs(lse - m) + (1 - e) * np.abs(m - target) + e * np.abs(m - mean)
        error += 4 * U32 * (terms + z_loss * lse**2) + TINY32
        error = np.where(labels == ignore_index, 0.0, error)
        if reduction == "none":
            return error, lse_bound
        how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        rounded = (labels.size + 4) * U32 * reduced(np.abs(losses), labels, **how)
        return reduced(error, labels, **how) + rounded, lse_bound


def cross_entropy_backward_bound(
    dloss: ArrayLike,
    logits: ArrayLike,
    labels: ArrayLike,
    lse: ArrayLike,
    *,
    dtype: DTypeLike,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dlse: ArrayLike | None = None,
) -> Float64:
    """Return the error bound of `cross_entropy_backward` rounded to dtype, from its arguments."""
    x, labels = np.asarray(logits, np.float64), np.asarray(labels)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    each = np.abs(spread(dloss, labels, **options))[..., None]
    options |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
    dx = cross_entropy_backward(dloss, x, labels, lse, dlse=dlse, **options)
    of_lse = 0.0 if dlse is None else np.abs(np.asarray(dlse, np.float64))[..., None]
    lse = np.asarray(lse, np.float64)[..., None]
    with np.errstate(**QUIET):
        factor = np.abs(1 + 2 * z_loss * lse)
        exponent = np.where(np.isneginf(x), 0.0, 4 * U32 * (np.abs(x) + np.abs(lse))) + 12 * U32
        hit = np.arange(x.shape[-1]) == labels[..., None]
        weight = np.exp(np.minimum(x - lse, 0.0))
        of_weight = weight_error(weight, exponent)
        error = factor * of_weight
        error += 4 * U32 * ((1 - label_smoothing) * hit + label_smoothing / x.shape[-1])
        error += 8 * U32 * z_loss * np.abs(lse) * weight
        ignored = (labels == ignore_index)[..., None]
        error = np.where(ignored, 0.0, each * error + TINY32 * (1 + each * factor))
        error += of_lse * of_weight + TINY32 * (1 + of_lse)
        bound: Float64 = error + 4 * U32 * np.abs(dx) + precision_of(dtype).store(dx)
        return np.where(ignored & (dlse is None), 0.0, bound)
