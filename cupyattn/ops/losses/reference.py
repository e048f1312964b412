"""Cross-entropy of rows of logits with their labels, and its gradient, in float64.

For logits x of a row, its label y, label smoothing e and the weight z of the z loss,

    loss = lse - (1 - e) x_y - e mean(x) + z lse^2,     lse = log(sum(exp(x)))
    dx_j = dloss ((1 + 2 z lse) exp(x_j - lse) - (1 - e) [j = y] - e / V) + dlse exp(x_j - lse)

Rows whose label is ignored have a loss and a gradient of 0. Rows whose label is no column have NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cupyattn.ops.linear.reference import linear_backward
from cupyattn.ops.softmax.reference import by_rows
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.precision import Float64

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Float64, Float64]:
    """Return the cross-entropy, and the log-sum-exp of each row.

    Parameters
    ----------
    logits : (..., V) floats
    labels : (...) ints
    ignore_index : int
        The label of rows that do not count.
    label_smoothing, z_loss : float
        e and z.
    reduction : {"mean", "sum", "none"}
        The mean is over rows that count, and NaN if there are none.

    Returns
    -------
    loss : () or (...) float64
    lse : (...) float64

    Examples
    --------
    >>> loss, lse = cross_entropy([[0.0, 0.0], [5.0, 1.0]], [1, -100])
    >>> float(loss) == float(lse[0]) == float(np.log(2))
    True
    """
    labels = np.asarray(labels)

    def of_rows(x: np.ndarray, labels: np.ndarray) -> Float64:
        x = x.astype(np.float64)
        vocabulary = x.shape[-1]
        m = np.max(x, axis=-1, initial=-np.inf)
        finite = np.where(np.isneginf(m), 0.0, m)
        log_l = np.log(np.exp(x - finite[..., None]).sum(axis=-1))
        lse = finite + log_l
        inside = (labels >= 0) & (labels < vocabulary)
        target = np.full(labels.shape, np.nan)
        target[inside] = x[inside, labels[inside]]
        # Differences from the maximum lose no digits for large logits.
        losses = log_l + (1 - label_smoothing) * (m - target)
        if label_smoothing:
            losses = losses + label_smoothing * (m - x.sum(axis=-1) / vocabulary)
        losses = losses + z_loss * lse**2
        losses = np.where(labels == ignore_index, 0.0, np.where(inside, losses, np.nan))
        return np.stack((losses, lse), axis=-1)

    both = by_rows(of_rows, *_flat(logits, labels)).reshape(*labels.shape, 2)
    losses, lse = both[..., 0], both[..., 1]
    return reduced(losses, labels, ignore_index=ignore_index, reduction=reduction), lse


def reduced(
    losses: np.ndarray, labels: np.ndarray, *, ignore_index: int, reduction: str
) -> Float64:
    """Return the mean of the losses that count, their sum, or the losses."""
    if reduction == "none":
        return np.asarray(losses, np.float64)
    total = np.asarray(losses.sum(dtype=np.float64))
    if reduction == "sum":
        return total
    with np.errstate(invalid="ignore"):
        return np.asarray(total / np.float64(np.count_nonzero(labels != ignore_index)))


def spread(dloss: ArrayLike, labels: np.ndarray, *, ignore_index: int, reduction: str) -> Float64:
    """Return the gradient with respect to each row's loss, from dloss of the reduced loss."""
    dloss = np.asarray(dloss, np.float64)
    if reduction == "mean":
        with np.errstate(divide="ignore", invalid="ignore"):
            dloss = dloss / np.float64(np.count_nonzero(labels != ignore_index))
    return np.broadcast_to(dloss, labels.shape)


def cross_entropy_backward(
    dloss: ArrayLike,
    logits: ArrayLike,
    labels: ArrayLike,
    lse: ArrayLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dlse: ArrayLike | None = None,
) -> Float64:
    """Return the gradient with respect to the logits.

    Parameters
    ----------
    dloss : () or (...) floats
        Gradient with respect to the loss, with its shape.
    logits, labels, ignore_index, label_smoothing, z_loss, reduction
        Arguments of `cross_entropy`.
    lse : (...) floats
        The lse that `cross_entropy` returned, possibly rounded.
    dlse : (...) floats, optional
        Gradient with respect to lse.

    Returns
    -------
    (..., V) float64
    """
    labels = np.asarray(labels)
    each = spread(dloss, labels, ignore_index=ignore_index, reduction=reduction)

    def of_rows(
        x: np.ndarray, labels: np.ndarray, dloss: Float64, lse: Float64, of_lse: Float64
    ) -> Float64:
        vocabulary = x.shape[-1]
        # At most 1: an lse that was rounded to float32 may be below the largest logit.
        weights = np.exp(np.minimum(x.astype(np.float64) - lse[:, None], 0.0))
        dx = (1 + 2 * z_loss * lse)[:, None] * weights - label_smoothing / max(vocabulary, 1)
        inside = (labels >= 0) & (labels < vocabulary)
        dx[inside, labels[inside]] -= 1 - label_smoothing
        dx *= np.where(inside, dloss, np.nan)[:, None]
        dx = np.where((labels == ignore_index)[:, None], 0.0, dx)
        return dx if dlse is None else dx + weights * of_lse[:, None]

    no_dlse = np.zeros(labels.shape)
    per_row = (
        np.asarray(array, np.float64).reshape(-1)
        for array in (each, lse, no_dlse if dlse is None else dlse)
    )
    return by_rows(of_rows, *_flat(logits, labels), *per_row).reshape(np.shape(logits))


def _flat(logits: ArrayLike, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(logits)
    return logits.reshape(labels.size, logits.shape[-1]), labels.reshape(-1)


class LinearCrossEntropyGrads(NamedTuple):
    """Gradients of linear_cross_entropy's inputs, each of its input's shape.

    In ``grads=`` a field that is None, the default, makes a new array.

    Attributes
    ----------
    dx : array (..., K)
        Gradient with respect to x.
    dw : array (K, V), or None
        Gradient with respect to the weight, summed over all rows of x; None for a quantised weight.
    """

    dx: Array | None = None
    dw: Array | None = None


def linear_cross_entropy(
    x: np.ndarray, w: np.ndarray, labels: np.ndarray, **options: Any
) -> tuple[Float64, Float64]:
    """Return the loss and lse of the logits x w; options as for `cross_entropy`."""
    return cross_entropy(_float64(x) @ _float64(w), labels, **options)


def linear_cross_entropy_backward(
    dloss: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    labels: np.ndarray,
    lse: np.ndarray,
    **options: Any,
) -> LinearCrossEntropyGrads:
    """Return dx and dw; arguments and options as for `cross_entropy_backward`."""
    x, w = _float64(x), _float64(w)
    dlogits = cross_entropy_backward(dloss, x @ w, labels, lse, **options)
    return LinearCrossEntropyGrads(*linear_backward(dlogits, x, w)[:2])


def _float64(array: np.ndarray) -> Float64:
    return np.asarray(array, dtype=np.float64)
