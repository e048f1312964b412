"""Where NumPy arrays run: the reference, or the kernels on the emulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from cupyattn.arrays import Operands
from cupyattn.errors import error
from cupyattn.kernels.cuda_device import cuda_device
from cupyattn.kernels.device import Device

if TYPE_CHECKING:
    from cupyattn.emulator import Checks, Report

BACKEND_VARIABLE = "CUPYATTN_BACKEND"
BACKENDS = ("reference", "emulator")

# What NumPy arrays run on: a device, or None for the reference; unset, the environment decides.
_numpy_device: ContextVar[Device | None] = ContextVar("cupyattn_numpy_device")


@contextmanager
def backend(
    name: str, /, *, checks: Checks | None = None, report: Report | None = None
) -> Iterator[None]:
    """Choose what NumPy arrays run on inside a ``with`` block.

    CuPy arrays always run on their GPU.

    Parameters
    ----------
    name : {"reference", "emulator"}
        "reference", the default outside of any block: NumPy in float64. "emulator": the CUDA
        kernels, compiled to PTX for sm_75 and executed on NumPy by `cupyattn.emulator`, with the
        checks, configurations and launches that a GPU would get. The environment variable
        CUPYATTN_BACKEND sets the default.
    checks : emulator.Checks, optional
        Which faults the emulator looks for in the kernels; by default all of them.
    report : emulator.Report, optional
        Is filled with what the kernels do: bank conflicts, sectors, instructions.

    Raises
    ------
    ValueError
        For another name, or checks and report without the emulator.

    Notes
    -----
    The choice belongs to the present context: other threads and asynchronous tasks keep theirs.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
    >>> expected = cupyattn.attention(q, k, v, causal=True)
    >>> with cupyattn.backend("emulator"):
    ...     out = cupyattn.attention(q, k, v, causal=True, implementation="tiled")
    >>> np.allclose(out, expected, atol=1e-6)
    True
    """
    token = _numpy_device.set(_named_device(name, "backend", checks, report))
    try:
        yield
    finally:
        _numpy_device.reset(token)


def device_of(operands: Operands) -> Device | None:
    """Return the device that a call's arrays run on; None stands for the reference."""
    if operands.library == "cupy":
        return cuda_device(operands.device_id)
    try:
        return _numpy_device.get()
    except LookupError:
        name = os.environ.get(BACKEND_VARIABLE) or "reference"
        device = _named_device(name, BACKEND_VARIABLE)
        _numpy_device.set(device)
        return device


def _named_device(
    name: str, given_as: str, checks: Checks | None = None, report: Report | None = None
) -> Device | None:
    if name not in BACKENDS:
        raise error(
            ValueError,
            f"{given_as} is {name!r}",
            f"allowed are {', '.join(map(repr, BACKENDS))}",
            "choose one of them; a GPU runs CuPy arrays whatever it is",
        )
    if name == "emulator":
        # Here, because the emulator is a large package that most processes never need.
        from cupyattn.emulator import Checks
        from cupyattn.kernels.emulated_device import EmulatedDevice

        return EmulatedDevice(checks or Checks.all(), report)
    if checks is not None or report is not None:
        raise error(
            ValueError,
            f"checks or report with backend {name!r}",
            "they are the emulator's",
            "leave them out, or use backend('emulator', ...)",
        )
    return None
