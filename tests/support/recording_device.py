"""A device that starts nothing and remembers everything, and CuPy arrays whose items are nowhere.

What the host does is tried with them without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn import attention
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.recorder import Launch, LaunchRecorder, RecordedKernel
from cupyattn.runtime.spec import Specialisation


def device_array(
    shape: tuple[int, ...],
    dtype: Any = np.float16,
    strides: tuple[int, ...] | None = None,
    address: int | None = None,
) -> Any:
    """A CuPy array whose items are nowhere: none may be touched. Without an address, a new one."""
    cupy = pytest.importorskip("cupy")
    if address is None:
        address = device_array.next_address
        device_array.next_address += 2**40
    memory = cupy.cuda.memory.UnownedMemory(address, 2**39, None, device_id=0)
    pointer = cupy.cuda.memory.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, dtype, pointer, strides)


device_array.next_address = 2**42


class Recorder(LaunchRecorder):
    """Records what is loaded, allocated and zeroed too; it allocates what `make` returns."""

    def __init__(self, make: Callable[[tuple[int, ...], np.dtype], Any] = device_array) -> None:
        super().__init__(TURING)
        self._make = make
        self.loaded: list[Specialisation] = []
        self.allocated: list[Any] = []
        self.zeroed: list[Any] = []

    @property
    def started(self) -> list[Launch]:
        return self.launches

    @property
    def entries(self) -> list[str]:
        """The kernels' entries, in the order of their launches."""
        return [launch.specialisation.spec.entry for launch in self.launches]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        self.allocated.append(self._make(shape, dtype))
        return self.allocated[-1]

    def zero(self, array: Any) -> None:
        self.zeroed.append(array)
        if isinstance(array, np.ndarray):  # CuPy's are nowhere
            super().zero(array)

    def load(self, specialisation: Specialisation) -> RecordedKernel:
        self.loaded.append(specialisation)
        return super().load(specialisation)

    @property
    def did_nothing(self) -> bool:
        return not (self.loaded or self.allocated or self.started)


def launched(recorder: Recorder, *arrays: Any, **options: Any) -> tuple[dict[str, Any], Any, int]:
    """Run attention; returns its kernel's macros, its params, and the CTAs."""
    attention(*arrays, **options)
    specialisation, grid, arguments = recorder.started[-1]
    return dict(specialisation.macros), arguments[-1], grid[0]


def backward_call(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a backward call by name, and its options: (B, Sq, Sk, H, G, D, Dv) as in BASE."""
    f32 = np.float32
    shapes = {"dout": (2, 3, 4, 6), "q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 6)}
    arrays = {name: device_array(shape, f32) for name, shape in shapes.items()}
    arrays |= {"out": device_array((2, 3, 4, 6), f32), "lse": device_array((2, 4, 3), f32)}
    return arrays, {"deterministic": True, **options}
