"""Which calls of attention a ring makes: a pure function of ranks, lengths, placement and window.

At each step every rank attends to the keys and values of the rank `shift` places before it. Blocks
move on by whole ranks, and shifts at which no rank sees anything are skipped. Within a step each
piece of queries attends to each piece of keys. With d = (first position of the queries' piece) -
(that of the keys') and positions `step` apart, query i sees key j of the two pieces where

    -left <= position of key - position of query = step (j - i) - d <= right
    low = ceil((d - left) / step) <= j - i <= floor((d + right) / step) = high

So a pair of pieces is hidden, seen whole, or a band; the band is a causal triangle or a window for
the kernels. Where positions do not matter otherwise, neighbouring pairs that are seen whole are one
call, and so is a rank's own block.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyattn.distributed.placement import Placement
from cupyattn.runtime.annotations import Keywords

Integers = NDArray[np.int64]


class RankRows(NamedTuple):
    """Rows of what a rank holds."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The rows as an index."""
        return slice(self.start, self.stop)


class AttentionCall(NamedTuple):
    """One call of attention: some of a rank's queries to some keys of a block.

    In sequence b, query i of the rows sees keys ``i + q_offsets[b] - left`` to
    ``i + q_offsets[b] + right`` of them; None is unbounded.
    """

    queries: RankRows
    keys: RankRows
    q_offsets: tuple[int, ...]
    left: int | None
    right: int | None
    own: bool
    """Whether queries see their own keys, as they do in one of all calls. Sinks belong there."""
    query_starts: tuple[int, ...]
    """The position of the first query in each sequence, of the first of joined pieces."""
    key_starts: tuple[int, ...]


class RingStep(NamedTuple):
    """The work of a rank on one block of keys and values."""

    shift: int
    """The block is that of the rank so many places before."""
    calls: tuple[AttentionCall, ...]


class RingPlan(NamedTuple):
    """The steps of one rank."""

    placement: Placement
    rank: int
    lengths: tuple[int, ...]
    """The lengths of the whole sequences."""
    steps: tuple[RingStep, ...]

    @property
    def hops(self) -> tuple[int, ...]:
        """By how many ranks blocks move on after each step; after the last one they return home."""
        shifts = [step.shift for step in self.steps] + [self.placement.ranks]
        return tuple(after - before for before, after in pairwise(shifts))

    @property
    def parted(self) -> tuple[tuple[RingStep, ...], tuple[AttentionCall, ...]]:
        """Steps without the own block's later pieces of queries, and those calls for the end.

        In the backward these calls run while the gradients of the last block go home. In causal
        order the first piece has a quarter of the own block, which runs during the first transfer.
        """
        first, *others = self.steps
        piece = int(self.cu_seqlens[-1])
        now = tuple(call for call in first.calls if call.queries.start < piece)
        later = tuple(call for call in first.calls if call.queries.start >= piece)
        return (first._replace(calls=now), *others), later

    @property
    def cu_seqlens(self) -> Integers:
        """Where each sequence begins within a piece of all of them."""
        pieces = [self.placement.piece_length(length) for length in self.lengths]
        return np.concatenate([[0], np.cumsum(pieces, dtype=np.int64)])

    @property
    def tokens(self) -> int:
        """How many tokens the rank holds."""
        return self.placement.pieces * int(self.cu_seqlens[-1])


