"""Times by CUDA events and of the host, the memory of a call, and the ceilings of a GPU."""

from __future__ import annotations

import json
import math
import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest
from support.processes import run

from cupyattn.benchmark import ceiling_kernels
from cupyattn.benchmark import timer as ceilings
from cupyattn.benchmark.host import microseconds_per_call
from cupyattn.benchmark.timer import Timer, peak_bytes
from cupyattn.emulator import Checks, Report
from cupyattn.runtime.arch import arch_of
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.runtime.plan import launch


class FakeCupy:
    """A stream on which a call takes some ms, and what of CuPy is used to time it."""

    def __init__(self, milliseconds=2.0):
        self.log, self.now, self.taken = [], 0.0, milliseconds
        self.cuda = types.SimpleNamespace(
            Event=lambda: FakeEvent(self),
            Stream=lambda non_blocking: FakeStream(self),
            get_current_stream=lambda: self,
            get_elapsed_time=lambda start, stop: stop.time - start.time,
        )

    def synchronize(self):
        self.log.append("wait")

    def call(self):
        self.log.append("call")
        self.now += self.taken


class FakeEvent:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.log.append("event")
        self.time = self.stream.now


class FakeStream:
    """Captures calls, and makes them again when the graph is launched."""

    def __init__(self, cupy):
        self.cupy, self.begun = cupy, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        return None

    def begin_capture(self):
        self.begun = len(self.cupy.log), self.cupy.now

    def end_capture(self):
        calls = self.cupy.log[self.begun[0] :].count("call")
        took, self.cupy.now = self.cupy.now - self.begun[1], self.begun[1]

        def launch(stream):
            stream.log.append(f"graph of {calls}")
            stream.now += took

        return types.SimpleNamespace(launch=launch)


@pytest.fixture
def cupy(monkeypatch):
    made = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def test_long_calls_are_queued_with_events_between_them(cupy):
    assert Timer(calls=4, warm_up=2, budget_s=1.0).times([cupy.call]) == ([0.002] * 4, 1)
    first = ["call", "wait", "event", "call", "event", "wait"]  # compiles; how long one takes
    assert cupy.log == [*first, "call", "call", "wait", "event", *["call", "event"] * 4, "wait"]


def test_fewer_are_made_where_the_budget_is_over(cupy):
    assert len(Timer(calls=1000, warm_up=100, budget_s=0.1).times([cupy.call]).seconds) == 50
    cupy.log.clear()
    assert len(Timer(calls=1000, warm_up=100, budget_s=0.001).times([cupy.call]).seconds) == 3
    assert cupy.log.count("call") == 2 + 1 + 3


def test_short_calls_are_made_in_graphs(cupy):
    cupy.taken = 0.02
    times = Timer(calls=10, warm_up=1, budget_s=1.0).times([cupy.call])
    assert times.seconds == pytest.approx([20e-6] * 10)
    assert times.calls_each == 50
    assert cupy.log.count("graph of 50") == 1 + 1 + 1 + 10


def test_a_round_is_one_graph_and_one_sample(cupy):
    """Calls keep separate arrays, however long the calls take."""
    times = Timer(calls=5, warm_up=1, budget_s=1.0).times([cupy.call] * 3)
    assert times.seconds == pytest.approx([0.002] * 5)
    assert times.calls_each == 3
    assert cupy.log.count("graph of 3") == 1 + 1 + 1 + 5


class FakePool:
    """Never gives a block back, as CuPy's while it is used."""

    def __init__(self):
        self.held = 0

    def malloc(self, size):
        self.held += size

    def total_bytes(self):
        return self.held


