"""Arrays of a call by name in dictionaries, for operations whose calls are not records yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime import arrays as _arrays
from cupyattn.runtime.arrays import (
    ALIGNMENT,
    Array,
    Layout,
    NamedDescription,
    NamedOperands,
    adopt_one,
    array_within,
    contiguous,
)
from cupyattn.runtime.checks import require_output, require_workspace
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.launch import prepare, start, typed
from cupyattn.runtime.overlaps import Pair, require_writable
from cupyattn.runtime.plan import SCRATCH_ALIGNMENT, SCRATCH_DTYPE, Output, workspace_of
from cupyattn.runtime.spans import share_an_item, span
from cupyattn.runtime.spec import Specialisation

Operands = NamedOperands
Description = NamedDescription


def layouts_of(description: Description) -> dict[str, Layout]:
    """Return the layout of each array by name."""
    return {
        name: contiguous(shape, dtype) if strides is None else Layout(shape, strides, dtype)
        for name, shape, strides, dtype, _ in description
    }


def starts_of(description: Description) -> dict[str, int]:
    """Return by how many bytes each array starts beyond a multiple of `ALIGNMENT`, by name."""
    return {name: start for name, *_, start in description}


def adopt(
    candidates: dict[str, Any],
    fixes: Mapping[str, str] = MappingProxyType({}),
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> Operands:
    """Take the arrays of a call, by name; None stands for an option that was not given.

    `fixes` has what to pass by the names in errors, where converting what is no array would not
    do: of a result nobody would see the copy. `shown_as` has what errors call an array that callers
    know by another name.

    Raises
    ------
    TypeError
        For something that is no array or cannot be taken, and for a mixture of NumPy and CuPy
        arrays.
    ValueError
        For arrays on different devices.
    """
    # One pass: in a call on a GPU this loop costs more than anything but the driver.
    arrays: dict[str, Array] = {}
    places: dict[str, int] = {}
    description = []
    devices: set[int | None] = set()
    for name, array in candidates.items():
        if array is None:
            continue
        if type(array) is not _arrays._device_array and type(array) is not np.ndarray:
            array = adopt_one(shown_as.get(name, name), array, fixes)
        strides: tuple[int, ...] | None
        if type(array) is np.ndarray:
            device_id, place, strides = None, array.ctypes.data, array.strides
        else:
            pointer = array.data
            device_id, place = pointer.device_id, pointer.ptr
            strides = None if array._c_contiguous else array.strides
        devices.add(device_id)
        arrays[name] = array
        places[name] = place
        description.append((name, array.shape, strides, array.dtype, place % ALIGNMENT))
    if len(devices) > 1:
        shown = {shown_as.get(name, name): array for name, array in arrays.items()}
        raise _arrays._mixed_libraries(shown) if None in devices else _arrays._mixed_devices(shown)
    return Operands(devices.pop() if devices else None, arrays, places, tuple(description))


ABSENT = ""
"""Names no array: kernels are passed null."""


class Step(NamedTuple):
    """One launch: its arrays are looked up by the names of the kernel's parameters."""

    specialisation: Specialisation
    ctas: int
    values: tuple[Any, ...]
    """What is passed by value, behind the arrays, typed as the kernel declares."""
    names: tuple[str, ...]
    """Of the arrays, in the order of the parameters."""
    required: frozenset[str]
    """Those of the arrays that may not be absent."""
    take: Callable[[Mapping[str, Any]], Sequence[Any]]
    """Takes what has these names, for the kernel; all of them at once take half the time."""

    @classmethod
    def of(
        cls,
        specialisation: Specialisation,
        ctas: int,
        *values: Any,
        renamed: Mapping[str, str] | None = None,
    ) -> Step:
        """Make a step; `renamed` has parameters that take the array of another name."""
        others = renamed or {}
        spec = specialisation.spec
        names = tuple(others.get(pointer.name, pointer.name) for pointer in spec.pointers)
        # Names stand where arrays will: `typed` types what goes by value, and counts the rest.
        by_value = typed(spec, [*names, *values])[len(names) :]
        optional = (pointer.optional for pointer in spec.pointers)
        required = {name for name, absent in zip(names, optional, strict=True) if not absent}
        return cls(
            specialisation, ctas, tuple(by_value), names, frozenset(required), _taking(names)
        )

    def renamed(self, others: Mapping[str, str]) -> Step:
        """Return a step that takes arrays of other names in place of some."""
        names = tuple(others.get(name, name) for name in self.names)
        required = frozenset(others.get(name, name) for name in self.required)
        return self._replace(names=names, required=required, take=_taking(names))


