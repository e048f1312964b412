"""The logits x @ w a chunk of rows at a time: the call checked, its memory, its chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.linear import backward, forward
from cupyattn.ops.linear.api import linear
from cupyattn.ops.linear.checks import described_backward, described_forward
from cupyattn.ops.linear.weights import weight_arrays
from cupyattn.ops.losses.plan import LossOptions, check_labels, layout_of
from cupyattn.ops.losses.reference import LinearCrossEntropyGrads
from cupyattn.runtime.arrays import Array, Layout, contiguous, is_contiguous
from cupyattn.runtime.axes import merge_axes
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import Description, Operands, adopt, allot, require_apart
from cupyattn.runtime.checks import (
    INTEGERS,
    fixes_of_results,
    require_dtype,
    require_output,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.plan import Output
from cupyattn.runtime.rows import statistics_dtype
from cupyattn.runtime.value_checks import checks_values

_SHOWN_AS = {name: f"grads.{name}" for name in LinearCrossEntropyGrads._fields}
_FIXES = {"labels": "pass an int32 array with an item for each row, of shape x.shape[:-1]"}
_FORWARD_FIXES = {**_FIXES, **fixes_of_results("out", "lse")}
_ROWS_TOGETHER = 128
"""A chunk is whole tiles of the products, where it has several."""
_BYTES = np.dtype(np.uint8)


class Chunk(NamedTuple):
    """Some of the rows."""

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

    operands: Operands
    device: Device | None
    w: Any
    """An array, or a quantised weight."""

    @classmethod
    def of(cls, w: Any, given: dict[str, Any], options: LossOptions) -> ChunkedCall:
        """Take and check w and the other arrays of a call by name, None for those not given."""
        own, weight = weight_arrays(w)
        fixes = _FIXES if "dloss" in given else _FORWARD_FIXES
        operands = adopt({"x": given["x"], **own, **given}, fixes, _SHOWN_AS)
        arrays = operands.arrays
        read = {name: arrays.get(name) for name in ("x", *own)}
        described_forward(adopt(read).description, None, False, weight)
        if "labels" not in arrays:
            raise error(
                TypeError, "labels is None", "they are the right columns", "pass an array of int32"
            )
        w = arrays["w"] if weight is None else w
        call, labels = cls(operands, device_of(operands), w), layout_of(arrays["labels"])
        require_dtype("labels", labels, INTEGERS)
        require_shape("labels", labels, call.rows, "an item for each row of x")
        require_whole_item_strides("labels", labels)
        if checks_values(operands):
            check_labels(arrays["labels"], w.shape[1], options.ignore_index)
        return call

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the call by name, without those not given."""
        return self.operands.arrays

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of what there is of each row."""
        return self.arrays["x"].shape[:-1]

    @property
    def statistics(self) -> np.dtype:
        """The dtype of losses and lse."""
        return statistics_dtype(self.arrays["x"].dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an uninitialised array."""
        return np.empty(shape, dtype) if self.device is None else self.device.empty(shape, dtype)

    def zero(self, array: Array) -> None:
        """Fill an array with zeros where it is."""
        if self.device is None:
            array.fill(0)
        else:
            self.device.zero(array)

    def require_apart(self, writes: Mapping[str, Output | None]) -> None:
        """Raise unless what is written, or is scratch memory, shares no item with the rest."""
        require_apart(self.operands, writes, _SHOWN_AS)

    def require_rows(self, *names: str) -> None:
        """Raise unless results with an item for each row, where given, can be written flat."""
        for name in names:
            if name in self.arrays:
                layout = layout_of(self.arrays[name])
                require_output(name, layout, self.rows, self.statistics)
                if not is_contiguous(layout):
                    raise _uneven(name, layout, "it is contiguous in C order")

    def require_per_row(self, *names: str) -> None:
        """Raise unless what is read of each row has an item for each."""
        if "lse" not in self.arrays:
            raise error(TypeError, "lse is None", "it is what return_lse=True returns", "pass that")
        for name in names:
            if name in self.arrays:
                layout = layout_of(self.arrays[name])
                require_dtype(name, layout, (self.statistics.name,))
                require_shape(name, layout, self.rows, "an item for each row of x")

    def require_flat_dx(self) -> None:
        """Raise unless the rows of dx, where it is given, lie evenly in memory."""
        if "dx" in self.arrays:
            layout, x = layout_of(self.arrays["dx"]), self.arrays["x"]
            require_output("grads.dx", layout, x.shape, x.dtype)
            if len(merge_axes(layout.shape[:-1], [layout.strides[:-1]])[0]) > 1:
                raise _uneven("grads.dx", layout, "its rows lie evenly in memory")

    def chunks(
        self,
        logits_bytes: Any,
        scratch: Mapping[str, Output],
        dx: Array | None = None,
        accumulate: bool = False,
    ) -> tuple[dict[str, Array], list[Chunk]]:
        """Lay out the scratch memory of a call: the arrays wanted by name, and the chunks.

        Parameters
        ----------
        logits_bytes : int
            How much memory the logits of a chunk may take; a chunk has a row at least.
        scratch : mapping
            What the call wants besides.
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
        x, w = as_rows(self.arrays["x"]), self.w
        labels = self.arrays["labels"].reshape(-1)
        count, columns = labels.size, w.shape[1]
        step = min(max(budget // max(columns * x.dtype.itemsize, 1), 1), max(count, 1))
        if _ROWS_TOGETHER < step < count:
            step -= step % _ROWS_TOGETHER
        parts = [slice(i, min(i + step, count)) for i in range(0, max(count, 1), step)]
        sizes = dict(scratch) | {"logits": Output((step, columns), x.dtype)}
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
        sizes["products"] = Output((needed,), _BYTES)
        memory = allot(self.device, sizes, self.arrays.get("workspace"))
        logits, products = memory["logits"], memory["products"] if needed else None
        return memory, [
            Chunk(rows, x[rows], w, labels[rows], logits[: rows.stop - rows.start], products)
            for rows in parts
        ]

    def _products_bytes(self, device: Device, x: Array, dx: Array | None, accumulate: bool) -> int:
        """Return the scratch memory of the products of a chunk."""
        own, weight = weight_arrays(self.w)
        logits = contiguous((len(x), self.w.shape[1]), x.dtype)

        def described(of_logits: str, **arrays: Array | None) -> Description:
            # The logits start at a vector, as all pieces of scratch memory do.
            return (*adopt({"x": x, **own, **arrays}).description, (of_logits, *logits, 0))

        problem = described_forward(described("out"), None, False, weight)
        needed = forward.scratch_bytes(device, problem)
        if dx is None:
            return needed
        description = described("dout", dx=dx, dw=self.arrays.get("dw"))
        problem = described_backward(description, None, accumulate, weight)
        return max(needed, backward.scratch_bytes(device, problem))


def as_rows(array: Array) -> Array:
    """Return an array with its outer axes merged; -1 says not how many where a row is empty."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _uneven(name: str, layout: Layout, allowed: str) -> ValueError:
    return error(
        ValueError,
        f"{name} has strides {layout.strides}",
        allowed,
        "pass a contiguous array, or none",
    )
