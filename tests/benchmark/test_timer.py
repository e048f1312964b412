"""CUDA events around the calls that are timed: how many, in graphs or not, within which budget."""

from __future__ import annotations

import sys
import types

import pytest

from cupyattn.benchmark.timer import Timer


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
    """Of calls with arrays of their own, however long they are."""
    times = Timer(calls=5, warm_up=1, budget_s=1.0).times([cupy.call] * 3)
    assert times.seconds == pytest.approx([0.002] * 5)
    assert times.calls_each == 3
    assert cupy.log.count("graph of 3") == 1 + 1 + 1 + 5
