"""Which rank has which tokens and device: placements, the plan of a ring, launchers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search import Search, deep

from cupyattn.distributed import (
    launched_group,
    positions,
    processes,
    ring_attention,
    run,
    shard,
    unshard,
)
from cupyattn.distributed.placement import PLACEMENTS, Placement
from cupyattn.distributed.plan import (
    RingStep,
    Sight,
    ring_plan,
    scores_by_shift,
    seen_by_shift,
    shifts_needed,
)
from cupyattn.distributed.processes import launched

FULL, CAUSAL = Sight(None, None), Sight(None, 0)


def sights(longest: int = 40) -> st.SearchStrategy[Sight]:
    side = st.one_of(st.none(), st.integers(0, longest))
    return st.sampled_from([FULL, CAUSAL]) | st.builds(Sight, side, side)


def visible(sight: Sight, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    distance = keys[None, :] - queries[:, None]
    seen = np.ones(distance.shape, bool)
    if sight.left is not None:
        seen &= distance >= -sight.left
    if sight.right is not None:
        seen &= distance <= sight.right
    return seen


def pairs_of(placement: Placement, rank: int, lengths, sight, **how):
    """How often the rank's calls let each query see each key: {sequence: (length, length)}."""
    seen = [np.zeros((length, length), int) for length in lengths]
    plan = ring_plan(placement, rank, tuple(lengths), sight, **how)
    if how["part_own"]:
        steps, later = plan.parted
        assert all(call.queries.start for call in later)
        plan = plan._replace(steps=(*steps, RingStep(0, later)))
    for step in plan.steps:
        owner = (rank - step.shift) % placement.ranks
        for call in step.calls:
            for b, length in enumerate(lengths):
                extent = placement.piece_length(length)
                total = int(plan.cu_seqlens[-1])
                begin = int(plan.cu_seqlens[b])

                def of(rows, holder, length=length, extent=extent, total=total, begin=begin):
                    numbers = placement.numbers(holder)
                    if total == extent:  # one sequence: rows may run through both pieces
                        held = np.concatenate(
                            [np.asarray(placement.piece(n, length), int) for n in numbers]
                        )
                        return held[rows.slice]
                    assert rows.stop - rows.start == total
                    number = numbers[rows.start // total] if total else numbers[0]
                    return np.asarray(placement.piece(number, length), int)

                queries, keys = of(call.queries, rank), of(call.keys, owner)
                distance = np.arange(len(keys))[None, :] - np.arange(len(queries))[:, None]
                distance = distance - call.q_offsets[b]
                inside = np.ones(distance.shape, bool)
                if call.left is not None:
                    assert call.left >= 0
                    inside &= distance >= -call.left
                if call.right is not None:
                    assert call.right >= 0
                    inside &= distance <= call.right
                np.add.at(seen[b], np.ix_(queries, keys), inside)
    return seen


def check(name, ranks, sizes, sight, *, join, packed, part_own=False):
    placement = Placement(name, ranks)
    how = {"join": join, "packed": packed, "part_own": part_own}
    lengths = [placement.pieces * ranks * size for size in sizes]
    total = [np.zeros((length, length), int) for length in lengths]
    for rank in range(ranks):
        for whole, part in zip(
            total, pairs_of(placement, rank, lengths, sight, **how), strict=True
        ):
            whole += part
    for whole, length in zip(total, lengths, strict=True):
        everyone = np.arange(length)
        assert np.array_equal(whole, visible(sight, everyone, everyone))
    counts = scores_by_shift(placement, tuple(lengths), sight)
    assert counts.sum() == sum(int(whole.sum()) for whole in total)


@settings(max_examples=300 if Search.deep else 60, deadline=None)
@given(
    name=st.sampled_from(PLACEMENTS),
    ranks=st.integers(1, 8),
    size=st.integers(1, 5),
    sight=sights(),
    join=st.booleans(),
    part_own=st.booleans(),
)
def test_every_visible_pair_is_computed_once(name, ranks, size, sight, join, part_own):
    check(name, ranks, [size], sight, join=join, packed=False, part_own=part_own)


@settings(max_examples=160 if Search.deep else 30, deadline=None)
@given(
    name=st.sampled_from(PLACEMENTS),
    ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    sight=sights(),
    part_own=st.booleans(),
)
def test_packed_sequences_are_each_computed_once(name, ranks, sizes, sight, part_own):
    check(name, ranks, sizes, sight, join=True, packed=True, part_own=part_own)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("sight", [FULL, CAUSAL, Sight(9, 0), Sight(70, 3), Sight(0, 0)])
@pytest.mark.parametrize("ranks", [16, *deep(33, 64)])
def test_many_ranks(name, sight, ranks):
    check(name, ranks, [2], sight, join=True, packed=False)


def balance(placement: Placement) -> float:
    """Share of the time that ranks compute: each step lasts as long as its slowest rank."""
    counts = scores_by_shift(placement, (131072,), CAUSAL)
    return counts.sum() / (counts.max(axis=1).sum() * placement.ranks)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zigzag_and_striped_are_balanced(ranks):
    assert balance(Placement("zigzag", ranks)) >= 0.99
    assert balance(Placement("striped", ranks)) >= 0.99
    assert balance(Placement("contiguous", ranks)) < 0.8


def test_causal_zigzag_takes_one_call_a_step():
    for rank in range(8):
        plan = ring_plan(Placement("zigzag", 8), rank, (1024,), CAUSAL)
        assert [len(step.calls) for step in plan.steps] == [1] * 8
        assert plan.hops == (1,) * 8


def test_a_window_skips_ranks():
    """Contiguous pieces of 16: a window of 16 reaches one rank back, of 17 two."""
    placement = Placement("contiguous", 8)
    assert shifts_needed(placement, (128,), Sight(16, 0)) == (0, 1)
    assert shifts_needed(placement, (128,), Sight(17, 0)) == (0, 1, 2)
    plan = ring_plan(placement, 0, (128,), Sight(16, 0))
    assert plan.hops == (1, 7)
    assert not plan.steps[1].calls  # rank 0 sees nothing of rank 7
    # Zigzag pieces have a neighbour at each side, and between those nothing is seen.
    assert shifts_needed(Placement("zigzag", 8), (128,), Sight(8, 0)) == (0, 1, 7)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("sight", [FULL, CAUSAL, Sight(9, 0)])
def test_pairs_of_pieces_are_counted(name, sight):
    placement = Placement(name, 4)
    pairs = seen_by_shift(placement, 64, sight)
    np.testing.assert_array_equal(pairs.sum(axis=(2, 3)), scores_by_shift(placement, (64,), sight))
    if name == "zigzag" and sight == CAUSAL:
        np.testing.assert_array_equal(pairs[0], [[[36, 0], [64, 36]]] * 4)
        np.testing.assert_array_equal(pairs[1, 0], [[0, 0], [64, 64]])  # of the last rank's block
        np.testing.assert_array_equal(pairs[1, 1], [[64, 0], [64, 0]])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 33, 64])
