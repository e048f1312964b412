"""Calls of row kernels: arrays of any rank, whose last axis is contiguous, checked and launched.

An operation is data, a `RowKernel`: the checks, the plan and the sums over rows serve all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    adopt,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    Overlaps,
    require_arrays,
    require_bool_mask,
    require_contiguous_axis,
    require_contiguous_rows,
    require_dtype,
    require_given,
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
from cupyattn.runtime.outputs import round_into
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import R, Record, given_of, made, values_of
from cupyattn.runtime.row_kernel import (
    COLUMN_SUMS_COLUMNS,
    OF_THE_PLAN,
    Macros,
    Result,
    RowKernel,
    column_sums,
)
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.runtime.structs import row_params
from cupyattn.runtime.value_checks import checks_values

_FLOAT32 = np.dtype(np.float32)


def is_stream(rows: object, weight: object) -> bool:
    """Tell whether rows are a float32 residual stream, of a model in a 16-bit dtype."""
    own, other = getattr(rows, "dtype", None), getattr(weight, "dtype", None)
    return own is not other and getattr(other, "itemsize", 0) == 2 and own == _FLOAT32


class RowOptions(NamedTuple):
    """Everything that a call decides apart from its arrays: hashable, a key for caches."""

    choices: tuple[tuple[str, Any], ...] = ()
    """A value for each choice of the kernel, without those in `OF_THE_PLAN`."""
    scalars: tuple[tuple[str, object], ...] = ()
    """A number for each scalar of the kernel, without those in `OF_THE_PLAN`."""
    wanted: tuple[str, ...] = ()
    """Optional results that are made where the call gives no array for them."""
    accumulate: bool = False
    """Whether gradients are added to the contents of the arrays that are given for them."""

    @classmethod
    def of(
        cls,
        *,
        choices: Mapping[str, Any] = MappingProxyType({}),
        wanted: tuple[str, ...] = (),
        accumulate: bool = False,
        **scalars: float,
    ) -> RowOptions:
        """Make the options of a call; `scalars` are numbers by name."""
        return cls((*choices.items(),), (*scalars.items(),), wanted, accumulate)


def call_rows(
    kernel: RowKernel,
    arrays: R,
    reference: Callable[..., np.ndarray | tuple[np.ndarray | None, ...]],
    options: RowOptions,
    check_values: Callable[[R], None] | None = None,
) -> R:
    """Run an operation on the arrays of its record; return the record with the results.

    Parameters
    ----------
    kernel : RowKernel
        The operation.
    arrays : Record
        The inputs, and the arrays that results are written into; None for those not given.
    reference : callable
        Takes the inputs in the kernel's order, None for those not given; returns the results in the
        kernel's order.
    options : RowOptions
        Choices, scalars, optional results and whether to accumulate.
    check_values : callable, optional
        Takes the arrays and raises for values that are not allowed. Called where `backend` has the
        values in arrays checked.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    operands = adopt(arrays, kernel.fixes)
    problem = row_problem(kernel, operands, options)
    if check_values is not None and checks_values(operands):
        check_values(operands.arrays)
    device = device_of(operands)
    if device is not None:
        return run_rows(device, problem, operands)
    exact = reference(*[getattr(arrays, name) for name in kernel.inputs])
    # The reference leaves out results that only other kernels read: no call on the CPU has them.
    values = exact if isinstance(exact, tuple) else (exact,)
    exacts = dict(zip(kernel.results, values, strict=False))
    for name, output in problem.outputs.items():
        target, result = getattr(arrays, name), exacts.get(name)
        assert result is not None, f"the reference gives no {name}"
        if options.accumulate and target is not None:
            with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
                result = target.astype(result.dtype) + result
        setattr(arrays, name, round_into(target, result, output.dtype))
    return arrays


def call_along(
    axis: Any,
    kernel: RowKernel,
    arrays: R,
    reference: Callable[..., np.ndarray],
    options: RowOptions,
) -> R:
    """Run an operation along another axis of its rows; return the record with the results.

    The kernel and the reference see views in which that axis is the last. Other parameters and
    errors as for `call_rows`.
    """
    if type(axis) is int and axis == -1:  # -1.0 equals it, and is no axis
        return call_rows(kernel, arrays, reference, options)
    operands = adopt(arrays, kernel.fixes)
    layouts = given_of(layouts_of(kernel.record, operands.description))
    require_given(kernel.rows[0], layouts.get(kernel.rows[0]))
    for field in filter(layouts.__contains__, kernel.whole_rows):
        shown, written = kernel.shown_as.get(field, field), field in kernel.results
        require_contiguous_axis(shown, layouts[field], axis, written=written)
    rows, views = layouts[kernel.rows[0]], made(type(arrays), values_of(arrays))
    for field in layouts:
        array = getattr(arrays, field)
        if field in kernel.broadcast:
            broadcast_layout(kernel, field, layouts[field], rows)
            array = np.broadcast_to(array, rows.shape)
        elif field not in kernel.whole_rows:
            continue
        setattr(views, field, _moved(array, axis, -1))
    call_rows(kernel, views, reference, options)
    for field, kind in kernel.results.items():
        result = getattr(views, field)
        if field not in layouts and result is not None:
            setattr(arrays, field, _moved(result, -1, axis) if kind is Result.ROW else result)
    return arrays


