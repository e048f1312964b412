"""Cross-entropy of logits with labels, forward and backward, and the reduction of losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from cupyattn.ops.losses import kernels, reference
from cupyattn.ops.losses.kernels import (
    CrossEntropyArrays,
    CrossEntropyBackwardArrays,
    ReductionArrays,
    reduce_losses,
)
from cupyattn.runtime.arrays import Array, Layout, adopt, layouts_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    checked_once,
    factor,
    integer,
    real,
    require_apart,
    require_bool,
    require_dtype,
    require_given,
    require_shape,
)
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import require_grads, round_into
from cupyattn.runtime.plan import Output, allot
from cupyattn.runtime.records import Record
from cupyattn.runtime.rows import RowOptions, call_rows, row_problem, statistics_dtype
from cupyattn.runtime.value_checks import on_host

Reference = Callable[..., Any]


@overload
def cross_entropy(
    logits: Array,
    labels: Array,
    /,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    reduction: str = ...,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
    workspace: Array | None = ...,
) -> Array: ...


@overload
def cross_entropy(
    logits: Array,
    labels: Array,
    /,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    reduction: str = ...,
    return_lse: Literal[True],
    out: tuple[Array, Array] | None = ...,
    workspace: Array | None = ...,
) -> tuple[Array, Array]: ...


@overload
def cross_entropy(
    logits: Array,
    labels: Array,
    /,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    reduction: str = ...,
    return_lse: bool,
    out: Array | tuple[Array, Array] | None = ...,
    workspace: Array | None = ...,
) -> Array | tuple[Array, Array]: ...


@differentiable(
    lambda: cross_entropy_backward,
    results=("loss",),
    saved=("lse",),
    saved_by="return_lse",
    gradients=("dlogits",),
)
def cross_entropy(
    logits: Array,
    labels: Array,
    /,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Array | tuple[Array, Array]:
    r"""Cross-entropy of logits with labels: ``log(sum(exp(logits))) - logits[label]`` of each row.

    Parameters
    ----------
    logits : array (..., V)
        float16, float32 or bfloat16, CuPy or NumPy. NumPy arrays may be float64, except on the
        emulator. The last axis is contiguous; the others may have any stride. V may be any number.
    labels : array (...)
        int32 or int64, of any strides: the correct column of each row, or `ignore_index`. For one
        row it may be a NumPy scalar.
    ignore_index : int
        The label of rows that do not count: their loss and their gradient are 0.
    label_smoothing : float
        e, at least 0 and at most 1. The target is (1 - e) for the label, plus e spread evenly over
        all V columns (Szegedy et al., arXiv:1512.00567, section 7).
    z_loss : float
        z, 0 or more. z lse^2 is added to the loss of each row that counts, which keeps lse near 0
        (Chowdhery et al., arXiv:2204.02311, section 5).
    reduction : {"mean", "sum", "none"}
        Return the mean of the losses over the rows that count (NaN if there are none), their sum,
        or all losses.
    return_lse : bool
        Whether to return the log-sum-exp of each row too, which the backward takes.
    out : array or tuple, optional
        Where to write the loss; with `return_lse` a tuple (loss, lse). The last axis of each is
        contiguous.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes: 4 bytes
        a row for "mean" and "sum", none for "none". By default it is allocated. With out and
        workspace a call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    loss : array () or (...), float32
        float64 for logits of float64. A row of -inf, or with a NaN or +inf, has a loss of NaN.
    lse : array (...), float32
        The log-sum-exp of each row, only with `return_lse`.

    Raises
    ------
    TypeError
        For something that is no array, a mixture of NumPy and CuPy arrays, a dtype that is not
        allowed, an option of another type, or an out that is no tuple with `return_lse`.
    ValueError
        For labels of another shape than the rows, a label_smoothing outside of 0 to 1, an unknown
        reduction, or an out or workspace that does not fit or overlaps another array. For the first
        label that is no column: always on NumPy arrays, on a GPU only inside
        ``backend(checks=True)``. Without that check the loss of such a row is NaN. On kernels also
        if more than four axes of rows remain after merging those with even strides.
    RuntimeError
        As `attention`.

    Notes
    -----
    On a GPU the logits are read once (the online softmax of Milakov and Gimelshein,
    arXiv:1805.02867, algorithm 3). Ignored rows are read only if lse is returned. A second kernel
    computes the mean or sum in a fixed order, from 4 bytes a row of scratch memory. The call waits
    for neither kernel.

    An lse of size A is rounded to float32 by up to A * 2**-24. That is the relative error of the
    weights in the backward, on NumPy arrays too; the loss is not affected. If logits exceed 1e4,
    subtract an offset of each row first: the loss and its gradient do not depend on it, but lse and
    a z_loss do.

    label_smoothing needs the sum of a row, which is float32 on a GPU: beyond 3.4e38 the loss is
    infinite.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> logits = np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]], np.float32)
    >>> labels = np.array([0, -100, 1], np.int32)
    >>> cupyattn.cross_entropy(logits, labels, reduction="none")
    array([0.12692802, 0.        , 0.6931472 ], dtype=float32)
    >>> cupyattn.cross_entropy(logits, labels)
    array(0.4100376, dtype=float32)
    """
    options = checked_options(ignore_index, label_smoothing, z_loss, reduction)
    require_bool("return_lse", return_lse)
    loss, lse = targets(out, bool(return_lse))
    reduces = reduction != "none"
    require_given("logits", logits)
    arrays = CrossEntropyArrays(logits, labels, loss, lse, workspace)
    without_scalars(arrays, "logits", "labels")
    labels = arrays.labels
    if reduces:
        _losses_apart(arrays)
    exact, of_rows = _forward_options(options, bool(return_lse))
    found = call_rows(kernels.FORWARD, arrays, exact, of_rows, _label_check(options))
    result = found.out
    assert result is not None
    if reduces:
        result = reduced(result, labels, loss, options, reduction)
    if not return_lse:
        return result
    assert found.lse is not None
    return result, found.lse


def cross_entropy_backward(
    dloss: Array,
    logits: Array,
    labels: Array,
    lse: Array,
    /,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dlse: Array | None = None,
    dlogits: Array | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> Array:
    r"""Gradient of `cross_entropy`: ``dloss * (exp(logits - lse) - [j = label])`` without options.

    Parameters
    ----------
    dloss : array () or (...), float32
        Gradient with respect to the loss, with its shape: for "mean" and "sum" one number, which
        may be a NumPy scalar. float64 for logits of float64.
    logits : array (..., V)
        The logits that `cross_entropy` was given.
    labels : array (...)
        The labels that `cross_entropy` was given.
    lse : array (...), float32
        The lse that `cross_entropy` returned.
    ignore_index, label_smoothing, z_loss, reduction
        The options of `cross_entropy`.
    dlse : array (...), float32, optional
        Gradient with respect to lse, if lse was used.
    dlogits : array (..., V), optional
        Where to write the gradient. It may be logits itself, and must not overlap another array.
    accumulate : bool
        Add to the contents of dlogits before the one rounding. Then dlogits is not logits.
    workspace : array, optional
        Scratch memory as for `cross_entropy`: 4 bytes for "mean", none otherwise. With dlogits and
        workspace a call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    array (..., V), dtype of logits
        Gradient with respect to the logits. Ignored rows have only the part of dlse.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `cross_entropy`; also for a dloss of another shape than the loss.

    Notes
    -----
    On a GPU each row is read and written once; a row with a label that is no column becomes NaN.
    With dlogits=logits a call allocates 4 bytes. A float16 gradient below 6e-8 becomes 0, as most
    do after a mean over thousands of rows: multiply dloss by a loss scale there.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> logits, labels = np.zeros((1, 2), np.float32), np.array([1], np.int32)
    >>> loss, lse = cupyattn.cross_entropy(logits, labels, return_lse=True)
    >>> cupyattn.cross_entropy_backward(np.ones_like(loss), logits, labels, lse)
    array([[ 0.5, -0.5]], dtype=float32)
    """
    options = checked_options(ignore_index, label_smoothing, z_loss, reduction)
    require_bool("accumulate", accumulate)
    require_grads(dlogits, accumulate, shown="dlogits")
    arrays = CrossEntropyBackwardArrays(logits, dloss, lse, dlse, labels, dlogits, workspace)
    without_scalars(arrays, "logits", "dloss", "lse", "dlse", "labels")
    adopt(arrays, kernels.BACKWARD.fixes)
    if arrays.logits is not None:
        rows = arrays.logits
        each = require_dloss(arrays.dloss, rows.shape[:-1], statistics_dtype(rows.dtype), reduction)
        arrays.dloss = each
    exact, of_rows = _backward_options(options, bool(accumulate))
    if reduction == "mean":
        whole = adopt(arrays)
        row_problem(kernels.BACKWARD, whole, of_rows)  # raises before anything is launched
        one = None
        if arrays.workspace is not None:
            number = Output((), arrays.dloss.dtype)
            (one,) = allot(device_of(whole), [number], arrays.workspace)
            arrays.workspace = None
        arrays.dloss = spread(arrays.dloss, arrays.labels, options, reduction, one)
    result = call_rows(kernels.BACKWARD, arrays, exact, of_rows, _label_check(options)).dlogits
    assert result is not None
    return result


@lru_cache(maxsize=4096)
def _forward_options(options: LossOptions, return_lse: bool) -> tuple[Reference, RowOptions]:
    """Return the reference of the rows' losses, and the options of the kernel."""
    smoothed = options.label_smoothing != 0.0
    wanted = ("lse",) if return_lse else ()
    exact = partial(reference.cross_entropy, reduction="none", **options._asdict())
    return exact, RowOptions.of(choices={"smoothed": smoothed}, wanted=wanted, **options._asdict())


