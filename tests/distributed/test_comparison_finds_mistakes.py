"""The comparison of a ring with one device can fail: it finds each of these mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ring import assert_same, case

from cupyattn import merge_attention, rope_tables
from cupyattn.distributed import calls, lane, plan, problem, results
from cupyattn.distributed.plan import AttentionCall, RingPlan, Sight

OPTIONS: dict[str, Any] = {
    "causal": True,
    "sinks": np.array([0.5, -1.0, 2.0, 0.0]),
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.1]),
    "rotary": rope_tables(400, 6, dtype="float64"),
    "dropout_p": 0.25,
    "seed": 3,
}


@pytest.fixture(autouse=True)
def _plans_made_anew():
    caches = (
        *(plan.ring_plan, plan.shifts_needed, plan.scores_by_shift, plan.seen_by_shift),
        problem._positions,
    )
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def merges_otherwise(patch: Any, merge: Callable[..., Any]) -> None:
    def wrong(*parts: Any, out: Any) -> None:
        for result, found in zip(out, merge(*parts), strict=True):
            result[...] = found

    patch.setattr(results, "merge_attention", wrong)


def weights_change_places(patch: Any) -> None:
    merges_otherwise(patch, lambda a, of_a, b, of_b: merge_attention(a, of_b, b, of_a))


def results_are_not_rescaled(patch: Any) -> None:
    merges_otherwise(patch, lambda a, of_a, b, of_b: (a + b, np.logaddexp(of_a, of_b)))


def lse_is_the_last_part(patch: Any) -> None:
    merges_otherwise(patch, lambda a, of_a, b, of_b: (merge_attention(a, of_a, b, of_b)[0], of_b))


def a_part_is_forgotten(patch: Any) -> None:
    """The one that is computed where its result goes is taken for nothing."""
    right = results.Merged.add

    def wrong(self: Any, queries: Any, compute: Any) -> None:
        right(self, queries, lambda part: (compute(part), part[1][:, :1].fill(-np.inf)))

    patch.setattr(results.Merged, "add", wrong)


def a_key_too_many(patch: Any) -> None:
    right = Sight.band

    def wrong(self: Sight, distance: Any, step: int) -> Any:
        low, high = right(self, distance, step)
        return low, None if high is None else high + 1

    patch.setattr(Sight, "band", wrong)


def a_piece_too_early(patch: Any) -> None:
    right = plan._call

    def wrong(placement: Any, of_queries: Any, of_keys: Any, *rest: Any) -> Any:
        place, number = of_keys
        return right(placement, of_queries, (place, max(number - (number == 2), 0)), *rest)

    patch.setattr(plan, "_call", wrong)


def sinks_in_every_call(patch: Any) -> None:
    changed_calls(patch, lambda call: call._replace(own=True))


def dropout_counts_keys_from_the_block(patch: Any) -> None:
    changed_calls(patch, lambda call: call._replace(key_starts=(0,)))


def dropout_counts_queries_from_the_shard(patch: Any) -> None:
    changed_calls(patch, lambda call: call._replace(query_starts=(0,)))


def positions_of_alibi_from_the_shard(patch: Any) -> None:
    changed_calls(
        patch, lambda call: call if call.own else call._replace(q_offsets=(call.q_offsets[0] - 32,))
    )


def changed_calls(patch: Any, change: Callable[[AttentionCall], AttentionCall]) -> None:
    right = plan._call

    def wrong(*given: Any) -> AttentionCall | None:
        call = right(*given)
        return None if call is None else change(call)

    patch.setattr(plan, "_call", wrong)


def tokens_are_turned_by_their_place_in_the_shard(patch: Any) -> None:
    patch.setattr(
        problem, "token_positions", lambda placement, rank, lengths: np.arange(
            sum(lengths) // placement.ranks
        ),
    )  # fmt: skip


def gradients_stay_where_they_end(patch: Any) -> None:
    right = RingPlan.hops.fget
    patch.setattr(
        RingPlan, "hops", property(lambda self: (*right(self)[:-1], self.placement.ranks))
    )


def blocks_go_two_ranks_at_a_time(patch: Any) -> None:
    right = RingPlan.hops.fget
    patch.setattr(RingPlan, "hops", property(lambda self: (2, *right(self)[1:])))


def gradients_replace_one_another(patch: Any) -> None:
    right = lane.RingBlocks.arrive

    def wrong(self: Any) -> Any:
        arrived = right(self)
        if arrived[0].dtype == np.float64 and self._own_is_spare:
            for array in arrived[:1]:
                array *= 0.5
        return arrived

    patch.setattr(lane.RingBlocks, "arrive", wrong)


def a_call_is_left_out(patch: Any) -> None:
    right = calls.RingCalls.backward

    def wrong(self: Any, call: AttentionCall, *given: Any) -> Any:
        grads = right(self, call, *given)
        return grads._replace(dk=0 * grads.dk) if not call.own else grads

    patch.setattr(calls.RingCalls, "backward", wrong)


MISTAKES = [
    weights_change_places,
    results_are_not_rescaled,
    lse_is_the_last_part,
    a_part_is_forgotten,
    a_key_too_many,
    a_piece_too_early,
    sinks_in_every_call,
    dropout_counts_keys_from_the_block,
    dropout_counts_queries_from_the_shard,
    positions_of_alibi_from_the_shard,
    tokens_are_turned_by_their_place_in_the_shard,
    gradients_stay_where_they_end,
    blocks_go_two_ranks_at_a_time,
    gradients_replace_one_another,
    a_call_is_left_out,
]


def test_without_a_mistake_it_is_right():
    assert_same(case(3, "zigzag", 32, batch=1, **OPTIONS))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(case(3, "zigzag", 32, batch=1, **OPTIONS))
