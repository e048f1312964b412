"""What a step does with CuPy's streams, pools and events, on stand-ins that note their calls."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cupyattn.models.activations import FUNCTIONS
from cupyattn.models.beside import Beside
from cupyattn.models.config import ELEMENTWISE, GATED
from cupyattn.models.generation import graph


class Noting:
    """A context manager and a bag of methods, whose names go into a list."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def __enter__(self):
        self.notes.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.notes.append(f"leave {self.name}")

    def __getattr__(self, method):
        def call(*_, **__):
            self.notes.append(f"{self.name}.{method}")
            return SimpleNamespace(launch=lambda: self.notes.append("launch"))

        return call


@pytest.fixture
def notes():
    return []


@pytest.fixture
def xp(notes):
    def pool():
        return SimpleNamespace(malloc="the pool's malloc")

    def using(malloc):
        assert malloc == "the pool's malloc"
        return Noting("pool", notes)

    cuda = SimpleNamespace(
        get_current_stream=lambda: Noting("current", notes),
        Stream=lambda non_blocking: Noting("stream", notes),
        MemoryPool=pool,
        using_allocator=using,
    )
    return SimpleNamespace(__name__="cupy", cuda=cuda)


def test_work_is_captured_behind_two_runs_of_it(xp, notes):
    replay = graph.capture(xp, lambda: notes.append("prepare"), lambda: notes.append("work"))
    assert notes == [
        "current.synchronize", "enter stream", "enter pool", "prepare", "work", "prepare", "work",
        "stream.synchronize", "stream.begin_capture", "work", "stream.end_capture",
        "leave pool", "leave stream",
    ]  # fmt: skip
    notes.clear()
    replay()
    assert notes == ["launch"]


def test_what_runs_beside_waits_at_both_ends(xp, notes):
    beside = Beside(xp)
    for _ in range(2):  # on the same stream
        with beside:
            notes.append("beside")
        notes.append("meanwhile")
        beside.join()
    once = [
        "current.record", "stream.wait_event", "enter stream", "beside", "leave stream",
        "meanwhile", "stream.record", "current.wait_event",
    ]  # fmt: skip
    assert notes == 2 * once


def test_activations_of_their_own_are_those_of_a_parallel_layer():
    assert tuple(FUNCTIONS) == (*ELEMENTWISE, *GATED)


def test_a_capture_that_fails_is_ended(xp, notes):
    """And the error is the work's own."""

    def work():
        notes.append("work")
        if notes.count("work") == 3:
            raise FloatingPointError("the work's own")

    with pytest.raises(FloatingPointError, match="the work's own"):
        graph.capture(xp, lambda: None, work)
    assert notes[-4:] == ["work", "stream.end_capture", "leave pool", "leave stream"]


def test_two_copies_are_on_their_way_at_most(monkeypatch, notes):
    """Each into memory of its own, waited for by an event of its own."""
    events = []

    class Event:
        def __init__(self, disable_timing):
            self.number = len(events)
            events.append(self)

        def record(self, stream):
            notes.append((stream, "record", self.number))

        def synchronize(self):
            notes.append(("wait", self.number))

    class Drawn:
        def __init__(self, *values):
            self.values = values

        def get(self, *, out, stream, blocking):
            assert not blocking
            out[:] = self.values

    memory = []

    def pinned(size):
        memory.append(bytearray(size))
        return memory[-1]

    monkeypatch.setattr(graph, "_current_stream", lambda: "stream")
    cuda = SimpleNamespace(alloc_pinned_memory=pinned, Event=Event)
    readback = graph.Readback(SimpleNamespace(__name__="cupy", cuda=cuda), 3)
    first, second = readback.queue(Drawn(1, 2, 3)), readback.queue(Drawn(4, 5, 6))
    assert notes == [("stream", "record", 0), ("stream", "record", 1)]
    assert (first(), second()) == ([1, 2, 3], [4, 5, 6])
    assert notes[2:] == [("wait", 0), ("wait", 1)]
    assert readback.queue(Drawn(7, 8, 9))() == [7, 8, 9]
    assert [len(each) for each in memory] == [12, 12]


def test_numpy_arrays_need_none_of_it():
    calls = []
    graph.capture(np, lambda: calls.append("prepare"), lambda: calls.append("work"))()
    assert calls == ["work"]
    array = np.arange(3, dtype=np.int32)
    read = graph.Readback(np, 3).queue(array)
    array += 1
    assert read() == [0, 1, 2]
