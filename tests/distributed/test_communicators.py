"""Communicators: a user's own, MPI's methods, NCCL through each library; and what groups refuse."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.communicators import MPI, Own, Wires
from support.ring import CLOSE, Case, case, one_device, ring
from support.search import deep

from cupyattn import DropoutSeed
from cupyattn.distributed import (
    Group,
    communicators,
    nccl,
    nccl_group,
    ring_attention,
    run,
    shard,
    threads,
)
from cupyattn.distributed.communicators import communicator_of
from cupyattn.distributed.mailbox import PostOffice, ThreadCommunicator
from cupyattn.distributed.threads import _ends
from cupyattn.runtime.device.cuda import device_count


def on_threads(case: Case, kind: Any) -> list[Any]:
    """The results of each rank with a communicator of that kind."""
    wires, results = Wires(), [None] * case.ranks
    failures: list[BaseException] = []

    def act(rank: int) -> None:
        try:
            with Group(kind(wires, rank, case.ranks), size=case.ranks) as group:
                results[rank] = ring(case, group)
        except BaseException as failure:
            failures.append(failure)

    ranks = range(case.ranks)
    threads = [threading.Thread(target=act, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("kind", [Own, MPI])
@pytest.mark.parametrize("ranks", [1, 2, 3, *deep(4, 5)])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 0)}], ids=str)
def test_a_communicator_carries_the_ring(kind, ranks, options):
    """Windows skip ranks: alternating senders must not wait in a circle."""
    problem = case(ranks, "zigzag", 3, sinks=np.ones(4), **options)
    outs, lses, grads = zip(*on_threads(problem, kind), strict=True)
    out, lse, expected = one_device(problem)
    np.testing.assert_allclose(problem.unshard(outs), out, **CLOSE)
    np.testing.assert_allclose(problem.unshard(lses, of_rows=True), lse, **CLOSE)
    for name in ("dq", "dk", "dv"):
        whole = problem.unshard([getattr(g, name) for g in grads])
        np.testing.assert_allclose(whole, getattr(expected, name), **CLOSE)


@pytest.mark.parametrize(("hop", "ranks"), list(combinations(range(1, 17), 2)))
def test_ranks_that_send_by_turns_never_wait_in_a_circle(hop, ranks):
    """In each circle of ranks one receives first, and one sends first."""
    step = min(hop, ranks - hop)
    sends_first = [rank // step % 2 == 0 for rank in range(ranks)]
    for start in range(ranks):
        circle = [start]
        while (following := (circle[-1] + hop) % ranks) != start:
            circle.append(following)
        assert {sends_first[rank] for rank in circle} == {True, False}


def test_a_block_of_rings_in_turn():
    """In many consecutive calls, each receives its own arrays."""

    def of_rank(group: Group) -> list[Any]:
        rng = np.random.default_rng(0)
        outs = []
        for causal in (True, False, True):
            x = rng.standard_normal((1, 12, 1, 4))
            mine = [shard(x, group.rank, group.size)] * 3
            outs.append(ring_attention(*mine, group=group, causal=causal).sum())
        return outs

    totals = np.sum(run(of_rank, 3), axis=0)
    np.testing.assert_allclose(totals, np.sum(run(of_rank, 1), axis=0))


def test_what_is_no_communicator_is_refused():
    with pytest.raises(TypeError, match="it has rank, size, send, receive, all_gather, or"):
        communicator_of(object())
    x = np.zeros((1, 2, 1, 4))
    with pytest.raises(TypeError, match=r"group has type .*Own; .*Group\(communicator\)"):
        ring_attention(x, x, x, group=Own(Wires(), 0, 1))


def test_a_communicator_of_another_size_is_refused():
    with pytest.raises(ValueError, match="a communicator of 3 ranks, this one rank 0, for 2 ranks"):
        Group(Own(Wires(), 0, 3), size=2)
    with pytest.raises(ValueError, match="a communicator of 3 ranks, this one rank 3"):
        Group(Own(Wires(), 3, 3))
    with pytest.raises(ValueError, match="timeout = 0"):
        Group(Own(Wires(), 0, 1), timeout=0)


def refused(kind: type[Exception], match: str, *shapes: Any, **options: Any) -> None:
    """A call on rank 0 of 4 is refused before anything is sent: no rank receives here."""
    size = options.pop("size", 4)
    communicator = options.pop("communicator", Own)(Wires(), 0, size)
    arrays = [np.zeros(shape) for shape in shapes or ((1, 4, 2, 8),) * 3]
    with pytest.raises(kind, match=match):
        ring_attention(*arrays, group=Group(communicator), **options)


def test_bad_input_is_refused_before_anything_is_sent():
    odd, other, packed = (1, 3, 2, 8), (1, 6, 2, 8), (8, 2, 8)
    refused(ValueError, "a multiple of 8", odd, odd, odd)
    refused(ValueError, "q has 3 tokens, k has 6", odd, other, other)
    refused(ValueError, "placement = 'spiral'", placement="spiral")
    refused(ValueError, "arrays that are NumPy's, of rank 0 on device 1", communicator=OnDevice)
    refused(ValueError, "H = 2 heads, k and v have G = 3", (1, 4, 2, 8), *[(1, 4, 3, 8)] * 2)
    refused(ValueError, "without a seed", dropout_p=0.5)
    refused(ValueError, "dropout with pieces of 2 tokens", dropout_p=0.5, seed=1)
    refused(ValueError, "window_size", window_size=(-1, 0))
    refused(TypeError, "causal", causal="yes")
    refused(TypeError, "rotary has type str", rotary="yes")
    refused(TypeError, "seed is a DropoutSeed", dropout_p=0.1, seed=DropoutSeed(3))
    striped = {"placement": "striped"}
    refused(NotImplementedError, "alibi_slopes with placement", alibi_slopes=np.ones(2), **striped)
    refused(NotImplementedError, "dropout_p with placement", dropout_p=0.1, seed=0, **striped)
    refused(ValueError, "q has shape .*with cu_seqlens", cu_seqlens=[0, 32])
    refused(ValueError, "cu_seqlens end at 16, .* 32 tokens", *[packed] * 3, cu_seqlens=[0, 16])
    refused(ValueError, "never fall", *[packed] * 3, cu_seqlens=[0, 40, 32])
    refused(ValueError, "a sequence of 12 tokens over 4", *[packed] * 3, cu_seqlens=[0, 12, 32])
    refused(TypeError, "integers", *[packed] * 3, cu_seqlens=[0.0, 32.0])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "ranks = None and devices = None"),
        ({"ranks": 0}, "ranks = 0"),
        ({"ranks": 2, "devices": [0, 1]}, "one of them"),
        ({"devices": [0, 0]}, "each on a separate device"),
        ({"devices": [0, -1]}, r"devices = \[0, -1\]"),
        ({"ranks": 2, "transport": "nccl"}, "without devices"),
        ({"devices": [0], "transport": "post"}, "transport = 'post'"),
    ],
)
def test_a_run_of_nothing_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        run(lambda group: None, **given)


def test_strided_views_need_no_copy_of_the_user():
    problem = case(2, "zigzag", 3, dims=(8, 8), heads=(2, 2), causal=True)
    out, _, _ = one_device(problem)

    def of_rank(group: Group) -> Any:
        packed = np.stack([problem.shard(name, group.rank) for name in "qkv"], axis=2)
        return ring_attention(
            packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], group=group, causal=True
        )

    np.testing.assert_allclose(problem.unshard(run(of_rank, 2)), out, **CLOSE)


def test_nothing_to_attend_to():
    """No tokens, and sequences without any."""
    assert (
        run(lambda group: ring_attention(*np.zeros((3, 2, 0, 2, 8)), group=group), 2)[0].size == 0
    )
    empty = np.zeros((3, 0, 2, 8))
    outs = run(lambda group: ring_attention(*empty, group=group, cu_seqlens=[0, 0, 0]), 2)
    assert outs[0].shape == (0, 2, 8)


class Bindings:
    """A fake `cupy.cuda.nccl` that records its calls."""

    NCCL_INT8 = 0
    available = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.asked.append((name, *given, *named.values()))


class NCCLEnd:
    """A NcclCommunicator: rank 1 of 3 on device 2."""

    def __init__(self, bindings: Bindings) -> None:
        for name in ("send", "recv", "allGather", "abort", "destroy"):
            setattr(self, name, getattr(bindings, name))

    def rank_id(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def device_id(self) -> int:
        return 2


class Backend:
    """A NCCLBackend of cupyx.distributed: rank 1 of 3."""

    rank, _n_devices = 1, 3

    def __init__(self, bindings: Bindings) -> None:
        self._comm = NCCLEnd(bindings)
        for name in ("send", "recv", "send_recv", "all_gather"):
            setattr(self, name, getattr(bindings, name))


class NCCL4Py:
    """A Communicator of nccl4py 0.6, whose buffers are positional and streams are not."""

    rank, nranks = 1, 3
    device = SimpleNamespace(device_id=2)

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings

    def send(self, sendbuf: Any, peer: int, *, stream: int | None = None) -> None:
        self._bindings.send(sendbuf, peer, stream)

    def recv(self, recvbuf: Any, peer: int, *, stream: int | None = None) -> None:
        self._bindings.recv(recvbuf, peer, stream)

    def allgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: int | None = None, config: Any = None
    ) -> None:
        assert config is None
        self._bindings.allgather(sendbuf, recvbuf, stream)

    def abort(self) -> None:
        self._bindings.abort()


class OnGPU:
    """Stands in for an array of a GPU: its place, its bytes."""

    def __init__(self, place: int, nbytes: int) -> None:
        self.data, self.nbytes, self.place = SimpleNamespace(ptr=place), nbytes, place

    def reshape(self, *_: int) -> OnGPU:
        return self

    view = reshape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnGPU) and other.place == self.place

    __hash__ = None  # type: ignore[assignment]


STREAM = SimpleNamespace(ptr=77)
HERE, THERE = OnGPU(1000, 12), OnGPU(2000, 12)


@pytest.mark.parametrize(("set_before", "found"), [(None, "0"), ("1", "1")])
def test_multicast_is_off_before_nccl_is_loaded(set_before, found, monkeypatch):
    """Unless the user has set it."""
    seen = []

    def import_module(name: str) -> Bindings:
        seen.append((name, os.environ.get("NCCL_NVLS_ENABLE")))
        return Bindings()

    monkeypatch.setenv("NCCL_NVLS_ENABLE", set_before or "")
    if set_before is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(nccl, "load_cupy", lambda: None)
    monkeypatch.setattr(nccl, "import_module", import_module)
    nccl.load_nccl()
    assert seen == [("cupy.cuda.nccl", found)]


def test_nccl_is_given_bytes_in_one_group(monkeypatch):
    bindings = Bindings()
    monkeypatch.setattr(nccl, "load_nccl", lambda: bindings)
    end = communicator_of(NCCLEnd(bindings))
    assert (end.rank, end.size, end.device) == (1, 3, 2)
    with end.together():
        end.send(HERE, 2, STREAM)
        end.receive(THERE, 0, STREAM)
    end.all_gather(HERE, THERE, STREAM)
    end.abort()
    assert bindings.asked == [
        ("groupStart",), ("send", 1000, 12, 0, 2, 77), ("recv", 2000, 12, 0, 0, 77),
        ("groupEnd",), ("allGather", 1000, 2000, 12, 0, 77), ("abort",),
    ]  # fmt: skip


def test_cupyx_has_two_peers_in_one_group(monkeypatch):
    """Its own send_recv has one for both."""
    bindings = Bindings()
    monkeypatch.setattr(communicators, "load_nccl", lambda: bindings)
    end = communicator_of(Backend(bindings))
    assert (end.rank, end.size, end.device) == (1, 3, 2)
    with end.together():
        end.send(HERE, 2, STREAM)
        end.receive(THERE, 0, STREAM)
    end.all_gather(HERE, THERE, STREAM)
    end.abort()
    assert bindings.asked == [
        ("groupStart",), ("send", HERE, 2, STREAM), ("recv", THERE, 0, STREAM), ("groupEnd",),
        ("all_gather", HERE, THERE, 12, STREAM), ("abort",),
    ]  # fmt: skip


def test_nccl4py_is_given_streams_by_their_address(monkeypatch):
    bindings = Bindings()

    @contextmanager
    def group() -> Iterator[None]:
        bindings.group_start()
        yield
        bindings.group_end()

    modules = {"nccl.core": SimpleNamespace(group=group)}
    monkeypatch.setattr(communicators, "import_module", modules.__getitem__)
    end = communicator_of(NCCL4Py(bindings))
    assert (end.rank, end.size, end.device) == (1, 3, 2)
    with end.together():
        end.send(HERE, 2, STREAM)
        end.receive(THERE, 0, STREAM)
    end.all_gather(HERE, THERE, STREAM)
    end.abort()
    assert bindings.asked == [
        ("group_start",), ("send", HERE, 2, 77), ("recv", THERE, 0, 77), ("group_end",),
        ("allgather", HERE, THERE, 77), ("abort",),
    ]  # fmt: skip


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
    """A fake of nccl4py, which takes the address of a stream."""

    device = 1

    def all_gather(self, array: Any, out: Any, stream: Any) -> None:
        raise AssertionError(stream.ptr)

    send = receive = all_gather


@pytest.mark.parametrize(
    ("array", "kind", "says"),
    [
        (ONE, ValueError, "an array that is NumPy's, of rank 0 on device 1"),
        (SimpleNamespace(device=SimpleNamespace(id=0)), ValueError, "that is on device 0, of rank"),
        ([1.0], TypeError, "list where an array belongs"),
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
    """Otherwise another rank would wait for an array that no rank sends."""
    with Group(Own(Wires(), 0, 3)) as group:
        for outgoing, incoming in (([ONE, ONE], [ONE]), ([ONE], [])):
            with pytest.raises(ValueError, match=r"\d arrays to send, and \d to receive"):
                group.exchange(outgoing, to, incoming, source)


def test_two_threads_of_one_rank_are_told_apart():
    """The first waits for the other rank, which comes after the second."""
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
