"""Where the kernel tests run: arrays go to the device with their strides and come back as NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.arrays import Layout, span
from cupyattn.kernels.device import Device, cuda_device

_ALIGNMENT = 256


class GpuArrays:
    """The first CUDA device."""

    @property
    def device(self) -> Device:
        """As the operations see it."""
        return cuda_device(0)

    def put(self, array: NDArray[Any]) -> Any:
        """Copy an array with the memory around its items: same strides, same alignment."""
        import cupy

        place = span(Layout(array.shape, array.strides, array.dtype))
        start, end = array.ctypes.data + place.start, array.ctypes.data + place.end
        margin = start % _ALIGNMENT
        buffer = cupy.zeros(margin + end - start, np.uint8)
        if end > start:
            memory = (ctypes.c_uint8 * (end - start)).from_address(start)
            buffer[margin:] = cupy.asarray(np.frombuffer(memory, np.uint8))
        first = buffer.data + margin + (array.ctypes.data - start)
        return cupy.ndarray(array.shape, array.dtype, first, array.strides)

    def get(self, array: Any) -> NDArray[Any]:
        """Copy back to NumPy."""
        import cupy

        return cupy.asnumpy(array)
