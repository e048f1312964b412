"""Which GPUs have tensor cores worth using: by the environment, their names, or a measurement."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from cupyattn import backend, device_info, emulator
from cupyattn.cli import info, main
from cupyattn.runtime.arch import TENSOR_CORES_VARIABLE, TURING, tensor_cores_override
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device import cuda, tensor_cores
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.runtime.device.tensor_cores import (
    FLOAT32_CYCLES,
    PRODUCTS,
    mma_rate,
    without_measuring,
)

WITH = (
    "Tesla T4", "NVIDIA T4G", "NVIDIA GeForce RTX 2060 SUPER", "GeForce RTX 2080 Ti", "TITAN RTX",
    "Quadro RTX 4000", "NVIDIA GeForce RTX 2070 with Max-Q Design", "NVIDIA T40",
)  # fmt: skip
WITHOUT = (
    "NVIDIA GeForce GTX 1650 Ti", "GeForce GTX 1650", "NVIDIA GeForce GTX 1660 SUPER",
    "NVIDIA GeForce GTX 1630", "NVIDIA GeForce MX450", "NVIDIA GeForce MX550", "NVIDIA T400 4GB",
    "NVIDIA T500", "NVIDIA T550 Laptop GPU", "NVIDIA T600", "NVIDIA T1000 8GB", "Quadro T1000",
    "NVIDIA T1200 Laptop GPU", "Quadro T2000 with Max-Q Design",
)  # fmt: skip
UNKNOWN = ("Graphics Device", "NVIDIA CMP 30HX", "", "GeForce GTX 1080", "NVIDIA T4000")


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TENSOR_CORES_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("names", "present"), [(WITH, True), (WITHOUT, False), (UNKNOWN, None)], ids=str
)
def test_names(names, present):
    for name in names:
        found = without_measuring(75, name)
        assert (None if found is None else found.present) is present, name
        assert found is None or found.because == "its name"


def test_newer_gpus_have_them_whatever_they_are_called():
    for name in (*WITHOUT, *UNKNOWN):
        assert without_measuring(86, name) == (True, "its compute capability, 8.6")


@pytest.mark.parametrize(("text", "present"), [("0", False), ("1", True), (" 1 ", True)])
def test_environment_variable_overrides_names(monkeypatch, text, present):
    monkeypatch.setenv(TENSOR_CORES_VARIABLE, text)
    for capability, name in ((75, "Tesla T4"), (75, "GeForce GTX 1650"), (90, "NVIDIA H200")):
        expected = (present, f"CUPYATTN_TENSOR_CORES={text.strip()}")
        assert without_measuring(capability, name) == expected
    assert device_info()["tensor_cores_override"] == text.strip()
    assert EmulatedDevice(emulator.Checks.all()).traits.tensor_cores is present


@pytest.mark.parametrize("text", [None, "", " "])
def test_unset_variable_is_no_override(monkeypatch, text):
    if text is not None:
        monkeypatch.setenv(TENSOR_CORES_VARIABLE, text)
    assert tensor_cores_override() is None
    assert device_info()["tensor_cores_override"] is None
    assert EmulatedDevice(emulator.Checks.all()).traits.tensor_cores


@pytest.mark.parametrize("text", ["2", "yes", "true", "-1", "01", "0.0", "1" * 500, "\u0661"])
def test_another_value_is_refused_without_a_gpu_too(monkeypatch, text):
    monkeypatch.setenv(TENSOR_CORES_VARIABLE, text)
    message = r"^CUPYATTN_TENSOR_CORES='.{1,80}'; it is 1 to .*; set .*=0 or 1, or unset it$"
    for use in (
        tensor_cores_override,
        device_info,
        lambda: without_measuring(90, "NVIDIA H200"),
        lambda: backend("emulator").__enter__(),
    ):
        with pytest.raises(ValueError, match=message):
            use()


class FakeCupy:
    """A replacement of CuPy for a device, whose products take the given number of cycles."""

    def __init__(self, name: str, cycles: int, *, capturing: bool = False) -> None:
        self.cycles, self.capturing, self.measurements = cycles, capturing, 0
        self.ndarray = np.empty
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0,
            cudaDevAttrMultiProcessorCount=16,
            cudaDevAttrL2CacheSize=38,
            deviceGetAttribute=lambda attribute, ordinal: 16,
            getDeviceProperties=lambda ordinal: {"name": name.encode()},
        )
        stream = types.SimpleNamespace(is_capturing=lambda: self.capturing)
        self.cuda = types.SimpleNamespace(
            runtime=runtime, Device=FakeContext, get_current_stream=lambda: stream
        )

    def kernel(self, device: Any, specialisation: Any) -> Any:
        """Return a kernel that reports the cycles as mma_rate does."""
        assert specialisation is mma_rate()

        def start(grid: Any, arrays: Any, values: Any) -> None:
            assert (grid, values) == ((1, 1, 1), ())
            self.measurements += 1
            arrays[0][:] = [self.cycles * PRODUCTS, 1, 2, 3]

        return types.SimpleNamespace(start=start)


class FakeContext:
    """cupy.cuda.Device."""

    compute_capability = "75"

    def __init__(self, ordinal: int) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, default_architecture: None):
    """A GPU of compute capability 7.5 by its name and the cycles of a product."""

    def make(*arguments: Any, **options: Any) -> tuple[cuda.CudaDevice, FakeCupy]:
        cupy = FakeCupy(*arguments, **options)
        monkeypatch.setattr(cuda, "load_cupy", lambda: cupy)
        monkeypatch.setattr(cuda, "CudaKernel", cupy.kernel)
        # Its arrays are NumPy's, which the kernel writes.
        monkeypatch.setattr(cuda.CudaDevice, "argument", lambda _, array: array)
        return cuda.CudaDevice(0), cupy

    return make


@pytest.mark.parametrize(
    ("cycles", "present"),
    [(8, True), (16, True), (FLOAT32_CYCLES - 1, True), (FLOAT32_CYCLES, False), (640, False)],
)
def test_an_unknown_name_is_measured_once(gpu, cycles, present):
    device, cupy = gpu("Graphics Device", cycles)
    assert cupy.measurements == 0, "before anyone asks"
    for _ in range(3):
        assert device.traits[:4] == (75, 16, present, 16)
    assert cupy.measurements == 1
    found = device.find_tensor_cores()
    assert found.because == (
        f"measured: a product of 16 x 8 x 8 takes {cycles} cycles by mma, 64 by float32 units"
    )


@pytest.mark.parametrize(("name", "present"), [("Tesla T4", True), ("NVIDIA T1000", False)])
def test_a_known_name_is_not_measured(gpu, name, present):
    device, cupy = gpu(name, 64)
    assert device.tensor_cores is present
    assert cupy.measurements == 0


def test_nothing_is_measured_in_a_capture(gpu):
    """Tensor cores are assumed, and measured after the capture."""
    device, cupy = gpu("Graphics Device", 640, capturing=True)
    for _ in range(2):
        assert device.tensor_cores is True and device.traits.tensor_cores
        assert "capture" in device.find_tensor_cores().because
    assert cupy.measurements == 0
    cupy.capturing = False
    assert not device.traits.tensor_cores
    assert device.tensor_cores is False
    cupy.capturing = True
    assert device.tensor_cores is False
    assert cupy.measurements == 1


def test_a_failed_measurement_is_made_again(gpu, monkeypatch):
    device, cupy = gpu("Graphics Device", 640)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "measured", lambda device: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _ = device.tensor_cores
    assert device.tensor_cores is False
    assert cupy.measurements == 1


def test_a_wrong_override_stops_the_first_use_of_a_gpu(gpu, monkeypatch):
    monkeypatch.setenv(TENSOR_CORES_VARIABLE, "maybe")
    with pytest.raises(ValueError, match="CUPYATTN_TENSOR_CORES='maybe'"):
        gpu("Tesla T4", 8)


@pytest.mark.nvrtc
def test_the_kernel_that_measures(monkeypatch):
    """On the emulator, which has no clock: every warp runs its products and writes its time."""
    ptx = compile_ptx(mma_rate(), TURING).code.decode()
    assert ptx.count("%clock64") == 2
    module = emulator.load(ptx.replace("%clock64", "%gridid"))
    cycles, report = np.full(4, 77, np.int64), emulator.Report()
    emulator.launch(
        module, "mma_rate", (1, 1, 1), mma_rate().threads, [emulator.Argument(cycles)],
        checks=emulator.Checks.all(), report=report,
    )  # fmt: skip
    assert cycles.tolist() == [0] * 4
    assert report.instruction_mix["tensor"] == 4 * PRODUCTS


@pytest.mark.gpu
def test_a_gpu_is_measured_as_it_is_known():
    device = cuda.cuda_device(0)
    found = without_measuring(device.capability, device.name)
    if found is None:
        pytest.skip("nothing but the measurement tells")
    assert tensor_cores.measured(device).present is found.present


def test_info_says_what_float16_runs_on(capsys, monkeypatch):
    assert main(["info"]) == 0
    assert "CUPYATTN_TENSOR_CORES" in capsys.readouterr().out
    device = {
        "name": "GeForce GTX 1650", "compute_capability": "7.5", "memory_bytes": 2**32, "arch": 75,
        "tensor_cores": False, "tensor_cores_because": "its name", "native": False, "tuned": None,
        "unusable_because": None,
    }  # fmt: skip
    monkeypatch.setattr(info, "describe", lambda: {**described, "devices": [device]})
    described = {"version": "0", **device_info(), "kernels": {}}
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "GeForce GTX 1650: float16 runs in float32 arithmetic (its name)" in printed
    monkeypatch.setitem(device, "tensor_cores", True)
    assert main(["info"]) == 0
    assert "float16 runs on tensor cores (its name)" in capsys.readouterr().out
