"""Plans: the launches of a call and their memory, and the one runner that launches them.

A plan holds everything of a call that depends only on the description of its arrays. It is made
once and cached. `run` allocates, zeroes and launches; no other module starts a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from operator import index as exact_integer
from operator import itemgetter
from typing import Any, Generic, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array, Operands, address, array_within
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.records import R, Record, fields_of, slots_of, values_of
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, StructParameter
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.runtime.structs import beyond

MAX_GRID_X = 2**31 - 1


def launch(
    device: Device,
    specialisation: Specialisation,
    ctas: int,
    arguments: Sequence[Any],
) -> None:
    """Start `ctas` CTAs of a kernel on the device's current stream.

    Parameters
    ----------
    device : Device
        Where the array arguments live.
    specialisation : Specialisation
        What to run; loaded the first time.
    ctas : int
        The size of the (flat) grid. None are started for 0.
    arguments : sequence
        In the order of the spec's parameters: arrays, numbers, struct scalars; None for an optional
        pointer.

    Raises
    ------
    TypeError
        If the arguments do not fit the spec: an error in the caller within this library.
    ValueError
        If the grid is larger than a GPU allows.
    """
    if ctas:
        ready = typed(specialisation.spec, arguments)
        count = len(specialisation.spec.pointers)
        passed = [device.null if x is None else device.argument(x) for x in ready[:count]]
        start(device, specialisation, ctas, passed, tuple(ready[count:]))


def typed(spec: KernelSpec, arguments: Sequence[Any]) -> list[Any]:
    """Check arguments against what a kernel declares, and give numbers their C types.

    Raises
    ------
    TypeError
        If they do not fit.
    ValueError
        If an integer is beyond its C type.
    """
    if len(arguments) != len(spec.parameters):
        raise TypeError(
            f"{spec.entry} takes {len(spec.parameters)} arguments, got {len(arguments)}"
        )
    required, by_value = _checks(spec)
    result = [*arguments]
    for index in required:
        if result[index] is None:
            name = spec.parameters[index].name
            raise TypeError(f"{name} of {spec.entry} must be an array, not None")
    for index, coerce in by_value:
        result[index] = coerce(result[index])
    return result


def start(
    device: Device,
    specialisation: Specialisation,
    ctas: int,
    arguments: Sequence[Any],
    values: tuple[Any, ...],
) -> None:
    """Start at least one CTA, with the device's arguments for arrays, and `typed` values."""
    if ctas > MAX_GRID_X:
        raise _too_large(specialisation, ctas)
    device.load(specialisation).start((ctas, 1, 1), arguments, values)


def prepare(device: Device, specialisation: Specialisation, ctas: int) -> None:
    """Load a kernel that is to be launched, and check its grid.

    A call of several launches prepares them all before it writes anything.

    Raises
    ------
    ValueError
        If the grid is larger than a GPU allows.
    """
    if ctas > MAX_GRID_X:
        raise _too_large(specialisation, ctas)
    if ctas:
        device.load(specialisation)


def _too_large(specialisation: Specialisation, ctas: int) -> ValueError:
    return error(
        ValueError,
        f"the problem needs {ctas} CTAs of {specialisation.spec.entry}",
        f"a launch has at most {MAX_GRID_X}",
        "split the batch over several calls",
    )


_Coercion = Callable[[Any], Any]


@cache
def _checks(spec: KernelSpec) -> tuple[tuple[int, ...], tuple[tuple[int, _Coercion], ...]]:
    """Return which arguments must be arrays, and which go by value and how they are typed.

    Untyped, CuPy would pass a Python int as 64 bits and a float as a double, whatever the kernel
    declares.
    """
    required: list[int] = []
    by_value: list[tuple[int, _Coercion]] = []
    for index, parameter in enumerate(spec.parameters):
        if isinstance(parameter, Pointer):
            required += [] if parameter.optional else [index]
        elif isinstance(parameter, Scalar):
            by_value.append((index, _number(parameter)))
        else:
            by_value.append((index, _struct_check(spec.entry, parameter)))
    return tuple(required), tuple(by_value)


