"""Where tests run: through the reference, on the emulator with all its checks, on a GPU.

Arrays go there with their strides and come back as NumPy. The kernel tests run on `KERNELS`, the
GPU if there is one, else the emulator. The public functions' promises are tried on every side
(`everywhere`, with conftest's fixture `side`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cupyattn
from cupyattn import MaskMod, ScoreMod
from cupyattn.emulator import Checks
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.runtime.spans import span

SENTINEL = 77.0
"""What stands in memory that a call must not write, or must write in full."""

_ALIGNMENT = 256


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """First address of the array's items, and the one behind the last."""
    place = span(Layout(array.shape, array.strides, array.dtype))
    return array.ctypes.data + place.start, array.ctypes.data + place.end


def _memory(start: int, end: int) -> NDArray[np.uint8]:
    if start == end:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), np.uint8)


class NumpyArrays:
    """Arrays stay where they are, and the functions are the reference."""

    def running(self) -> AbstractContextManager[None]:
        return cupyattn.backend("reference")

    def put(self, array: Any) -> Any:
        return array

    def get(self, array: Any) -> np.ndarray:
        return array


class GpuArrays:
    """The first CUDA device."""

    @property
    def xp(self) -> Any:
        """The array library."""
        import cupy

        return cupy

    @property
    def device(self) -> Device:
        """As the operations see it."""
        return cuda_device(0)

    def running(self) -> AbstractContextManager[None]:
        """Inside, the public functions run the kernels on arrays from `put`."""
        return nullcontext()

    def put(self, array: NDArray[Any]) -> Any:
        """Copy an array with the memory around its items: same strides, same alignment."""
        start, end = _extent(array)
        margin = start % _ALIGNMENT
        buffer = self.xp.zeros(margin + end - start, np.uint8)
        if end > start:
            buffer[margin:] = self.xp.asarray(_memory(start, end))
        first = buffer.data + margin + (array.ctypes.data - start)
        return self.xp.ndarray(array.shape, array.dtype, first, array.strides)

    def get(self, array: Any) -> NDArray[Any]:
        """Copy back to NumPy."""
        return self.xp.asnumpy(array)


class EmulatedArrays:
    """The emulator, with every check on."""

    xp = np
    device: Device = EmulatedDevice(Checks.all())

    def running(self) -> AbstractContextManager[None]:
        """Inside, the public functions run the kernels on arrays from `put`."""
        return cupyattn.backend("emulator")

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copy an array with the memory around its items: same strides, same alignment."""
        start, end = _extent(array)
        buffer = np.zeros(end - start + 2 * _ALIGNMENT, np.uint8)
        margin = (start - buffer.ctypes.data) % _ALIGNMENT
        buffer[margin : margin + end - start] = _memory(start, end)
        first = margin + (array.ctypes.data - start)
        return np.ndarray(array.shape, array.dtype, buffer, first, array.strides)

    def get(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copy."""
        return array.copy()


NUMPY, EMULATED, CUPY = NumpyArrays(), EmulatedArrays(), GpuArrays()
KERNELS: GpuArrays | EmulatedArrays = CUPY if device_count() else EMULATED

everywhere = pytest.mark.parametrize(
    "side",
    [
        pytest.param(NUMPY, id="numpy"),
        pytest.param(EMULATED, id="emulator", marks=pytest.mark.nvrtc),
        pytest.param(CUPY, id="cupy", marks=pytest.mark.gpu),
    ],
    indirect=True,
)

kernels_only = pytest.mark.parametrize(
    "side",
    [
        pytest.param(EMULATED, id="emulator", marks=pytest.mark.nvrtc),
        pytest.param(CUPY, id="cupy", marks=pytest.mark.gpu),
    ],
    indirect=True,
)


def placed(side: Any, value: Any) -> Any:
    """Move an option's arrays."""
    if isinstance(value, np.ndarray):
        return side.put(value)
    if isinstance(value, ScoreMod | MaskMod):
        moved = copy(value)
        moved.arrays = {name: placed(side, array) for name, array in value.arrays.items()}
        return moved
    if isinstance(value, cupyattn.Rotary):
        return cupyattn.Rotary(*placed(side, tuple(value)))
    return tuple(placed(side, item) for item in value) if type(value) is tuple else value


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """The arrays among the values, and in tuples of them, keep their contents."""

    def contents(value: Any) -> Any:
        return tuple(map(contents, value)) if isinstance(value, tuple) else _bytes(value)

    before = contents(values)
    yield
    assert contents(values) == before, "an input was written to"


def _bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return CUPY.get(value).tobytes() if type(value).__module__.startswith("cupy.") else None
