"""Cross-entropy of the logits x @ w, which are never all in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.linear.api_backward import linear_backward
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.ops.losses.api import cross_entropy, cross_entropy_backward
from cupyattn.ops.losses.logit_chunks import ChunkedCall, as_rows
from cupyattn.ops.losses.plan import checked_options, layout_of, require_reduction
from cupyattn.ops.losses.reductions import reduced, require_dloss, spread, targets
from cupyattn.ops.losses.reference import LinearCrossEntropyGrads
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import require_bool, require_dtype, require_given, require_shape
from cupyattn.runtime.outputs import named_grads
from cupyattn.runtime.plan import Output


def linear_cross_entropy(
    x: Array,
    w: Array | QuantizedWeight,
    labels: Array,
    /,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    logits_bytes: int = 2**28,
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    r"""Cross-entropy of the logits ``x @ w`` with labels, a chunk of rows at a time.

    Parameters
    ----------
    x : array (..., K)
        As `linear` takes it.
    w : array (K, V), dtype of x
        As `linear` takes it: ``w.T`` of an array (V, K) works without a copy. Or a
        `QuantizedWeight`.
    labels : array (...)
        int32 or int64, as `cross_entropy` takes them.
    ignore_index, label_smoothing, z_loss, reduction
        The options of `cross_entropy`.
    return_lse : bool
        Return the log-sum-exp of each row too, which the backward needs.
    logits_bytes : int
        How much memory logits may take: there are that many rows at a time, and one at least.
    out : array or tuple, optional
        Where to write the loss, with `return_lse` a tuple (loss, lse). What has an item for each
        row is C-contiguous.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated: the logits of a chunk, and what Notes says. An error says how
        many bytes a call needs. With out and workspace, and labels that lie evenly in memory, a
        call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    loss : array () or (...), float32
        As `cross_entropy` of the logits, rounded to x's dtype.
    lse : array (...), float32
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear` and `cross_entropy`; for logits_bytes that is no positive integer.

    Notes
    -----
    Beside the results a call takes `logits_bytes` at most (one row at least), what `linear` takes,
    and 8 bytes a row. A vocabulary of 128,256 in float16 has 1,024 rows in 2**28 bytes, where all
    logits of 8,192 rows would be 2.1 GB. Products of fewer than some hundred rows are slower.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((6, 4)), rng.standard_normal((4, 10))
    >>> labels = np.array([3, 0, -100, 9, 1, 1])
    >>> loss = cupyattn.linear_cross_entropy(x, w, labels, logits_bytes=200)
    >>> np.allclose(loss, cupyattn.cross_entropy(x @ w, labels))
    True
    """
    options = checked_options(ignore_index, label_smoothing, z_loss)
    require_reduction(reduction)
    require_bool("return_lse", return_lse)
    loss, lse = targets(out, bool(return_lse))
    read = _without_scalars({"x": x, "labels": labels})
    given = {**read, "out": loss, "lse": lse, "workspace": workspace}
    call = ChunkedCall.of(w, given, options)
    arrays, reduces = call.arrays, reduction != "none"
    of_rows = Output(call.rows, call.statistics)
    call.require_rows("lse") if reduces else call.require_rows("out", "lse")
    call.require_apart({"out": Output((), call.statistics) if reduces else None, "lse": None})
    memory, chunks = call.chunks(logits_bytes, {"losses": of_rows} if reduces else {})
    losses = memory["losses"] if reduces else arrays.get("out")
    losses = call.empty(*of_rows) if losses is None else losses
    lse = arrays.get("lse")
    lse = call.empty(*of_rows) if lse is None and return_lse else lse

    flat_losses, flat_lse = losses.reshape(-1), None if lse is None else lse.reshape(-1)
    for chunk in chunks:
        target = flat_losses[chunk.rows], None if flat_lse is None else flat_lse[chunk.rows]
        cross_entropy(
            chunk.compute(),
            chunk.labels,
            reduction="none",
            return_lse=lse is not None,
            out=target[0] if lse is None else target,
            **options._asdict(),
        )
    result = losses
    if reduces:
        result = reduced(losses, arrays["labels"], arrays.get("out"), options, reduction)
    return (result, lse) if return_lse else result


def linear_cross_entropy_backward(
    dloss: Array,
    x: Array,
    w: Array | QuantizedWeight,
    labels: Array,
    lse: Array,
    /,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dlse: Array | None = None,
    logits_bytes: int = 2**28,
    grads: LinearCrossEntropyGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> LinearCrossEntropyGrads:
    r"""Gradients of `linear_cross_entropy`, which computes the logits of each chunk again.

    Parameters
    ----------
    dloss : array () or (...), float32
        Gradient with respect to the loss, of its shape; one number may be NumPy's scalar.
    x, w, labels
        As `linear_cross_entropy` was given them.
    lse : array (...), float32
        What it returned.
    ignore_index, label_smoothing, z_loss, reduction
        The options of `linear_cross_entropy`.
    dlse : array (...), float32, optional
        Gradient with respect to lse, for those who use it.
    logits_bytes : int
        As of `linear_cross_entropy`; the two need not be the same (a pullback of `vjp` keeps the
        call's, and takes no other).
    grads : LinearCrossEntropyGrads, optional
        Arrays to write the gradients into; a field that is None makes a new array.
    accumulate : bool
        Add to the contents of grads instead of replacing them.
    workspace : array, optional
        As of `linear_cross_entropy`; this call needs another size. With grads and workspace, and
        dloss, labels, lse and dlse that lie evenly in memory, a call allocates nothing.

    Returns
    -------
    LinearCrossEntropyGrads
        ``(dx, dw)``, each like its array, and dw None for a `QuantizedWeight`. A new dw lies in
        memory as w does, as `linear_backward` says.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear_backward` and `linear_cross_entropy`.

    Notes
    -----
    The logits of a chunk become their gradient in place. dw is added up chunk by chunk in its
    dtype, which rounds it once a chunk: in float16 take as large a `logits_bytes` as there is room
    for. Memory as of `linear_cross_entropy`, and the workspace of `linear_backward`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, w, labels = np.ones((2, 3)), np.zeros((3, 2)), np.array([0, 1])
    >>> loss, lse = cupyattn.linear_cross_entropy(x, w, labels, return_lse=True)
    >>> dx, dw = cupyattn.linear_cross_entropy_backward(np.ones(()), x, w, labels, lse)
    >>> dw
    array([[0., 0.],
           [0., 0.],
           [0., 0.]])
    """
    options = checked_options(ignore_index, label_smoothing, z_loss)
    require_reduction(reduction)
    require_bool("accumulate", accumulate)
    given = named_grads(LinearCrossEntropyGrads, grads, accumulate)
    read = _without_scalars({"dloss": dloss, "x": x, "labels": labels, "lse": lse, "dlse": dlse})
    require_given("dloss", dloss)
    call = ChunkedCall.of(w, {**read, **given, "workspace": workspace}, options)
    arrays, labels = call.arrays, call.arrays["labels"]
    call.require_per_row("lse", "dlse")
    call.require_flat_dx()
    call.require_apart({"dx": None, "dw": None})
    each = require_dloss(arrays["dloss"], call.rows, call.statistics, reduction)
    if reduction == "none":
        require_dtype("dloss", layout_of(each), (call.statistics.name,))
        require_shape("dloss", layout_of(each), call.rows, "an item for each row")

    dx, dw = arrays.get("dx"), arrays.get("dw")
    if dx is None:
        dx = call.empty(arrays["x"].shape, arrays["x"].dtype)
        if accumulate:
            call.zero(dx)
    flat_dx = as_rows(dx)
    one = {"dloss": Output((), call.statistics)}
    memory, chunks = call.chunks(logits_bytes, one, flat_dx, accumulate)
    each = spread(each, labels, options, reduction, memory["dloss"])
    flat: dict[str, Array] = {
        name: arrays[name].reshape(-1) for name in ("lse", "dlse") if name in arrays
    }
    flat["dloss"] = each.reshape(-1)
    for chunk in chunks:
        rows, logits = chunk.rows, chunk.compute()
        cross_entropy_backward(
            flat["dloss"][rows],
            logits,
            chunk.labels,
            flat["lse"][rows],
            reduction="none",
            dlse=flat["dlse"][rows] if "dlse" in flat else None,
            dlogits=logits,
            **options._asdict(),
        )
        adds = accumulate or rows.start > 0
        if adds and not accumulate:
            call.zero(flat_dx[rows])  # what the product with w is added to
        target = LinearGrads(dx=flat_dx[rows], dw=dw)
        dw = linear_backward(
            logits, chunk.x, chunk.w, grads=target, accumulate=adds, workspace=chunk.workspace
        ).dw
    return LinearCrossEntropyGrads(dx, dw)


def _without_scalars(arrays: dict[str, Any]) -> dict[str, Any]:
    return {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in arrays.items()}
