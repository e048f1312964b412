"""Operations over rows, on a device: any rank, last axis contiguous, outer axes of any strides.

What an operation reads and writes is data, the `RowKernel` of its table: the checks, the plan and
the sums over rows are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyattn.runtime.arrays import (
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.axes import row_params
from cupyattn.runtime.broadcast import broadcast_layout
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    fixes_of_results,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.overlaps import Overlaps
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import R, Record, given_of
from cupyattn.runtime.row_kernel import (
    COLUMN_SUMS_COLUMNS,
    OF_THE_PLAN,
    Macros,
    Result,
    RowKernel,
    column_sums,
)
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items

_FLOAT32 = np.dtype(np.float32)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class RowProblem:
    """A valid call of a row operation."""

    kernel: RowKernel
    shape: tuple[int, ...]
    dtype: np.dtype
    scalars: Mapping[str, Any]
    choices: Mapping[str, Any]
    accumulate: bool
    """Whether gradients are added to what is there."""
    arrays: Record[Layout]
    layouts: dict[str, Layout]
    """Of the arrays that are given; what broadcasts has the shape of the rows here."""
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    wanted: frozenset[str]
    """The optional results that are written."""
    overlaps: Overlaps

    @property
    def length(self) -> int:
        """Items of a row."""
        return self.shape[-1]

    @property
    def count(self) -> int:
        """Rows."""
        return math.prod(self.shape[:-1])

    def is_there(self, name: str) -> bool:
        """Whether the call has an array, given or made."""
        name = self.kernel.follows.get(name, name)
        return name in self.layouts or name in self.wanted or name not in self.kernel.optional

    @property
    def outputs(self) -> dict[str, Output]:
        """What is written."""
        of = {
            Result.ROW: Output(self.shape, self.dtype),
            Result.PER_ROW: Output(self.shape[:-1], statistics_dtype(self.dtype)),
            Result.COLUMN_SUM: Output((self.length,), self.dtype),
        }
        return {name: of[kind] for name, kind in self.kernel.results.items() if self.is_there(name)}

    def macros(self, vec: int) -> Macros:
        """Return what the call decides of how the kernel is compiled, with `vec` items a load."""
        kernel, layouts = self.kernel, self.layouts
        present = [name for name in kernel.optional if self.is_there(name)]
        typed = [name for name in (*kernel.integers, *kernel.broadcast) if name in layouts]
        dtypes = {name: layouts[name].dtype.name for name in typed}
        whole = [name for name in kernel.broadcast if name in layouts and self._whole(name, vec)]
        choices = {**self.choices, "accumulate": self.accumulate}
        return kernel.macros_of(present, dtypes, choices, whole)

    def _whole(self, name: str, vec: int) -> bool:
        """Whether an array that broadcasts comes in vectors, of at most 16 bytes each."""
        *outer, column = self.layouts[name].strides
        itemsize = self.layouts[name].dtype.itemsize
        aligned_to = min(vec * itemsize, VECTOR_BYTES)
        starts = (self.starts.get(name, 0), *outer)
        return vec > 1 and column == itemsize and not any(each % aligned_to for each in starts)


def statistics_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of what there is of each row."""
    return dtype if dtype == np.float64 else _FLOAT32


