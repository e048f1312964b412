"""The one place that starts a kernel: arguments are checked and typed by its spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, Struct
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
    kind = parameter.dtype.type

    def number(value: Any) -> Any:
        try:
            return kind(value)
        except OverflowError:
            raise beyond(parameter.name, value, parameter.dtype) from None

    return number


def _struct_check(entry: str, parameter: Struct) -> _Coercion:
    expected = parameter.dtype

    def struct(value: Any) -> Any:
        dtype = getattr(value, "dtype", None)
        if dtype is not expected and dtype != expected:
            raise TypeError(f"{parameter.name} of {entry} is another struct: {value!r}")
        return value

    return struct