def test_memory_is_that_of_a_pool_of_its_own(monkeypatch):
    allocators = []

    @contextmanager
    def using_allocator(malloc):
        allocators.append(malloc)
        yield
        allocators.pop()

    class Array:
        def __init__(self, address):
            self.nbytes, self.data = 100, types.SimpleNamespace(ptr=address)

    stream = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(
        MemoryPool=FakePool, using_allocator=using_allocator, get_current_stream=lambda: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    there, addresses = Array(0), iter(range(1, 99))

    def scratch(*results):
        if allocators:
            for size in (300, 200):
                allocators[-1](size)
        return results

    assert peak_bytes(scratch) == 500
    assert peak_bytes(lambda: None) == 0
    assert peak_bytes(lambda: scratch(there)) == 500, "a result that was given"
    assert peak_bytes(lambda: scratch(there, Array(next(addresses)))) == 400, "one of its own"


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """The most at a time: the second array takes the place of the first."""
    import cupy

    def call():
        for _ in range(2):
            cupy.empty(1 << 20, cupy.uint8)

    kept = cupy.empty(1 << 24, cupy.uint8)
    assert peak_bytes(call) == 1 << 20
    assert kept.nbytes == 1 << 24


@pytest.mark.usefixtures("default_architecture")
@pytest.mark.nvrtc
def test_ceilings_launch_the_kernels_that_measure(monkeypatch):
    """Small ceilings, a millisecond each: the emulator runs the reads but has no clock for mma."""
    launches = []

    def queued(call):
        call()
        return [1e-3]

    class Array(np.ndarray):
        data = property(
            lambda array: types.SimpleNamespace(copy_from_device_async=lambda other, count: None)
        )

    def launched(device, specialisation, grid, arguments):
        launches.append((specialisation.spec.entry, specialisation.macros, grid))
        if specialisation.spec.entry == "read_weight":
            launch(device, specialisation, grid, [np.asarray(arguments[0]), *arguments[1:]])

    cupy = types.SimpleNamespace(
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
    )
    report = Report()
    device = EmulatedDevice(Checks.fast(), report)
    for name, value in (
        ("load_cupy", lambda: cupy), ("_TIMER", types.SimpleNamespace(queued=queued)),
        ("_copied_bytes", lambda: 2**16), ("launch", launched),
    ):  # fmt: skip
        monkeypatch.setattr(ceilings, name, value)
    found = ceilings.measured_ceilings(device)
    assert found["copy_gb_per_s"] == pytest.approx(2 * 2**16 / 1e-3 / 1e9)
    assert found["read_gb_per_s"] == pytest.approx(2**16 / 1e-3 / 1e9)
    sectors = sum(each.sectors for each in report.accesses if each.space == "global")
    assert sectors * 32 == 2**16
    _, mma, fma = launches
    for (entry, macros, grid), name, flops in (
        (mma, "mma", 4 * 2 * 16 * 8 * 8), (fma, "fma", ceiling_kernels.THREADS * 2),
    ):  # fmt: skip
        assert entry == f"{name}_rate"
        flops *= grid * dict(macros)["ROUNDS"] * dict(macros)["IN_FLIGHT"]
        assert found[f"{name}_tflops"] == pytest.approx(flops / 1e-3 / 1e12)
    assert found["bfloat16_mma_tflops"] is None
    device.arch = arch_of(80)
    native = ceilings.measured_ceilings(device)
    assert dict(launches[-2][1])["MMA_K"] == 16
    assert native["bfloat16_mma_tflops"] == native["mma_tflops"] == 2 * found["mma_tflops"]
    device.tensor_cores = False
    without = ceilings.measured_ceilings(device)
    assert without["mma_tflops"] is without["bfloat16_mma_tflops"] is None
    assert without["fma_tflops"] == found["fma_tflops"]


@pytest.mark.nvrtc
def test_every_thread_makes_its_multiply_adds():
    """Each chain of 20 is 1 - 2 ** -20."""
    sums = np.full(2 * ceiling_kernels.THREADS, np.nan, np.float32)
    launch(EmulatedDevice(Checks.all(), Report()), ceiling_kernels.fma_rate(20), 2, (sums, 0.5))
    assert (sums == ceiling_kernels.IN_FLIGHT * (1 - 2.0**-20)).all()


@pytest.mark.gpu
def test_ceilings_of_a_gpu():
    from cupyattn.runtime.device.cuda import cuda_device

    found = ceilings.measured_ceilings(cuda_device(0))
    assert 0.5 < found["read_gb_per_s"] / found["copy_gb_per_s"] < 2
    assert 0 < found["fma_tflops"] < (found["mma_tflops"] or math.inf)


def test_host_batches_are_timed_without_waiting():
    events = []
    times = microseconds_per_call(
        lambda: events.append("call"), lambda: events.append("wait"), calls=3, batches=2
    )
    assert events == ["call", "call", "call", "wait"] * 3  # one batch to warm up
    assert len(times) == 2
    assert all(time > 0 for time in times)


@pytest.mark.gpu
def test_host_on_a_gpu(tmp_path):
    file = tmp_path / "host.json"
    arguments = ("host", "--batch", "20", "--calls", "60", "--json", str(file))
    result = run(*arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    rows = {row["call"]: row for row in json.loads(file.read_text())["rows"]}
    assert {"attention", "attention, out=", "rms_norm", "linear, out=", "rope"} <= set(rows)
    assert {row["times"]["calls_per_sample"] for row in rows.values()} == {20}
    assert all(0 < row["times"]["min_s"] <= row["times"]["p50_s"] for row in rows.values())
