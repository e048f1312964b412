"""What a ring takes, modelled: compute, passes over memory, transfer, and the host's time.

A step of a ring takes as long as the rank that is last, the transfers beside it, or the host, which
asks for all of it, whichever is longest:

    step = max(scores * operations / rate + bytes of passes / memory's rate,
               bytes of the block / bandwidth + latency,
               launches * the host's time of one)

- A score takes 2 (D + Dv) operations forward, and 2.5 times that backward (five products of two
  sizes). Calls whose queries see all keys take longer for each (`Card.whole_forward`). Their CTAs
  take equally long, in waves of as many as run at a time, and the last wave as long as a full one;
  under causal order short ones fill it.
- Passes forward: from the second step on each piece of queries that sees anything is merged. What
  there is of it is read (16 bits, from the third step on 32) with the part that came, in 16, and
  written in 32, at the last step in 16: 6 to 10 bytes an item of out.
- Passes backward: the sums dq, dk and dv are zeroed (4 bytes an item). At each step the shares are
  read in 16 bits, and the sums of pieces that see or are seen read and written: 10 bytes. At the
  end they are read and rounded into the gradients: 6.
- Transfers forward are of k and v; backward of the float32 gradients of the block before besides.
  Behind the last step these go home, beside what is left of the rank's own block: with zigzag its
  second piece of queries.
- The host launches one kernel forward or three backward, one for each merge or sum, and for a
  transfer what sends and receives. Before the first kernel it checks the call; behind it, it
  compares it with those of the other ranks.

Two H200 reached 91.7 % of as fast as there are GPUs (131,072 tokens, 16 heads of 128, causal,
2026-11-23). One H200 that computes both ranks' shares in turn, without a link, loses 7.2 % of them
(264.2 ms beside 245.2; with the backward 6.9 %; compute_75 code, 2026-11-24):

- 5 %, for blocks of other ranks are seen whole. Own blocks take 61.6 ms, others 68.6 and 70.3
  (backward 184.4, 202.4 and 198.7). All CTAs walk the keys of a head side by side, and all wait
  where the first of them finds a tile in no cache. Code for sm_80 and on brings tiles to L2 before
  their turn: own blocks take 51.9 ms there, others 52.5 and 53.7, and one GPU's call 205.3, which
  would be 97 % (forward, head dim 128; the backward does so since, and is up to 4 % faster). A
  tile takes longer on a T4: nothing is assumed lost there.
- 1.5 % in the last waves: 8,192 and 4,096 CTAs, 264 at a time, are 31.03 and 15.5 waves.
- 0.6 % in the host, which then compared calls before the first kernel, and 0.2 % in merges.

This says 93.5 %, for ranks compare their calls behind the first kernel now. What else the two GPUs
lost is the link's, or comes of clocks: one GPU alone was the measure of both.

Two H100 reached 93.1 % with that code, and 93.2 % with the backward. With their own code they
reached 97.1 and 93.1 %, by copies between peers 97.2 and 93.7 (`python -m cupyattn.benchmark ring`,
NVLink, driver 13.0, 2026-11-24, when the backward brought nothing to L2 yet).
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
    forward: float
    """TFLOP/s of causal attention in float16 at head dim 128."""
    backward: float
    gb_per_s: float
    """Of its memory, read and written."""
    launch_us: float
    """Microseconds of the host for a launch."""
    whole_forward: float = 1.0
    """Of the rate, what is left of it where queries see all keys."""
    whole_backward: float = 1.0
    """The same, with what the last waves lose."""
    slots: int = 0
    """CTAs of the forward that run at a time, two on each multiprocessor; 0 counts no waves."""


class Link(NamedTuple):
    """What joins neighbours of a ring."""

    name: str
    gb_per_s: float
    """In each direction at once."""
    microseconds: float
    """Before the first byte arrives."""


# Of the T4 the modelled utilisation of its tensor cores (python -m cupyattn turing) times their 65
# TFLOP/s; of the H200 what Turing's code reached there (131,072 tokens, 16 heads of 128, and parts
# of them, 2026-11-24), a copy there, and a call's host side (benchmark host, 2026-11-22). Of the
# T4's 320 GB/s two thirds, and a host as slow again: no measurements.
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
    """Seconds of one call on each rank.

    Attributes
    ----------
    compute : float
        Of scores, on the rank that is last at each step, summed over steps.
    memory : float
        Of its passes over memory that one card alone does not make.
    transfer : float
        Of all transfers.
    exposed : float
        What transfers add to the time of these.
    host : float
        What the host adds besides.
    single : float
        What one card alone would take.
    balance : float
        The share of the time that ranks compute, counted in scores.
    steps : int
    """

    ranks: int
    compute: float
    memory: float
    transfer: float
    exposed: float
    host: float
    single: float
    balance: float
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

    Parameters
    ----------
    ranks, tokens : int
        How many cards, and how many tokens they hold together of each sequence.
    heads, kv_heads, head_dim, batch : int
        Of q, and of k and v; kv_heads are as many as heads by default.
    card, link
        What computes, and what carries.
    placement, causal, window_size
        As for `ring_attention`.
    backward : bool
        The backward instead of the forward.

    Raises
    ------
    ValueError
        For a number that is below 1, key-value heads that do not divide heads, and a length that
        the placement cannot split.

    Examples
    --------
    Two T4s over PCIe hide all of the transfer forward:

    >>> cost = ring_cost(2, 131_072, heads=16, head_dim=128)
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

    scores: int
    """Of a pair."""
    rate: float
    """Of that of others."""
    waves: float
    """Of a piece of queries; 0 counts none."""

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
        """Add bytes that every rank reads and writes, beside nothing."""
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
