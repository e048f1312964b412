"""Cross-entropy of the logits x @ w, of which only a chunk of rows is in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, overload

import numpy as np

from cupyattn.ops.linear.api import linear, linear_backward
from cupyattn.ops.linear.plan import backward_workspace_bytes, require_product, workspace_bytes
from cupyattn.ops.linear.problem import weight_fields
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.ops.linear.weight_formats import QuantizedWeight
from cupyattn.ops.losses.api import (
    LossOptions,
    check_labels,
    checked_options,
    cross_entropy,
    cross_entropy_backward,
    reduced,
    require_dloss,
    spread,
    targets,
    without_scalars,
)
from cupyattn.ops.losses.reference import LinearCrossEntropyGrads
from cupyattn.runtime.arrays import (
    Array,
    Layout,
    Operands,
    adopt,
    contiguous,
    is_contiguous,
    layouts_of,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    INTEGERS,
    fixes_of_results,
    integer,
    require_apart,
    require_bool,
    require_dtype,
    require_given,
    require_output,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import take_grads
from cupyattn.runtime.plan import Output, allot
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.rows import statistics_dtype
from cupyattn.runtime.structs import merge_axes
from cupyattn.runtime.value_checks import checks_values

_FIXES = {"labels": "pass an int32 array with an item for each row, of shape x.shape[:-1]"}
_FORWARD_FIXES = {**_FIXES, **fixes_of_results("out", "lse")}
_ROWS_TOGETHER = 128
"""A chunk of more rows has a multiple of this many: whole tiles of the products."""
_BYTES = np.dtype(np.uint8)


@dataclass(slots=True)
class LinearLossArrays(Record[T]):
    """Arrays of a forward or backward call; w, or in its place those of a quantised weight."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads.dx", "dw": "grads.dw"})

    x: T
    w: T | None = None
    codes: T | None = None
    scales: T | None = None
    super_scales: T | None = None
    scale_table: T | None = None
    dloss: T | None = None
    labels: T | None = None
    out: T | None = None
    lse: T | None = None
    dlse: T | None = None
    dx: T | None = None
    dw: T | None = None
    workspace: T | None = None


@overload
def linear_cross_entropy(
    x: Array,
    w: Array | QuantizedWeight,
    labels: Array,
    /,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    reduction: str = ...,
    return_lse: Literal[False] = ...,
    logits_bytes: int = ...,
    out: Array | None = ...,
    workspace: Array | None = ...,
) -> Array: ...


@overload
def linear_cross_entropy(
    x: Array,
    w: Array | QuantizedWeight,
    labels: Array,
    /,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    reduction: str = ...,
    return_lse: Literal[True],
    logits_bytes: int = ...,
    out: tuple[Array, Array] | None = ...,
    workspace: Array | None = ...,
) -> tuple[Array, Array]: ...


@overload
def linear_cross_entropy(
    x: Array,
    w: Array | QuantizedWeight,
    labels: Array,
    /,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    reduction: str = ...,
    return_lse: bool,
    logits_bytes: int = ...,
    out: Array | tuple[Array, Array] | None = ...,
    workspace: Array | None = ...,
) -> Array | tuple[Array, Array]: ...


