"""GPUs through CuPy: the only place that loads modules."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cupyattn.runtime.arch import ARCH_VARIABLE, TURING, Arch, arch_of, arch_override, target_of
from cupyattn.runtime.arrays import Array, Operands
from cupyattn.runtime.compile import compile_cubin, compile_ptx
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device import traits_of
from cupyattn.runtime.device.arguments import PackedArguments
from cupyattn.runtime.device.tensor_cores import (
    IN_CAPTURE,
    TensorCores,
    measured,
    without_measuring,
)
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.spec import Specialisation, Value
from cupyattn.runtime.tuning import choices_for


def device_count() -> int:
    """Return how many CUDA devices there are: 0 without a driver, or without CuPy.

    Raises
    ------
    RuntimeError
        If CuPy cannot be imported because CUPY_CACHE_DIR is no usable folder.
    """
    try:
        cupy = load_cupy()
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


_STATIC_LIMIT = 48 * 1024  # bytes of shared memory that a kernel may have without opting in
_MOST_DYNAMIC_SHARED_BYTES, _SHARED_MEMORY_CARVEOUT = 8, 9  # CUfunction_attribute


@cache
def cuda_device(ordinal: int) -> CudaDevice:
    """Return the CUDA device of this ordinal, the same object each time."""
    return CudaDevice(ordinal)


class CudaDevice:
    """A GPU through CuPy. Kernels are loaded as modules and start on its current stream."""

    null = 0
    _traits: DeviceTraits | None = None

    def __init__(self, ordinal: int) -> None:
        cupy = load_cupy()

        self._cupy = cupy
        self._current_device = cupy.cuda.runtime.getDevice
        self.ordinal = ordinal
        self.capability = int(cupy.cuda.Device(ordinal).compute_capability)
        self.arch = _arch_for(self.capability)
        runtime = cupy.cuda.runtime
        self.multiprocessors, self.l2_bytes = (
            int(runtime.deviceGetAttribute(attribute, ordinal))
            for attribute in (
                runtime.cudaDevAttrMultiProcessorCount,
                runtime.cudaDevAttrL2CacheSize,
            )
        )
        self._tensor_cores = without_measuring(self.capability, self.name)
        self.choices = choices_for(self.name, self.arch.real)
        self._kernels: dict[Specialisation, CudaKernel] = {}
        self._loading = threading.Lock()

    def __setattr__(self, name: str, value: object) -> None:
        """Set a property of the device, and drop the cached `traits` so that plans see it."""
        super().__setattr__(name, value)
        super().__setattr__("_traits", None)

    @property
    def traits(self) -> DeviceTraits:
        """The properties that plans depend on, cached because each call needs them."""
        return self._traits or self._make_traits()

    def _make_traits(self) -> DeviceTraits:
        traits = traits_of(self)
        if self._tensor_cores is not None:  # in a capture the answer is only an assumption
            super().__setattr__("_traits", traits)
        return traits

    @property
    def name(self) -> str:
        """The product name that the driver reports."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self.ordinal)
        return properties["name"].decode()

    @property
    def tensor_cores(self) -> bool:
        """Whether matrix products of float16 use tensor cores instead of float32 arithmetic."""
        return (self._tensor_cores or self.find_tensor_cores()).present

    def find_tensor_cores(self) -> TensorCores:
        """Return whether the device has tensor cores, and how that is known.

        If the name does not decide, a kernel of at most 0.1 ms measures it once, and this waits for
        the kernel. A CUDA graph capture cannot wait: there tensor cores are assumed.
        """
        if self._tensor_cores is None:
            with self._cupy.cuda.Device(self.ordinal):
                if self._cupy.cuda.get_current_stream().is_capturing():
                    return IN_CAPTURE
                self._tensor_cores = measured(self)
        return self._tensor_cores

    @property
    def loaded(self) -> tuple[Specialisation, ...]:
        """The kernels that this process has loaded on this device."""
        return tuple(self._kernels)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an uninitialised array from CuPy's current memory pool."""
        if self._current_device() == self.ordinal:
            return self._cupy.ndarray(shape, dtype)
        with self._cupy.cuda.Device(self.ordinal):
            return self._cupy.ndarray(shape, dtype)

    def zero(self, array: Array) -> None:
        """Fill an array of this device with zeros, whichever device is current."""
        if self._current_device() == self.ordinal:
            array.fill(0)
            return
        with self._cupy.cuda.Device(self.ordinal):
            array.fill(0)

    def arguments(self, operands: Operands) -> list[Any]:
        """Return the addresses of a call's arrays, in a new list."""
        return [*operands.places]

    def argument(self, array: Any) -> int:
        """Return the address of an array."""
        return array.data.ptr

    def argument_within(self, memory: Array, offset: int, *_: object) -> int:
        """Return the address of an array in the memory of another, without making it."""
        return memory.data.ptr + offset

    def load(self, specialisation: Specialisation) -> CudaKernel:
        """Return the kernel; the first time, compile it (or read it from the cache) and load it.

        Raises
        ------
        RuntimeError
            If the first time is inside a CUDA graph capture, which loading would break.
        """
        kernel = self._kernels.get(specialisation)
        return kernel if kernel is not None else self._load(specialisation)

    def _load(self, specialisation: Specialisation) -> CudaKernel:
        with self._cupy.cuda.Device(self.ordinal), self._loading:
            if specialisation in self._kernels:
                return self._kernels[specialisation]
            if self._cupy.cuda.get_current_stream().is_capturing():
                raise error(
                    RuntimeError,
                    f"the first call of {specialisation.spec.entry} with these options came "
                    "inside a CUDA graph capture",
                    "a capture can only hold kernels that are loaded already",
                    "call once first, outside the capture",
                )
            kernel = CudaKernel(self, specialisation)
            self._kernels[specialisation] = kernel
            return kernel