def test_blocks_come_home(ranks):
    for name in PLACEMENTS:
        for sight in (FULL, CAUSAL, Sight(5, 0)):
            plan = ring_plan(Placement(name, ranks), 0, (4 * ranks,), sight)
            assert sum(plan.hops) == ranks
            assert plan.steps[0].shift == 0
            assert plan.tokens == 4


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("sight", [FULL, CAUSAL, Sight(9, 0), Sight(70, 3)])
def test_each_query_meets_itself_in_one_call(name, sight):
    """Sinks are given to those calls: more than one would count them twice."""
    for join in (True, False):
        plan = ring_plan(Placement(name, 4), 1, (64,), sight, join=join)
        met = np.zeros(plan.tokens, int)
        for step in plan.steps:
            for call in step.calls:
                met[call.queries.slice] += call.own
        assert (met == 1).all()


X = np.arange(24).reshape(1, 8, 3)


def halves(**how: Any) -> list[np.ndarray]:
    return [shard(X, rank, 2, **how) for rank in range(2)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", [list, tuple, iter, np.stack])
def test_shards_come_in_anything_that_has_them_in_order(kind, placement):
    parts = halves(placement=placement)
    np.testing.assert_array_equal(unshard(kind(parts), placement=placement), X)


@pytest.mark.parametrize("axis", [1, -2, np.int64(1)])
def test_an_axis_from_either_end(axis):
    np.testing.assert_array_equal(unshard(halves(axis=axis), axis=axis), X)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_ranks_are_integers_of_any_kind(kind):
    np.testing.assert_array_equal(shard(X, kind(1), kind(2)), halves()[1])
    many = positions(kind(99), kind(200), 400)  # twice as many pieces are no uint8
    np.testing.assert_array_equal(many, positions(99, 200, 400))


@pytest.mark.parametrize("bounds", [[0], [0, 0]])
def test_no_tokens_at_all(bounds):
    nothing = np.zeros((0, 2, 8))
    part = shard(nothing, 1, 2, cu_seqlens=bounds)
    assert part.shape == (0, 2, 8)
    assert unshard([part] * 2, cu_seqlens=bounds).shape == (0, 2, 8)
    assert positions(0, 2, cu_seqlens=bounds).shape == (0,)

    def of_rank(group: Any) -> Any:
        return ring_attention(part, part, part, group=group, cu_seqlens=bounds)

    assert [out.shape for out in run(of_rank, 2)] == [(0, 2, 8)] * 2


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: shard(X[0, :, 0], 0, 2), ValueError, r"axis = 1 of an array \(8,\); .*axis=0"),
        (lambda: shard(X, 0, 2, axis=9), ValueError, r"axis = 9 of an array \(1, 8, 3\)"),
        (lambda: shard(X, 0, 2, axis=-4), ValueError, "axis = -4"),
        (lambda: shard(X, 0, 2, axis="x"), TypeError, "axis = 'x'"),
        (lambda: shard(np.array(3), 0, 2, axis=0), ValueError, r"axis = 0 of an array \(\)"),
        (lambda: shard([1, 2, 3, 4], 0, 2, axis=0), TypeError, r"x has type builtins\.list"),
        (lambda: shard(None, 0, 2), TypeError, "x is None; it must be an array"),
        (lambda: shard(X, 0.0, 2), ValueError, r"rank 0\.0 of 2"),
        (lambda: shard(X, 0, 0), ValueError, "rank 0 of 0; there is 1 rank or more"),
        (lambda: unshard(3), TypeError, "shards = 3; it is a sequence of arrays"),
        (lambda: unshard([]), ValueError, r"shards that are \[\]; there is one for each rank"),
        (
            lambda: unshard([[1, 2], [3, 4]], axis=0),
            TypeError,
            r"shards\[0\] has type builtins\.list",
        ),
        (lambda: unshard([X, X[:, :4]]), ValueError, r"int64 \(1, 8, 3\)', 'int64 \(1, 4, 3\)'"),
        (lambda: unshard([X, X.astype(np.int32)]), ValueError, "one shape and dtype"),
        (lambda: unshard([X, None]), ValueError, "there is one for each rank"),
        (lambda: unshard([X, X], axis=3), ValueError, "axis = 3"),
        (lambda: positions(0, 2, -8), ValueError, "length = -8; it is an integer, 0 or more"),
        (lambda: positions(0, 2, 8.0), TypeError, r"length = 8\.0"),
        (lambda: positions(0, 2), TypeError, "neither length nor cu_seqlens"),
    ],
)
def test_what_is_refused(call, kind, says):
    with pytest.raises(kind, match=says):
        call()


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, 2)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (5, 8, 1),
        ),
        ({**MPICH, "MPI_LOCALRANKID": "0"}, (1, 2, 0)),
        (TORCHRUN, (3, 4, 1)),
        ({**TORCHRUN, **BATCH}, (3, 4, 1)),
        ({**MPICH, **BATCH}, (1, 2, 1)),
        ({**MPICH, "RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({**MPICH, **TORCHRUN, "CUPYATTN_RANK": "0", "CUPYATTN_SIZE": "3"}, (0, 3, 0)),
    ],
)
def test_launchers_say_who_is_who(environment, found):
    assert launched(environment) == found


