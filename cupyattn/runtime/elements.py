"""Element-wise operations, on a device: any rank, last axis contiguous, outer axes of any strides.

What an operation reads and writes is data, the `ElementKernel` of its table: the checks and the
plan are the same for all. A result may be an input itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.axes import merge_axes, walk_params
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    fixes_of_results,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_same_dtype,
    require_shape,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.element_kernel import ElementKernel
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.overlaps import Overlaps
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import R, Record, given_of
from cupyattn.runtime.tables import cpp_bool

_FLOAT32 = np.dtype(np.float32)
_MOST_UNITS = 2**32 - 1


@dataclass(frozen=True)
class Part:
    """What a kernel's array is of an array of the call: one of `count` parts of its last axis."""

    array: str
    index: int = 0
    count: int = 1

    def shape_of_whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the call's array, from that of the kernel's."""
        return (*shape[:-1], self.count * shape[-1]) if self.count > 1 else shape

    def within(self, array: Array) -> Array:
        """Return the view of the call's array."""
        items = array.shape[-1] // self.count if self.count > 1 else 0
        return array[..., self.index * items : (self.index + 1) * items] if items else array


@dataclass(frozen=True, eq=False)
class ElementProblem:
    """A valid call of an element-wise operation."""

    kernel: ElementKernel
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Mapping[str, Part]
    """Of each array of the kernel that there is."""
    decided: Mapping[str, str]
    """What the call decides: macros of the kernel."""
    accumulate: bool
    arrays: Record[Layout]
    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    overlaps: Overlaps

    @property
    def outputs(self) -> dict[str, Output]:
        """What is written, by the names of the call."""
        found = {}
        for name in self.kernel.results:
            part = self.parts[name]
            dtype = _FLOAT32 if name in self.kernel.float32 else self.dtype
            found[part.array] = Output(part.shape_of_whole(self.shape), dtype)
        return found

    def piece(self, name: str) -> tuple[Layout, int]:
        """Return how a kernel's array is laid out, and its first item's number in the call's."""
        part = self.parts[name]
        whole = self.layouts.get(part.array) or contiguous(*self.outputs[part.array])
        return Layout(self.shape, whole.strides, whole.dtype), (
            part.index * self.shape[-1] if part.count > 1 else 0
        )