class CudaKernel:
    """A kernel of a module, loaded on one GPU."""

    def __init__(self, device: CudaDevice, specialisation: Specialisation) -> None:
        cupy = device._cupy
        with no_fork():
            from cupy_backends.cuda.api import driver

        # Looked up once: attribute accesses would slow down every launch.
        self._launch = driver.launchKernel
        self._on_device = cupy.cuda.Device
        self._current_device = cupy.cuda.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self.specialisation = specialisation
        self._ordinal = device.ordinal
        # For an older architecture than its own, the driver gets PTX and compiles it.
        compiler = compile_cubin if device.arch.number == device.capability else compile_ptx
        code = compiler(specialisation, device.arch).code
        self.target = target_of(code)
        # Not RawModule, which would read the file again: this code has been checked.
        module = cupy.cuda.function.Module()
        module.load(code)
        entry = specialisation.spec.entry
        try:
            self._function = module.get_function(entry)
        except RuntimeError as missing:  # CuPy's CUDADriverError is one
            raise error(
                RuntimeError,
                f"no kernel {entry!r} in the module ({missing})",
                "a kernel is found by its name, which C++ changes",
                'declare it extern "C" __global__',
            ) from missing
        self._address = self._function.ptr
        if specialisation.shared_bytes > _STATIC_LIMIT:
            driver.funcSetAttribute(
                self._address, _MOST_DYNAMIC_SHARED_BYTES, specialisation.shared_bytes
            )
        if specialisation.shared_bytes:
            # In percent. Without it the driver may choose 32 KB on Turing, and one CTA per SM.
            driver.funcSetAttribute(self._address, _SHARED_MEMORY_CARVEOUT, 100)
        self._threads = specialisation.threads
        self._shared_bytes = specialisation.shared_bytes
        self._of_thread = threading.local()

    def start(
        self, grid: tuple[int, int, int], addresses: Sequence[int], values: tuple[Value, ...]
    ) -> None:
        """Start the kernel on the current stream of its device, without waiting."""
        if self._current_device() != self._ordinal:
            with self._on_device(self._ordinal):
                self.start(grid, addresses, values)
            return
        try:
            packed: PackedArguments = self._of_thread.packed
        except AttributeError:
            # A thread's first launch goes through CuPy, which makes the GPU's context current.
            pointers = map(np.uint64, addresses)
            self._function(grid, (self._threads, 1, 1), (*pointers, *values), self._shared_bytes)
            self._of_thread.packed = PackedArguments(self.specialisation.spec)
            return
        packed.fill(addresses, values)
        x, y, z = grid
        self._launch(  # one by one: with stars a call first makes a list of them
            self._address, x, y, z, self._threads, 1, 1, self._shared_bytes,
            self._current_stream(self._ordinal).ptr, packed.address, 0,
        )  # fmt: skip


def _arch_for(capability: int) -> Arch:
    """Return the architecture to compile for: the device's own, or that of CUPYATTN_ARCH."""
    if capability < TURING.number:
        raise error(
            RuntimeError,
            f"this GPU has compute capability {capability / 10:.1f}",
            "7.5 (Turing) is the oldest supported",
            "use a newer GPU, or NumPy arrays, which run on the CPU",
        )
    override = arch_override()
    if override is None:
        return arch_of(capability)
    if override.number > capability:
        raise error(
            ValueError,
            f"{ARCH_VARIABLE}={override.number} on a device of compute capability "
            f"{capability / 10:.1f}",
            "it is not above the device's own",
            f"set {ARCH_VARIABLE}=75, or unset it",
        )
    return override