def _number(parameter: Scalar) -> _Coercion:
    """Return the conversion of a number to its C type. It never changes the value silently."""
    name, dtype, fix = parameter.name, parameter.dtype, parameter.fix
    kind = dtype.type

    def integer(value: Any) -> Any:
        try:
            return kind(exact_integer(value))
        except OverflowError:
            raise beyond(name, value, dtype, fix=fix) from None
        except TypeError:
            raise _no_number(parameter, value, "an integer", "int") from None

    def boolean(value: Any) -> Any:
        if type(value) in (bool, np.bool_) or (isinstance(value, Integral) and value in (0, 1)):
            return kind(value)
        raise _no_number(parameter, value, "a bool", "bool")

    def real(value: Any) -> Any:
        number, plain = value, type(value)
        if plain is not float and plain is not int:
            # The class Real comes last: asking for it takes a microsecond.
            if not isinstance(value, (int, np.floating, np.integer, kind, Real)):
                raise _no_number(parameter, value, "a real number", "float")
            try:
                number = float(value)
            except OverflowError:  # of a fraction
                raise beyond(name, value, dtype, reals, fix) from None
        if -largest <= number <= largest or number != number or number in (math.inf, -math.inf):
            return kind(number)
        raise beyond(name, value, dtype, reals, fix)

    if dtype.kind == "c":
        return kind
    if dtype.kind in "biu":
        return boolean if dtype.kind == "b" else integer
    largest = _largest(dtype)
    reals = f"-{largest:g} to {largest:g}"
    return real


def _largest(dtype: np.dtype) -> float:
    """Return the largest finite number of a dtype such as float32 or bfloat16."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).max)
    with no_fork():
        import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)


def _no_number(parameter: Scalar, value: object, allowed: str, kind: str) -> TypeError:
    name = parameter.name
    return error(
        TypeError,
        f"{name} is {shown(value)} of type {type(value).__name__}",
        f"kernels take {name} as {parameter.dtype.name}, {allowed}",
        f"convert it with {kind}(...)",
    )


def _struct_check(entry: str, parameter: StructParameter) -> _Coercion:
    expected = parameter.dtype

    def struct(value: object) -> object:
        dtype = getattr(value, "dtype", None)
        if dtype is not expected and dtype != expected:
            raise TypeError(f"{parameter.name} of {entry} is another struct: {value!r}")
        return value

    return struct


SCRATCH_ALIGNMENT = 256  # bytes: the alignment of CuPy's allocations
SCRATCH_DTYPE = np.dtype(np.float32)
_BYTES = np.dtype(np.uint8)

NULL = -1
"""The slot of an absent array, for which kernels get a null pointer."""


class Step(NamedTuple):
    """One launch. Arrays are slots: the numbers of the record's fields, then scratch arrays."""

    specialisation: Specialisation
    ctas: int
    values: tuple[Any, ...]
    """Arguments that are passed by value, after the arrays, typed as the kernel declares."""
    slots: tuple[int, ...]
    """Slots of the arrays, in the order of the parameters."""
    take: Callable[[Sequence[object]], Sequence[object]]
    """Returns the arguments in these slots; all at once, which takes half the time."""

    @classmethod
    def of(
        cls, specialisation: Specialisation, ctas: int, slots: Iterable[int | None], *values: object
    ) -> Step:
        """Make a step; `slots` has one for each array of the kernel, None for absent arrays.

        Raises
        ------
        TypeError
            If an array that the kernel needs is absent, or arguments do not fit its declaration.
            This is an error of this library, found when the plan is made.
        """
        given = tuple(slots)
        by_value = typed(specialisation.spec, [*given, *values])[len(given) :]
        taken = tuple(NULL if slot is None else slot for slot in given)
        return cls(specialisation, ctas, tuple(by_value), taken, _taking(taken))


def _taking(slots: tuple[int, ...]) -> Callable[[Sequence[object]], Sequence[object]]:
    return itemgetter(*slots) if len(slots) > 1 else lambda of: [of[slot] for slot in slots]


class Output(NamedTuple):
    """Shape and dtype of a result, which is allocated if the caller gave no array."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Made(NamedTuple):
    """A result of a plan: its field in the record, and its shape and dtype if it is allocated."""

    slot: int
    field: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Scratch(NamedTuple):
    """A float32 array within the workspace."""

    offset: int
    """Bytes from the start of the workspace."""
    items: int

    @property
    def end(self) -> int:
        """Bytes from the start of the workspace to the end of the array."""
        return self.offset + self.items * SCRATCH_DTYPE.itemsize


class Plan(NamedTuple):
    """Everything that the launches of a call need and that equal calls share."""

    steps: tuple[Step, ...]
    results: tuple[Made, ...]
    scratch: tuple[Scratch, ...] = ()
    """Scratch arrays, whose slots follow those of the record's fields."""
    zero_first: tuple[int, ...] = ()
    """Slots of results and scratch arrays to zero before the first launch."""
    zero_new: bool = False
    """Whether allocated results have to start as zeros, because kernels add to them."""
    transposed: tuple[int, ...] = ()
    """Slots of results that are allocated as transposes of arrays in C order."""

    @property
    def workspace_bytes(self) -> int:
        """The size of the scratch memory."""
        return self.scratch[-1].end if self.scratch else 0


