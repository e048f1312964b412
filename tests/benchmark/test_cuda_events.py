"""CUDA events around the calls that are timed, and what a measurement says it was made on."""

from __future__ import annotations

import sys
import types

from support.fake_gpu import HEADER

from cupyattn.benchmark import cuda_events
from cupyattn.benchmark.cuda_events import event_timer


class FakeCupy:
    """A stream on which a call takes 2 ms, and what of CuPy is used to time it."""

    __version__ = "14.2.0"

    def __init__(self):
        self.log = []
        self.now = 0.0
        runtime = types.SimpleNamespace(driverGetVersion=lambda: 13020)
        self.cuda = types.SimpleNamespace(
            Event=lambda: FakeEvent(self),
            get_current_stream=lambda: self,
            get_elapsed_time=lambda start, stop: stop.time - start.time,
            runtime=runtime,
        )

    def synchronize(self):
        self.log.append("wait")

    def call(self):
        self.log.append("call")
        self.now += 2.0


class FakeEvent:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.log.append("event")
        self.time = self.stream.now


def test_calls_are_queued_with_events_between_them(monkeypatch):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert event_timer(calls=3, warm_up=2)(cupy.call) == [0.002] * 3
    timed = ["event", *["call", "event"] * 3]
    assert cupy.log == ["call", "call", "wait", *timed, "wait"]


def test_the_header_names_the_target_in_the_code(monkeypatch, tmp_path):
    """Here the code is of another architecture than the device and what is asked of it."""
    code = tmp_path / "kernel.ptx"
    code.write_text(".version 8.8\n.target sm_80\n")
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(cuda_events, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    device = types.SimpleNamespace(
        name="A GPU", capability=90, loaded=("a", "b"), tensor_cores=False,
        load=lambda specialisation: types.SimpleNamespace(code=code),
    )  # fmt: skip
    header = cuda_events.measured_on(device)
    assert set(header) == set(HEADER)
    assert header["code"] == ["compute_80"]
    assert (header["compute_capability"], header["cuda_driver"]) == ("9.0", "13.2")
    assert header["arch_override"] == "75"
    assert header["tensor_cores"] is False
