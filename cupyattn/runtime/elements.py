"""Element-wise operations: kernels that are data, and one way to check, plan and run their calls.

An element kernel (cuda_src/common/elements.cuh) reads arrays of one shape item by item and writes
arrays of that shape. The last axis is contiguous; other axes have any strides. A result may be an
input itself. `ElementKernel` declares what a kernel reads and writes; checks and plans are the same
for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arch import TURING
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
    Overlaps,
    fixes_of_results,
    require_arrays,
    require_bool,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_same_dtype,
    require_shape,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.outputs import require_grads, round_into
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import R, Record, given_of
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES
from cupyattn.runtime.structs import element_params, elements_struct, merge_axes
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for


@dataclass(frozen=True)
class ElementConfig:
    """How rows are cut into units: a unit is what `lanes` threads load at once."""

    threads: int
    lanes: int
    vectors: int
    """Loads of 16 bytes that a thread has in flight for each array."""
    singles: int
    """Loads of single items that a thread has in flight where some row is not aligned."""
    reason: str

    @property
    def units_per_cta(self) -> int:
        """How many units one CTA works on at a time."""
        return self.threads // self.lanes

    def loads(self, vec: int) -> int:
        """Return how many loads of `vec` items a thread has in flight."""
        return self.vectors if vec > 1 else self.singles


ElementTable = Mapping[int, Mapping[int | None, ElementConfig]]

# The key is the most loads in a row of the arrays that a configuration takes; None takes the rest.
# Timed on an H200 as compute_75 code by `python -m cupyattn.benchmark layers`, 2026-11-22, on 8192
# rows of 768 to 4096: one load a thread is 3 to 20 % faster than two, forward and backward, and 128
# threads are 1 to 2 % faster than 256, which are faster than 512.
ELEMENTS: ElementTable = {
    75: {
        512: ElementConfig(128, 8, 1, 8, "rows of up to 8 KiB: units of 128 bytes leave few idle"),
        None: ElementConfig(128, 32, 1, 8, "a warp 512 bytes; a second load a thread slows it"),
    }
}


_GATES = Gates(registers=72)  # the gated backward needs them; 64 suffice for the others


@dataclass(frozen=True, eq=False)
class ElementKernel:
    """An element-wise kernel: its arrays by the names and in the order of the C parameters.

    Attributes
    ----------
    entry, source : str
        The kernel's entry and file, as in a `KernelSpec`.
    inputs : tuple of str
        Arrays that are read.
    results : tuple of str
        Arrays that are written.
    updated : tuple of str
        Arrays that are read and written: they are changed in place. They come before the inputs.
    optional : tuple of str
        Inputs that may be absent; their pointers are null then. Macro WITH_<NAME> is true for
        those that are present.
    float32 : tuple of str
        Arrays that are float32 whatever dtype the others have (macro DTYPE).
    numbers : tuple of str
        float32 arrays of one item, which may be absent: numbers that stay on the device.
    scalars : mapping
        Numbers passed by value, with their dtypes.
    choices : mapping
        Macros that a call chooses, with their possible values.
    accumulates : bool
        Whether results may be added to the contents of their arrays: macro ACCUMULATE.
    indexed : bool
        Whether the kernel uses an item's number. Vectors then start at multiples of their length.
    table : ElementTable
        By architecture and loads in a row.
    """

    entry: str
    source: str
    inputs: tuple[str, ...]
    results: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    scalars: Mapping[str, type[np.generic]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accumulates: bool = False
    indexed: bool = False
    table: ElementTable = field(default_factory=lambda: ELEMENTS)

    @property
    def arrays(self) -> tuple[str, ...]:
        """All arrays, in the order in which ElementsParams has their strides."""
        return (*self.updated, *self.inputs, *self.results)

    @cached_property
    def spec(self) -> KernelSpec:
        """The specification that is compiled and launched."""
        return KernelSpec(
            self.entry,
            self.source,
            (
                *(
                    Pointer(name, const=name in self.inputs, optional=name in self.optional)
                    for name in self.arrays
                ),
                *inputs(*self.numbers, optional=True),
                *(Scalar(name, np.dtype(kind)) for name, kind in self.scalars.items()),
                elements_struct(len(self.arrays)),
            ),
        )

    @cached_property
    def decisions(self) -> Mapping[str, tuple[str, ...]]:
        """Every macro that a call chooses, with its possible values."""
        flags = [f"WITH_{name.upper()}" for name in self.optional]
        flags += ["ACCUMULATE"] if self.accumulates else []
        return {**self.choices, **dict.fromkeys(flags, (cpp_bool(False), cpp_bool(True)))}

    def vector_items(self, dtype: str) -> int:
        """Return how many items the widest load has: 16 bytes of the widest dtype."""
        widest = max(STORAGE[dtype], STORAGE["float32"] if self.float32 else 0)
        return VECTOR_BYTES // widest

    def config(self, arch: int, loads: int) -> ElementConfig:
        """Return the configuration for rows of that many loads."""
        rows = rows_for(self.table, arch).items()
        return next(row for limit, row in rows if limit is None or loads <= limit)

    def specialise(
        self, arch: int, dtype: str, loads: int, vec: int, **decided: str
    ) -> Specialisation:
        """Specialise the kernel: `vec` items a load, and a value for each of `decisions`."""
        return _specialise(self, self.config(arch, loads), dtype, vec, tuple(decided.items()))

    def catalogue(self, arch: int = TURING.number) -> Iterator[Specialisation]:
        """Yield pairwise combinations of configurations, dtypes, loads and decisions."""
        limits = rows_for(self.table, arch)
        beyond = max(filter(None, limits)) + 1
        decisions = self.decisions.values()
        for dtype, limit, whole, *decided in pairs(STORAGE, limits, (True, False), *decisions):
            vec = self.vector_items(dtype) if whole else 1
            macros = dict(zip(self.decisions, decided, strict=True))
            yield self.specialise(arch, dtype, limit or beyond, vec, **macros)


@cache
def _specialise(
    kernel: ElementKernel,
    config: ElementConfig,
    dtype: str,
    vec: int,
    decided: tuple[tuple[str, str], ...],
) -> Specialisation:
    macros: dict[str, Any] = {
        "DTYPE": dtype,
        "LANES": config.lanes,
        "VECTORS": config.loads(vec),
        "VEC": vec,
        **dict(decided),
    }
    return kernel.spec.specialise(
        threads=config.threads, gates=_GATES, reason=config.reason, **macros
    )


_FLOAT32 = np.dtype(np.float32)
_MOST_UNITS = 2**32 - 1


@dataclass(frozen=True)
class Part:
    """The part of a call's array that a kernel's array is: one of `count` along the last axis."""

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
    """The part of the call's arrays that each present array of the kernel is."""
    decided: Mapping[str, str]
    """Macros that the call chose, with their values."""
    accumulate: bool
    arrays: Record[Layout]
    layouts: dict[str, Layout]
    starts: dict[str, int]
    """How many bytes each array starts after a multiple of a vector's size."""
    overlaps: Overlaps

    @property
    def outputs(self) -> dict[str, Output]:
        """The results, by the names of the call."""
        found = {}
        for name in self.kernel.results:
            part = self.parts[name]
            dtype = _FLOAT32 if name in self.kernel.float32 else self.dtype
            found[part.array] = Output(part.shape_of_whole(self.shape), dtype)
        return found

    def piece(self, name: str) -> tuple[Layout, int]:
        """Return the layout of a kernel's array, and its offset in the call's array in items."""
        part = self.parts[name]
        whole = self.layouts.get(part.array) or contiguous(*self.outputs[part.array])
        return Layout(self.shape, whole.strides, whole.dtype), (
            part.index * self.shape[-1] if part.count > 1 else 0
        )


