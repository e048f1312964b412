"""Losses of rows made one number, and the gradient of that number made those of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.ops.losses import reference
from cupyattn.ops.losses.kernels import (
    CrossEntropyArrays,
    CrossEntropyBackwardArrays,
    ReductionArrays,
)
from cupyattn.ops.losses.plan import LossOptions, check_labels, layout_of, reduce_losses
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import require_dtype, require_shape
from cupyattn.runtime.errors import error
from cupyattn.runtime.records import R, given_of
from cupyattn.runtime.rounding import round_into


def without_scalars(arrays: R) -> R:
    """Replace NumPy's scalars in a record by arrays without axes.

    NumPy makes a scalar of every sum and product of such arrays, of a loss times a loss scale too.
    """
    for name, array in given_of(arrays).items():
        if isinstance(array, np.generic):
            setattr(arrays, name, np.asarray(array))
    return arrays


def reduced(
    losses: Array, labels: Array, target: Any, options: LossOptions, reduction: str
) -> Array:
    """Return the mean or the sum of losses, written into `target` if that is given."""
    operands = adopt(ReductionArrays(labels, losses, result=target))
    device, arrays = device_of(operands), operands.arrays
    ignored = options.ignore_index
    if device is not None:
        return reduce_losses(device, operands, ignored, reduction == "mean")
    exact = reference.reduced(losses, arrays.labels, ignore_index=ignored, reduction=reduction)
    return round_into(arrays.result, exact, losses.dtype)


def require_dloss(dloss: Any, rows: tuple[int, ...], dtype: np.dtype, reduction: str) -> Array:
    """Take the gradient of a loss, and return it as one of each row."""
    one = adopt(ReductionArrays(None, dloss=dloss)).arrays.dloss
    if one is None or reduction == "none":
        return one
    require_dtype("dloss", layout_of(one), (dtype.name,))
    require_shape("dloss", layout_of(one), (), "one number, as the loss is")
    return np.broadcast_to(one, rows)


def spread(
    dloss: Array, labels: Array, options: LossOptions, reduction: str, one: Array | None = None
) -> Array:
    """Return the gradient of each row's loss; `dloss` is what `require_dloss` returned.

    A device writes it into `one`, an array of one number, or into a new one.
    """
    if reduction != "mean":
        return dloss
    operands = adopt(ReductionArrays(labels, dloss=dloss))
    device, labels, rows = device_of(operands), operands.arrays.labels, dloss.shape
    if 0 in rows:
        return dloss
    first = (*(0 for _ in rows), ...)
    ignored = options.ignore_index
    if device is not None:
        given = ReductionArrays(labels, dloss=dloss[first], result=one)
        return np.broadcast_to(reduce_losses(device, adopt(given), ignored, True), rows)
    exact = reference.spread(dloss[first], labels, ignore_index=ignored, reduction=reduction)
    return round_into(None, exact, dloss.dtype)


def targets(out: Any, return_lse: bool) -> tuple[Any, Any]:
    """Return what the loss and lse are to be written into, None for what is to be made."""
    if not return_lse or out is None:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise error(
            TypeError,
            f"out is a {type(out).__name__}",
            "with return_lse it is a tuple (loss, lse)",
            "pass a tuple of two arrays, or none",
        )
    return out


def label_check(options: LossOptions) -> Callable[[Any], None]:
    """Return the check of a call's labels against its logits."""

    def check(
        arrays: CrossEntropyArrays[Array] | CrossEntropyBackwardArrays[Array],
    ) -> None:
        check_labels(arrays.labels, arrays.logits.shape[-1], options.ignore_index)

    return check