def row_problem(
    kernel: RowKernel,
    operands: Operands[Any],
    *,
    wanted: Iterable[str] = (),
    choices: Mapping[str, Any] = _NOTHING,
    scalars: Mapping[str, Any] = _NOTHING,
    accumulate: bool = False,
) -> RowProblem:
    """Check the arrays of a call, or find that they were checked before.

    Parameters
    ----------
    kernel : RowKernel
        The operation.
    operands : Operands
        Its arrays, by the names of the kernel's parameters.
    wanted : iterable of str
        Optional results to make where none was given.
    choices, scalars : mapping
        A value for each choice and each scalar of the kernel, but for those of the plan.
    accumulate : bool
        Add gradients to what is there.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    # As they came: to find and type those of the kernel would take as long as the look-up.
    problem = _cached_problem(
        kernel,
        operands.description,
        tuple(scalars.items()),
        tuple(choices.items()),
        accumulate,
        tuple(wanted),
    )
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(
    kernel: RowKernel,
    description: Description,
    given_scalars: tuple[tuple[str, Any], ...],
    given_choices: tuple[tuple[str, Any], ...],
    accumulate: bool,
    wanted: tuple[str, ...],
) -> RowProblem:
    scalars, choices = dict(given_scalars), dict(given_choices)
    arrays = layouts_of(kernel.record, description)
    layouts = given_of(arrays)
    require_arrays(layouts, [name for name in kernel.inputs if name not in kernel.optional])
    first = layouts[kernel.rows[0]]
    for name in kernel.broadcast:
        if name in layouts:
            layouts[name] = broadcast_layout(kernel, name, layouts[name], first)
    in_place = {} if accumulate else kernel.in_place  # an input is no gradient to add to
    problem = RowProblem(
        kernel,
        first.shape,
        first.dtype,
        {
            name: kind(scalars[name])
            for name, kind in kernel.scalars.items()
            if name not in OF_THE_PLAN
        },
        {name: choices[name] for name in kernel.choices if name not in OF_THE_PLAN},
        accumulate,
        arrays,
        layouts,
        given_of(starts_of(kernel.record, description)),
        frozenset(wanted),
        Overlaps.of(arrays, (*kernel.results, "workspace"), in_place),
    )
    _check_inputs(problem)
    for name in kernel.results:
        if name in layouts and not problem.is_there(name):
            raise error(
                ValueError,
                f"{kernel.shown_as.get(name, name)} was given without {kernel.follows[name]}",
                "there is one exactly if there is the other",
                f"leave it out, or pass {kernel.follows[name]}",
            )
    for name, output in problem.outputs.items():
        if name in layouts:
            require_output(kernel.shown_as.get(name, name), layouts[name], *output)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return problem


def _check_inputs(problem: RowProblem) -> None:
    kernel, layouts, first = problem.kernel, problem.layouts, problem.kernel.rows[0]
    given = [name for name in kernel.inputs if name in layouts]
    if not problem.shape:
        raise error(
            ValueError,
            f"{first} has no axes",
            "it runs over the last axis",
            f"pass {first}[None]",
        )
    for name in given:
        layout, shown = layouts[name], kernel.shown_as.get(name, name)
        if name in kernel.rows:
            require_dtype(shown, layout, CPU_FLOATS)
            require_shape(shown, layout, problem.shape, f"shaped like {first}")
            require_contiguous_rows(shown, layout)
        elif name in kernel.columns:
            require_dtype(name, layout, CPU_FLOATS)
            require_shape(name, layout, problem.shape[-1:], "(N,), an item for each column")
            require_contiguous_rows(name, layout)
        elif name not in kernel.broadcast:
            allowed = (
                INTEGERS if name in kernel.integers else (statistics_dtype(problem.dtype).name,)
            )
            require_dtype(name, layout, allowed)
            require_shape(name, layout, problem.shape[:-1], "an item for each row")
            require_whole_item_strides(name, layout)
    same = [name for name in (*kernel.rows, *kernel.columns) if name in layouts]
    require_same_dtype({kernel.shown_as.get(name, name): layouts[name] for name in same})


@cache
def array_fixes(kernel: RowKernel) -> Mapping[str, str]:
    """Return what to pass instead of what is no array, by the names in errors."""
    rows = kernel.shown_as.get(kernel.rows[0], kernel.rows[0])
    of_row = f"pass an int32 array with an item for each row, of shape {rows}.shape[:-1]"
    return {
        **dict.fromkeys(kernel.columns, "pass an array of shape (N,), an item for each column"),
        **dict.fromkeys(kernel.integers, of_row),
        **fixes_of_results(*(kernel.shown_as.get(name, name) for name in kernel.results)),
    }


def run_rows(device: Device, problem: RowProblem, operands: Operands[R]) -> R:
    """Run a row operation; return its arrays, the results among them."""
    plan = _plan(problem, device.arch.number, device.multiprocessors)
    return run(device, plan, operands)


@lru_cache(maxsize=4096)
def _plan(problem: RowProblem, arch: int, multiprocessors: int) -> Plan:
    kernel, dtype, found = problem.kernel, problem.dtype.name, problem.outputs
    accumulate = problem.accumulate
    require_item_alignment(problem.layouts, problem.starts, kernel.shown_as)
    require_kernel_dtype(kernel.rows[0], problem.dtype)
    planner = Planner(kernel.record, problem.arrays, found)
    slots: dict[str, int] = given_of(planner.slots)
    sums = [name for name in kernel.results_of(Result.COLUMN_SUM) if name in found]
    statistics = any(kernel.results[name] is Result.PER_ROW for name in found)
    if problem.count == 0 or (problem.length == 0 and not statistics):
        zero_first = () if accumulate else [slots[name] for name in sums]
        return planner.plan(zero_first=zero_first, zero_new=accumulate)

    layouts = {name: contiguous(*output) for name, output in found.items()} | problem.layouts
    vec = _vector(problem, layouts)
    config = kernel.config(arch, problem.length)
    ctas = -(-problem.count // config.rows_per_cta)
    ctas = min(ctas, multiprocessors * config.summing_ctas) if sums else ctas
    specialisation = kernel.specialise(arch, dtype, problem.length, vec, problem.macros(vec))
    partials = {name: planner.scratch(ctas * problem.length) for name in sums}
    queries = problem.shape[-2] if len(problem.shape) > 1 else 1
    scalars = {**problem.scalars, "accumulate": accumulate, "queries": queries}
    values = [_column_stride(layouts.get(name)) for name in kernel.broadcast]
    values += [scalars[name] for name in kernel.scalars]
    arrays = [(slots | partials).get(name) for name in (*kernel.inputs, *kernel.results)]
    steps = [Step.of(specialisation, ctas, arrays, *values, _params(problem, layouts))]
    counts = (ctas, problem.length, accumulate)
    for first in range(0, len(sums), 2):
        name, more = (*sums[first : first + 2], "")[:2]
        columns = -(-problem.length // COLUMN_SUMS_COLUMNS) * (2 if more else 1)
        summed = (partials[name], partials.get(more), slots[name], slots.get(more))
        steps.append(Step.of(column_sums(dtype), columns, summed, *counts))
    return planner.plan(*steps, zero_new=accumulate)


def _column_stride(layout: Layout | None) -> int:
    """Return how many items apart neighbouring columns are; 0 of what is absent."""
    return layout.strides[-1] // layout.dtype.itemsize if layout else 0


def _vector(problem: RowProblem, layouts: Mapping[str, Layout]) -> int:
    """Return how many items one load brings: a vector's where every row starts at one, or 1."""
    items = vector_items(problem.dtype.name)
    rows = [name for name in problem.kernel.whole_rows if name in layouts]
    aligned = not any(problem.starts.get(name, 0) for name in (*rows, *problem.kernel.columns))
    aligned = aligned and all(
        stride % VECTOR_BYTES == 0 for name in rows for stride in layouts[name].strides[:-1]
    )
    return items if aligned and problem.length % items == 0 else 1


def _params(problem: RowProblem, layouts: Mapping[str, Layout]) -> Any:
    """Fill the C struct RowsParams; what is absent has strides of 0."""
    *rows, length = problem.shape
    strides = {
        name: (
            tuple(n // layouts[name].dtype.itemsize for n in layouts[name].strides[: len(rows)])
            if name in layouts
            else (0,) * len(rows)
        )
        for name in problem.kernel.strided
    }
    return row_params(tuple(rows), length, strides, problem.kernel.shown_as)
