"""Cross-entropy of logits that are a product, its gradients, and how far kernels may be from them.

With logits z = x w, rounded to the dtype: an error E of each of them (that of `linear`) moves the
loss by at most 2 max E, for the loss's slope is p - share, whose absolute values add up to at most
2; and, with the z loss, by 2 z (|lse| + max E) max E. A gradient p_j - share_j, given lse, moves by
at most 2 p_j max E, beside what the kernel of cross-entropy errs by itself; and is then an operand
of the products of `linear_backward`, whose bound is for exact operands. Where dw is added up chunk
by chunk, each addition rounds the sum so far once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupyattn.ops.linear.bounds import linear_backward_bound, linear_bound
from cupyattn.ops.linear.reference import linear_backward
from cupyattn.ops.losses.bounds import cross_entropy_backward_bound, cross_entropy_bound
from cupyattn.ops.losses.reference import cross_entropy, cross_entropy_backward
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.precision import Float64, precision_of


class LinearCrossEntropyGrads(NamedTuple):
    """Gradients of linear_cross_entropy's inputs, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., K)
        Of the input.
    dw : array (K, V)
        Of the weight, summed over all rows of x.
    """

    dx: Array = None
    dw: Array = None


def linear_cross_entropy(
    x: NDArray[Any], w: NDArray[Any], labels: NDArray[Any], **options: Any
) -> tuple[Float64, Float64]:
    """Return the loss and lse of the logits x w; options as of `cross_entropy`."""
    return cross_entropy(_float64(x) @ _float64(w), labels, **options)


def linear_cross_entropy_backward(
    dloss: NDArray[Any],
    x: NDArray[Any],
    w: NDArray[Any],
    labels: NDArray[Any],
    lse: NDArray[Any],
    **options: Any,
) -> LinearCrossEntropyGrads:
    """Return dx and dw; arguments and options as of `cross_entropy_backward`."""
    x, w = _float64(x), _float64(w)
    dlogits = cross_entropy_backward(dloss, x @ w, labels, lse, **options)
    return LinearCrossEntropyGrads(*linear_backward(dlogits, x, w)[:2])


def linear_cross_entropy_bound(
    x: NDArray[Any], w: NDArray[Any], labels: NDArray[Any], *, dtype: DTypeLike, **options: Any
) -> tuple[Float64, Float64]:
    """Error bounds of both results of `linear_cross_entropy`, of losses that are not reduced."""
    logits = _float64(x) @ _float64(w)
    each = {**options, "reduction": "none"}
    _, lse = cross_entropy(logits, labels, **each)
    largest = linear_bound(x, w, dtype=dtype)[0].max(axis=-1)
    loss_bound, lse_bound = cross_entropy_bound(logits, labels, **each)
    moved = 2 * largest + 2 * options.get("z_loss", 0.0) * (np.abs(lse) + largest) * largest
    ignored = labels == options.get("ignore_index", -100)
    return np.where(ignored, 0.0, 1.01 * (loss_bound + moved)), 1.01 * (lse_bound + largest)


def linear_cross_entropy_backward_bound(
    dloss: NDArray[Any],
    x: NDArray[Any],
    w: NDArray[Any],
    labels: NDArray[Any],
    lse: NDArray[Any],
    *,
    dtype: DTypeLike,
    chunks: int,
    **options: Any,
) -> LinearCrossEntropyGrads:
    """Error bounds of `linear_cross_entropy_backward` with dloss of rows, in a number of chunks."""
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


def _float64(array: NDArray[Any]) -> Float64:
    return np.asarray(array, dtype=np.float64)
