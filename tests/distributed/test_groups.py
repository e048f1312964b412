"""What a group takes and refuses: seconds, ranks, devices, peers, threads, calls after its end."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.wires import Own, Wires

from cupyattn.distributed import Group, nccl_group, ring_attention, run, threads
from cupyattn.distributed.communicators.mailbox import PostOffice, ThreadCommunicator
from cupyattn.distributed.threads import _ends
from cupyattn.functional.device_info import device_count

ONE = np.ones(1)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**400, np.float32(20), np.int64(20)])
def test_seconds_are_any_number(timeout):
    """More than threads can wait is as long as they ever do."""
    assert run(lambda group: len(group.all_gather(ONE)), 2, timeout=timeout) == [2, 2]
    with Group(Own(Wires(), 0, 1), timeout=timeout) as group:
        assert group.all_gather(ONE) == [ONE]


@pytest.mark.parametrize("timeout", [math.nan, 0, -1.0, "5", True, None, -math.inf])
def test_seconds_that_are_none_are_refused_everywhere(timeout, tmp_path):
    for start in (
        lambda: Group(Own(Wires(), 0, 1), timeout=timeout),
        lambda: run(lambda group: None, 2, timeout=timeout),
        lambda: nccl_group(0, 1, bytes(128), folder=tmp_path, timeout=timeout),
    ):
        with pytest.raises(ValueError, match=r"timeout = .*; it is a number of seconds above 0"):
            start()
    assert not any(tmp_path.iterdir())


def test_ranks_are_integers_of_any_kind():
    assert run(lambda group: group.size, np.int64(2)) == [2, 2]
    for wrong in (2.0, "2"):
        with pytest.raises(TypeError, match=r"ranks = .* ranks is an integer"):
            run(lambda group: None, wrong)


@pytest.mark.parametrize("given", [(0, 2), iter([0, 2]), np.array([0, 2])])
def test_devices_are_any_sequence(given, monkeypatch):
    monkeypatch.setattr(threads, "_device_count", lambda: 3)
    _, ends = _ends(None, given, "peer", 1.0)
    assert [end.device for end in ends] == [0, 2]


@pytest.mark.parametrize("wrong", [2, "ab", [0, "1"], [0.0, 1.0]])
def test_devices_that_are_none_are_refused(wrong):
    with pytest.raises(TypeError, match="devices a sequence of CUDA ordinals"):
        run(lambda group: None, devices=wrong)


def test_no_device_has_a_number_below_0():
    with pytest.raises(ValueError, match=r"devices = \[0, -1\]"):
        run(lambda group: None, devices=[0, -1])


def test_devices_are_there():
    pytest.importorskip("cupy")  # it counts them
    count = device_count()
    with pytest.raises(ValueError, match=rf"devices = \[{count}\], where CUDA has {count};"):
        run(lambda group: None, devices=[count])


@pytest.mark.parametrize(("rank", "size"), [("0", 2), (0.5, 2), (0, 2.0), (None, 2)])
def test_a_rank_that_is_no_integer_is_refused(rank, size):
    with pytest.raises(TypeError, match=r"a communicator of rank .*; both are integers"):
        Group(Own(Wires(), rank, size))


class OnDevice(Own):
    """Whose bytes are a GPU's: it asks what it is given for a stream's address."""

    device = 1

    def all_gather(self, array: Any, out: Any, stream: Any) -> None:
        raise AssertionError(stream.ptr)

    send = receive = all_gather


@pytest.mark.parametrize(
    ("array", "kind", "says"),
    [
        (ONE, ValueError, "an array that is NumPy's, of rank 0 on device 1"),
        (SimpleNamespace(device=SimpleNamespace(id=0)), ValueError, "that is on device 0, of rank"),
        ([1.0], TypeError, "a list where an array belongs"),
    ],
)
def test_arrays_that_are_elsewhere_are_refused(array, kind, says):
    """And the group serves on: nothing was sent."""
    group = Group(OnDevice(Wires(), 0, 2))
    for call in (
        lambda: group.all_gather(array),
        lambda: group.exchange([array], 1, [], 1),
        lambda: group.exchange([], 1, [array], 1),
    ):
        with pytest.raises(kind, match=says):
            call()
    group.check()


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_goes_to_oneself_is_copied(ranks):
    with Group(Own(Wires(), ranks - 1, ranks)) as group:
        into = np.zeros(2)
        group.exchange([np.arange(2.0)], group.rank, [into], group.rank)
    np.testing.assert_array_equal(into, [0, 1])


@pytest.mark.parametrize(
    ("to", "source", "says"),
    [
        (7, 7, "to = 7 in a group of 3 ranks"),
        (1, -1, "source = -1 in a group"),
        (1, 1, r"rank 0 sends to rank 1 and receives from rank 1; .*receive from rank 2"),
        ("1", 1, "to = '1' in a group"),
        (1, 2.0, r"source = 2\.0 in a group"),
    ],
)
def test_peers_that_nobody_has_are_refused_at_once(to, source, says):
    def of_rank(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(ValueError, match=says):
                group.exchange([ONE], to, [np.zeros(1)], source)

    begun = time.monotonic()
    run(of_rank, 3)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(("to", "source"), [(1, 2), (0, 0)])
def test_as_many_arrays_are_received_as_are_sent(to, source):
    """Otherwise another rank would wait for an array that nobody sends."""
    with Group(Own(Wires(), 0, 3)) as group:
        for outgoing, incoming in (([ONE, ONE], [ONE]), ([ONE], [])):
            with pytest.raises(ValueError, match=r"\d arrays to send, and \d to receive"):
                group.exchange(outgoing, to, incoming, source)


def test_two_threads_of_one_rank_are_told_apart():
    """The first waits for the other rank, which comes behind the second."""
    office = PostOffice(timeout=20)
    groups = [Group(ThreadCommunicator(office, rank, 2)) for rank in range(2)]
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(groups[0].all_gather(ONE)))
    first.start()
    until = time.monotonic() + 10
    while not groups[0]._busy.locked() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="two threads use the group of rank 0 at once"):
        groups[0].all_gather(ONE)
    groups[1].all_gather(ONE)
    first.join(20)
    assert [len(parts) for parts in found] == [2]


def test_after_its_end_a_group_serves_no_more():
    kept: list[Group] = []
    run(kept.append, 2)
    with Group(Own(Wires(), 0, 2)) as group:
        kept.append(group)
    begun = time.monotonic()
    for group in kept:
        with pytest.raises(RuntimeError, match=f"the group of rank {group.rank} has ended"):
            group.all_gather(ONE)
        with pytest.raises(RuntimeError, match="has ended"):
            ring_attention(*[np.zeros((1, 4, 2, 8))] * 3, group=group)
    assert time.monotonic() - begun < 10


def test_a_group_is_closed_once():
    closed = []
    communicator = Own(Wires(), 0, 1)
    communicator.close = lambda: closed.append(True)
    with Group(communicator) as group:
        group.close()
    assert closed == [True]