def _moved(array: Array, source: int, destination: int) -> Array:
    """Return a view in which axis `source` has become axis `destination`."""
    axes = list(range(array.ndim))
    axes.insert(destination % array.ndim, axes.pop(source))
    return array.transpose(axes)


@dataclass(frozen=True, eq=False)
class RowProblem:
    """A valid call of a row operation."""

    kernel: RowKernel
    shape: tuple[int, ...]
    dtype: np.dtype
    scalars: Mapping[str, Any]
    choices: Mapping[str, object]
    accumulate: bool
    """Whether gradients are added to the contents of their arrays."""
    arrays: Record[Layout]
    layouts: dict[str, Layout]
    """Layouts of the arrays that are given. Arrays that broadcast have the rows' shape here."""
    starts: dict[str, int]
    """How many bytes each array starts beyond a multiple of a vector's size."""
    wanted: frozenset[str]
    """Optional results that are made."""
    overlaps: Overlaps

    @property
    def length(self) -> int:
        """The number of items in a row."""
        return self.shape[-1]

    @property
    def count(self) -> int:
        """The number of rows."""
        return math.prod(self.shape[:-1])

    def is_there(self, name: str) -> bool:
        """Tell whether the call has an array, given or made."""
        name = self.kernel.follows.get(name, name)
        if any(self.is_there(new) for new, old in self.kernel.replaces.items() if old == name):
            return False
        return name in self.layouts or name in self.wanted or name not in self.kernel.optional

    @property
    def outputs(self) -> dict[str, Output]:
        """The results by name."""
        of = {
            Result.ROW: Output(self.shape, self.dtype),
            Result.PER_ROW: Output(self.shape[:-1], statistics_dtype(self.dtype)),
            Result.CODES: Output(self.shape, np.dtype(np.int8)),
            Result.SCALE: Output(self.shape[:-1], _FLOAT32),
            Result.COLUMN_SUM: Output((self.length,), self.dtype),
        }
        found = {n: of[kind] for n, kind in self.kernel.results.items() if self.is_there(n)}
        of_stream = [name for name in self.kernel.stream if name in found]
        return found | dict.fromkeys(of_stream, Output(self.shape, _FLOAT32))

    def macros(self, vec: int) -> Macros:
        """Return the macros that the call decides, with `vec` items in one load."""
        kernel, layouts = self.kernel, self.layouts
        present = [name for name in kernel.optional if self.is_there(name)]
        typed = [name for name in (*kernel.integers, *kernel.broadcast) if name in layouts]
        dtypes = {name: layouts[name].dtype.name for name in typed}
        whole = [name for name in kernel.broadcast if name in layouts and self._whole(name, vec)]
        choices = {**self.choices, "accumulate": self.accumulate}
        return kernel.macros_of(present, dtypes, choices, whole)

    def _whole(self, name: str, vec: int) -> bool:
        """Tell whether an array that broadcasts is loaded in vectors of at most 16 bytes."""
        *outer, column = self.layouts[name].strides
        itemsize = self.layouts[name].dtype.itemsize
        aligned_to = min(vec * itemsize, VECTOR_BYTES)
        starts = (self.starts.get(name, 0), *outer)
        return vec > 1 and column == itemsize and not any(each % aligned_to for each in starts)

    @property
    def vector(self) -> int:
        """The number of items in one load: a vector's if every row starts at one, or 1."""
        found = {name: contiguous(*output) for name, output in self.outputs.items()}
        return _vector(self, found | self.layouts)


def statistics_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of results with one item for each row of this dtype."""
    return dtype if dtype == np.float64 else _FLOAT32


def row_problem(kernel: RowKernel, operands: Operands, options: RowOptions) -> RowProblem:
    """Check the arrays of a call, or find that arrays of this description were checked before.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    problem = _cached_problem(kernel, operands.description, options)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(kernel: RowKernel, description: Description, options: RowOptions) -> RowProblem:
    scalars, choices = dict(options.scalars), dict(options.choices)
    accumulate = options.accumulate
    arrays = layouts_of(kernel.record, description)
    layouts = given_of(arrays)
    require_arrays(layouts, [name for name in kernel.inputs if name not in kernel.optional])
    model = _model_row(kernel, layouts)
    first = layouts[model]
    # The layouts of a kernel with a stream have at least one column, which is not of the stream.
    dtype = layouts[kernel.columns[0]].dtype if kernel.stream else first.dtype
    for name in kernel.broadcast:
        if name in layouts:
            layouts[name] = broadcast_layout(kernel, name, layouts[name], first)
    in_place = {} if accumulate else kernel.in_place  # an input is no gradient to add to
    problem = RowProblem(
        kernel,
        first.shape,
        dtype,
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
        frozenset(options.wanted),
        Overlaps.of(arrays, (*kernel.results, "workspace"), in_place),
    )
    _check_inputs(problem, model)
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


