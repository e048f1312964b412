"""A cost model of ring attention: compute, passes over memory, transfers, and the host's time.

A step of a ring takes as long as its last rank, the transfers meanwhile, or the host, which queues
all of it:

    step = max(scores * operations / rate + bytes of passes / memory's rate,
               bytes of the block / bandwidth + latency,
               launches * the host's time of one)

- A score takes 2 (D + Dv) operations forward, and 2.5 times that backward. Calls whose queries see
  all keys take longer for each (`Card.whole_forward`), in waves of CTAs of which the last takes as
  long as a full one; under causal order short CTAs fill it.
- Passes forward: from the second step on, each piece of queries that sees anything is merged: its
  sum (16 bits, from the third step on 32) and the new part (16) are read, the sum is written in 32
  bits, at the last step in 16.
- Passes backward: the sums dq, dk and dv are zeroed (4 bytes an item). At each step the parts are
  read in 16 bits, and the sums of pieces that see or are seen are read and written: 10 bytes. At
  the end the sums are read and rounded into the gradients: 6.
- Transfers forward are of k and v, backward also of the float32 gradients of the block before.
  After the last step these go home, while the rank's second piece of queries is computed.
- The host launches one kernel forward or three backward, one for each merge or sum, and for a
  transfer what sends and receives. It checks the call before the first kernel, and compares it with
  those of the other ranks after it.

Two H200 reached 91.7 % of twice one GPU's speed (131,072 tokens, 16 heads of 128, causal,
compute_75 code, 2026-11-23), when the ranks still compared their calls before the first kernel;
for that order the model gives 92.8 %, and 93.5 % for today's. Two H100 reached 97.1 % with their
own code, with the backward 93.1 % (NVLink, driver 13.0, 2026-11-24).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.distributed.placement import Placement, placement_of
from cupyattn.distributed.plan import balance, seen_by_shift, shifts_needed, sight_of
from cupyattn.errors import error, shown


class Card(NamedTuple):
    """A GPU, by what attention reaches on it."""

    name: str
    forward: float  # TFLOP/s of causal attention in float16 at head dim 128
    backward: float
    gb_per_s: float  # of its memory, read and written
    launch_us: float  # of the host, for a launch
    whole_forward: float = 1.0  # the share of the rate where queries see all keys
    whole_backward: float = 1.0  # the same, with what the last waves lose
    slots: int = 0  # CTAs of the forward that run at a time; 0 counts no waves


class Link(NamedTuple):
    """What joins neighbours of a ring."""

    name: str
    gb_per_s: float  # in each direction at once
    microseconds: float  # before the first byte arrives


# T4: the modelled utilisation (python -m cupyattn turing) times 65 TFLOP/s, two thirds of 320 GB/s.
# H200: what Turing's code reached there (131,072 tokens, 16 heads of 128, 2026-11-24), a copy, and
# a call's host side (2026-11-22).
T4 = Card("T4 (modelled)", 0.89 * 65, 0.65 * 65, 213.0, 25.0, slots=80)
H200 = Card("H200", 288.0, 239.0, 4257.0, 12.8, 0.91, 0.918, 264)
# What such links are sold as, less a tenth to a quarter for what NCCL reaches; no measurements.
PCIE = Link("PCIe 3.0 x16", 12.0, 20.0)
THROUGH_HOST = Link("PCIe through the host", 6.0, 40.0)
NVLINK = Link("NVLink 4", 360.0, 10.0)
INFINIBAND = Link("InfiniBand NDR, one a GPU", 45.0, 15.0)

FLOAT16, FLOAT32 = 2, 4  # bytes
SUM = FLOAT16 + 2 * FLOAT32  # a share is read, a sum read and written
CTA_ROWS = 128  # of queries, at head dims from 40 to 128
# The host's work in launches' worth. Two ranks that are threads of a process take turns: a forward
# of 64 tokens each took 2.9 ms, and 7.5 ms with the backward (the host of an H200, 2026-11-24). Of
# what is neither launch nor transfer, checks are a tenth on NumPy arrays.
CHECKS, AGREEMENT, TRANSFER = 10, 75, 25


class RingCost(NamedTuple):
    """Seconds of one call on each rank."""

    ranks: int
    compute: float  # of scores, on the rank that is last at each step
    memory: float  # of its passes over memory that one GPU alone does not make
    transfer: float
    exposed: float  # what transfers add to the time of these
    host: float  # what the host adds besides
    single: float  # what one GPU alone would take
    balance: float  # the share of the time that ranks compute, counted in scores
    steps: int

    @property
    def total(self) -> float:
        """Seconds of the call."""
        return self.compute + self.memory + self.exposed + self.host

    @property
    def efficiency(self) -> float:
        """Share of the ranks' ideal speed: 1 is as fast as there are ranks."""
        return self.single / (self.ranks * self.total)


