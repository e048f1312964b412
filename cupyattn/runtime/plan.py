"""What every operation comes to: launches, and the memory that they share. One runner runs it.

A plan is all of a call that does not change from call to call with arrays of the same description,
so it is made once and remembered. `run` alone allocates, zeroes and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array, Operands, address, array_within
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.launch import prepare, start, typed
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import VECTOR_BYTES

SCRATCH_ALIGNMENT = 256  # bytes: what CuPy gives an array of its own
SCRATCH_DTYPE = np.dtype(np.float32)
_BYTES = np.dtype(np.uint8)

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


class Output(NamedTuple):
    """A result, allocated where the caller gave none."""

    shape: tuple[int, ...]
    dtype: np.dtype


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
    given, arguments = operands.arrays, device.arguments(operands)
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
        workspace = _workspace(device, plan.workspace_bytes, given.get("workspace"))
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
    workspace = _workspace(device, max((piece.end for piece in pieces), default=0), given)
    return {name: array_within(workspace, offset, *arrays[name]) for name, offset, _ in pieces}


def _workspace(device: Device, needed: int, given: Array | None) -> Array:
    """Return the scratch memory of a call: what was given, or new."""
    if given is None:
        return device.empty((needed,), _BYTES)
    beyond = address(given) % VECTOR_BYTES
    if given.nbytes < needed or beyond:
        start = f", {beyond} beyond a multiple of {VECTOR_BYTES}" if beyond else ""
        library = "numpy" if isinstance(given, np.ndarray) else "cupy"
        raise error(
            ValueError,
            f"workspace has {given.nbytes} bytes{start}",
            f"this call needs {needed}, starting at a multiple of {VECTOR_BYTES}",
            f"pass for example {library}.empty({needed}, 'uint8'), or none",
        )
    return given


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
