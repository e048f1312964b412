"""Cross-entropy of the logits x @ w, which are never all in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, Layout, adopt, is_contiguous
from cupyattn.errors import error
from cupyattn.functional.backend import device_of
from cupyattn.functional.layers.cross_entropy import cross_entropy, cross_entropy_backward
from cupyattn.functional.layers.losses import (
    reduced,
    require_dloss,
    spread,
    targets,
    without_scalars,
)
from cupyattn.functional.linear.backward import linear_backward
from cupyattn.functional.linear.forward import linear
from cupyattn.gradients import LinearCrossEntropyGrads, LinearGrads
from cupyattn.kernels.device import Device
from cupyattn.ops.checks import (
    INTEGERS,
    require_bool,
    require_dtype,
    require_output,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.ops.layers.cross_entropy import (
    LossOptions,
    check_labels,
    checked_options,
    layout_of,
    require_reduction,
    require_scalar_output,
)
from cupyattn.ops.linear.checks import forward_problem
from cupyattn.ops.numbers import integer
from cupyattn.ops.rows import merge_axes, statistics_dtype
from cupyattn.ops.value_checks import checks_values

_ROWS_TOGETHER = 128
"""A chunk is whole tiles of the products, where it has several."""


def linear_cross_entropy(
    x: Array,
    w: Array,
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
) -> Any:
    r"""Cross-entropy of the logits ``x @ w`` with labels, a chunk of rows at a time.

    Parameters
    ----------
    x : array (..., K)
        As `linear` takes it.
    w : array (K, V), dtype of x
        As `linear` takes it: ``w.T`` of an array (V, K) works without a copy.
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
    read = without_scalars({"x": x, "w": w, "labels": labels})
    call = _Call.of({**read, "out": loss, "lse": lse}, options)
    arrays, reduces = call.arrays, reduction != "none"
    if reduces:
        require_scalar_output(call.operands, call.statistics)
    else:
        call.require_rows("out", call.statistics)
    call.require_rows("lse", call.statistics)
    losses = None if reduces else arrays.get("out")
    losses = call.empty(call.rows) if losses is None else losses
    lse = arrays.get("lse")
    lse = call.empty(call.rows) if lse is None and return_lse else lse

    flat_losses, flat_lse = losses.reshape(-1), None if lse is None else lse.reshape(-1)
    for chunk in call.chunks(logits_bytes):
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
    w: Array,
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

    Returns
    -------
    LinearCrossEntropyGrads
        ``(dx, dw)``, each like its array. A new dw lies in memory as w does, as
        `linear_backward` says.

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
    given = _given(grads, accumulate)
    read = without_scalars(
        {"dloss": dloss, "x": x, "w": w, "labels": labels, "lse": lse, "dlse": dlse}
    )
    dloss = read.pop("dloss")
    call = _Call.of({**read, **given._asdict()}, options)
    arrays, labels = call.arrays, call.arrays["labels"]
    for name in ("lse", "dlse"):
        call.require_per_row(name)
    each = require_dloss(dloss, call.rows, call.statistics, reduction)
    if reduction == "none":
        adopt({"dloss": each, "x": arrays["x"]})
        require_dtype("dloss", layout_of(each), (call.statistics.name,))
        require_shape("dloss", layout_of(each), call.rows, "an item for each row")
    each = spread(each, labels, options, reduction)

    dx, dw = arrays.get("dx"), arrays.get("dw")
    if dx is None:
        dx = call.empty(arrays["x"].shape, arrays["x"].dtype)
        if accumulate:
            call.zero(dx)
    else:
        call.require_flat("dx")
    flat: dict[str, Array] = {
        name: arrays[name].reshape(-1) for name in ("lse", "dlse") if name in arrays
    }
    flat["dloss"], flat_dx = each.reshape(-1), _as_rows(dx)
    for chunk in call.chunks(logits_bytes):
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
        dw = linear_backward(logits, chunk.x, arrays["w"], grads=target, accumulate=adds).dw
    return LinearCrossEntropyGrads(dx, dw)


class _Chunk(NamedTuple):
    rows: slice
    x: Array
    w: Array
    labels: Array
    logits: Array

    def compute(self) -> Array:
        """Return the logits of these rows, written over those of the chunk before."""
        return linear(self.x, self.w, out=self.logits)