@differentiable(
    lambda: linear_cross_entropy_backward,
    results=("loss",),
    saved=("lse",),
    saved_by="return_lse",
    gradients=LinearCrossEntropyGrads._fields,
)
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
    out: Array | tuple[Array, Array] | None = None,
    workspace: Array | None = None,
) -> Array | tuple[Array, Array]:
    r"""Cross-entropy of the logits ``x @ w`` with labels, a chunk of rows at a time.

    Parameters
    ----------
    x : array (..., K)
        As for `linear`.
    w : array (K, V), dtype of x
        As for `linear`, or a `QuantizedWeight`. ``w.T`` of an array (V, K) works without a copy.
    labels : array (...)
        int32 or int64, as for `cross_entropy`.
    ignore_index, label_smoothing, z_loss, reduction
        The options of `cross_entropy`.
    return_lse : bool
        Whether to return the log-sum-exp of each row too, which the backward takes.
    logits_bytes : int
        How much memory logits may take. It sets the number of rows in a chunk, at least one.
    out : array or tuple, optional
        Where to write the loss; with `return_lse` a tuple (loss, lse). Arrays with an item for each
        row are C-contiguous.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes. By
        default it is allocated. It holds the logits of a chunk and the arrays in Notes; the error
        for a small one says how many bytes. With out and workspace, and labels with even strides, a
        call allocates nothing, and can be captured in a CUDA graph.

    Returns
    -------
    loss : array () or (...), float32
        The result of `cross_entropy` for the logits, rounded to x's dtype.
    lse : array (...), float32
        The log-sum-exp of each row, only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear` and `cross_entropy`; also for logits_bytes that is no positive integer.

    Notes
    -----
    Apart from its results a call takes at most `logits_bytes` (or one row), the workspace of
    `linear`, and 8 bytes a row. With a vocabulary of 128,256 in float16 a chunk of 2**28 bytes has
    1,024 rows; all logits of 8,192 rows would take 2.1 GB. Products of fewer than some hundred rows
    are slower.

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
    options = checked_options(ignore_index, label_smoothing, z_loss, reduction)
    require_bool("return_lse", return_lse)
    loss, lse = targets(out, bool(return_lse))
    given = LinearLossArrays(x, labels=labels, out=loss, lse=lse, workspace=workspace)
    call = ChunkedCall.of(w, given, options)
    arrays, reduces = call.arrays, reduction != "none"
    of_rows = Output(call.rows, call.statistics)
    call.require_rows("lse") if reduces else call.require_rows("out", "lse")
    loss_output = Output((), call.statistics) if reduces else None
    require_apart(call.operands, {"out": loss_output, "lse": None})
    scratch, chunks = call.chunks(logits_bytes, [of_rows] if reduces else [])
    losses = scratch[0] if reduces else arrays.out
    losses = call.empty(*of_rows) if losses is None else losses
    lse = arrays.lse
    lse = call.empty(*of_rows) if lse is None and return_lse else lse

    flat_losses, flat_lse = losses.reshape(-1), None if lse is None else lse.reshape(-1)
    for chunk in chunks:
        rows = chunk.rows
        target = flat_losses[rows] if flat_lse is None else (flat_losses[rows], flat_lse[rows])
        cross_entropy(
            chunk.compute(),
            chunk.labels,
            reduction="none",
            return_lse=lse is not None,
            out=target,
            **options._asdict(),
        )
    result = losses
    if reduces:
        result = reduced(losses, arrays.labels, arrays.out, options, reduction)
    if not return_lse:
        return result
    assert lse is not None
    return result, lse


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
    r"""Gradients of `linear_cross_entropy`. The logits of each chunk are computed again.

    Parameters
    ----------
    dloss : array () or (...), float32
        Gradient with respect to the loss, with its shape; one number may be a NumPy scalar.
    x, w, labels
        The arrays that `linear_cross_entropy` was given.
    lse : array (...), float32
        The lse that it returned.
    ignore_index, label_smoothing, z_loss, reduction
        The options of `linear_cross_entropy`.
    dlse : array (...), float32, optional
        Gradient with respect to lse, if lse was used.
    logits_bytes : int
        As for `linear_cross_entropy`; the two calls may have different ones. A pullback of `vjp`
        uses the one of the forward call.
    grads : LinearCrossEntropyGrads, optional
        Arrays to write the gradients into; a field that is None makes a new array.
    accumulate : bool
        Add to the contents of grads instead of replacing them.
    workspace : array, optional
        As for `linear_cross_entropy`, of another size. With grads and workspace, and dloss, labels,
        lse and dlse with even strides, a call allocates nothing.

    Returns
    -------
    LinearCrossEntropyGrads
        ``(dx, dw)``, each with the shape and dtype of its input; dw is None for a
        `QuantizedWeight`. A new dw has the layout of w, as for `linear_backward`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `linear_backward` and `linear_cross_entropy`.

    Notes
    -----
    The gradient of a chunk's logits replaces the logits. dw is summed chunk by chunk in its dtype
    and rounded once for each chunk: for float16 use as large a `logits_bytes` as memory allows.
    Memory as for `linear_cross_entropy`, and the workspace of `linear_backward`.

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
    options = checked_options(ignore_index, label_smoothing, z_loss, reduction)
    require_bool("accumulate", accumulate)
    given = LinearLossArrays(x, dloss=dloss, labels=labels, lse=lse, dlse=dlse, workspace=workspace)
    take_grads(given, LinearCrossEntropyGrads, grads, accumulate)
    require_given("dloss", dloss)
    call = ChunkedCall.of(w, given, options)
    arrays = call.arrays
    call.require_per_row("lse", "dlse")
    call.require_flat_dx()
    require_apart(call.operands, {"dx": None, "dw": None})
    each = require_dloss(arrays.dloss, call.rows, call.statistics, reduction)
    if reduction == "none":
        call.require_per_row("dloss")

    dx, dw = arrays.dx, arrays.dw
    if dx is None:
        dx = call.empty(arrays.x.shape, arrays.x.dtype)
        if accumulate:
            call.zero(dx)
    flat_dx = as_rows(dx)
    (one,), chunks = call.chunks(logits_bytes, [Output((), call.statistics)], flat_dx, accumulate)
    each = spread(each, arrays.labels, options, reduction, one).reshape(-1)
    assert arrays.lse is not None
    flat_lse = arrays.lse.reshape(-1)
    flat_dlse = None if arrays.dlse is None else arrays.dlse.reshape(-1)
    for chunk in chunks:
        rows, logits = chunk.rows, chunk.compute()
        cross_entropy_backward(
            each[rows],
            logits,
            chunk.labels,
            flat_lse[rows],
            reduction="none",
            dlse=None if flat_dlse is None else flat_dlse[rows],
            dlogits=logits,
            **options._asdict(),
        )
        adds = accumulate or rows.start > 0
        if adds and not accumulate:
            call.zero(flat_dx[rows])  # the product with w is added to it
        target = LinearGrads(dx=flat_dx[rows], dw=dw)
        dw = linear_backward(
            logits, chunk.x, chunk.w, grads=target, accumulate=adds, workspace=chunk.workspace
        ).dw
    return LinearCrossEntropyGrads(dx, dw)


