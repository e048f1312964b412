"""Arguments of a launch on a GPU, read back from their memory without a GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.recording_device import device_array

from cupyattn.ops.activations.kernels import ActivationArrays
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.device import cuda as cuda_module
from cupyattn.runtime.device.arguments import PackedArguments
from cupyattn.runtime.device.tensor_cores import TensorCores
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, StructParameter
from cupyattn.runtime.tuning import Choices

PARAMS = np.dtype([("n", np.int64), ("x", np.float32)], align=True)
SPEC = KernelSpec(
    entry="probe",
    source="probe.cu",
    parameters=(
        Pointer("x", const=True),
        Pointer("maybe", optional=True),
        Scalar("count", np.dtype(np.int32)),
        StructParameter("params", PARAMS, "Params"),
    ),
)
ADDRESSES = 2**42 + 16, 2**63 + 32  # the second as a driver may place it, beyond a signed word


def params(n: int, x: float) -> Any:
    return np.array((n, x), PARAMS)[()]


def read(table: int) -> tuple[int, int, int, tuple[int, float]]:
    """Read the arguments of a kernel of SPEC from their addresses."""
    places = struct.unpack("4P", ctypes.string_at(table, 32))
    formats = ("Q", "Q", "i", "qf")
    values = [
        struct.unpack(f"={form}", ctypes.string_at(place, struct.calcsize(f"={form}")))
        for form, place in zip(formats, places, strict=True)
    ]
    return values[0][0], values[1][0], values[2][0], values[3]


def test_packed_arguments_have_the_addresses_of_the_table():
    packed = PackedArguments(SPEC)
    x, maybe = ADDRESSES
    of_a_plan = np.int32(-5), params(3, 0.5)
    packed.fill([x, maybe], of_a_plan)
    assert read(packed.address) == (*ADDRESSES, -5, (3, 0.5))
    packed.fill([maybe, 0], of_a_plan)
    assert read(packed.address) == (ADDRESSES[1], 0, -5, (3, 0.5))
    packed.fill([maybe, x], (np.int32(7), params(-1, 2.0)))
    assert read(packed.address) == (ADDRESSES[1], ADDRESSES[0], 7, (-1, 2.0))
    packed.fill([maybe, x], of_a_plan)
    assert read(packed.address)[2:] == (-5, (3, 0.5)), "with another plan's between"
    packed.fill([maybe, x], (np.int32(9), of_a_plan[1]))
    assert read(packed.address)[2:] == (9, (3, 0.5)), "one of a plan's values changed"


class Driver:
    """A replacement of CuPy for launches: two devices, each with a current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cupy = pytest.importorskip("cupy")
        from cupy_backends.cuda.api import driver

        self.current = 1
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: list[bytes] = []
        self.attributes: list[tuple[int, ...]] = []
        compiled = SimpleNamespace(code=b".target sm_75")
        module = SimpleNamespace(load=self.loaded.append, get_function=lambda _: Function(self))
        monkeypatch.setattr(cuda_module, "compile_cubin", lambda *_: compiled)
        monkeypatch.setattr(cupy.cuda.function, "Module", lambda: module)
        monkeypatch.setattr(driver, "funcSetAttribute", lambda *each: self.attributes.append(each))
        monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: self.current)
        monkeypatch.setattr(cupy.cuda, "Device", lambda ordinal: Current(self, ordinal))
        monkeypatch.setattr(
            cupy.cuda, "get_current_stream", lambda ordinal: SimpleNamespace(ptr=1000 + ordinal)
        )
        monkeypatch.setattr(driver, "launchKernel", self.launch)
        self.device = SimpleNamespace(
            _cupy=cupy, ordinal=1, capability=75, arch=SimpleNamespace(number=75)
        )

    def launch(self, *arguments: Any) -> None:
        *others, table, extra = arguments
        self.calls.append((self.current, *others, extra, read(table)))


class Current:
    """A device made the current one in a block."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal

    def __enter__(self) -> None:
        self.outside, self.driver.current = self.driver.current, self.ordinal

    def __exit__(self, *_: object) -> None:
        self.driver.current = self.outside


class Function:
    """The function of CuPy for a thread's first launch."""

    ptr = 77

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __call__(self, *arguments: Any) -> None:
        self.driver.calls.append((self.driver.current, "CuPy", *arguments))


def test_a_kernel_without_extern_c_is_explained(monkeypatch):
    driver = Driver(monkeypatch)

    def missing(_):
        raise RuntimeError("CUDA_ERROR_NOT_FOUND")

    monkeypatch.setattr(driver.device._cupy.cuda.function.Module(), "get_function", missing)
    message = r'no kernel .*\(CUDA_ERROR_NOT_FOUND\); .*; declare it extern "C" __global__'
    with pytest.raises(RuntimeError, match=message):
        cuda_module.CudaKernel(driver.device, SPEC.specialise(threads=64))


