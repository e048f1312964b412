"""Operations over rows, on a device: any rank, last axis contiguous, outer axes of any strides.

What an operation reads and writes is data, the `RowKernel` of its table: the checks, the plan and
the sums over rows are the same for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.errors import error
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES, vector_items
from cupyattn.kernels.configs.rows import (
    COLUMN_SUMS_COLUMNS,
    SUMMING_CTAS,
    Result,
    RowKernel,
    column_sums,
)
from cupyattn.kernels.device import Device
from cupyattn.kernels.structs import OUTER_AXES, rows_params
from cupyattn.ops.checks import (
    CPU_FLOATS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_same_dtype,
    require_shape,
    require_workspace,
)
from cupyattn.ops.overlaps import Overlaps
from cupyattn.ops.plan import Output, Plan, Step, lay_out_scratch, run

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class RowProblem:
    """A valid call of a row operation."""

    kernel: RowKernel
    shape: tuple[int, ...]
    dtype: np.dtype
    scalars: tuple[Any, ...]
    """In the order of the kernel."""
    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    overlaps: Overlaps

    @property
    def length(self) -> int:
        """Items of a row."""
        return self.shape[-1]

    @property
    def count(self) -> int:
        """Rows."""
        return math.prod(self.shape[:-1])

    @property
    def outputs(self) -> dict[str, Output]:
        """What is written."""
        statistics = self.dtype if self.dtype == np.float64 else _FLOAT32
        of = {
            Result.ROW: Output(self.shape, self.dtype),
            Result.PER_ROW: Output(self.shape[:-1], statistics),
            Result.COLUMN_SUM: Output((self.length,), self.dtype),
        }
        return {name: of[kind] for name, kind in self.kernel.results.items()}


def row_problem(kernel: RowKernel, operands: Operands, **scalars: Any) -> RowProblem:
    """Check the arrays of a call, or find that they were checked before.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    values = tuple([kind(scalars[name]) for name, kind in kernel.scalars.items()])
    problem = _cached_problem(kernel, operands.description, values)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(
    kernel: RowKernel, description: Description, scalars: tuple[Any, ...]
) -> RowProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, (*kernel.rows, *kernel.columns))
    first = layouts[kernel.rows[0]]
    for name in kernel.rows:
        layout = layouts[name]
        require_dtype(name, layout, CPU_FLOATS)
        if not layout.shape:
            raise error(
                ValueError,
                f"{name} has no axes",
                f"{kernel.entry} runs over the last axis",
                f"pass {name}[None]",
            )
        require_shape(name, layout, first.shape, f"shaped like {kernel.rows[0]}")
        require_contiguous_rows(name, layout)
    for name in kernel.columns:
        require_dtype(name, layouts[name], CPU_FLOATS)
        require_shape(name, layouts[name], first.shape[-1:], "(N,), an item for each column")
        require_contiguous_rows(name, layouts[name])
    require_same_dtype(layouts, (*kernel.rows, *kernel.columns))
    overlaps = Overlaps.of(layouts, (*kernel.results, "workspace"))
    starts = starts_of(description)
    problem = RowProblem(kernel, first.shape, first.dtype, scalars, layouts, starts, overlaps)
    for name, output in problem.outputs.items():
        if name in layouts:
            require_output(name, layouts[name], *output)
            if kernel.results[name] is not Result.ROW:
                _require_c_order(name, layouts[name])
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return problem


def _require_c_order(name: str, layout: Layout) -> None:
    if not is_contiguous(layout):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides}",
            "what a row operation writes for rows or columns is contiguous in C order",
            "pass a contiguous array, or none",
        )


def run_rows(
    device: Device, problem: RowProblem, operands: Operands, *, accumulate: bool = False
) -> dict[str, Array]:
    """Run a row operation; with `accumulate` sums over rows are added to what is there."""
    plan = _plan(problem, device.arch.number, accumulate)
    return run(device, plan, operands.arrays)


@lru_cache(maxsize=4096)
def _plan(problem: RowProblem, arch: int, accumulate: bool) -> Plan:
    kernel, dtype = problem.kernel, problem.dtype.name
    outputs = tuple(problem.outputs.items())
    require_item_alignment(problem.layouts, problem.starts)
    require_kernel_dtype(kernel.rows[0], problem.dtype)
    sums = kernel.results_of(Result.COLUMN_SUM)
    statistics = kernel.results_of(Result.PER_ROW)
    if problem.count == 0 or (problem.length == 0 and not statistics):
        return Plan((), outputs, zero_first=() if accumulate else sums, zero_new=accumulate)

    strided = [
        problem.layouts.get(name) or contiguous(problem.shape, problem.dtype)
        for name in kernel.strided
    ]
    vec = _vector(problem, strided)
    config = kernel.config(arch, problem.length)
    ctas = -(-problem.count // config.rows_per_cta)
    ctas = min(ctas, SUMMING_CTAS) if sums else ctas
    specialisation = kernel.specialise(arch, dtype, problem.length, vec)
    partials = {name: f"{name}_partials" for name in sums}
    values = (*problem.scalars, _params(strided))
    steps = [Step.of(specialisation, ctas, *values, renamed=partials)]
    for name, partial in partials.items():
        columns = -(-problem.length // COLUMN_SUMS_COLUMNS)
        counts = (ctas, problem.length, accumulate)
        renamed = {"partials": partial, "sums": name}
        steps.append(Step.of(column_sums(dtype), columns, *counts, renamed=renamed))
    scratch = lay_out_scratch(dict.fromkeys(partials.values(), ctas * problem.length))
    plan = Plan(tuple(steps), outputs, scratch, zero_new=accumulate)
    plan.require_arrays(problem.layouts)
    return plan


def _vector(problem: RowProblem, strided: list[Layout]) -> int:
    """Return how many items one load brings: a vector's where every row starts at one, or 1."""
    items = vector_items(problem.dtype.name)
    names = (*problem.kernel.strided, *problem.kernel.columns)
    aligned = not any(problem.starts.get(name, 0) for name in names) and all(
        stride % VECTOR_BYTES == 0 for layout in strided for stride in layout.strides[:-1]
    )
    return items if aligned and problem.length % items == 0 else 1


def _params(layouts: list[Layout]) -> Any:
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
