"""Which calls of dense attention the kernels of decoding take, and their plan.

flash gives each head of each sequence a CTA that walks over all of its keys, with a tile of 64 to
128 query rows of which a few have a query. The kernels of decoding cut the keys into equal shares
for all multiprocessors, and the query rows of a key-value head share what is read.
"""

from __future__ import annotations

from cupyattn.ops.attention.kernels.decode import TILE_KEYS
from cupyattn.ops.attention.options import POSITION_OPTIONS
from cupyattn.ops.attention.paged import (
    MOST_UNITS,
    launch_of,
    row_tiles_of,
    shared_keys_plan,
    units_of,
)
from cupyattn.ops.attention.paged_problem import MAX_QUERIES
from cupyattn.ops.attention.problem import AttentionProblem, forward_outputs
from cupyattn.runtime.by_name import Plan
from cupyattn.runtime.card import Card

LEAST_DECODED_KEYS = 256
"""Keys that a query may see. Timed on an H200 as compute_75 code (2026-11-22), decoding was faster
than flash from there on, of one sequence and of many. For half as many keys of one sequence they
took about as long, and the second launch weighs on the host."""

_DECODED_OPTIONS = POSITION_OPTIONS | {"alibi_slopes", "softcap", "sinks", "rotary"}
# With rotary a launch before rotates q, and all of k: by the emulator's count of bytes (one query,
# 32 heads on 8 of 128, 1,024 keys of float16) k and v are then 5.1 times k instead of 2.0: k is
# read and written once more, and the tables are as large. Rotated in the walk, each key-value head
# would read the tables again, for a pair of features twice its own bytes, and hold them in
# registers beside the tiles of keys on their way. Who decodes keeps rotated keys (append_kv), and
# reads none of this.

# Passes over K and V that take as long as flash's walk for one head where its grid fills the card.
# Of a T4 (320 GB/s; 65 and 8.1 TFLOP/s, of which flash reaches about 0.8) at head dim 128: 1.6 ns
# a key and pass of float16, 1.26 a key and head; 3.2 and 8 of float32.
_PASSES_OF_A_WALK = 0.75  # on tensor cores
_PASSES_OF_A_FLOAT_WALK = 2.0
_FLASH_CTAS_PER_SM = 2


def suits(problem: AttentionProblem, card: Card) -> bool:
    """Return whether the kernels of decoding have what a call asks for, and are faster."""
    return _has_kernels(problem) and _is_faster(problem, card)


def _has_kernels(problem: AttentionProblem) -> bool:
    return (
        problem.implementation == "flash"
        and problem.head_dim == problem.head_dim_v
        and not problem.refusable_options - _DECODED_OPTIONS
        and problem.batch * problem.heads * problem.sq > 0
        and problem.sk >= TILE_KEYS
    )


def _is_faster(problem: AttentionProblem, card: Card) -> bool:
    """Compare passes over K and V with flash's walks, of which there are as many as heads.

    Those use no more of the card than their grid fills.
    """
    if problem.sq > MAX_QUERIES or _keys_seen(problem) < LEAST_DECODED_KEYS:
        return False
    launch = launch_of(problem, card)
    if units_of(problem, launch) > MOST_UNITS:
        return False
    filled = min(1.0, problem.batch * problem.heads / (card.multiprocessors * _FLASH_CTAS_PER_SM))
    on_tensor_cores = card.has_mma(problem.dtype.name)
    walk = _PASSES_OF_A_WALK if on_tensor_cores else _PASSES_OF_A_FLOAT_WALK
    group = problem.heads // problem.kv_heads
    return row_tiles_of(problem, launch) * filled <= max(1.0, walk * group)


def _keys_seen(problem: AttentionProblem) -> int:
    """Return how many keys the window leaves for all queries together, at the most."""
    left, right = problem.window
    if left is None or right is None:
        return problem.sk
    return min(problem.sk, left + problem.sq + right)


def few_queries_plan(problem: AttentionProblem, card: Card, *, return_lse: bool) -> Plan:
    """Plan a call that `suits`."""
    return shared_keys_plan(
        problem,
        launch_of(problem, card),
        card.multiprocessors,
        forward_outputs(problem, return_lse),
        feed="DenseFeed",
        fields={},
        renamed={"k_cache": "k", "v_cache": "v", "seqlens_k": "seqused_k"},
    )