@lru_cache(maxsize=4096)
def _backward_options(options: LossOptions, accumulate: bool) -> tuple[Reference, RowOptions]:
    def exact(
        logits: np.ndarray,
        dloss: np.ndarray,
        lse: np.ndarray,
        dlse: np.ndarray | None,
        labels: np.ndarray,
    ) -> np.ndarray:
        return reference.cross_entropy_backward(
            dloss, logits, labels, lse, dlse=dlse, reduction="none", **options._asdict()
        )

    return exact, RowOptions.of(accumulate=accumulate, **options._asdict())


def _losses_apart(arrays: CrossEntropyArrays[Array]) -> None:
    """Check the out of a reduced loss, and replace it by scratch memory for the rows' losses.

    Without a workspace the rows' losses are allocated as a result would be.
    """
    if arrays.out is None and arrays.workspace is None:
        return
    operands = adopt(arrays, kernels.FORWARD.fixes)
    dtype = statistics_dtype(arrays.logits.dtype)
    require_apart(operands, {"out": Output((), dtype), "lse": None})
    device, workspace = device_of(operands), arrays.workspace
    arrays.out = arrays.workspace = None
    if device is not None and workspace is not None:
        (arrays.out,) = allot(device, [Output(arrays.logits.shape[:-1], dtype)], workspace)