def test_a_launch_goes_to_the_current_stream_of_the_kernels_device(monkeypatch):
    """This holds for every current device, which the launch does not change."""
    driver = Driver(monkeypatch)
    kernel = cuda_module.CudaKernel(driver.device, SPEC.specialise(threads=64, shared_bytes=512))
    assert driver.loaded == [b".target sm_75"]
    assert kernel.target == "compute_75"
    assert driver.attributes == [(77, 9, 100)], "the driver may choose little shared memory"
    addresses, values = [ADDRESSES[1], 0], (np.int32(4), params(1, 1.5))
    kernel.start((9, 1, 1), addresses, values)
    assert driver.calls == [(1, "CuPy", (9, 1, 1), (64, 1, 1), (*addresses, *values), 512)]
    pointers = driver.calls[0][4][:2]
    assert {type(pointer) for pointer in pointers} == {np.uint64}, "CuPy takes no larger int"
    driver.calls.clear()
    expected = (1, 77, 9, 1, 1, 64, 1, 1, 512, 1001, 0, (ADDRESSES[1], 0, 4, (1, 1.5)))
    for current in (1, 0):
        driver.current = current
        kernel.start((9, 1, 1), addresses, values)
        assert driver.calls.pop() == expected
        assert driver.current == current


def test_threads_pack_arguments_apart(monkeypatch):
    """One thread packs its arguments, and the driver reads them after another thread has packed."""
    driver = Driver(monkeypatch)
    kernel = cuda_module.CudaKernel(driver.device, SPEC.specialise(threads=64))
    values = {number: (np.int32(number), params(number, 0.5)) for number in range(4)}
    packed = threading.Barrier(len(values), timeout=10)
    seen: dict[int, Any] = {}

    def launch(*arguments: Any) -> None:
        packed.wait()
        *_, table, _ = arguments
        seen[threading.get_ident()] = read(table)
        packed.wait()

    kernel._launch = launch
    expected: dict[int, Any] = {}

    def work(number: int) -> None:
        address = ADDRESSES[0] + 16 * number
        expected[threading.get_ident()] = (address, 0, number, (number, 0.5))
        for _ in range(2):  # a thread's first launch goes through CuPy
            kernel.start((1, 1, 1), [address, 0], values[number])

    with ThreadPoolExecutor(len(values), initializer=packed.wait) as pool:
        list(pool.map(work, values))
    assert len(seen) == len(values)
    assert seen == expected


def test_gpu_arguments_are_addresses_read_once(cuda_device):
    """This includes addresses of scratch memory and new results, for which no array is made."""
    x, memory = device_array((3,)), device_array((1024,), np.uint8)
    operands = adopt(ActivationArrays(x))
    arguments = cuda_device.arguments(operands)
    assert arguments == [x.data.ptr, 0]
    arguments.append(1)
    assert operands.places == [x.data.ptr, 0]
    assert cuda_device.argument(x) == x.data.ptr
    within = cuda_device.argument_within(memory, 256, (4,), np.dtype(np.float32))
    assert within == memory.data.ptr + 256


def test_traits_follow_changes_of_the_device(cuda_device):
    """The properties are cached until one of them is set."""
    traits = cuda_device.traits
    assert cuda_device.traits is traits
    assert traits == (90, 132, True, 132, cuda_device.choices, False)
    cuda_device.choices = chosen = Choices()
    assert cuda_device.traits.choices is chosen
    cuda_device.multiprocessors = 5
    assert cuda_device.traits.multiprocessors == 5
    cuda_device._tensor_cores = TensorCores(False, "a test")
    assert not cuda_device.traits.tensor_cores


def test_traits_know_a_geforce_by_its_name(cuda_device, monkeypatch):
    name = {"name": b"NVIDIA GeForce RTX 2080 Ti"}
    monkeypatch.setattr(cuda_device._cupy.cuda.runtime, "getDeviceProperties", lambda _: name)
    assert cuda_device.traits.geforce


@pytest.fixture
def cuda_device(monkeypatch: pytest.MonkeyPatch) -> cuda_module.CudaDevice:
    """A GPU's properties as CuPy reports them, without a GPU."""
    cupy = pytest.importorskip("cupy")
    runtime = cupy.cuda.runtime
    monkeypatch.setattr(
        cupy.cuda, "Device", lambda ordinal: SimpleNamespace(compute_capability="90")
    )
    monkeypatch.setattr(runtime, "deviceGetAttribute", lambda attribute, ordinal: 132)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda ordinal: {"name": b"NVIDIA H200"})
    monkeypatch.delenv("CUPYATTN_ARCH", raising=False)
    return cuda_module.CudaDevice(0)
