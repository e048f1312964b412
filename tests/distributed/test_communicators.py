"""What carries the bytes: a user's own communicator, MPI's methods, threads; what is refused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.ring import CLOSE, Case, case, one_device, ring
from support.wires import MPI, Own, Wires

from cupyattn import AttentionGrads, DropoutSeed
from cupyattn.distributed import (
    Group,
    RankFailedError,
    ring_attention,
    ring_attention_backward,
    run,
    shard,
)
from cupyattn.distributed.communicators.adapters import communicator_of


def on_threads(case: Case, kind: Any) -> list[Any]:
    """What each rank computes with a communicator of that kind."""
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
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 0)}], ids=str)
def test_a_communicator_carries_the_ring(kind, ranks, options):
    """Windows jump over ranks: whoever sends by turns must not wait in a circle."""
    problem = case(ranks, "zigzag", 3, sinks=np.ones(4), **options)
    outs, lses, grads = zip(*on_threads(problem, kind), strict=True)
    out, lse, expected = one_device(problem)
    np.testing.assert_allclose(problem.unshard(outs), out, **CLOSE)
    np.testing.assert_allclose(problem.unshard(lses, of_rows=True), lse, **CLOSE)
    for name in ("dq", "dk", "dv"):
        whole = problem.unshard([getattr(g, name) for g in grads])
        np.testing.assert_allclose(whole, getattr(expected, name), **CLOSE)


@pytest.mark.parametrize("ranks", range(2, 17))
@pytest.mark.parametrize("hop", range(1, 16))
def test_ranks_that_send_by_turns_never_wait_in_a_circle(ranks, hop):
    """Of each circle of ranks someone receives first, and someone sends first."""
    if hop >= ranks:
        return
    step = min(hop, ranks - hop)
    sends_first = [rank // step % 2 == 0 for rank in range(ranks)]
    for start in range(ranks):
        circle = [start]
        while (following := (circle[-1] + hop) % ranks) != start:
            circle.append(following)
        assert {sends_first[rank] for rank in circle} == {True, False}


def test_a_block_of_rings_in_turn():
    """Many calls one behind the other: what is received belongs to its call."""

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
    with pytest.raises(TypeError, match=r"group is a .*Own; .*distributed.Group\(communicator\)"):
        ring_attention(x, x, x, group=Own(Wires(), 0, 1))


def test_a_communicator_of_another_size_is_refused():
    with pytest.raises(ValueError, match="a communicator of 3 ranks, this one rank 0, for 2 ranks"):
        Group(Own(Wires(), 0, 3), size=2)
    with pytest.raises(ValueError, match="a communicator of 3 ranks, this one rank 3"):
        Group(Own(Wires(), 3, 3))
    with pytest.raises(ValueError, match="timeout = 0"):
        Group(Own(Wires(), 0, 1), timeout=0)


class OnDevice(Own):
    device = 1


def refused(kind: type[Exception], match: str, *shapes: Any, **options: Any) -> None:
    """A call on rank 0 of 4 is refused before anything is sent: nobody receives here."""
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
    refused(TypeError, "rotary is a str", rotary="yes")
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
        ({"devices": [0, 0]}, "each on a device of its own"),
        ({"ranks": 2, "transport": "nccl"}, "without devices"),
        ({"devices": [0], "transport": "post"}, "transport = 'post'"),
    ],
)
def test_a_run_of_nothing_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        run(lambda group: None, **given)


def test_results_go_where_they_are_told():
    problem = case(2, "zigzag", 2, causal=True)
    out, lse, _ = one_device(problem)

    def of_rank(group: Group) -> Any:
        q, k, v, dout = (problem.shard(name, group.rank) for name in ("q", "k", "v", "dout"))
        batch, tokens, heads, _ = q.shape
        given = np.full((*q.shape[:3], v.shape[3]), np.nan), np.full((batch, heads, tokens), np.nan)
        found = ring_attention(q, k, v, group=group, causal=True, out=given, return_lse=True)
        assert found[0] is given[0]
        assert found[1] is given[1]
        grads = AttentionGrads(dq=np.ones(q.shape), dk=np.ones(k.shape))
        results = ring_attention_backward(
            dout, q, k, v, *found, group=group, causal=True, grads=grads, accumulate=True
        )
        assert results.dq is grads.dq
        return found, results

    found, grads = zip(*run(of_rank, 2), strict=True)
    np.testing.assert_allclose(problem.unshard([f[0] for f in found]), out, **CLOSE)
    without = one_device(problem._replace(arrays={**problem.arrays, "dlse": 0 * lse}))[2]
    np.testing.assert_allclose(problem.unshard([g.dq for g in grads]), without.dq + 1, **CLOSE)
    np.testing.assert_allclose(problem.unshard([g.dv for g in grads]), without.dv, **CLOSE)


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


def test_a_failure_of_one_rank_alone_before_the_ring():
    def of_rank(group: Group) -> None:
        x = np.zeros((1, 4, 2, 8))
        ring_attention(x, x, x, group=group, softcap=-1.0 if group.rank else None)

    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: softcap"):
        run(of_rank, 2, timeout=20)
