"""What the softmax family has in common: an axis to run over, and the options of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array, Layout, adopt
from cupyattn.runtime.broadcast import broadcast_layout
from cupyattn.runtime.call_rows import call_rows
from cupyattn.runtime.checks import require_bool, require_contiguous_axis
from cupyattn.runtime.numbers import factor
from cupyattn.runtime.outputs import require_grads
from cupyattn.runtime.records import Record, given_of
from cupyattn.runtime.row_kernel import Result, RowKernel
from cupyattn.runtime.rows import array_fixes


class SoftmaxGrads(NamedTuple):
    """Gradients of softmax's inputs, or of log_softmax's, each of its input's shape.

    As ``grads=`` None, the default, stands for an array that is to be made.

    Attributes
    ----------
    dx : array (..., N)
        Of x.
    dbias : array of bias's shape
        Of the bias, summed over the axes that it broadcast along.
    """

    dx: Array = None
    dbias: Array = None


def call_along(
    axis: Any,
    kernel: RowKernel,
    arrays: Record[Any],
    exact: Callable[..., np.ndarray],
    *,
    causal: Any = None,
    scale: Any = 1.0,
    accumulate: Any = False,
    **choices: Any,
) -> Array:
    """Run a row kernel over an axis, the last of what it sees, and return its first result.

    Parameters
    ----------
    axis : int
        Of the arrays of whole rows.
    kernel, arrays, exact
        As of `call_rows`.
    causal : bool, optional
        Of kernels that have the choice.
    scale : float
        Of scores.
    accumulate : bool
        Of gradients.
    **choices
        The kernel's others, which the reference does not take: it is one for each of them.
    """
    scale = factor("scale", scale)
    require_bool("accumulate", accumulate)
    if accumulate:
        require_grads(getattr(arrays, "dx", None), accumulate)
    options: dict[str, Any] = {}
    if causal is not None:
        require_bool("causal", causal)
        options["causal"] = bool(causal)

    def reference(*inputs: Any, **numbers: Any) -> np.ndarray:
        numbers = {name: value for name, value in numbers.items() if name not in choices}
        given = len(kernel.rows) + len(kernel.per_row)
        named = dict(zip(kernel.broadcast, inputs[given:], strict=True))
        return exact(*inputs[:given], **named, **numbers)

    (name,) = (each for each in kernel.results if each in ("out", "dx"))

    def call(arrays: Record[Any]) -> Array:
        found = call_rows(
            kernel,
            arrays,
            reference,
            choices={**options, **choices},
            accumulate=bool(accumulate),
            scalars={"scale": scale},
        )
        return getattr(found, name)

    if type(axis) is int and axis == -1:  # -1.0 equals it, and is no axis
        return call(arrays)
    operands = given_of(adopt(arrays, array_fixes(kernel)).arrays)
    for field in kernel.whole_rows:
        if field in operands:
            require_contiguous_axis(
                kernel.shown_as.get(field, field),
                _layout(operands[field]),
                axis,
                written=field in kernel.results,
            )
    first = _layout(operands[kernel.rows[0]])
    moved = replace(arrays)  # type: ignore[type-var]
    for field, array in operands.items():
        if field in kernel.broadcast:
            broadcast_layout(kernel, field, _layout(array), first)
            array = np.broadcast_to(array, first.shape)
        if field in kernel.whole_rows or field in kernel.broadcast:
            setattr(moved, field, _moved(array, axis, -1))
    result = call(moved)
    if name in operands:
        return operands[name]
    return result if kernel.results[name] is Result.PER_ROW else _moved(result, -1, axis)


def _layout(array: Array) -> Layout:
    return Layout(array.shape, array.strides, array.dtype)


def _moved(array: Array, source: int, destination: int) -> Array:
    """Return a view whose axis `source` stands at `destination`."""
    axes = list(range(array.ndim))
    axes.insert(destination % array.ndim, axes.pop(source))
    return array.transpose(axes)
