"""Softmax and its backward on a device: rows of any length, outer axes of any strides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import (
    Array,
    Layout,
    LayoutKey,
    Span,
    addresses,
    alignments,
    layouts_of,
    span,
)
from cupyattn.errors import error
from cupyattn.kernels import configs
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES, vector_items
from cupyattn.kernels.device import Device
from cupyattn.kernels.launch import launch
from cupyattn.kernels.spec import Specialisation
from cupyattn.kernels.structs import OUTER_AXES, rows_params
from cupyattn.ops.checks import (
    FLOATS,
    require_arrays,
    require_contiguous_rows,
    require_disjoint,
    require_dtype,
    require_item_alignment,
    require_output,
    require_same_dtype,
    require_shape,
)


@dataclass(frozen=True, eq=False)
class SoftmaxProblem:
    """A valid call: softmax of one input (x), or its backward of two (dout, out)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    inputs: tuple[str, ...]
    result: str
    layouts: dict[str, Layout]
    spans: dict[str, Span]

    @property
    def length(self) -> int:
        """Items of a row."""
        return self.shape[-1]


class _Plan(NamedTuple):
    specialisation: Specialisation
    ctas: int
    params: Any


@lru_cache(maxsize=4096)
def softmax_problem(key: LayoutKey, result: str) -> SoftmaxProblem:
    """Check the arrays of a call that writes `result`, or find that they were checked before."""
    layouts = layouts_of(key)
    inputs = ("x",) if result == "out" else ("dout", "out")
    require_arrays(layouts, inputs)
    first = layouts[inputs[0]]
    for name in inputs:
        layout = layouts[name]
        require_dtype(name, layout, FLOATS)
        if not layout.shape:
            raise error(
                ValueError,
                f"{name} has no axes",
                "softmax runs over the last axis",
                f"pass {name}[None]",
            )
        require_shape(name, layout, first.shape, f"shaped like {inputs[0]}")
        require_contiguous_rows(name, layout)
    require_same_dtype(layouts, inputs)
    if result in layouts:
        require_output(result, layouts[result], first.shape, first.dtype)
    spans = {name: span(layout) for name, layout in layouts.items()}
    return SoftmaxProblem(first.shape, first.dtype, inputs, result, layouts, spans)


def softmax_rows(device: Device, problem: SoftmaxProblem, arrays: dict[str, Array]) -> Array:
    """Run softmax of the one input, or its backward of the two."""
    require_disjoint((problem.result,), arrays, addresses(arrays), problem.spans)

    result = arrays.get(problem.result)
    if result is None:
        result = device.empty(problem.shape, problem.dtype)
    if result.size == 0:
        return result

    operands = {name: arrays[name] for name in problem.inputs} | {problem.result: result}
    starts = alignments(addresses(operands).values(), VECTOR_BYTES)
    plan = _plan(problem, result.strides, starts)

    launch(device, plan.specialisation, plan.ctas, (*operands.values(), plan.params))
    return result


@lru_cache(maxsize=4096)
def _plan(problem: SoftmaxProblem, strides: tuple[int, ...], starts: tuple[int, ...]) -> _Plan:
    named = {name: problem.layouts[name] for name in problem.inputs}
    named[problem.result] = Layout(problem.shape, strides, problem.dtype)
    require_item_alignment(named, dict(zip(named, starts, strict=True)))
    layouts = tuple(named.values())
    items = vector_items(problem.dtype.name)
    aligned = not any(starts) and all(
        stride % VECTOR_BYTES == 0 for layout in layouts for stride in layout.strides[:-1]
    )
    vec = items if aligned and problem.length % items == 0 else 1
    table = configs.softmax.forward if len(problem.inputs) == 1 else configs.softmax.backward
    config = configs.softmax.row_config(problem.length)
    rows = math.prod(problem.shape[:-1])
    specialisation = table(problem.dtype.name, problem.length, vec)
    return _Plan(specialisation, -(-rows // config.rows_per_cta), _params(layouts))


def _params(layouts: tuple[Layout, ...]) -> Any:
    """Fill the C struct RowsParams."""
    itemsize = layouts[0].dtype.itemsize
    shape, strides = merge_axes(
        layouts[0].shape[:-1],
        [tuple(s // itemsize for s in layout.strides[:-1]) for layout in layouts],
    )
    missing = OUTER_AXES - len(shape)
    if missing < 0:
        raise error(
            ValueError,
            f"arrays of shape {layouts[0].shape} with strides that leave {len(shape)} axes apart",
            f"at most {OUTER_AXES} axes before the last, after merging those that lie evenly",
            "copy the array with ascontiguousarray(...), or reshape it",
        )
    params = np.zeros((), rows_params(len(layouts)))
    params["shape"] = (1,) * missing + shape
    params["strides"] = [(0,) * missing + axes for axes in strides]
    params["rows"] = math.prod(shape)
    params["length"] = layouts[0].shape[-1]
    return params[()]


def merge_axes(
    shape: tuple[int, ...], strides: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring axes that every array steps through evenly, and drop axes of one.

    Examples
    --------
    >>> merge_axes((2, 3, 4), [(12, 4, 1), (24, 8, 2)])
    ((24,), [(1,), (2,)])
    >>> merge_axes((2, 3), [(3, 1), (1, 2)])
    ((2, 3), [(3, 1), (1, 2)])
    """
    merged_shape: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        if merged_shape and all(
            outer[-1] == array[axis] * extent for outer, array in zip(merged, strides, strict=True)
        ):
            merged_shape[-1] *= extent
            for outer, array in zip(merged, strides, strict=True):
                outer[-1] = array[axis]
        else:
            merged_shape.append(extent)
            for outer, array in zip(merged, strides, strict=True):
                outer.append(array[axis])
    return tuple(merged_shape), [tuple(axes) for axes in merged]
