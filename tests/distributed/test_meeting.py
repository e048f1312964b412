"""Threads of one process come together before what needs all of them, and know who is late."""

from __future__ import annotations

import threading
import time

import pytest

from cupyattn.distributed import RankFailedError
from cupyattn.distributed.communicators.meeting import Meeting
from cupyattn.distributed.failures import SharedFailures


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
    meeting, came, seen = Meeting(size, SharedFailures(), 10.0), [0] * size, []

    def act(rank):
        for turn in range(1, 20):
            time.sleep(0.001 * ((rank + turn) % 3))
            came[rank] = turn
            meeting(rank)
            seen.append(min(came) >= turn)

    assert together(size, act) == [None] * size
    assert len(seen) == 19 * size and all(seen)


def test_who_does_not_come_is_named():
    meeting = Meeting(3, SharedFailures(), 0.2)
    raised = together(3, lambda rank: None if rank == 1 else meeting(rank))
    assert [error and error.rank for error in raised] == [1, None, 1]
    assert "rank 1 did not come" in str(raised[0])


def test_who_has_left_is_not_waited_for():
    failures = SharedFailures()
    meeting = Meeting(2, failures, 60.0)
    begun = time.monotonic()
    raised = together(2, lambda rank: failures.leave(1) if rank else meeting(rank))
    assert "rank 1 has returned" in str(raised[0]) and time.monotonic() - begun < 10


def test_a_failure_ends_the_wait():
    failures = SharedFailures()
    meeting = Meeting(2, failures, 60.0)

    def act(rank):
        if rank:
            time.sleep(0.05)
            failures.post(1, "it has failed")
        else:
            meeting(rank)

    begun = time.monotonic()
    waiting, _ = together(2, act)
    assert waiting.rank == 1 and time.monotonic() - begun < 10
