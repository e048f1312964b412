"""In which order the tiles of causal attention start: how many heads take turns.

Under causal order the last rows of a head see all keys, the first ones few. Multiprocessors take
CTAs in the order of the grid: with one head behind the other, the long tiles of the last head start
late, and most of the card waits for them. With the long tiles of all heads first, the short ones
fill the end (the longest first, Graham, 1969; FlashAttention-3's scheduler does so too). Too many
heads at once would find nothing of each other's keys in L2.
"""

from __future__ import annotations

from cupyattn.kernels.card import Card
from cupyattn.ops.attention.modifiers import BLOCK_MASK
from cupyattn.ops.attention.problem import AttentionProblem

_L2_SHARE = 2
"""Of L2, what K and V of the heads may take. A CTA of 128 rows alone does 128 operations for each
byte of them, of which a T4 wants 170 at 0.85 of its tensor cores: one reading in two may miss."""

# Causal over plain calls by `python -m support.grid_order` (a simulation, 2026-11-22), forward of
# 1 x 2,048 tokens of 32 heads, at head dims 64, 80, 128, 192, 256: with one head behind the other
# 1.72, 1.71, 1.72, 1.74, 1.74 on a T4's 40 multiprocessors and 1.18, 1.16, 1.18, 1.47, 1.47 on an
# H200's 132; in this order 1.97, 1.96, 1.97, 1.85, 1.85 and 1.83, 1.82, 1.83, 1.83, 1.83. The
# backward of head dim 128 gains from 1.74 to 1.85, and from 1.47 to 1.83.


def kv_heads_together(
    problem: AttentionProblem, card: Card, *, backward: bool = False, prompts: bool = False
) -> int:
    """Return how many key-value heads take turns in the grid; 0 where all tiles are alike.

    They differ under causal order and with a block mask, whose lists say which come first.

    With each come all query heads of its group, which share its keys. It is as many as leave each
    query head some CTAs at a time, and as L2 has room for: for keys and values, in the backward for
    queries and their gradients too. It divides B * G; or G of packed prompts, whose
    order is that of their sequences. (Of packed sequences those with equally many tiles take turns,
    and the last heads of these may be fewer.)
    """
    left, right = problem.window
    sequences = problem.kv_heads if prompts else problem.batch * problem.kv_heads
    uneven = (left is None and right is not None) or BLOCK_MASK in problem.layouts
    if not uneven or not sequences * problem.heads:
        return 0
    group = problem.heads // problem.kv_heads
    rows = max(problem.sk, group * problem.sq if backward else 0)
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    most = min(
        card.multiprocessors // 2 // group, _L2_SHARE * card.l2_bytes // max(rows * row_bytes, 1)
    )
    return max(count for count in range(1, max(most, 1) + 1) if sequences % count == 0)
