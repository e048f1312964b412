"""Which calls of the dense forward share the keys of a tile of query rows, and both plans.

A grid of fewer tiles than the card takes at once leaves multiprocessors idle: few heads, some
hundreds of queries, long keys. Each tile's keys are then cut into parts, a CTA each, and a second
kernel adds the parts up (cuda_src/attention/key_parts.cuh). Every option of the forward works.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from cupyattn.ops.attention.block_mask import block_lists
from cupyattn.ops.attention.kernels.combine import ROWS, combine
from cupyattn.ops.attention.modifiers import BLOCK_MASK
from cupyattn.ops.attention.params import attention_params, forward_params, score_options
from cupyattn.ops.attention.problem import AttentionProblem, Outputs, PackedProblem, result_layouts
from cupyattn.ops.attention.structs import SPLIT_PARAMS
from cupyattn.runtime.by_name import Plan, Step, lay_out_scratch
from cupyattn.runtime.card import Card
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.structs import new_struct

LEAST_KEYS = 256
"""Of a part."""
_CTA_KEYS = 128
"""What a part costs beside its keys, in keys: it begins and ends."""
_ROW_KEYS = 4
"""What each of its rows costs more, in keys: float32 sums that are written and read again. By the
bytes of 128 rows beside the products of 64 keys it is about 3 on a T4, an estimate. A causal call
of 1 x 2,048 tokens, 16 heads of 128, took 0.134 ms in 3 parts on an H200, where one of the code
before took 0.120 ms whole (compute_75 code, 2026-11-22, `benchmark attention --tokens 2048
--seqlen 2048 --options causal`)."""
_COMBINE_KEYS = 128
"""What the second launch costs, in keys."""
_MOST_WAVES = 4
"""Turns that CTAs take on the card, at the most: scratch memory holds sums of all of them."""


class TileRow(Protocol):
    """What the choice needs of a row of a table."""

    @property
    def tile_q(self) -> int:
        """Query rows of a CTA."""

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp."""

    @property
    def tile_k(self) -> int:
        """Keys of a tile."""

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that a multiprocessor takes at once."""


def num_splits(problem: AttentionProblem, row: TileRow, card: Card) -> int:
    """Return into how many parts the keys of each tile of query rows are cut; 1 for none.

    CTAs take turns on the card, and a turn is as long as a part: of the numbers of parts that leave
    LEAST_KEYS to each, the one with the least turns * (keys of a part + what it costs beside), if
    it saves more than _COMBINE_KEYS. Packed sequences are not split, nor are tiles that fill the
    card, nor what a block mask leaves.
    """
    if isinstance(problem, PackedProblem) or BLOCK_MASK in problem.layouts:
        return 1
    heads, slots = problem.batch * problem.heads, card.multiprocessors * row.ctas_per_sm
    tiles = heads * -(-problem.sq // row.tile_q)
    keys = _keys_of_tiles(problem, row.tile_q) if 0 < tiles < slots else ()
    longest = max(keys, default=0)
    best, least = 1, longest + _CTA_KEYS
    beside = _CTA_KEYS + _ROW_KEYS * min(row.tile_q, problem.sq)
    for splits in range(2, min(longest // LEAST_KEYS, _MOST_WAVES * slots // max(tiles, 1)) + 1):
        part = -(-longest // splits)
        waves = -(-heads * sum(-(-each // part) for each in keys) // slots)
        cost = waves * (part + beside) + _COMBINE_KEYS
        if cost < least:
            best, least = splits, cost
    return best


def _keys_of_tiles(problem: AttentionProblem, tile_q: int) -> tuple[int, ...]:
    """Return how many keys each tile of query rows of a head sees.

    Where the device alone knows where queries stand, it is what the window leaves at the most; of
    keys in use it is taken that all are.
    """
    sq, sk, (left, right) = problem.sq, problem.sk, problem.window
    offset = sk - sq if problem.q_offset is None else problem.q_offset
    seen = []
    for first in range(0, sq, tile_q):
        last = min(first + tile_q, sq) - 1
        if "q_offset" in problem.layouts:
            reach = sk if left is None or right is None else left + right + last - first + 1
            seen.append(min(reach, sk))
            continue
        begin = 0 if left is None else max(first + offset - left, 0)
        end = sk if right is None else min(last + offset + right + 1, sk)
        seen.append(max(end - begin, 0))
    return tuple(seen)


def whole_plan(
    problem: AttentionProblem,
    kernel: Specialisation,
    row: TileRow,
    outputs: Outputs,
    *tables: Any,
) -> Plan:
    """Plan a kernel whose CTAs walk over all keys of their rows, behind a block mask's lists.

    `tables` is the C struct RotaryTables, for one that takes it.
    """
    lists = block_lists(problem, "lists", rows=row.tile_q, keys=row.tile_k, part=row.warp_rows)
    step = Step.of(
        kernel,
        problem.heads * problem.query_tiles(row.tile_q),
        forward_params(problem, result_layouts(problem, outputs)),
        *tables,
        *problem.block_modifier_strides,
        renamed=lists.renamed,
    )
    return Plan((*lists.steps, step), outputs, lay_out_scratch(lists.scratch))


def split_plan(
    problem: AttentionProblem,
    kernel: Specialisation,
    row: TileRow,
    splits: int,
    outputs: Outputs,
) -> Plan:
    """Plan both kernels: each part of the keys, then the sum of the parts of each row."""
    params = new_struct(SPLIT_PARAMS)
    params["attention"] = attention_params(problem, result_layouts(problem, outputs))
    params["splits"], params["least_keys"] = splits, LEAST_KEYS
    params["batch"] = problem.batch
    rows = math.prod(problem.lse_shape)
    tiles = problem.heads * problem.query_tiles(row.tile_q)
    sinks = score_options(problem).sinks
    tile = row.tile_q, row.tile_k
    adder = combine(problem.dtype.name, problem.head_dim_v, *tile, sinks)
    return Plan(
        (
            Step.of(kernel, tiles * splits, params[()], *problem.modifier_strides),
            Step.of(adder, -(-rows // ROWS), params[()]),
        ),
        outputs,
        lay_out_scratch(
            {
                "partial_out": rows * splits * problem.head_dim_v,
                "partial_sums": rows * splits * 2,
            }
        ),
    )
