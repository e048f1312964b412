"""The choice of what NumPy arrays run on (reference or emulator) and of what is checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from cupyattn.runtime import value_checks
from cupyattn.runtime.arrays import Operands
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.fork import no_fork

if TYPE_CHECKING:
    from cupyattn.emulator import Checks, Report

BACKEND_VARIABLE = "CUPYATTN_BACKEND"
BACKENDS = ("reference", "emulator")

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class _Choice(NamedTuple):
    """The settings inside a block."""

    name: str
    checks: Checks | bool | None
    report: Report | None
    device: Device | None
    """The device of NumPy arrays; None means the reference."""
    outside: _Choice | None
    """The settings to restore after the block."""


# None until the environment variable has been read, once for each context.
_choice: ContextVar[_Choice | None] = ContextVar("cupyattn_backend", default=None)


def backend(
    name: str | None = None,
    *,
    checks: Checks | bool | None = None,
    report: Report | None = None,
) -> Backend:
    """Choose what NumPy arrays run on, and what is checked, inside a ``with`` block.

    CuPy arrays always run on their GPU.

    Parameters
    ----------
    name : {"reference", "emulator"}, optional
        "reference", the default outside of any block: NumPy in float64. "emulator": the CUDA
        kernels, compiled to PTX and executed on NumPy by `cupyattn.emulator`, with the checks of a
        call, configurations and launches that a GPU would get: a Turing GPU (sm_75), or the one
        that the environment variable CUPYATTN_ARCH names (80, 86, 89, 90, ...) when the block
        begins. The variable CUPYATTN_BACKEND sets the default. Without a name, only `checks` and
        `report` change. With a name, these two start from their defaults.
    checks : bool or emulator.Checks, optional
        On the emulator, the faults to look for in the kernels: all with True, the default; none
        with False; those of an `emulator.Checks`. On a GPU, True checks the values in arrays, such
        as lengths and block ids, for which each call waits for the GPU. By default only shapes and
        dtypes are checked there. The values in NumPy arrays are always checked.
    report : emulator.Report, optional
        Filled with what the kernels do on the emulator: bank conflicts, sectors, instructions.

    Returns
    -------
    Backend
        A context manager. It may be entered any number of times, also inside of itself and from
        several threads at once. It is also a decorator: the whole function runs in the block.

    Raises
    ------
    ValueError
        For an unknown name, or for a report or an `emulator.Checks` without the emulator.
    TypeError
        For checks or a report of another type.

    Notes
    -----
    The choice belongs to the current context: other threads and asynchronous tasks keep their own.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
    >>> expected = cupyattn.attention(q, k, v, causal=True)
    >>> with cupyattn.backend("emulator"):
    ...     out = cupyattn.attention(q, k, v, causal=True, implementation="tiled")
    >>> np.allclose(out, expected, atol=1e-6)
    True

    Without checks it is faster:

    >>> with cupyattn.backend("emulator"), cupyattn.backend(checks=False):
    ...     again = cupyattn.attention(q, k, v, causal=True, implementation="tiled")
    >>> np.array_equal(out, again)
    True
    """
    return Backend(name, checks, report)


class Backend(ContextDecorator):
    """The context manager that `backend` returns."""

    def __init__(self, name: object, checks: object, report: object) -> None:
        self._name = None if name is None else _require_name(name, "backend")
        self._checks = _require_checks(checks)
        self._report = _require_report(report)
        if self._name is not None:
            _require_use(self._name, self._checks, self._report)

    def __enter__(self) -> None:
        outside = _choice.get()
        name, checks, report = self._name, self._checks, self._report
        if name is None:
            outside = outside or _from_environment()
            name = outside.name
            checks = outside.checks if checks is None else checks
            report = outside.report if report is None else report
            _require_use(name, checks, report)
        _hold(_Choice(name, checks, report, _device(name, checks, report), outside))

    def __exit__(self, *_: object) -> None:
        # The outer settings are in the context, not here: this object may be entered in others too.
        choice = _choice.get()
        _hold(choice and choice.outside)

    def __call__(self, function: _Decorated) -> _Decorated:
        """Return a function that runs entirely in the block."""
        if any(runs_later(function) for runs_later in _RUN_LATER):
            raise error(
                TypeError,
                f"backend as a decorator of {function.__name__}, which runs after it has returned",
                "it decorates plain functions",
                "write 'with backend(...):' inside of the function",
            )
        return super().__call__(function)


_RUN_LATER = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction


def device_of(operands: Operands) -> Device | None:
    """Return the device that a call's arrays run on; None means the reference."""
    if operands.device_id is not None:
        return cuda_device(operands.device_id)
    return (_choice.get() or _from_environment()).device


def kernels_run_numpy_arrays() -> bool:
    """Tell whether calls on NumPy arrays run kernels here, on the emulator."""
    return (_choice.get() or _from_environment()).device is not None


@contextmanager
def running_on(device: Device) -> Iterator[None]:
    """Run NumPy arrays on any device, such as one that records launches."""
    outside = _choice.get()
    _hold(_Choice("emulator", None, None, device, outside))
    try:
        yield
    finally:
        _hold(outside)


def _hold(choice: _Choice | None) -> None:
    _choice.set(choice)
    value_checks.on_gpu.set(choice is not None and choice.checks is True)


def _from_environment() -> _Choice:
    name = _require_name(os.environ.get(BACKEND_VARIABLE) or "reference", BACKEND_VARIABLE)
    choice = _Choice(name, None, None, _device(name, None, None), None)
    _hold(choice)
    return choice


def _device(name: str, checks: Checks | bool | None, report: Report | None) -> Device | None:
    if name == "reference":
        return None
    # Imported here: the emulator is a large package that most processes never need.
    with no_fork():
        from cupyattn.emulator import Checks
        from cupyattn.runtime.device.emulated import EmulatedDevice

    if not isinstance(checks, Checks):
        checks = Checks.none() if checks is False else Checks.all()
    return EmulatedDevice(checks, report)


def _require_name(name: object, given_as: str) -> str:
    if isinstance(name, str) and name in BACKENDS:
        return name
    raise error(
        ValueError,
        f"{given_as} is {shown(name)}",
        f"allowed are {', '.join(map(repr, BACKENDS))}",
        "choose one of them; a GPU runs CuPy arrays whatever it is",
    )


def _require_checks(checks: object) -> Checks | bool | None:
    if checks is None:
        return None
    if isinstance(checks, bool | np.bool_):
        return bool(checks)
    with no_fork():
        from cupyattn.emulator import Checks

    if isinstance(checks, Checks):
        return checks
    raise error(
        TypeError,
        f"checks has type {type(checks).__name__}",
        "it must be True, False or an emulator.Checks",
        "pass for example checks=False, or checks=Checks.fast()",
    )


def _require_report(report: object) -> Report | None:
    if report is None:
        return None
    with no_fork():
        from cupyattn.emulator import Report

    if isinstance(report, Report):
        return report
    raise error(
        TypeError,
        f"report has type {type(report).__name__}",
        "it must be an emulator.Report",
        "make one: report = Report(), and pass report=report",
    )


def _require_use(name: str, checks: Checks | bool | None, report: Report | None) -> None:
    """Raise ValueError for options of the emulator without the emulator."""
    if name != "emulator" and (report is not None or not isinstance(checks, bool | None)):
        raise error(
            ValueError,
            f"{'checks' if report is None else 'report'} with backend {name!r}",
            "an emulator.Checks and a report are the emulator's",
            "leave them out, or use backend('emulator', ...)",
        )
