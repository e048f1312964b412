"""What each rank computes at each step: everything that is visible once, and evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyattn.distributed.placement import PLACEMENTS, Placement
from cupyattn.distributed.plan import (
    Sight,
    Step,
    balance,
    ring_plan,
    scores_by_shift,
    seen_by_shift,
    shifts_needed,
)

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
        plan = plan._replace(steps=(*steps, Step(0, later)))
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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=80, deadline=None)
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
@pytest.mark.parametrize("ranks", [16, 33, 64])
def test_many_ranks(name, sight, ranks):
    check(name, ranks, [2], sight, join=True, packed=False)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zigzag_and_striped_are_balanced(ranks):
    tokens = 131072
    assert balance(Placement("zigzag", ranks), (tokens,), CAUSAL) >= 0.99
    assert balance(Placement("striped", ranks), (tokens,), CAUSAL) >= 0.99
    assert balance(Placement("contiguous", ranks), (tokens,), CAUSAL) < 0.8


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


@pytest.mark.parametrize("ranks", range(1, 65))
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


def test_a_planted_piece_off_by_one_is_found(monkeypatch):
    right = Placement.first_position

    def wrong(self, number, length):
        return right(self, number, length) + (number == 2)

    monkeypatch.setattr(Placement, "first_position", wrong)
    cached = (ring_plan, scores_by_shift, seen_by_shift, shifts_needed)
    for function in cached:
        function.cache_clear()
    with pytest.raises((AssertionError, IndexError)):
        check("zigzag", 2, [3], CAUSAL, join=False, packed=False)
    for function in cached:
        function.cache_clear()