def element_problem(
    kernel: ElementKernel,
    operands: Operands,
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
    kind: type[Record],
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
    # A gradient comes first and is often wrong: shapes are compared with the array after it.
    model = parts[read[1 if read[0] == "dout" and len(read) > 1 else 0]]
    shape = _shape_of_items(layouts, model, shown_as)
    first = shown_as.get(model.array, model.array)
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
        like = f"shaped like {first}"
        if model.count > part.count:
            like += f", with 1/{model.count} of its last axis"
        require_shape(shown, layout, part.shape_of_whole(shape), like)
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
    """Return the shape of the kernel's arrays, from the array that its first one is part of."""
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


@cache
def _fixes(kernel: ElementKernel, kind: type[Record]) -> Mapping[str, str]:
    """Return what errors propose for each array that is written, by its name in errors."""
    return fixes_of_results(*kernel.updated, *kernel.results, *kind.SHOWN_AS.values())


def run_elements(
    device: Device, problem: ElementProblem, operands: Operands[R], **scalars: object
) -> R:
    """Run an element-wise operation; return its arrays with the results.

    `scalars` are numbers passed by value, which may differ in each call.
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

    rows = _Rows.of(problem)
    vec = rows.vector()
    loads = -(-rows.length // vec)
    config = kernel.config(arch, loads)
    units = -(-loads // (config.lanes * config.loads(vec)))
    count = math.prod(rows.shape)
    ctas = -(-count * units // config.units_per_cta)
    if ctas * config.units_per_cta > _MOST_UNITS:
        raise error(
            ValueError,
            f"{count} rows of {rows.length} items",
            f"a call takes at most {_MOST_UNITS // units} such rows",
            "split the arrays over several calls, or copy them to contiguous ones",
        )
    specialisation = kernel.specialise(arch, dtype, loads, vec, **problem.decided)
    unset = (kind(0) for kind in kernel.scalars.values())
    slots = given_of(planner.slots)
    wholes = {name: part.array for name, part in problem.parts.items()}
    arrays = [slots.get(wholes.get(name, name)) for name in (*kernel.arrays, *kernel.numbers)]
    step = Step.of(specialisation, ctas, arrays, *unset, rows.params(units))
    return planner.plan(step, zero_new=problem.accumulate)


class _Rows(NamedTuple):
    """The kernel's arrays as rows of items that are neighbours in memory in each of them."""

    problem: ElementProblem
    shape: tuple[int, ...]
    """The axes that could not be merged into one: their product is the number of rows."""
    strides: dict[str, tuple[int, ...]]
    """Steps from row to row in each array, in items."""
    offsets: dict[str, int]
    """Number of each array's first item in the call's array."""
    length: int
    """Items of a row."""

    @classmethod
    def of(cls, problem: ElementProblem) -> _Rows:
        """Merge the axes of the kernel's arrays."""
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
        """Return how many items one load has: a vector's if every row starts at one, or 1."""
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
        """Return the C struct ElementsParams; an absent array has zeros."""
        arrays = self.problem.kernel.arrays
        absent = (0,) * len(self.shape)
        strides = {name: self.strides.get(name, absent) for name in arrays}
        shown = self.problem.arrays.SHOWN_AS
        shown_as = {
            name: shown.get(part.array, part.array) for name, part in self.problem.parts.items()
        }
        params = element_params(self.shape, strides, self.length, units, shown_as)
        params["offsets"] = [self.offsets.get(name, 0) for name in arrays]
        return params[()]


def call_elements(
    kernel: ElementKernel,
    arrays: R,
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
    *,
    parts: Mapping[str, Part] | None = None,
    accumulate: bool = False,
    decided: Mapping[str, str] | None = None,
    scalars: Mapping[str, Any] | None = None,
    cpu: Callable[..., None] | None = None,
) -> R:
    """Check a call, run it on the CPU or by the kernel, and return its record with the results.

    Parameters
    ----------
    kernel : ElementKernel
        The operation.
    arrays : Record
        Its inputs, and the results to write into; None for those not given.
    reference : callable
        Takes the arrays that the kernel updates and its inputs, in the kernel's order, None for
        absent ones; returns the updated arrays and the results in theirs.
    parts : mapping, optional
        The kernel's arrays that are parts of the call's; the others have the same name.
    accumulate : bool
        Add to the contents of the results instead of replacing them.
    decided : mapping, optional
        A value for each macro in the kernel's `choices`.
    scalars : mapping, optional
        The kernel's scalars.
    cpu : callable, optional
        A faster way on NumPy arrays than the reference, used where results are not accumulated and
        no array is float64. Takes the inputs and then the results, and writes the latter.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    if accumulate is not False:
        require_bool("accumulate", accumulate)
    operands = adopt(arrays, _fixes(kernel, type(arrays)))  # type: ignore[arg-type]
    problem = element_problem(
        kernel, operands, parts=parts, decided=decided, accumulate=bool(accumulate)
    )
    if accumulate and all(getattr(arrays, name) is None for name in problem.outputs):
        shown = (arrays.SHOWN_AS.get(name, name) for name in problem.outputs)
        require_grads(None, True, shown=", ".join(shown))
    device = device_of(operands)
    if device is not None:
        return run_elements(device, problem, operands, **(scalars or {}))
    return _on_cpu(problem, arrays, reference, cpu)


def require_elements(kernel: ElementKernel, arrays: R) -> None:
    """Raise what `call_elements` would raise for arrays before it writes into them."""
    operands = adopt(arrays, _fixes(kernel, type(arrays)))  # type: ignore[arg-type]
    problem = element_problem(kernel, operands)
    device = device_of(operands)
    if device is not None:
        _plan(problem, device.arch.number)


def _on_cpu(
    problem: ElementProblem,
    arrays: R,
    reference: Callable[..., np.ndarray | tuple[np.ndarray, ...]],
    cpu: Callable[..., None] | None,
) -> R:
    kernel, parts = problem.kernel, problem.parts

    def view(name: str) -> Any:
        return parts[name].within(getattr(arrays, parts[name].array)) if name in parts else None

    given = [view(name) for name in (*kernel.updated, *kernel.inputs)]
    for name, output in problem.outputs.items():
        if getattr(arrays, name) is None:
            setattr(arrays, name, (np.zeros if problem.accumulate else np.empty)(*output))
    if cpu is not None and not problem.accumulate and problem.dtype != np.float64:
        cpu(*given, *(view(name) for name in kernel.results))
        return arrays
    exact = reference(*given)
    written = (*kernel.updated, *kernel.results)
    for name, result in zip(written, exact if isinstance(exact, tuple) else (exact,), strict=True):
        target = view(name)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, as on a GPU
            if problem.accumulate:
                result = result + target.astype(np.float64)
        round_into(target, np.asarray(result), target.dtype)
    return arrays