class Sight(NamedTuple):
    """The keys that a query sees: `left` positions before its own to `right` after; None is all."""

    left: int | None
    right: int | None

    def band(self, distance: Any, step: int) -> tuple[Any, Any]:
        """Return `low` and `high` of j - i for pieces at that distance; None is unbounded."""
        low = None if self.left is None else -((self.left - distance) // step)
        high = None if self.right is None else (distance + self.right) // step
        return low, high


def sight_of(
    causal: bool, window_size: tuple[int | None, int | None] | None, longest: int
) -> Sight:
    """Return the keys that causal and window_size leave to a query.

    A side that reaches every key of the `longest` sequence is None: positions are 64-bit integers.
    """
    left, right = window_size or (None, None)
    sides = left, 0 if causal else right
    return Sight(
        *(None if side is None or int(side) >= longest - 1 else int(side) for side in sides)
    )


@lru_cache(maxsize=256)
def ring_plan(
    placement: Placement,
    rank: int,
    lengths: tuple[int, ...],
    sight: Sight,
    *,
    join: bool = True,
    packed: bool = False,
    part_own: bool = False,
) -> RingPlan:
    """Plan one rank's calls for a placement that splits all `lengths`, those of whole sequences.

    `join` makes one call of neighbouring pairs of pieces where the result is the same. `packed`
    sequences have nothing to join: pieces of two sequences lie between two of one. `part_own` keeps
    the pieces of queries apart in the rank's own block: see `RingPlan.parted`.
    """
    joins = join and not packed
    steps = tuple(
        RingStep(shift, _calls(placement, rank, shift, lengths, sight, joins, part_own))
        for shift in shifts_needed(placement, lengths, sight)
    )
    return RingPlan(placement, rank, lengths, steps)


@lru_cache(maxsize=256)
def shifts_needed(placement: Placement, lengths: tuple[int, ...], sight: Sight) -> tuple[int, ...]:
    """Return the shifts at which any rank sees anything; the own block always counts."""
    counts = scores_by_shift(placement, lengths, sight)
    return tuple(shift for shift in range(placement.ranks) if shift == 0 or counts[shift].any())


@lru_cache(maxsize=256)
def scores_by_shift(placement: Placement, lengths: tuple[int, ...], sight: Sight) -> Integers:
    """Count the scores that each rank computes at each shift, for one head: (shifts, ranks)."""
    counts = np.zeros((placement.ranks, placement.ranks), np.int64)
    for length in set(lengths):
        counts += lengths.count(length) * seen_by_shift(placement, length, sight).sum(axis=(2, 3))
    counts.flags.writeable = False
    return counts


@lru_cache(maxsize=16)
def seen_by_shift(placement: Placement, length: int, sight: Sight) -> Integers:
    """Count the scores of each pair of pieces: (shifts, ranks, pieces of queries, of keys)."""
    ranks, pieces = placement.ranks, placement.pieces
    numbers = np.array([placement.numbers(rank) for rank in range(ranks)])
    extent = placement.piece_length(length)
    unit = placement.first_position(1, length)
    counts = np.zeros((ranks, ranks, pieces, pieces), np.int64)
    for shift in range(ranks):
        of_keys = np.roll(numbers, shift, axis=0)
        distance = (numbers[:, :, None] - of_keys[:, None, :]) * unit
        counts[shift] = _seen(*sight.band(distance, placement.step), extent)
    counts.flags.writeable = False
    return counts


def _seen(low: Any, high: Any, extent: int) -> Any:
    """Count the pairs i, j below `extent` with low <= j - i <= high."""
    upper = extent * extent if high is None else _pairs_up_to(high, extent)
    lower = 0 if low is None else _pairs_up_to(low - 1, extent)
    return np.maximum(upper - lower, 0)


def _pairs_up_to(high: Any, extent: int) -> Any:
    """Count the pairs i, j below `extent` with j - i <= high."""
    high = np.clip(high, -extent, extent - 1)
    rising = (extent + high) * (extent + high + 1) // 2
    return np.where(high < 0, rising, extent * extent - (extent - 1 - high) * (extent - high) // 2)


def _calls(
    placement: Placement,
    rank: int,
    shift: int,
    lengths: tuple[int, ...],
    sight: Sight,
    join: bool,
    part_own: bool,
) -> tuple[AttentionCall, ...]:
    of_keys = placement.numbers((rank - shift) % placement.ranks)
    pairs = [
        _call(placement, (place, query), (key_place, key), lengths, sight)
        for place, query in enumerate(placement.numbers(rank))
        for key_place, key in enumerate(of_keys)
    ]
    calls = [call for call in pairs if call is not None]
    if not join or len(calls) < 2:
        return tuple(calls)
    if shift == 0 and sight == CAUSAL:
        # Positions rise from token to token, in queries and keys alike.
        ends = [call.queries for call in calls if call.own] if part_own else [calls[-1].queries]
        begins = [rows.start for rows in ends] if part_own else [0]
        return tuple(
            calls[0]._replace(
                queries=RankRows(begin, rows.stop),
                keys=RankRows(0, rows.stop),
                q_offsets=(begin,),
                right=0,
            )
            for begin, rows in zip(begins, ends, strict=True)
        )
    of_queries = _joined(calls, "queries", "keys")
    if shift == 0 and part_own:
        return tuple(of_queries)
    return tuple(_joined(of_queries, "keys", "queries"))


CAUSAL = Sight(None, 0)


def _call(
    placement: Placement,
    of_queries: tuple[int, int],
    of_keys: tuple[int, int],
    lengths: tuple[int, ...],
    sight: Sight,
) -> AttentionCall | None:
    """Return the call for a pair of pieces, (place, number) each; None where nothing is seen."""
    (place, query), (key_place, key) = of_queries, of_keys
    extents = [placement.piece_length(length) for length in lengths]
    starts = [placement.first_position(query, length) for length in lengths]
    key_starts = [placement.first_position(key, length) for length in lengths]
    offsets: list[int] = []
    seen = below = above = False  # anything; and whether a band has this edge in any sequence
    left = right = None
    for extent, start, key_start in zip(extents, starts, key_starts, strict=True):
        low, high = sight.band(start - key_start, placement.step)
        seen |= bool(_seen(low, high, extent))
        below |= low is not None and low > 1 - extent
        above |= high is not None and high < extent - 1
        # Between two tokens of a piece, take the nearest one.
        offset = (start - key_start) // placement.step
        offset = offset if low is None else max(offset, low)
        offsets.append(offset)
        left = None if low is None else offset - low
        right = None if high is None else high - offset
    if not seen:
        return None
    total = sum(extents)
    return AttentionCall(
        RankRows(place * total, (place + 1) * total),
        RankRows(key_place * total, (key_place + 1) * total),
        tuple(offsets),
        left if below else None,
        right if above else None,
        query == key,
        tuple(starts),
        tuple(key_starts),
    )


def _joined(calls: list[AttentionCall], alike: str, neighbours: str) -> list[AttentionCall]:
    """Join calls that are seen whole, alike on one side, if they are neighbours on the other."""
    joined: list[AttentionCall] = []
    for call in sorted(calls, key=lambda call: (getattr(call, alike), getattr(call, neighbours))):
        last = joined[-1] if joined else call
        whole = all(side is None for side in (last.left, last.right, call.left, call.right))
        adjacent = getattr(last, neighbours).stop == getattr(call, neighbours).start
        same = getattr(last, alike) == getattr(call, alike)
        # Calls in which queries see their own keys are not joined with others.
        if joined and whole and adjacent and same and (alike == "queries" or last.own == call.own):
            both = RankRows(getattr(last, neighbours).start, getattr(call, neighbours).stop)
            rows: Keywords = {neighbours: both}
            joined[-1] = last._replace(own=last.own or call.own, **rows)
        else:
            joined.append(call)
    return joined