def test_launchers_that_disagree_are_refused():
    """Either may have started the other: torchrun on each host by mpiexec, or the reverse."""
    says = "PMI_RANK has 1 of 2, RANK has 3 of 4; .*CUPYATTN_RANK"
    with pytest.raises(RuntimeError, match=says):
        launched({**MPICH, **TORCHRUN})


@pytest.mark.parametrize("wrong", ["x", "", "1.0"])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(ValueError, match=f"RANK = '{wrong}', WORLD_SIZE = '4'; they are integers"):
        launched({"RANK": wrong, "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match="rank 4 of 4"):
        launched({"RANK": "4", "WORLD_SIZE": "4"})


def test_without_a_launcher_it_is_said():
    with pytest.raises(RuntimeError, match="mpiexec -n 2"):
        launched({})


@pytest.mark.parametrize(
    ("local", "device", "used"), [("1", None, 1), ("3", None, 1), ("1", 0, 0), (None, None, 0)]
)
def test_a_process_takes_the_device_of_its_number_on_its_host(
    local, device, used, tmp_path, monkeypatch
):
    """Each host has two ranks; rank 6 of 8 is not the sixth on its host."""
    taken = []

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.use = lambda: taken.append(ordinal)

    cuda = SimpleNamespace(Device=Device, runtime=SimpleNamespace(getDeviceCount=lambda: 2))
    monkeypatch.setattr(processes, "load_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(processes, "load_nccl", lambda: None)
    monkeypatch.setattr(processes, "shared_id", lambda *given: given)
    monkeypatch.setattr(processes, "nccl_group", lambda *given, **named: (given, named))
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", local)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    given, named = launched_group(tmp_path, device=device, timeout=7)
    assert taken == [used]
    assert given == (6, 8, (tmp_path, 6, 8, 7))
    assert named == {"folder": tmp_path, "timeout": 7}