def ring_cost(
    ranks: int,
    tokens: int,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    batch: int = 1,
    card: Card = T4,
    link: Link = PCIE,
    placement: str = "zigzag",
    causal: bool = True,
    window_size: tuple[int | None, int | None] | None = None,
    backward: bool = False,
) -> RingCost:
    """Model a call of `ring_attention`, or of its backward, in float16.

    `ranks` GPUs hold `tokens` of each sequence together; the other arguments are those of
    `ring_attention`. Raises ValueError for a number below 1, key-value heads that do not divide
    heads, and a length that the placement cannot split.

    Examples
    --------
    >>> cost = ring_cost(2, 131_072, heads=16, head_dim=128)  # the transfer is hidden
    >>> round(cost.exposed / cost.total, 3), round(cost.balance, 3)
    (0.0, 1.0)
    """
    kv_heads = heads if kv_heads is None else kv_heads
    require_counts(
        ranks=ranks, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch
    )
    sight = sight_of(causal, window_size, tokens)
    dealt: Placement = placement_of(placement, ranks, (tokens,))
    seen = seen_by_shift(dealt, tokens, sight)
    shifts = shifts_needed(dealt, (tokens,), sight)
    per_score = 4 * head_dim * (2.5 if backward else 1.0)
    rate = (card.backward if backward else card.forward) * 1e12
    seconds_per_score = batch * heads * per_score / rate
    extent = dealt.piece_length(tokens)
    whole = _Whole(
        extent * extent,
        card.whole_backward if backward else card.whole_forward,
        0.0 if backward or not card.slots else extent * batch * heads / CTA_ROWS / card.slots,
    )
    queries, keys = (batch * (tokens // ranks) * each * head_dim for each in (heads, kv_heads))
    block, gradients = (
        2 * keys * size / (link.gb_per_s * 1e9) + link.microseconds / 1e6
        for size in (FLOAT16, FLOAT32)
    )
    total = _Sum(card, seconds_per_score, whole)
    if backward:
        total.passes(FLOAT32 * (queries + 2 * keys))  # zeros
    for number, shift in enumerate(shifts):
        here = seen[shift][:, :1] if backward and shift == 0 else seen[shift]
        last = number + 1 == len(shifts)
        asked = AGREEMENT * (ranks > 1 and number == 0)
        total.uneven = shift == 0 and causal
        if backward:
            moved = [block] * (not last) + [gradients] * (number > 0)
            total.step(here, SUM * queries, SUM * 2 * keys, moved, asked + 6)
        else:
            read = FLOAT16 + (FLOAT16 if number == 1 else FLOAT32)
            merged = (read + (FLOAT16 if last else FLOAT32)) * queries * (number > 0)
            total.step(here, merged, 0, [block] * (not last), asked + 1 + dealt.pieces)
    if backward:
        home = [gradients] * bool(shifts[-1])
        total.uneven = causal
        total.step(seen[0][:, 1:], SUM * queries, SUM * 2 * keys, home, 6)
        total.passes((FLOAT32 + FLOAT16) * (queries + 2 * keys))
    total.host += CHECKS * card.launch_us / 1e6
    alone = (
        1.0
        if sight.left is not None or sight.right is not None
        else float(whole.factor(dealt.pieces * ranks))
    )
    return RingCost(
        ranks, total.compute, total.memory, total.transfer, total.exposed, total.host,
        alone * int(seen.sum()) * seconds_per_score, balance(dealt, (tokens,), sight), len(shifts),
    )  # fmt: skip


class _Whole(NamedTuple):
    """What pairs of pieces take that are seen whole."""

    scores: int  # of a pair
    rate: float  # relative to that of other pairs
    waves: float  # of a piece of queries; 0 counts none

    def factor(self, pieces: Any) -> Any:
        """Return by how much a call of so many pieces of queries takes longer than others."""
        waves = self.waves * np.maximum(pieces, 1)
        return (np.ceil(waves) / waves if self.waves else 1.0) / self.rate


class _Sum:
    """What the steps of a call take together."""

    def __init__(self, card: Card, seconds_per_score: float, whole: _Whole) -> None:
        self._card, self._seconds_per_score, self._whole = card, seconds_per_score, whole
        self.compute = self.memory = self.transfer = self.exposed = self.host = 0.0
        self.uneven = False
        """Whether pairs that are seen whole are of a call whose queries see more and more keys."""

    def passes(self, size: float) -> None:
        """Add bytes that every rank reads and writes, while nothing else runs."""
        self.memory += size / (self._card.gb_per_s * 1e9)

    def step(
        self, seen: Any, of_queries: float, of_keys: float, transfers: list[float], launches: int
    ) -> None:
        """Add a step: scores (ranks, pieces of queries, of keys), bytes of passes over all pieces.

        A rank makes its passes over the pieces of queries that see anything, and those of keys that
        are seen.
        """
        pieces = seen.shape[2]
        computed = self._scores(seen) * self._seconds_per_score
        shares = ((seen > 0).any(axis=axis).sum(axis=1) / pieces for axis in (2, 1))
        size = sum(share * each for share, each in zip(shares, (of_queries, of_keys), strict=True))
        passed = size / (self._card.gb_per_s * 1e9)
        latest = int(np.argmax(computed + passed))
        self.compute += float(computed[latest])
        self.memory += float(passed[latest])
        moved, busy = sum(transfers), float(computed[latest] + passed[latest])
        self.transfer += moved
        self.exposed += max(moved - busy, 0.0)
        asked = (launches + TRANSFER * len(transfers)) * self._card.launch_us / 1e6
        self.host += max(asked - max(busy, moved), 0.0)

    def _scores(self, seen: Any) -> Any:
        """Return how many scores of others each rank's take as long as."""
        if self.uneven:
            return seen.sum(axis=(1, 2))
        whole = seen == self._whole.scores
        alike = (seen * whole).sum(axis=(1, 2))
        return (seen * ~whole).sum(axis=(1, 2)) + alike * self._whole.factor(
            whole.any(axis=2).sum(axis=1)
        )


def require_counts(**counts: Any) -> None:
    """Raise for numbers of heads and the like that are none, or do not go together.

    Raises
    ------
    ValueError
    """
    for name, count in counts.items():
        if not isinstance(count, int | np.integer) or count < 1:
            raise error(
                ValueError, f"{name} = {shown(count)}", "it is an integer, 1 or more",
                "pass how many there are",
            )  # fmt: skip
    if counts["heads"] % counts["kv_heads"]:
        raise error(
            ValueError,
            f"{counts['heads']} heads, {counts['kv_heads']} key-value heads",
            "each key-value head serves as many heads",
            "pass a number of key-value heads that divides that of heads",
        )