def _taking(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    return itemgetter(*names) if len(names) > 1 else lambda of: [of[name] for name in names]


class Scratch(NamedTuple):
    """A float32 array within the workspace."""

    name: str
    offset: int
    """In bytes."""
    items: int

    @property
    def end(self) -> int:
        """Where it ends, in bytes."""
        return self.offset + self.items * SCRATCH_DTYPE.itemsize

    @property
    def place(self) -> tuple[int, tuple[int], np.dtype]:
        """Its offset, shape and dtype."""
        return self.offset, (self.items,), SCRATCH_DTYPE


class Plan(NamedTuple):
    """All that the launches of a call need and that does not change from call to call."""

    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, Output], ...]
    scratch: tuple[Scratch, ...] = ()
    zero_first: tuple[str, ...] = ()
    """Results, and pieces of scratch, that have to be zero before the first launch."""
    zero_new: bool = False
    """Whether results that are allocated start from zero, because kernels add to them."""
    transposed: tuple[str, ...] = ()
    """Results that, where they are allocated, are transposes of arrays in C order."""

    def for_arrays(self, given: Iterable[str]) -> Plan:
        """Return the plan of calls with these arrays by name: kernels get null for all others.

        Raises
        ------
        TypeError
            If a kernel needs one of those, or if something is to be zero that is not the plan's: an
            error within this library, which shows when the plan is made.
        """
        own = {*dict(self.outputs), *(piece.name for piece in self.scratch)}
        present = {*given, *own}
        if strangers := {*self.zero_first} - own:
            raise TypeError(f"{sorted(strangers)} are to be zero and neither results nor scratch")
        for step in self.steps:
            if absent := step.required - present:
                entry = step.specialisation.spec.entry
                raise TypeError(f"{sorted(absent)} of {entry} are neither given nor made")
        nulls = (
            {name: ABSENT for name in step.names if name not in present} for step in self.steps
        )
        steps = (step.renamed(others) for step, others in zip(self.steps, nulls, strict=True))
        return self._replace(steps=tuple(steps))

    @property
    def workspace_bytes(self) -> int:
        """What the scratch takes."""
        return max((piece.end for piece in self.scratch), default=0)


def run(device: Device, plan: Plan, operands: Operands) -> dict[str, Array]:
    """Run a plan on the arrays of a call, `workspace` among them; return its results by name.

    Raises
    ------
    ValueError
        If a workspace was given that does not fit. Nothing has been written then.
    """
    # Taken apart at once: each dot of a plan would cost every call.
    steps, outputs, scratch, zero_first, zero_new, transposed = plan
    given, arguments = operands.arrays, device.arguments_by_name(operands)
    results: dict[str, Array] = {}
    to_zero: list[Array] = []
    arguments[ABSENT] = device.null
    for name, output in outputs:
        result = given.get(name)
        if result is None:
            shape, dtype = output
            turned = name in transposed
            result = device.empty(shape[::-1], dtype).T if turned else device.empty(shape, dtype)
            arguments[name] = device.argument(result)
            if zero_new and name not in zero_first:
                to_zero.append(result)
        if name in zero_first:
            to_zero.append(result)
        results[name] = result
    if scratch:
        workspace = workspace_of(device, plan.workspace_bytes, given.get("workspace"))
        for piece in scratch:
            arguments[piece.name] = device.argument_within(workspace, *piece.place)
            if piece.name in zero_first:
                to_zero.append(array_within(workspace, *piece.place))
    if zero_first or len(steps) > 1:
        for step in steps:
            prepare(device, step.specialisation, step.ctas)
    for array in to_zero:
        device.zero(array)
    for specialisation, ctas, values, _, _, take in steps:
        if ctas:
            start(device, specialisation, ctas, take(arguments), values)
    return results