def element_problem(
    kernel: ElementKernel,
    operands: Operands[Any],
    *,
    parts: Mapping[str, Part] | None = None,
    decided: Mapping[str, str] | None = None,
    accumulate: bool = False,
) -> ElementProblem:
    """Check the arrays of a call, or find that they were checked before.

    `parts` has the kernel's arrays that are parts of the call's; the others have the same name.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    problem = _cached_problem(
        kernel,
        type(operands.arrays),  # type: ignore[arg-type]  # see records.fields_of
        operands.description,
        tuple((parts or {}).items()),
        tuple((decided or {}).items()),
        accumulate,
    )
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(
    kernel: ElementKernel,
    kind: type[Record[Any]],
    description: Description,
    given_parts: tuple[tuple[str, Part], ...],
    given_decisions: tuple[tuple[str, str], ...],
    accumulate: bool,
) -> ElementProblem:
    arrays = layouts_of(kind, description)
    layouts = given_of(arrays)
    own = dict(given_parts)
    parts = {name: own.get(name) or Part(name) for name in kernel.arrays}
    for name in kernel.optional:
        if parts[name].array not in layouts:
            del parts[name]
    read = tuple(name for name in (*kernel.updated, *kernel.inputs) if name in parts)
    shown_as = kind.SHOWN_AS
    whole = tuple(dict.fromkeys(parts[name].array for name in read))
    require_arrays(layouts, whole, shown_as)
    shape = _shape_of_items(layouts, parts[read[0]], shown_as)
    first = shown_as.get(parts[read[0]].array, parts[read[0]].array)
    for name in read:
        part = parts[name]
        layout, shown = layouts[part.array], shown_as.get(part.array, part.array)
        fix = ""
        if name in kernel.updated:  # a copy would take the update, and be thrown away with it
            zeros = (
                f"make {shown} once before the first step, zeros of float32 of {first}'s shape, "
                "and keep it"
            )
            fix = zeros if name in kernel.float32 else made_beforehand(shown)
        dtypes = ("float32",) if name in kernel.float32 else CPU_FLOATS
        require_dtype(shown, layout, dtypes, fix)
        require_shape(shown, layout, part.shape_of_whole(shape), f"shaped like {first}")
        if name in kernel.updated:
            require_output(shown, layout, layout.shape, layout.dtype)
        else:
            require_contiguous_rows(shown, layout)
    for name in kernel.numbers:
        if name in layouts:
            require_dtype(name, layouts[name], ("float32",))
            require_shape(name, layouts[name], (), "an array of one number")
    of_dtype = [parts[name].array for name in read if name not in kernel.float32]
    require_same_dtype({shown_as.get(name, name): layouts[name] for name in of_dtype})
    decisions = dict(given_decisions)
    decisions |= {f"WITH_{name.upper()}": cpp_bool(name in parts) for name in kernel.optional}
    if kernel.accumulates:
        decisions["ACCUMULATE"] = cpp_bool(accumulate)
    results = {parts[name].array for name in kernel.results}
    updated = {parts[name].array for name in kernel.updated}
    overlaps = Overlaps.of(arrays, results | updated, item_by_item=True)
    dtype = layouts[of_dtype[0]].dtype
    starts = given_of(starts_of(kind, description))
    problem = ElementProblem(
        kernel, shape, dtype, parts, decisions, accumulate, arrays, layouts, starts, overlaps
    )
    for name, output in problem.outputs.items():
        if name in layouts:
            require_output(shown_as.get(name, name), layouts[name], *output)
    return problem


def _shape_of_items(
    layouts: dict[str, Layout], part: Part, shown_as: Mapping[str, str]
) -> tuple[int, ...]:
    """Return the shape of what the kernel sees, from the array whose part its first one is."""
    shape = layouts[part.array].shape
    if part.count == 1:
        return shape
    if not shape or shape[-1] % part.count:
        raise error(
            ValueError,
            f"{shown_as.get(part.array, part.array)} has shape {shape}",
            f"packed it is (..., {part.count} * N): its last axis has {part.count} equal parts",
            "pass an array of that shape, or the parts one by one",
        )
    return (*shape[:-1], shape[-1] // part.count)


def array_fixes(kernel: ElementKernel, shown: Iterable[str]) -> Mapping[str, str]:
    """Return what to pass instead of what is no array, by the names in errors."""
    return _fixes(kernel, tuple(shown))


@cache
def _fixes(kernel: ElementKernel, shown: tuple[str, ...]) -> Mapping[str, str]:
    return fixes_of_results(*kernel.updated, *kernel.results, *shown)


def run_elements(
    device: Device, problem: ElementProblem, operands: Operands[R], **scalars: Any
) -> R:
    """Run an element-wise operation; return its arrays, the results among them.

    `scalars` are the kernel's, and may differ in each call.
    """
    plan = _plan(problem, device.arch.number)
    if scalars:
        kinds = problem.kernel.scalars
        values = tuple([kind(scalars[name]) for name, kind in kinds.items()])
        plan = plan._replace(
            steps=tuple([step._replace(values=(*values, step.values[-1])) for step in plan.steps])
        )
    return run(device, plan, operands)


@lru_cache(maxsize=4096)
def _plan(problem: ElementProblem, arch: int) -> Plan:
    kernel, dtype = problem.kernel, problem.dtype.name
    planner = Planner(type(problem.arrays), problem.arrays, problem.outputs)
    shown_as = problem.arrays.SHOWN_AS
    require_item_alignment(problem.layouts, problem.starts, shown_as)
    first = problem.parts[(*kernel.updated, *kernel.inputs)[0]].array
    require_kernel_dtype(shown_as.get(first, first), problem.dtype)
    if 0 in problem.shape:
        return planner.plan(zero_new=problem.accumulate)

    walk = _Walk.of(problem)
    vec = walk.vector()
    loads = -(-walk.length // vec)
    config = kernel.config(arch, loads)
    units = -(-loads // (config.lanes * config.loads(vec)))
    rows = math.prod(walk.shape)
    ctas = -(-rows * units // config.units_per_cta)
    if ctas * config.units_per_cta > _MOST_UNITS:
        raise error(
            ValueError,
            f"{rows} rows of {walk.length} items",
            f"a call takes at most {_MOST_UNITS // units} such rows",
            "split the arrays over several calls, or copy them to contiguous ones",
        )
    specialisation = kernel.specialise(arch, dtype, loads, vec, **problem.decided)
    unset = (kind(0) for kind in kernel.scalars.values())
    slots = given_of(planner.slots)
    wholes = {name: part.array for name, part in problem.parts.items()}
    arrays = [slots.get(wholes.get(name, name)) for name in (*kernel.arrays, *kernel.numbers)]
    step = Step.of(specialisation, ctas, arrays, *unset, walk.params(units))
    return planner.plan(step, zero_new=problem.accumulate)


class _Walk(NamedTuple):
    """How the kernel's arrays are walked: rows of items that lie side by side in all of them."""

    problem: ElementProblem
    shape: tuple[int, ...]
    """Of the rows: axes that do not lie evenly."""
    strides: dict[str, tuple[int, ...]]
    """From row to row, in items."""
    offsets: dict[str, int]
    """Of the first item, in items."""
    length: int
    """Items of a row."""

    @classmethod
    def of(cls, problem: ElementProblem) -> _Walk:
        pieces = {name: problem.piece(name) for name in problem.parts}
        shape, merged = merge_axes(
            problem.shape,
            [
                tuple(stride // layout.dtype.itemsize for stride in layout.strides)
                for layout, _ in pieces.values()
            ],
        )
        length = 1
        if shape and all(strides[-1] == 1 for strides in merged):
            length, shape, merged = shape[-1], shape[:-1], [strides[:-1] for strides in merged]
        offsets = {name: offset for name, (_, offset) in pieces.items()}
        strides = dict(zip(pieces, merged, strict=True))
        return cls(problem, shape, strides, offsets, length)

    def vector(self) -> int:
        """Return how many items one load brings: the most that each row's start allows, or 1."""
        problem = self.problem
        items = problem.kernel.vector_items(problem.dtype.name)
        if self.length < items or (problem.kernel.indexed and self.shape and self.length % items):
            return 1
        for name, part in problem.parts.items():
            size = problem.piece(name)[0].dtype.itemsize
            start = problem.starts.get(part.array, 0) + self.offsets[name] * size
            if any(n % (items * size) for n in (start, *(s * size for s in self.strides[name]))):
                return 1
        return items

    def params(self, units: int) -> Any:
        """Fill the C struct ElementsParams; of an array that is absent with zeros."""
        arrays = self.problem.kernel.arrays
        absent = (0,) * len(self.shape)
        strides = {name: self.strides.get(name, absent) for name in arrays}
        shown = self.problem.arrays.SHOWN_AS
        shown_as = {
            name: shown.get(part.array, part.array) for name, part in self.problem.parts.items()
        }
        params = walk_params(self.shape, strides, self.length, units, shown_as)
        params["offsets"] = [self.offsets.get(name, 0) for name in arrays]
        return params[()]
