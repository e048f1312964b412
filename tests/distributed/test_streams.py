"""Order on a GPU's streams, without a GPU: nothing is read or written while another may write it.

A stand-in for CuPy has streams and events that keep vector clocks. What computes and what carries
note which buffers they read and write, and two that touch one buffer, one of them writing, have to
be ordered by events.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from cupyattn.distributed import communicators, mailbox, watch
from cupyattn.distributed import group as groups
from cupyattn.distributed import lane as lanes
from cupyattn.distributed.group import Group
from cupyattn.distributed.lane import Lane, RingBlocks
from cupyattn.distributed.mailbox import PostOffice, ThreadCommunicator
from cupyattn.distributed.placement import Placement
from cupyattn.distributed.plan import CAUSAL, Sight, ring_plan


class Log:
    """Every access to every buffer, and the races among them."""

    lock = threading.Lock()
    accesses: ClassVar[dict[int, list[Any]]] = {}
    races: ClassVar[list[str]] = []

    @classmethod
    def note(cls, buffer: int, stream: Stream, clock: dict[Any, int], writes: bool, what: str):
        with cls.lock:
            for other, at, wrote, done in cls.accesses.setdefault(buffer, []):
                if (writes or wrote) and other is not stream and clock.get(other, 0) < at:
                    cls.races.append(f"{done} and {what} of one buffer")
            cls.accesses[buffer].append((stream, clock[stream], writes, what))


class Stream:
    """A vector clock: up to which moment of each stream it has waited."""

    current = threading.local()

    def __init__(self, **_: Any) -> None:
        self.clock: dict[Any, int] = {self: 0}
        self.ptr = id(self)

    def touch(self, array: FakeArray, what: str, *, writes: bool) -> None:
        self.clock[self] += 1
        Log.note(array.buffer, self, dict(self.clock), writes, what)

    def wait_event(self, event: Event) -> None:
        assert event is not None
        for stream, moment in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), moment)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Event:
    done = True

    def __init__(self, **_: Any) -> None:
        self.clock: dict[Any, int] = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


class FakeArray:
    """A buffer and its contents."""

    made = iter(range(10**9))

    def __init__(self, value: Any = None) -> None:
        self.buffer = next(self.made)
        self.value = value
        self.shape, self.dtype, self.nbytes = (1,), np.dtype(np.float32), 4
        self.device = SimpleNamespace(id=0)

    @property
    def data(self) -> FakeArray:
        return self

    def copy_from_device_async(self, source: FakeArray, size: int, stream: Stream) -> None:
        stream.touch(source, "a transfer's reading", writes=False)
        stream.touch(self, "a transfer's writing", writes=True)
        self.value = source.value


class Context:
    def __init__(self, ordinal: Any = 0) -> None:
        self.id = ordinal

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def use(self) -> None:
        pass


def current_stream() -> Stream:
    if not hasattr(Stream.current, "stream"):
        Stream.current.stream = Stream()
    return Stream.current.stream


FAKE = SimpleNamespace(
    cuda=SimpleNamespace(
        Stream=Stream, Event=Event, Device=Context, get_current_stream=current_stream
    ),
    empty=lambda shape, dtype: FakeArray(),
)


@pytest.fixture(autouse=True)
def _a_stand_in_for_cupy(monkeypatch):
    for module in (groups, lanes, watch, mailbox, communicators):
        monkeypatch.setattr(module, "load_cupy", lambda: FAKE)
    Log.accesses.clear()
    Log.races.clear()


def backward(group: Group, plan: Any, results: dict[int, Any]) -> None:
    """The order of the backward: blocks, and their gradients one step later."""
    own, sums = FakeArray(f"k of {group.rank}"), FakeArray([])
    with Lane(group, own) as lane:
        stream = current_stream()
        stream.touch(own, "making k", writes=True)
        stream.touch(sums, "making dk", writes=True)
        blocks = RingBlocks(lane, [own], len(plan.hops) - 1)
        gradients = RingBlocks(lane, [sums], len(plan.hops), overwrites=True)
        seen = []

        def add(of: str) -> None:
            (dk,) = gradients.here
            stream.touch(dk, "adding to dk", writes=True)
            dk.value = [*dk.value, (group.rank, of)]

        for number, hop in enumerate(plan.hops):
            (k,) = blocks.arrive() if number else blocks.here
            before = lane.mark()
            stream.touch(k, "a kernel's reading", writes=False)
            seen.append(k.value)
            if number + 1 < len(plan.hops):
                blocks.depart(hop, before)
            if number:
                gradients.depart(plan.hops[number - 1], before)
                gradients.arrive()
            add(seen[-1])
        before = lane.mark()
        stream.touch(own, "a kernel's reading of its own block", writes=False)
        gradients.depart(plan.hops[-1], before)
        (home,) = gradients.arrive()
        stream.touch(home, "reading dk at home", writes=False)
    for array in (own, sums):  # memory of the call is used again
        stream.touch(array, "using memory again", writes=True)
    results[group.rank] = (seen, home.value)


def walk(ranks: int, sight: Sight) -> dict[int, Any]:
    office = PostOffice(20)
    plan = ring_plan(Placement("zigzag", ranks), 0, (16 * ranks,), sight)
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    entered: list[Group] = []

    def act(rank: int) -> None:
        try:
            entered.append(group := Group(ThreadCommunicator(office, rank, ranks)))
            backward(group, plan, results)
        except BaseException as failure:
            failures.append(failure)
            office.failures.post(rank, str(failure))

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for group in entered:
        group.close()  # otherwise its watch keeps running during later tests
    assert not failures, failures
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sight", [CAUSAL, Sight(7, 0)], ids=["causal", "window"])
def test_streams_are_ordered_and_blocks_are_whose_they_should_be(ranks, sight):
    plan = ring_plan(Placement("zigzag", ranks), 0, (16 * ranks,), sight)
    shifts = [step.shift for step in plan.steps]
    for rank, (seen, home) in walk(ranks, sight).items():
        assert seen == [f"k of {(rank - shift) % ranks}" for shift in shifts]
        assert home == [((rank + shift) % ranks, f"k of {rank}") for shift in shifts]
    assert not Log.races, Log.races[:5]


def test_a_communicator_of_ones_own_is_called_on_its_device_and_stream(monkeypatch):
    """On another thread than the caller's, where neither is the current one."""
    entered: list[Any] = []
    for kind in (Context, Stream):
        monkeypatch.setattr(
            kind, "__enter__", lambda self: entered.append((type(self), threading.get_ident()))
        )
    called: list[Any] = []

    class Own:
        rank, size = 0, 2

        def send(self, array: Any, peer: int, stream: Any) -> None:
            here = threading.get_ident()
            called.append([kind for kind, thread in entered if thread == here])

        receive = all_gather = send

    with Group(Own()) as group:
        group.exchange([FakeArray()], 1, [FakeArray()], 1, Stream())
    assert called == [[Context, Stream]] * 2
    assert threading.get_ident() not in {thread for _, thread in entered}


def no_wait_for_what_fills_it(patch: Any) -> None:
    right = Lane.transfer
    patch.setattr(
        Lane, "transfer", lambda self, out, into, hop, behind: right(self, out, into, hop, None)
    )


def kernels_do_not_wait_for_arrival(patch: Any) -> None:
    patch.setattr(Lane, "wait", lambda self, mark: None)


def one_buffer_instead_of_two(patch: Any) -> None:
    right = RingBlocks.__init__

    def wrong(self: Any, *given: Any, **options: Any) -> None:
        right(self, *given, **options)
        self._spare = [(*self._spare[0],) for _ in self._spare]

    patch.setattr(RingBlocks, "__init__", wrong)


def the_sender_does_not_wait_for_the_copy(patch: Any) -> None:
    patch.setattr(ThreadCommunicator, "_collect", lambda self, parcel, peer, stream: None)


@pytest.mark.parametrize(
    "mistake",
    [
        no_wait_for_what_fills_it,
        kernels_do_not_wait_for_arrival,
        one_buffer_instead_of_two,
        the_sender_does_not_wait_for_the_copy,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_planted_race_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    walk(4, CAUSAL)
    assert Log.races
