"""Where tests run: through the reference, on the emulator with all its checks, on a GPU.

Arrays go there with their strides and come back as NumPy. The kernel tests run on `KERNELS`, the
GPU if there is one, else the emulator. The public functions' promises are tried on every side
(`everywhere`, with conftest's fixture `side`).

Also the dtypes that tests go through (the only list of them), devices without tensor cores, calls
that use a given configuration instead of the usual one, and small kernels that each try one thing
of the CUDA sources (tests/runtime/probes.cu).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyattn
from cupyattn import MaskMod, ScoreMod
from cupyattn.emulator import Checks
from cupyattn.runtime import backend
from cupyattn.runtime.arch import ARCH_VARIABLE, TENSOR_CORES_VARIABLE, TURING
from cupyattn.runtime.arrays import Layout, span
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.runtime.device.tensor_cores import TensorCores
from cupyattn.runtime.plan import launch
from cupyattn.runtime.source import read_unit, source_root
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer, Specialisation
from cupyattn.runtime.tuning import Choices

SENTINEL = 77.0
"""The initial bytes of memory that a call must not write, or must write in full."""

_ALIGNMENT = 256


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """First address of the array's items, and the one after the last."""
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


@contextmanager
def emulated(arch: int, **options: Any) -> Iterator[EmulatedDevice]:
    """Run the public functions on an emulated device of compute capability `arch`, such as 80.

    The options are those of ``backend``. Blocks inside of this one have the architecture, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARCH_VARIABLE, str(arch))
        with cupyattn.backend("emulator", **options):
            choice = backend._choice.get()
            assert choice is not None
            assert isinstance(choice.device, EmulatedDevice)
            yield choice.device


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


def choose(monkeypatch: pytest.MonkeyPatch, question: str, name: str) -> None:
    """Have the kernels' device choose; every emulated one has the choices of its class."""
    device = KERNELS.device
    holder = device if "choices" in vars(device) else type(device)
    monkeypatch.setattr(holder, "choices", Choices({question: name}))


_MMA = re.compile(r"^\s*mma\.", re.MULTILINE)


@contextmanager
def without_tensor_cores() -> Iterator[None]:
    """Inside, the public functions run the kernels of a device without them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TENSOR_CORES_VARIABLE, "0")
        if device_count():
            patch.setattr(KERNELS.device, "_tensor_cores", TensorCores(False, "a test"))
        with KERNELS.running():
            yield


@cache
def has_mma(specialisation: Specialisation) -> bool:
    """Tell whether its PTX has the instruction; what does not include mma.cuh is not compiled."""
    source = source_root() / specialisation.spec.source
    if all(path.name != "mma.cuh" for path in read_unit(source).files):
        return False
    return bool(_MMA.search(compile_ptx(specialisation, TURING).code.decode()))


DTYPES = ("float16", "bfloat16", "float32")
FLOAT_DTYPES = ("float32", "bfloat16")
"""Those that have no products on Turing's tensor cores, and hence kernels of their own."""


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


PROBES = Path(__file__).resolve().parent.parent / "runtime" / "probes.cu"
PHILOX = Path(__file__).with_name("golden") / "philox.cu"  # its words are compared with a GPU's too


class Probe:
    """A probe kernel: `run` copies NumPy arguments to the device and those it writes back."""

    def __init__(self, name: str, *parameters: Parameter, threads: int = 128, **macros: Any):
        self.spec = KernelSpec(
            entry=f"probe_{name}",
            source=str(PHILOX if name == "philox" else PROBES),
            parameters=parameters,
        )
        self.specialisation = self.spec.specialise(
            threads=threads, **{f"PROBE_{name.upper()}": 1}, **macros
        )

    def run(self, ctas: int, *arguments: Any) -> list[np.ndarray]:
        pointers = [isinstance(parameter, Pointer) for parameter in self.spec.parameters]
        passed = [
            KERNELS.put(argument) if is_pointer and argument is not None else argument
            for argument, is_pointer in zip(arguments, pointers, strict=True)
        ]
        launch(KERNELS.device, self.specialisation, ctas, passed)
        return [
            KERNELS.get(argument)
            for argument, parameter in zip(passed, self.spec.parameters, strict=True)
            if isinstance(parameter, Pointer) and not parameter.const
        ]