class Planner(Generic[R]):
    """The builder of a plan: it numbers the arrays of a call and its scratch arrays.

    Attributes
    ----------
    slots : Record of int or None
        The slot of each field, None if its array is neither given nor made.
    results : tuple of Made
        The results of the plan.
    """

    def __init__(self, kind: type[R], given: Record, outputs: Mapping[str, Output]) -> None:
        """Take the kind of record, the record of what is given, and the outputs by field."""
        self._fields = fields_of(kind)
        numbers = {field: slot for slot, field in enumerate(self._fields)}
        self.results = tuple(Made(numbers[name], name, *each) for name, each in outputs.items())
        present = zip(self._fields, values_of(given), strict=True)
        self.slots = slots_of(
            kind, [None if each is None and name not in outputs else 0 for name, each in present]
        )
        self._pieces: list[Scratch] = []

    def scratch(self, items: int) -> int:
        """Add a float32 scratch array after the others; return its slot."""
        end = self._pieces[-1].end if self._pieces else 0
        offset = -(-end // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self._pieces.append(Scratch(offset, items))
        return len(self._fields) + len(self._pieces) - 1

    def plan(
        self,
        *steps: Step,
        zero_first: Iterable[int] = (),
        zero_new: bool = False,
        transposed: Iterable[int] = (),
    ) -> Plan:
        """Return the plan of these steps."""
        pieces = tuple(self._pieces)
        return Plan(steps, self.results, pieces, tuple(zero_first), zero_new, tuple(transposed))


def run(device: Device, plan: Plan, operands: Operands[R]) -> R:
    """Run a plan on the arrays of a call, including `workspace`; return them with the results.

    Raises
    ------
    ValueError
        If a workspace was given that does not fit. Nothing has been written by then.
    """
    # Unpacked at once: looking up each attribute of the plan takes longer in each call.
    steps, results, scratch, zero_first, zero_new, transposed = plan
    arrays, arguments = operands.arrays, device.arguments(operands)
    to_zero: list[Array] = []
    for slot, field, shape, dtype in results:
        result = getattr(arrays, field)
        if result is None:
            if slot in transposed:
                result = device.empty(shape[::-1], dtype).T
            else:
                result = device.empty(shape, dtype)
            setattr(arrays, field, result)
            arguments[slot] = device.argument(result)
            if zero_new and slot not in zero_first:
                to_zero.append(result)
        if slot in zero_first:
            to_zero.append(result)
    if scratch:
        fields = len(arguments)
        given = getattr(arrays, "workspace", None)
        workspace = workspace_of(device, plan.workspace_bytes, given)
        for slot, (offset, items) in enumerate(scratch, fields):
            place = offset, (items,), SCRATCH_DTYPE
            arguments.append(device.argument_within(workspace, *place))
            if slot in zero_first:
                to_zero.append(array_within(workspace, *place))
    arguments.append(device.null)
    if zero_first or len(steps) > 1:
        for step in steps:
            prepare(device, step.specialisation, step.ctas)
    for array in to_zero:
        device.zero(array)
    for specialisation, ctas, values, _, take in steps:
        if ctas:
            start(device, specialisation, ctas, take(arguments), values)
    return arrays


def allot(device: Device | None, outputs: Sequence[Output], given: Array | None) -> list[Array]:
    """Return scratch arrays of a call that runs several plans, in the workspace or in new memory.

    Without a device they are new NumPy arrays.

    Raises
    ------
    ValueError
        If the given workspace does not fit.
    """
    if device is None:
        return [np.empty(*output) for output in outputs]
    offsets, end = [], 0
    for shape, dtype in outputs:
        offsets.append(-(-end // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT)
        end = offsets[-1] + math.prod(shape) * dtype.itemsize
    workspace = workspace_of(device, end, given)
    placed = zip(offsets, outputs, strict=True)
    return [array_within(workspace, offset, *output) for offset, output in placed]


def workspace_of(device: Device, needed: int, given: Array | None) -> Array:
    """Return the scratch memory of a call: the given workspace, or new memory.

    Raises
    ------
    ValueError
        If the given workspace is too small or not aligned.
    """
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