class LossOptions(NamedTuple):
    """Checked options of cross-entropy that its kernels have."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


@checked_once
def checked_options(
    ignore_index: object, label_smoothing: object, z_loss: object, reduction: object
) -> LossOptions:
    """Check the options, and return those of the kernels."""
    ignored = integer("ignore_index", ignore_index)
    if not -(2**63) <= ignored < 2**63:
        raise error(
            ValueError,
            f"ignore_index = {shown(ignored)}",
            "it is an integer of 64 bits",
            "pass one that is no class, -100 for example",
        )
    smoothing = real("label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise error(
            ValueError,
            f"label_smoothing = {smoothing}",
            "it is at least 0 and at most 1",
            "pass the part of the target that is spread over all classes, 0.1 for a tenth",
        )
    weight = factor("z_loss", z_loss)
    if weight < 0.0:
        raise error(
            ValueError,
            f"z_loss = {weight}",
            "it is 0 or more: a negative one would drive lse away from 0",
            "pass the weight of lse^2, 1e-4 for example",
        )
    if not isinstance(reduction, str) or reduction not in reference.REDUCTIONS:
        raise error(
            ValueError,
            f"reduction = {shown(reduction)}",
            f"allowed are {', '.join(map(repr, reference.REDUCTIONS))}",
            "choose one of them; 'mean' is over the labels that are not ignored",
        )
    return LossOptions(ignored, smoothing, weight)


def check_labels(labels: Array, classes: int, ignore_index: int) -> None:
    """Raise ValueError for the first label that is neither a class nor ignored."""
    host = on_host(labels)
    wrong = ((host < 0) | (host >= classes)) & (host != ignore_index)
    if wrong.any():
        place = tuple(int(axis) for axis in np.argwhere(wrong)[0])
        position = ", ".join(map(str, place))
        raise error(
            ValueError,
            f"labels[{position}] = {host[place]}",
            f"a label is at least 0 and below {classes}, the last axis of the logits, or it is "
            f"ignore_index = {ignore_index}",
            "correct it, or set it to ignore_index",
        )


def without_scalars(arrays: Record[Any], *inputs: str) -> None:
    """Replace NumPy scalars among the inputs in a record by arrays without axes.

    Sums and products of arrays without axes, such as a loss times a loss scale, are NumPy scalars.
    A result is not replaced: the caller would never see it.
    """
    for name in inputs:
        array = getattr(arrays, name)
        if isinstance(array, np.generic):
            setattr(arrays, name, np.asarray(array))


def reduced(losses: Any, labels: Any, target: Any, options: LossOptions, reduction: str) -> Array:
    """Return the mean or the sum of losses, written into `target` if that is given."""
    operands = adopt(ReductionArrays(losses, labels=labels, result=target))
    device, arrays = device_of(operands), operands.arrays
    labels, ignored = arrays.labels, options.ignore_index
    if device is not None:
        return reduce_losses(device, operands, ignored, reduction == "mean")
    exact = reference.reduced(losses, labels, ignore_index=ignored, reduction=reduction)
    return round_into(arrays.result, exact, losses.dtype)


def require_dloss(dloss: Any, rows: tuple[int, ...], dtype: np.dtype, reduction: str) -> Any:
    """Take the gradient of a loss; return an array with an item for each row."""
    operands = adopt(ReductionArrays(dloss=dloss))
    one: Any = operands.arrays.dloss
    layout = layouts_of(ReductionArrays[Layout], operands.description).dloss
    if layout is None or reduction == "none":
        return one
    require_dtype("dloss", layout, (dtype.name,))
    require_shape("dloss", layout, (), "one number, as the loss is")
    return np.broadcast_to(one, rows)


def spread(
    dloss: Any, labels: Any, options: LossOptions, reduction: str, one: Array | None = None
) -> Array:
    """Return the gradient with respect to each row's loss, from the result of `require_dloss`.

    A device writes it into `one`, an array of one number, or into a new array.
    """
    if reduction != "mean":
        return dloss
    operands = adopt(ReductionArrays(dloss=dloss, labels=labels))
    device, rows = device_of(operands), dloss.shape
    labels = operands.arrays.labels
    if 0 in rows:
        return dloss
    first = (*(0 for _ in rows), ...)
    ignored = options.ignore_index
    if device is not None:
        given = ReductionArrays(dloss=dloss[first], labels=labels, result=one)
        each: Any = reduce_losses(device, adopt(given), ignored, True)
        return np.broadcast_to(each, rows)
    exact = reference.spread(dloss[first], labels, ignore_index=ignored, reduction=reduction)
    return round_into(None, exact, dloss.dtype)


def targets(out: Any, return_lse: bool) -> tuple[Any, Any]:
    """Return the arrays of out= for the loss and lse; None for a new result."""
    if not return_lse or out is None:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise error(
            TypeError,
            f"out has type {type(out).__name__}",
            "with return_lse it must be a tuple (loss, lse)",
            "pass a tuple of two arrays, or none",
        )
    return out


def _label_check(options: LossOptions) -> Callable[[Any], None]:
    """Return the check of a call's labels against its logits."""

    def check(arrays: CrossEntropyArrays[Array] | CrossEntropyBackwardArrays[Array]) -> None:
        check_labels(arrays.labels, arrays.logits.shape[-1], options.ignore_index)

    return check