def _model_row(kernel: RowKernel, layouts: Mapping[str, Layout]) -> str:
    """Return the array that errors take shape and dtype from: the first of the rows.

    A gradient is often wrong, and is the first argument of a backward. So another array is chosen
    there, unless more of the arrays agree with the gradient.
    """
    first, *others = [name for name in kernel.rows if name in layouts]
    if first != "dout" or not others:
        return first

    def agreeing(name: str) -> int:
        model = layouts[name]
        expected = {
            **dict.fromkeys(kernel.rows, (model.shape, model.dtype)),
            **dict.fromkeys(kernel.columns, (model.shape[-1:], model.dtype)),
            **dict.fromkeys(kernel.per_row, (model.shape[:-1], statistics_dtype(model.dtype))),
        }
        return sum(
            (layouts[other].shape == shape) + (layouts[other].dtype == dtype)
            for other, (shape, dtype) in expected.items()
            if other in layouts
        )

    return max((*others, first), key=agreeing)


def _check_inputs(problem: RowProblem, first: str) -> None:
    kernel, layouts = problem.kernel, problem.layouts
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
            require_dtype(shown, layout, CPU_FLOATS)
            require_shape(shown, layout, problem.shape[-1:], "(N,), an item for each column")
            require_contiguous_rows(shown, layout)
    both = (*kernel.rows, *kernel.columns)
    of_stream = [name for name in kernel.stream if name in layouts and name in both]
    for name in of_stream:
        require_dtype(kernel.shown_as.get(name, name), layouts[name], ("float32",))
    same = [name for name in both if name in layouts and name not in of_stream]
    require_same_dtype({kernel.shown_as.get(name, name): layouts[name] for name in same})
    for name in given:
        layout = layouts[name]
        if name not in (*both, *kernel.broadcast):
            allowed = (
                INTEGERS if name in kernel.integers else (statistics_dtype(problem.dtype).name,)
            )
            require_dtype(name, layout, allowed)
            require_shape(name, layout, problem.shape[:-1], "an item for each row")
            require_whole_item_strides(name, layout)


def broadcast_layout(kernel: RowKernel, name: str, layout: Layout, rows: Layout) -> Layout:
    """Return the layout of an array broadcast to the rows' shape.

    Raises
    ------
    TypeError, ValueError
        For another dtype, or a shape that does not broadcast.
    """
    shape, dtypes = rows.shape, kernel.broadcast[name]
    if "float32" in dtypes and rows.dtype == np.float64:
        dtypes = (*dtypes, "float64")
    if dtypes == ("bool",):
        require_bool_mask(name, layout)
    else:
        require_dtype(name, layout, dtypes)
    require_whole_item_strides(name, layout)
    extents = (1,) * (len(shape) - len(layout.shape)) + layout.shape
    fits = len(extents) == len(shape) and all(
        extent in (1, full) for extent, full in zip(extents, shape, strict=True)
    )
    if not fits:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"it broadcasts to the rows' shape {shape}",
            f"give it axes of 1 where it does not vary, as {name}[:, None] does",
        )
    strides = (0,) * (len(shape) - len(layout.shape)) + layout.strides
    return Layout(
        shape,
        tuple(0 if n == 1 else stride for n, stride in zip(extents, strides, strict=True)),
        layout.dtype,
    )


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
    """Return the distance of neighbouring columns in items; 0 for an absent array."""
    return layout.strides[-1] // layout.dtype.itemsize if layout else 0


def _vector(problem: RowProblem, layouts: Mapping[str, Layout]) -> int:
    """Return the number of items in one load: a vector's if every row starts at one, or 1."""
    items = VECTOR_BYTES // problem.dtype.itemsize
    rows = [name for name in problem.kernel.whole_rows if name in layouts]
    aligned = not any(problem.starts.get(name, 0) for name in (*rows, *problem.kernel.columns))
    aligned = aligned and all(
        stride % VECTOR_BYTES == 0 for name in rows for stride in layouts[name].strides[:-1]
    )
    return items if aligned and problem.length % items == 0 else 1


def _params(problem: RowProblem, layouts: Mapping[str, Layout]) -> Any:
    """Fill the C struct RowsParams; absent arrays have strides of 0."""
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
