"""What a ring takes, modelled: compute, transfer, and how much of the transfer is exposed.

Each step takes as long as the rank with the most scores computes, or the block's transfer that runs
beside it, whichever is longer:

    step i = max(most scores of a rank * operations of one / rate, bytes / bandwidth + latency)

A score takes 2 (D + Dv) operations forward, and 2.5 times that backward (five products of two
sizes). Forward, a step's transfer is that of k and v; backward the float32 gradients of the block
before besides. Behind the last step these go home, beside what is left of the rank's own block:
with zigzag its second piece of queries. What a call costs the host, and merges (a pass over out
each), are left out: they do not grow with the keys.
"""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.distributed.placement import Placement, placement_of
from cupyattn.distributed.plan import balance, own_scores, scores_by_shift, shifts_needed, sight_of


class Card(NamedTuple):
    """A GPU, by what attention reaches on it."""

    name: str
    forward: float
    """TFLOP/s of causal attention in float16 at head dim 128."""
    backward: float


class Link(NamedTuple):
    """What joins neighbours of a ring."""

    name: str
    gb_per_s: float
    """In each direction at once."""
    microseconds: float
    """Before the first byte arrives."""


# Of the T4 the modelled utilisation of its tensor cores (python -m cupyattn turing) times their 65
# TFLOP/s; of the H200 what Turing's code reached there (benchmark attention, attention_backward,
# head dim 128, CUPYATTN_ARCH=75, 2026-11-21).
T4 = Card("T4 (modelled)", 0.89 * 65, 0.65 * 65)
H200 = Card("H200", 249.0, 210.0)
# What such links are sold as, less a tenth to a quarter for what NCCL reaches; no measurements.
PCIE = Link("PCIe 3.0 x16", 12.0, 20.0)
THROUGH_HOST = Link("PCIe through the host", 6.0, 40.0)
NVLINK = Link("NVLink 4", 360.0, 10.0)
INFINIBAND = Link("InfiniBand NDR, one a GPU", 45.0, 15.0)

FLOAT16, FLOAT32 = 2, 4  # bytes


class RingCost(NamedTuple):
    """Seconds of one call on each rank.

    Attributes
    ----------
    compute : float
        Of the rank with the most to do, summed over steps.
    transfer : float
        Of all transfers.
    exposed : float
        What transfers add to the time of computing.
    single : float
        What one card alone would take.
    balance : float
        The share of the time that ranks compute, counted in scores.
    steps : int
    """

    ranks: int
    compute: float
    transfer: float
    exposed: float
    single: float
    balance: float
    steps: int

    @property
    def total(self) -> float:
        """Seconds of the call."""
        return self.compute + self.exposed

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
        For a length that the placement cannot split.

    Examples
    --------
    Two T4s over PCIe hide all of the transfer forward:

    >>> cost = ring_cost(2, 131_072, heads=16, head_dim=128)
    >>> round(cost.exposed / cost.total, 3), round(cost.balance, 3)
    (0.0, 1.0)
    """
    kv_heads = heads if kv_heads is None else kv_heads
    sight = sight_of(causal, window_size, tokens)
    dealt: Placement = placement_of(placement, ranks, (tokens,))
    counts = scores_by_shift(dealt, (tokens,), sight)
    per_score = 4 * head_dim * (2.5 if backward else 1.0)
    rate = (card.backward if backward else card.forward) * 1e12
    seconds_per_score = batch * heads * per_score / rate

    items = 2 * batch * (tokens // ranks) * kv_heads * head_dim  # of k and v
    block, gradients = (
        items * size / (link.gb_per_s * 1e9) + link.microseconds / 1e6
        for size in (FLOAT16, FLOAT32)
    )
    shifts = shifts_needed(dealt, (tokens,), sight)
    compute = transfer = exposed = 0.0
    first, later = own_scores(dealt, tokens, sight)
    for number, shift in enumerate(shifts):
        most = first if backward and shift == 0 else int(counts[shift].max())
        computed = most * seconds_per_score
        moved = block * (number + 1 < len(shifts)) + gradients * (backward and number > 0)
        compute += computed
        transfer += moved
        exposed += max(moved - computed, 0.0)
    if backward:
        home = gradients if shifts[-1] else 0.0
        computed = later * seconds_per_score
        compute += computed
        transfer += home
        exposed += max(home - computed, 0.0)
    return RingCost(
        ranks, compute, transfer, exposed, int(counts.sum()) * seconds_per_score,
        balance(dealt, (tokens,), sight), len(shifts),
    )  # fmt: skip
