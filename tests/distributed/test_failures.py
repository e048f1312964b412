"""A rank that fails, or never comes, ends all others with an error that names it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.search import deep

from cupyattn.distributed import (
    Group,
    RankFailedError,
    ring_attention,
    ring_attention_backward,
    run,
    shard,
)
from cupyattn.distributed.calls import RingCalls
from cupyattn.distributed.failures import FolderFailures, SharedFailures
from cupyattn.distributed.mailbox import Parcel, PostOffice, ThreadCommunicator
from cupyattn.distributed.nccl import ThreadMeeting
from cupyattn.distributed.watch import Watch

Q = np.random.default_rng(0).standard_normal((1, 24, 2, 8))


def own(group: Group) -> list[np.ndarray]:
    return [shard(Q, group.rank, group.size)] * 3


@pytest.mark.parametrize(("ranks", "culprit"), [(2, 0), (3, 1), *deep((2, 1), (5, 0), (5, 1))])
def test_a_rank_that_raises_is_named(ranks, culprit):
    x = np.zeros((1, 2 * ranks * 2, 2, 8))
    ended: list[int] = []

    def of_rank(group: Group) -> None:
        mine = [shard(x, group.rank, group.size)] * 3
        try:
            ring_attention(*mine, group=group)
            if group.rank == culprit:
                raise ZeroDivisionError("planted")
            ring_attention(*mine, group=group, causal=True)
        except RankFailedError:
            ended.append(group.rank)
            raise

    begun = time.monotonic()
    with pytest.raises(RankFailedError, match=f"rank {culprit} failed: ZeroDivisionError") as found:
        run(of_rank, ranks, timeout=60)
    assert time.monotonic() - begun < 10
    assert found.value.rank == culprit
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert sorted(ended) == [rank for rank in range(ranks) if rank != culprit]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_never_comes_is_named_by_whoever_waits(ranks):
    """Not the neighbour that waits for it in turn."""
    late = threading.Event()

    def of_rank(group: Group) -> None:
        mine = [shard(np.zeros((1, 4 * ranks, 2, 8)), group.rank, group.size)] * 3
        if group.rank == 1:
            late.wait(30)
            return
        try:
            ring_attention(*mine, group=group)
        finally:
            late.set()

    begun = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 did not come") as found:
        run(of_rank, ranks, timeout=0.5)
    assert found.value.rank == 1
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_waits_for_a_rank_that_has_returned_waits_no_more(ranks):
    def of_rank(group: Group) -> None:
        if group.rank != 1:
            ring_attention(*[np.zeros((1, 4, 2, 8))] * 3, group=group)

    begun = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 has returned, and rank \d waits") as found:
        run(of_rank, ranks)
    assert found.value.rank == 1
    assert time.monotonic() - begun < 10


def test_who_waits_for_one_that_has_what_it_waited_for_waits_on():
    """Rank 1 has its parcel of rank 2, which has returned, and has not woken up yet."""
    office = PostOffice(timeout=0.2)
    office._waits_for[1] = 2, lambda: True
    office.failures.leave(2)
    with pytest.raises(RankFailedError, match="rank 1 did not come: rank 0 waited"):
        office.take(0, 1)


def test_a_rank_that_does_not_return_is_named():
    late = threading.Event()
    begun = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 did not return") as found:
        run(lambda group: late.wait(30) if group.rank == 1 else None, 3, timeout=0.5)
    late.set()
    assert found.value.rank == 1
    assert time.monotonic() - begun < 10


def test_who_returns_last_has_its_time_from_the_one_before():
    """The second comes in time for the first, the third for the second."""
    run(lambda group: time.sleep(0.6 * group.rank), 3, timeout=1.0)


def of_another_run(group: Group) -> None:
    """Raise the error of other ranks than the group's."""
    run(lambda inner: 1 // (inner.rank - 3), 4)


def of_its_own(group: Group) -> None:
    """Raise what the user means by it."""
    raise RankFailedError(3, "rank 3 failed: ZeroDivisionError")


@pytest.mark.parametrize("raises", [of_another_run, of_its_own])
def test_a_failure_of_other_ranks_is_one_of_the_rank_that_raises_it(raises):
    def of_rank(group: Group) -> None:
        if group.rank == 1:
            raises(group)
        group.all_gather(np.zeros(1))

    begun = time.monotonic()
    says = "rank 1 failed: RankFailedError: rank 3 failed: ZeroDivisionError"
    with pytest.raises(RankFailedError, match=says) as found:
        run(of_rank, 2, timeout=20)
    assert found.value.rank == 1
    assert time.monotonic() - begun < 10


def test_a_group_that_has_failed_stays_so():
    groups: dict[int, Group] = {}

    def of_rank(group: Group) -> None:
        groups[group.rank] = group
        if group.rank:
            raise ValueError("planted")
        ring_attention(*own(group), group=group)

    with pytest.raises(RankFailedError):
        run(of_rank, 2, timeout=20)
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: planted"):
        ring_attention(*own(groups[0]), group=groups[0])


class Flaky:
    """The other rank sends 1, 2 and 3; the second time the wire is loose, and the 2 stays on it."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.on_the_wire = iter([1, ConnectionError("planted"), 2, 3])

    def send(self, array: Any, peer: int, stream: Any) -> None:
        pass

    def receive(self, array: Any, peer: int, stream: Any) -> None:
        given = next(self.on_the_wire)
        if isinstance(given, Exception):
            raise given
        array[...] = given

    def all_gather(self, array: Any, out: Any, stream: Any) -> None:
        self.receive(out, 1, stream)


@pytest.mark.parametrize("what", ["exchange", "all_gather"])
def test_after_a_transfer_that_raised_nothing_comes(what):
    """Otherwise the next call would receive the arrays of the one before."""
    group = Group(Flaky())

    def received() -> float:
        if what == "all_gather":
            return group.all_gather(np.zeros(1))[1].item()
        into = np.zeros(1)
        group.exchange([np.zeros(1)], 1, [into], 1)
        return into.item()

    assert received() == 1
    with pytest.raises(ConnectionError, match="planted"):
        received()
    with pytest.raises(RankFailedError, match="rank 0 failed: ConnectionError: planted") as found:
        received()
    assert found.value.rank == 0
    group.close()


class Stuck:
    """A user's communicator whose methods never return."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def send(self, array: Any, peer: int, stream: Any) -> None:
        self.let_go.wait(60)

    receive = all_gather = send


@pytest.mark.parametrize("what", ["exchange", "all_gather"])
def test_a_communicator_that_waits_for_ever_is_left_alone(what):
    stuck = Stuck()
    group = Group(stuck, timeout=0.3)
    begun = time.monotonic()
    x = np.zeros(1)
    with pytest.raises(RankFailedError, match=r"rank 0 waited 0\.3 s for rank \d") as found:
        group.all_gather(x) if what == "all_gather" else group.exchange([x], 1, [x], 2)
    stuck.let_go.set()
    assert found.value.rank == (1 if what == "all_gather" else 2)
    assert time.monotonic() - begun < 10


def test_a_communicator_that_waits_hears_of_a_failure_in_a_folder(tmp_path):
    stuck = Stuck()
    group = Group(stuck, folder=tmp_path)
    other = FolderFailures(tmp_path / "cupyattn-ranks", 2, 3)
    threading.Timer(0.3, other.post, (2, "rank 2 failed: planted")).start()
    with pytest.raises(RankFailedError, match="rank 2 failed: planted"):
        group.all_gather(np.zeros(1))
    stuck.let_go.set()


def test_a_folder_is_for_who_has_no_other_way(tmp_path):
    office = PostOffice(timeout=20)
    with pytest.raises(ValueError, match=r"folder = .* with a ThreadCommunicator"):
        Group(ThreadCommunicator(office, 0, 1), folder=tmp_path)


def test_a_context_tells_others_of_an_exception():
    office = PostOffice(timeout=20)
    groups = [Group(ThreadCommunicator(office, rank, 2)) for rank in range(2)]
    with pytest.raises(KeyError), groups[0]:
        raise KeyError("planted")
    with pytest.raises(RankFailedError, match="rank 0 failed: KeyError"), groups[1] as group:
        group.all_gather(np.zeros(1))


class Event:
    """A fake CUDA event: done when the test sets it."""

    done = True


class Stream:
    """A stream whose transfers never end."""


class Endless:
    done = False


def test_a_transfer_that_does_not_end_is_aborted(monkeypatch):
    """The thread that watches a GPU's transfers, without a GPU."""
    marks = iter([Event(), Endless()])
    aborted = threading.Event()
    failures = SharedFailures()
    monkeypatch.setattr("cupyattn.distributed.watch._mark", lambda stream: next(marks))
    monkeypatch.setattr("cupyattn.distributed.watch.current_device", lambda: None)
    watch = Watch(0, 0.2, failures, aborted.set)
    with watch.over(Stream(), 1, "rank 1 to send"):
        pass
    assert aborted.wait(10)
    failure = failures.first()
    assert failure is not None
    assert failure.rank == 1
    assert "rank 0 waited 0.2 s for rank 1 to send" in str(failure)
    watch.stop()


def test_a_transfer_that_has_not_begun_may_wait(monkeypatch):
    """Its time counts from when the kernels before it are done."""
    begun = Endless()
    marks = iter([begun, Endless()])
    aborted = threading.Event()
    monkeypatch.setattr("cupyattn.distributed.watch._mark", lambda stream: next(marks))
    monkeypatch.setattr("cupyattn.distributed.watch.current_device", lambda: None)
    watch = Watch(0, 0.2, SharedFailures(), aborted.set)
    with watch.over(Stream(), 1, "rank 1"):
        pass
    assert not aborted.wait(0.6)
    begun.done = True
    assert aborted.wait(10)
    watch.stop()


def test_the_watch_looks_for_ranks_that_are_gone(monkeypatch):
    """While a transfer waits for one, the host of this rank does something else."""

    class Gone(SharedFailures):
        def look(self) -> None:
            self.post(1, "rank 1 has ended")

    marks = iter([Event(), Endless()])
    aborted = threading.Event()
    monkeypatch.setattr("cupyattn.distributed.watch._mark", lambda stream: next(marks))
    monkeypatch.setattr("cupyattn.distributed.watch.current_device", lambda: None)
    watch = Watch(0, 60, Gone(), aborted.set)
    with watch.over(Stream(), 1, "rank 1 to send"):
        pass
    assert aborted.wait(10)
    watch.stop()


@pytest.mark.skipif(not hasattr(os, "getpgid"), reason="process ids are POSIX's")
def test_no_thread_of_a_failed_run_stays():
    def of_rank(group: Group) -> None:
        if group.rank == 0:
            raise ValueError("planted")
        group.all_gather(np.zeros(1))

    before = threading.enumerate()
    with pytest.raises(RankFailedError):
        run(of_rank, 3, timeout=20)
    assert not [t for t in threading.enumerate() if t not in before]


X = np.random.default_rng(0).standard_normal((1, 16, 2, 8))
SINKS = np.zeros(2)
STAGES: dict[str, tuple[Any, Any]] = {
    "send": (ThreadCommunicator, lambda communicator: communicator.rank),
    "receive": (ThreadCommunicator, lambda communicator: communicator.rank),
    "all_gather": (ThreadCommunicator, lambda communicator: communicator.rank),
    "forward": (RingCalls, lambda calls: calls._plan.rank),
    "backward": (RingCalls, lambda calls: calls._plan.rank),
}
"""The failing call, and its rank."""


def both(group: Group) -> None:
    given: dict[str, Any] = {"group": group, "causal": True, "sinks": SINKS}
    out, lse = ring_attention(X, X, X, return_lse=True, **given)
    ring_attention_backward(X, X, X, X, out, lse, **given)


class Planted:
    """Has one rank fail when it does something for the n-th time."""

    def __init__(self, stage: str, culprit: int, time: int, patch: pytest.MonkeyPatch) -> None:
        owner, rank_of = STAGES[stage]
        right, self.made = getattr(owner, stage), 0

        def fails(its: Any, *given: Any, **options: Any) -> Any:
            if rank_of(its) == culprit:
                self.made += 1
                if self.made == time:
                    raise MemoryError("planted")
            return right(its, *given, **options)

        patch.setattr(owner, stage, fails)


@pytest.mark.parametrize("ranks", [2, *deep(3, 5)])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_each_time(stage, ranks):
    for culprit in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            often = Planted(stage, culprit, 0, patch)
            run(both, ranks)
        assert often.made >= 2
        for number in range(1, often.made + 1):
            begun = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                Planted(stage, culprit, number, patch)
                with pytest.raises(RankFailedError) as raised:
                    run(both, ranks)
            assert str(raised.value) == f"rank {culprit} failed: MemoryError: planted"
            assert time.monotonic() - begun < 60  # ranks wait for 300


def together(size, act):
    """Run act(rank) on a thread each; return what each raised."""
    raised = [None] * size

    def of_rank(rank):
        try:
            act(rank)
        except RankFailedError as error:
            raised[rank] = error

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nobody_begins_before_all_have_come(size):
    meeting, came, seen = ThreadMeeting(size, SharedFailures(), 10.0), [0] * size, []

    def act(rank):
        for turn in range(1, 20):
            time.sleep(0.001 * ((rank + turn) % 3))
            came[rank] = turn
            meeting(rank)
            seen.append(min(came) >= turn)

    assert together(size, act) == [None] * size
    assert len(seen) == 19 * size and all(seen)


def test_who_does_not_come_is_named():
    meeting = ThreadMeeting(3, SharedFailures(), 0.2)
    raised = together(3, lambda rank: None if rank == 1 else meeting(rank))
    assert [error and error.rank for error in raised] == [1, None, 1]
    assert "rank 1 did not come" in str(raised[0])


def test_who_has_left_is_not_waited_for():
    failures = SharedFailures()
    meeting = ThreadMeeting(2, failures, 60.0)
    begun = time.monotonic()
    raised = together(2, lambda rank: failures.leave(1) if rank else meeting(rank))
    assert "rank 1 has returned" in str(raised[0]) and time.monotonic() - begun < 10


def test_a_failure_ends_the_wait():
    failures = SharedFailures()
    meeting = ThreadMeeting(2, failures, 60.0)

    def act(rank):
        if rank:
            time.sleep(0.05)
            failures.post(1, "it has failed")
        else:
            meeting(rank)

    begun = time.monotonic()
    waiting, _ = together(2, act)
    assert waiting.rank == 1 and time.monotonic() - begun < 10


def test_who_has_got_what_it_waited_for_does_not_miss_a_rank_that_left():
    """It has not woken up yet; a waiting rank must not blame the other one."""
    office, parcel = PostOffice(20.0), Parcel(np.zeros(1), None)
    waiting = threading.Thread(target=office.wait_until_taken, args=(parcel, 1, 2))
    waiting.start()
    while 1 not in office._waits_for:
        time.sleep(0.001)
    with office.failures.changed:
        assert office._who_is_missing(1) == 2
        office.confirm(parcel)
        office.failures.leave(2)
        assert office._who_is_missing(1) == 1
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert office.failures.first() is None
