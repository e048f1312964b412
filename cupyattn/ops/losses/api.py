"""Cross-entropy of logits with labels, forward and backward."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.losses import kernels, reference
from cupyattn.ops.losses.kernels import CrossEntropyArrays, CrossEntropyBackwardArrays
from cupyattn.ops.losses.plan import checked_options, require_reduction
from cupyattn.ops.losses.reductions import (
    label_check,
    reduced,
    require_dloss,
    spread,
    targets,
    without_scalars,
)
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.call_rows import call_rows
from cupyattn.runtime.checks import require_bool, require_given
from cupyattn.runtime.outputs import require_grads
from cupyattn.runtime.overlaps import require_apart
from cupyattn.runtime.plan import Output, allot
from cupyattn.runtime.rows import array_fixes, row_problem, statistics_dtype


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
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    r"""Cross-entropy of logits with labels: ``log(sum(exp(logits))) - logits[label]`` of each row.

    Parameters
    ----------
    logits : array (..., V)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous, the others may have any stride; V may be any number.
    labels : array (...)
        int32 or int64, of any strides: the column of each row that is right, or `ignore_index`. Of
        one row it may be NumPy's scalar.
    ignore_index : int
        The label of rows that do not count: their loss is 0, and so is their gradient.
    label_smoothing : float
        e, at least 0 and at most 1: of the target (1 - e) is the label, and e spread over all V
        columns (Szegedy et al., arXiv:1512.00567, section 7).
    z_loss : float
        z, 0 or more: z lse^2 is added to the loss of each row that counts, which keeps lse near 0
        (Chowdhery et al., arXiv:2204.02311, section 5).
    reduction : {"mean", "sum", "none"}
        Of the losses: their mean over the rows that count (NaN where there are none), their sum, or
        all of them.
    return_lse : bool
        Return the log-sum-exp of each row too, which the backward needs.
    out : array or tuple, optional
        Where to write the loss, with `return_lse` a tuple (loss, lse); the last axis of each is
        contiguous.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated: 4 bytes a row for "mean" and "sum", and none for "none". With out
        and workspace a call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    loss : array () or (...), float32
        float64 for logits of float64. A row of -inf, or with a NaN or +inf, has a loss of NaN.
    lse : array (...), float32
        Only with `return_lse`, of all rows.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, a dtype that is not allowed, an
        option of another type, or an out that is no tuple with `return_lse`.
    ValueError
        For labels of another shape than the rows, a label_smoothing outside of 0 to 1, an unknown
        reduction, or an out or workspace that does not fit or overlaps another array. For a label
        that is no column, naming the first: always on NumPy arrays, on a GPU inside of
        ``backend(checks=True)``; otherwise there the loss of such a row is NaN. For kernels also if
        more than four axes of rows lie unevenly in memory.
    RuntimeError
        As `attention`.

    Notes
    -----
    On a GPU the logits are read once (the online softmax of Milakov and Gimelshein,
    arXiv:1805.02867, algorithm 3), those of ignored rows only if lse is returned. Mean and sum come
    from a second kernel, in one order always; nothing waits for either. Beside the results they
    take 4 bytes a row.

    lse is float32, rounded by up to A * 2**-24 where it is of size A: that is the relative error of
    the weights in the backward, on NumPy arrays too. The loss itself loses nothing by it. Where
    logits pass 1e4 subtract a row's offset first: neither the loss nor its gradient has it
    (lse and a z_loss do).
    label_smoothing takes the sum of a row, which on a GPU is float32: beyond 3.4e38 the loss is
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
    options = checked_options(ignore_index, label_smoothing, z_loss)
    require_reduction(reduction)
    require_bool("return_lse", return_lse)
    loss, lse = targets(out, bool(return_lse))
    reduces = reduction != "none"
    require_given("logits", logits)
    arrays = without_scalars(CrossEntropyArrays(logits, labels, loss, lse, workspace))
    labels = arrays.labels
    if reduces:
        _losses_apart(arrays)

    def exact(logits: Array, labels: Array, *, smoothed: bool, **numbers: Any) -> Any:
        return reference.cross_entropy(logits, labels, reduction="none", **numbers)

    found = call_rows(
        kernels.FORWARD,
        arrays,
        exact,
        wanted=("lse",) if return_lse else (),
        check_values=label_check(options),
        choices={"smoothed": options.label_smoothing != 0.0},
        scalars=options._asdict(),
    )
    result = found.out
    if reduces:
        result = reduced(result, labels, loss, options, reduction)
    return (result, found.lse) if return_lse else result


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
        Gradient with respect to the loss, of its shape: one number for "mean" and "sum", which may
        be NumPy's scalar. float64 for logits of float64.
    logits : array (..., V)
        As `cross_entropy` was given it.
    labels : array (...)
        As `cross_entropy` was given it.
    lse : array (...), float32
        What `cross_entropy` returned.
    ignore_index, label_smoothing, z_loss, reduction
        The options of `cross_entropy`.
    dlse : array (...), float32, optional
        Gradient with respect to lse, for those who use it.
    dlogits : array (..., V), optional
        Where to write the gradient: it may be logits itself, and must not overlap another array.
    accumulate : bool
        Add to the contents of dlogits, which then is not logits, before the one rounding.
    workspace : array, optional
        As of `cross_entropy`: 4 bytes for "mean", and none otherwise. With dlogits and workspace a
        call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    array (..., V), dtype of logits
        Gradient with respect to the logits: 0 in rows whose label is ignored (but for dlse).

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `cross_entropy`; and for a dloss of another shape than the loss.

    Notes
    -----
    On a GPU each row is read and written once; a row with a label that is no column becomes NaN.
    With dlogits=logits no memory is taken beside 4 bytes. A gradient in float16 is 0 below 6e-8,
    which most are after a mean over thousands of rows: pass dloss times a loss scale there.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> logits, labels = np.zeros((1, 2), np.float32), np.array([1], np.int32)
    >>> loss, lse = cupyattn.cross_entropy(logits, labels, return_lse=True)
    >>> cupyattn.cross_entropy_backward(np.ones_like(loss), logits, labels, lse)
    array([[ 0.5, -0.5]], dtype=float32)
    """
    options = checked_options(ignore_index, label_smoothing, z_loss)
    require_reduction(reduction)
    require_bool("accumulate", accumulate)
    require_grads(dlogits, accumulate, shown="dlogits")
    arrays = without_scalars(
        CrossEntropyBackwardArrays(logits, dloss, lse, dlse, labels, dlogits, workspace)
    )
    adopt(arrays, array_fixes(kernels.BACKWARD))
    if arrays.logits is not None:
        rows = arrays.logits
        each = require_dloss(arrays.dloss, rows.shape[:-1], statistics_dtype(rows.dtype), reduction)
        arrays.dloss = each
    if reduction == "mean":
        whole = adopt(arrays)
        # Before anything is launched.
        row_problem(kernels.BACKWARD, whole, scalars=options._asdict(), accumulate=bool(accumulate))
        one = None
        if arrays.workspace is not None:
            number = Output((), arrays.dloss.dtype)
            (one,) = allot(device_of(whole), [number], arrays.workspace)
            arrays.workspace = None
        arrays.dloss = spread(arrays.dloss, arrays.labels, options, reduction, one)

    def exact(
        logits: Array, dloss: Array, lse: Array, dlse: Array | None, labels: Array, **numbers: Any
    ) -> Any:
        return reference.cross_entropy_backward(
            dloss, logits, labels, lse, dlse=dlse, reduction="none", **numbers
        )

    return call_rows(
        kernels.BACKWARD,
        arrays,
        exact,
        accumulate=bool(accumulate),
        check_values=label_check(options),
        scalars=options._asdict(),
    ).dlogits


def _losses_apart(arrays: CrossEntropyArrays[Array]) -> None:
    """Check what a reduced loss is written into, and put scratch for the rows' losses in its place.

    Without a workspace they are allocated as a result would be.
    """
    if arrays.out is None and arrays.workspace is None:
        return
    operands = adopt(arrays, array_fixes(kernels.FORWARD))
    dtype = statistics_dtype(arrays.logits.dtype)
    require_apart(operands, {"out": Output((), dtype), "lse": None})
    device, workspace = device_of(operands), arrays.workspace
    arrays.out = arrays.workspace = None
    if device is not None and workspace is not None:
        (arrays.out,) = allot(device, [Output(arrays.logits.shape[:-1], dtype)], workspace)