class Chunk(NamedTuple):
    """Consecutive rows of a call, and the memory for their logits."""

    rows: slice
    x: Array
    w: Any
    labels: Array
    logits: Array
    workspace: Array | None
    """Scratch memory of the products."""

    def compute(self) -> Array:
        """Return the logits of these rows, written over those of the chunk before."""
        return linear(self.x, self.w, out=self.logits, workspace=self.workspace)


class ChunkedCall(NamedTuple):
    """A call whose x, w and labels are checked."""

    operands: Operands[LinearLossArrays[Array]]
    layouts: LinearLossArrays[Layout]
    device: Device | None
    w: Any
    """An array, or a quantised weight."""

    @classmethod
    def of(cls, w: Any, arrays: LinearLossArrays[Any], options: LossOptions) -> ChunkedCall:
        """Take the arrays of a call and check x, w and labels."""
        fields, weight = weight_fields(w)
        arrays.w, arrays.codes, arrays.scales, arrays.super_scales, arrays.scale_table = fields
        forward = arrays.dloss is None
        without_scalars(arrays, "x", "w", "dloss", "dlse", "labels", *(() if forward else ("lse",)))
        operands = adopt(arrays, _FORWARD_FIXES if forward else _FIXES)
        layouts = layouts_of(LinearLossArrays[Layout], operands.description)
        w = arrays.w if weight is None else w
        require_product(arrays.x, w)
        if layouts.labels is None:
            raise error(
                TypeError, "labels is None", "they are the right columns", "pass an array of int32"
            )
        call = cls(operands, layouts, device_of(operands), w)
        require_dtype("labels", layouts.labels, INTEGERS)
        require_shape("labels", layouts.labels, call.rows, "an item for each row of x")
        require_whole_item_strides("labels", layouts.labels)
        assert arrays.labels is not None
        if checks_values(operands):
            check_labels(arrays.labels, call.w.shape[1], options.ignore_index)
        return call

    @property
    def arrays(self) -> LinearLossArrays[Array]:
        """The arrays of the call."""
        return self.operands.arrays

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of an array with an item for each row of x."""
        return self.layouts.x.shape[:-1]

    @property
    def statistics(self) -> np.dtype:
        """The dtype of losses and lse."""
        return statistics_dtype(self.layouts.x.dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an uninitialised array."""
        return np.empty(shape, dtype) if self.device is None else self.device.empty(shape, dtype)

    def zero(self, array: Array) -> None:
        """Fill an array with zeros on its device."""
        if self.device is None:
            array.fill(0)
        else:
            self.device.zero(array)

    def require_rows(self, *names: str) -> None:
        """Raise unless results with an item for each row, where given, can be written flat."""
        for name in names:
            layout: Layout | None = getattr(self.layouts, name)
            if layout is not None:
                require_output(name, layout, self.rows, self.statistics)
                if not is_contiguous(layout):
                    raise _uneven(name, layout, "it is contiguous in C order")

    def require_per_row(self, *names: str) -> None:
        """Raise unless inputs that belong to rows have an item for each."""
        if self.layouts.lse is None:
            raise error(TypeError, "lse is None", "it is what return_lse=True returns", "pass that")
        for name in names:
            layout: Layout | None = getattr(self.layouts, name)
            if layout is not None:
                require_dtype(name, layout, (self.statistics.name,))
                require_shape(name, layout, self.rows, "an item for each row of x")

    def require_flat_dx(self) -> None:
        """Raise unless the rows of dx, where it is given, are evenly spaced in memory."""
        layout, x = self.layouts.dx, self.layouts.x
        if layout is not None:
            require_output("grads.dx", layout, x.shape, x.dtype)
            if len(merge_axes(layout.shape[:-1], [layout.strides[:-1]])[0]) > 1:
                raise _uneven("grads.dx", layout, "its rows lie evenly in memory")

    def chunks(
        self,
        logits_bytes: Any,
        scratch: Sequence[Output],
        dx: Array | None = None,
        accumulate: bool = False,
    ) -> tuple[list[Array], list[Chunk]]:
        """Lay out the scratch memory of a call: return the arrays of `scratch`, and the chunks.

        Parameters
        ----------
        logits_bytes : int
            How much memory the logits of a chunk may take; a chunk has at least one row.
        scratch : sequence of Output
            Scratch arrays that the call needs apart from the logits and the products.
        dx : array, optional
            In a backward the gradient of x, flat; it is added to with `accumulate`.
        """
        budget = integer("logits_bytes", logits_bytes)
        if budget < 1:
            raise error(
                ValueError,
                f"logits_bytes = {budget}",
                "it is how much memory logits may take, at least a byte",
                "pass for example 2**28",
            )
        x, w = as_rows(self.arrays.x), self.w
        assert self.arrays.labels is not None
        labels = self.arrays.labels.reshape(-1)
        count, columns = labels.size, w.shape[1]
        step = min(max(budget // max(columns * x.dtype.itemsize, 1), 1), max(count, 1))
        if _ROWS_TOGETHER < step < count:
            step -= step % _ROWS_TOGETHER
        parts = [slice(i, min(i + step, count)) for i in range(0, max(count, 1), step)]
        needed = 0
        if self.device is not None:
            needed = max(
                self._products_bytes(
                    self.device,
                    x[rows],
                    None if dx is None else dx[rows],
                    accumulate or rows.start > 0,
                )
                for rows in parts
            )
        sizes = [*scratch, Output((step, columns), x.dtype), Output((needed,), _BYTES)]
        *memory, logits, products = allot(self.device, sizes, self.arrays.workspace)
        workspace = products if needed else None
        return memory, [
            Chunk(rows, x[rows], w, labels[rows], logits[: rows.stop - rows.start], workspace)
            for rows in parts
        ]

    def _products_bytes(self, device: Device, x: Array, dx: Array | None, accumulate: bool) -> int:
        """Return the scratch memory of the products of a chunk."""
        logits = contiguous((len(x), self.w.shape[1]), x.dtype)  # at a vector, as all scratch is
        needed = workspace_bytes(device, x, self.w, logits)
        if dx is None:
            return needed
        gradients = (dx, self.arrays.dw)
        return max(
            needed,
            backward_workspace_bytes(device, logits, x, self.w, *gradients, accumulate=accumulate),
        )


def as_rows(array: Array) -> Array:
    """Return an array with its outer axes merged; reshape(-1, 0) would not find their extent."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _uneven(name: str, layout: Layout, allowed: str) -> ValueError:
    return error(
        ValueError,
        f"{name} has strides {layout.strides}",
        allowed,
        "pass a contiguous array, or none",
    )