class _Call(NamedTuple):
    """A call whose x, w and labels are checked."""

    operands: Any
    device: Device | None

    @classmethod
    def of(cls, given: dict[str, Any], options: LossOptions) -> _Call:
        operands = adopt(given)
        arrays = operands.arrays
        forward_problem(adopt({name: arrays.get(name) for name in ("x", "w")}), None, False)
        if "labels" not in arrays:
            raise error(
                TypeError, "labels is None", "they are the right columns", "pass an array of int32"
            )
        call, labels = cls(operands, device_of(operands)), layout_of(arrays["labels"])
        require_dtype("labels", labels, INTEGERS)
        require_shape("labels", labels, call.rows, "an item for each row of x")
        require_whole_item_strides("labels", labels)
        if checks_values(operands):
            check_labels(arrays["labels"], arrays["w"].shape[1], options.ignore_index)
        return call

    @property
    def arrays(self) -> dict[str, Array]:
        return self.operands.arrays

    @property
    def rows(self) -> tuple[int, ...]:
        return self.arrays["x"].shape[:-1]

    @property
    def statistics(self) -> np.dtype:
        return statistics_dtype(self.arrays["x"].dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Array:
        dtype = dtype or self.statistics
        return np.empty(shape, dtype) if self.device is None else self.device.empty(shape, dtype)

    def zero(self, array: Array) -> None:
        """Fill an array with zeros where it is."""
        if self.device is None:
            array.fill(0)
        else:
            self.device.zero(array)

    def require_rows(self, name: str, dtype: np.dtype) -> None:
        """Raise unless a result with an item for each row, if it is given, can be written flat."""
        if name in self.arrays:
            layout = layout_of(self.arrays[name])
            require_output(name, layout, self.rows, dtype)
            if not is_contiguous(layout):
                raise _uneven(name, layout, "it is contiguous in C order")

    def require_per_row(self, name: str) -> None:
        """Raise unless what is read of each row has an item for each."""
        if name == "lse" and name not in self.arrays:
            raise error(TypeError, "lse is None", "it is what return_lse=True returns", "pass that")
        if name in self.arrays:
            layout = layout_of(self.arrays[name])
            require_dtype(name, layout, (self.statistics.name,))
            require_shape(name, layout, self.rows, "an item for each row of x")

    def require_flat(self, name: str) -> None:
        """Raise unless the rows of a gradient lie evenly in memory."""
        layout = layout_of(self.arrays[name])
        require_output(name, layout, self.arrays["x"].shape, self.arrays["x"].dtype)
        if len(merge_axes(layout.shape[:-1], [layout.strides[:-1]])[0]) > 1:
            raise _uneven(name, layout, "its rows lie evenly in memory")

    def chunks(self, logits_bytes: Any) -> Iterator[_Chunk]:
        """Yield the rows in chunks, which share the memory of their logits."""
        budget = integer("logits_bytes", logits_bytes)
        if budget < 1:
            raise error(
                ValueError,
                f"logits_bytes = {budget}",
                "it is how much memory logits may take, at least a byte",
                "pass for example 2**28",
            )
        x, w = self.arrays["x"], self.arrays["w"]
        flat_x, labels = _as_rows(x), self.arrays["labels"].reshape(-1)
        count, columns = labels.size, w.shape[1]
        step = min(max(budget // max(columns * x.dtype.itemsize, 1), 1), max(count, 1))
        if _ROWS_TOGETHER < step < count:
            step -= step % _ROWS_TOGETHER
        memory = self.empty((step, columns), x.dtype)
        for first in range(0, max(count, 1), step):
            rows = slice(first, min(first + step, count))
            logits = memory[: rows.stop - rows.start]
            yield _Chunk(rows, flat_x[rows], w, labels[rows], logits)


def _as_rows(array: Array) -> Array:
    """Return an array with its outer axes merged; -1 says not how many where a row is empty."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _given(grads: Any, accumulate: bool) -> LinearCrossEntropyGrads:
    if grads is None and not accumulate:
        return LinearCrossEntropyGrads()
    if not isinstance(grads, LinearCrossEntropyGrads):
        raise error(
            TypeError if grads is not None else ValueError,
            f"grads is a {type(grads).__name__}",
            "it is a LinearCrossEntropyGrads of arrays, with accumulate=True those to add to",
            "pass grads=LinearCrossEntropyGrads(dx, dw)",
        )
    return grads


def _uneven(name: str, layout: Layout, allowed: str) -> ValueError:
    return error(
        ValueError,
        f"{name} has strides {layout.strides}",
        allowed,
        "pass a contiguous array, or none",
    )
