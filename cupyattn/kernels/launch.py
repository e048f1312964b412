"""The one place that starts a kernel: arguments are checked and typed by its spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cupyattn.errors import error
from cupyattn.kernels.device import Device
from cupyattn.kernels.spec import KernelSpec, Parameter, Pointer, Scalar, Specialisation

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
    if ctas == 0:
        return
    _require_grid(specialisation, ctas)
    spec = specialisation.spec
    if len(arguments) != len(spec.parameters):
        raise TypeError(
            f"{spec.entry} takes {len(spec.parameters)} arguments, got {len(arguments)}"
        )
    typed = [*arguments]
    for index, coerce in _coercions(spec):
        typed[index] = coerce(typed[index])
    device.load(specialisation).start((ctas, 1, 1), tuple(typed))


def prepare(device: Device, specialisation: Specialisation, ctas: int) -> None:
    """Load a kernel that is to be launched, and check its grid.

    A call of several launches prepares them all before it writes anything.

    Raises
    ------
    ValueError
        If the grid is larger than a GPU allows.
    """
    if ctas:
        _require_grid(specialisation, ctas)
        device.load(specialisation)


def _require_grid(specialisation: Specialisation, ctas: int) -> None:
    if ctas > MAX_GRID_X:
        raise error(
            ValueError,
            f"the problem needs {ctas} CTAs of {specialisation.spec.entry}",
            f"a launch has at most {MAX_GRID_X}",
            "split the batch over several calls",
        )


@cache
def _coercions(spec: KernelSpec) -> tuple[tuple[int, Callable[[Any], Any]], ...]:
    """Return which arguments to type, and how; an optional pointer may be None, which is null."""
    return tuple(
        (index, _coercion(spec.entry, parameter))
        for index, parameter in enumerate(spec.parameters)
        if not (isinstance(parameter, Pointer) and parameter.optional)
    )


def _coercion(entry: str, parameter: Parameter) -> Callable[[Any], Any]:
    """Return the function that types one argument.

    Without it CuPy would pass a Python int as 64 bits and a float as a double, whatever the kernel
    declares.
    """
    if isinstance(parameter, Pointer):
        return _pointer(entry, parameter)
    if isinstance(parameter, Scalar):
        return parameter.dtype.type

    def struct(value: Any) -> Any:
        if getattr(value, "dtype", None) != parameter.dtype:
            raise TypeError(f"{parameter.name} of {entry} is another struct: {value!r}")
        return value

    return struct


def _pointer(entry: str, parameter: Pointer) -> Callable[[Any], Any]:
    def pointer(array: Any) -> Any:
        if array is None:
            raise TypeError(f"{parameter.name} of {entry} must be an array, not None")
        return array

    return pointer
