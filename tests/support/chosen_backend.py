"""Where NumPy arrays go at this moment: what the innermost `cupyattn.backend` chose."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays import adopt
from cupyattn.emulator import Checks, Report
from cupyattn.functional.backend import device_of
from cupyattn.kernels.device import Device
from cupyattn.kernels.device.emulated import EmulatedDevice

NUMPY = adopt({"x": np.zeros((2, 3), np.float32)})


def chosen() -> Device | None:
    return device_of(NUMPY)


def on_emulator() -> bool:
    return isinstance(chosen(), EmulatedDevice)


def checks() -> Checks:
    device = chosen()
    assert isinstance(device, EmulatedDevice)
    return device.checks


def report() -> Report | None:
    device = chosen()
    assert isinstance(device, EmulatedDevice)
    return device.report