def allot(
    device: Device | None, arrays: Mapping[str, Output], given: Array | None
) -> dict[str, Array]:
    """Return scratch arrays of a call that runs several plans, in what was given or in new memory.

    Without a device they are NumPy's, and a workspace is left as it is.

    Raises
    ------
    ValueError
        If a workspace was given that does not fit.
    """
    if device is None:
        return {name: np.empty(*output) for name, output in arrays.items()}
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in arrays.items()}
    pieces = lay_out_scratch({n: -(-s // SCRATCH_DTYPE.itemsize) for n, s in sizes.items()})
    workspace = workspace_of(device, max((piece.end for piece in pieces), default=0), given)
    return {name: array_within(workspace, offset, *arrays[name]) for name, offset, _ in pieces}


def lay_out_scratch(items: Mapping[str, int]) -> tuple[Scratch, ...]:
    """Place float32 arrays one behind the other.

    Examples
    --------
    >>> lay_out_scratch({"delta": 3, "dq_acc": 100})
    (Scratch(name='delta', offset=0, items=3), Scratch(name='dq_acc', offset=256, items=100))
    """
    placed, end = [], 0
    for name, count in items.items():
        placed.append(Scratch(name, end, count))
        size = count * SCRATCH_DTYPE.itemsize
        end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return tuple(placed)


def spanning(name: str, pieces: tuple[Scratch, ...]) -> tuple[Scratch, ...]:
    """Return one array over neighbouring pieces; none over none.

    Examples
    --------
    >>> spanning("zeroed", lay_out_scratch({"dq_acc": 3, "scratch": 100}))
    (Scratch(name='zeroed', offset=0, items=164),)
    """
    if not pieces:
        return ()
    first, last = pieces[0], pieces[-1]
    items = (last.offset - first.offset) // SCRATCH_DTYPE.itemsize + last.items
    return (Scratch(name, first.offset, items),)


class Overlaps(NamedTuple):
    """What a call's arrays, as they are laid out, have to be asked before results are written."""

    pairs: tuple[tuple[str, str, int, int, bool], ...]
    """What each `Pair` holds: plain tuples come apart faster, and each call takes them apart."""
    results: tuple[str, ...]
    shown_as: Mapping[str, str]

    @classmethod
    def of(
        cls,
        layouts: Mapping[str, Layout],
        writes: Iterable[str],
        shown_as: Mapping[str, str] = MappingProxyType({}),
        in_place: Mapping[str, str] = MappingProxyType({}),
        item_by_item: bool = False,
    ) -> Overlaps:
        """Pair each array of `writes` with every other; `shown_as` has names for people.

        `in_place` has, for a result, the array that it may be itself, item for item; with
        `item_by_item` each result may be any array that is only read.
        """
        writes = frozenset(writes)
        names, spans = [*layouts], {name: span(layout) for name, layout in layouts.items()}
        results = tuple(name for name in names if name in writes)
        pairs = [
            Pair(
                result,
                other,
                least=spans[result].start - spans[other].end,
                most=spans[result].end - spans[other].start,
                may_be_same=(
                    in_place.get(result) == other or (item_by_item and other not in results)
                )
                and layouts[result] == layouts[other],
            )
            for result in results
            for other in names
            if other not in results or names.index(other) > names.index(result)
        ]
        return cls(tuple((*pair,) for pair in pairs), results, shown_as)

    def check(self, operands: Operands) -> None:
        """Raise ValueError if a result is read-only or shares an item with another array.

        Where items lie settles almost every pair.
        """
        places = operands.places
        for result, other, least, most, may_be_same in self.pairs:
            distance = places[other] - places[result]
            if least < distance < most and not (may_be_same and distance == 0):
                self._check_items(operands, result, other)
        if operands.device_id is None:
            for result in self.results:
                require_writable(self._shown(result), operands.arrays[result])

    def _check_items(self, operands: Operands, result: str, other: str) -> None:
        layouts = layouts_of(operands.description)
        distance = operands.places[other] - operands.places[result]
        if share_an_item(layouts[result], layouts[other], distance):
            shown = self._shown(result)
            raise error(
                ValueError,
                f"{shown} overlaps {self._shown(other)} in memory",
                "both are written"
                if other in self.results
                else "results are written while inputs are still read",
                f"give {shown} memory of its own, or leave it out",
            )

    def _shown(self, name: str) -> str:
        return self.shown_as.get(name, name)


def require_apart(
    operands: Operands,
    writes: Mapping[str, Output | None],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise unless what is written, or is scratch memory, fits and shares no item with the rest.

    `writes` has the arrays that are written, where they are given, each with the result that it has
    to be, or None where others check that; `shown_as` has names for people.
    """
    names = tuple(shown_as.items())
    _apart(operands.description, tuple(writes.items()), names).check(operands)


@lru_cache(maxsize=4096)
def _apart(
    description: Description,
    writes: tuple[tuple[str, Output | None], ...],
    shown_as: tuple[tuple[str, str], ...],
) -> Overlaps:
    layouts = layouts_of(description)
    for name, output in writes:
        if output is not None and name in layouts:
            require_output(dict(shown_as).get(name, name), layouts[name], *output)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return Overlaps.of(layouts, ("workspace", *dict(writes)), dict(shown_as))
