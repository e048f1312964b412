"""Decoding on a device: the keys of all sequences in equal parts, then the shared rows merged.

Plans are those of paged attention, and of calls on dense keys with few queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.ops.attention.kernels import decode
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    attention_params,
    item_strides,
    rows_start_at,
    score_options,
    step_of,
    whole_vectors,
)
from cupyattn.ops.attention.problem import AttentionArrays, AttentionProblem, QuantizedPagedArrays
from cupyattn.ops.attention.structs import DECODE_PARAMS, filled
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Step
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items

MOST_UNITS = 2**31 - 1
"""The most units of work that kernels count."""
DECODE_ARITHMETIC = {
    True: "{dtype} queries of this head dim are decoded on tensor cores",
    False: "these {dtype} rows are decoded in float32 arithmetic",
}
"""The reason for the decode kernels of a call, by whether they use tensor cores."""


def shared_keys_steps(
    problem: AttentionProblem,
    laid: AttentionArrays[Layout],
    planner: AttentionPlanner,
    launch: decode.DecodeLaunch,
    multiprocessors: int,
    *,
    loader: str,
    fields: Mapping[str, Any],
    whole: bool = False,
) -> list[Step]:
    """Return both launches: the keys in equal parts, then the rows that several CTAs shared.

    `fields` of DecodeParams locate the tiles for `loader`. With `whole` nothing is shared: one
    kernel, a CTA for each key-value head of each sequence.
    """
    slots: Any = planner.slots
    places = {"k_cache": slots.k, "v_cache": slots.v, "seqlens_k": slots.seqused_k}
    row_tiles, most_ctas = (
        row_tiles_of(problem, launch),
        multiprocessors * launch.config.ctas_per_sm,
    )
    ctas = 0 if whole else min(units_of(problem, launch), most_ctas)
    params = filled(
        DECODE_PARAMS,
        attention=attention_params(problem, laid),
        **fields,
        batch=problem.batch,
        kv_heads=problem.kv_heads,
        row_tiles=row_tiles,
        ctas=ctas,
    )
    options = score_options(problem)
    segments = problem.batch * problem.kv_heads * row_tiles
    forward = decode.forward(launch, options, loader)
    values: tuple[Any, ...] = (params,)
    if isinstance(laid, QuantizedPagedArrays):
        assert laid.k_centre is not None
        values = params, item_strides(laid.k_centre)[0]
    if whole:
        places |= {"partial_out": None, "partial_sums": None}
        return [step_of(forward, segments, slots, *values, **places)]
    rows = 2 * ctas * launch.config.rows
    places["partial_out"] = planner.scratch(rows * problem.head_dim)
    places["partial_sums"] = planner.scratch(rows * 2)
    parts = -(-ctas // segments) + 1  # one begins and ends anywhere
    combine = decode.combine(launch, options.sinks, parts)
    combined = problem.batch * problem.heads * problem.sq
    return [
        step_of(forward, ctas, slots, *values, **places),
        step_of(combine, combined, slots, params, **places),
    ]


def launch_of(problem: AttentionProblem, traits: DeviceTraits) -> decode.DecodeLaunch:
    """Choose the kernels by the rows that share a key-value head and how the arrays lie."""
    dtype, cache = problem.dtype.name, problem.layouts.v.dtype.name
    together = problem.sq * (problem.heads // problem.kv_heads)
    centred = isinstance(problem.layouts, QuantizedPagedArrays)
    if centred:  # a key's codes start at a multiple of gcd(D, 16) bytes, and a load has fewer
        vec = whole_vectors(vector_items(dtype), problem, problem.layouts, ("q", "v"))
    elif cache in decode.INTEGER_BITS:
        vec = _integer_items(problem, cache)
    else:
        vec = whole_vectors(vector_items(dtype), problem, problem.layouts, ("q", "k", "v"))
    return decode.decode_launch(
        traits.arch,
        dtype,
        problem.head_dim,
        together,
        vec,
        cache,
        tensor_cores=traits.multiplies(dtype),
        centred=centred,
    )


def _integer_items(problem: AttentionProblem, cache: str) -> int:
    """Return how many integers of a cache can be loaded at once; as many of q are whole vectors."""
    bits = decode.INTEGER_BITS[cache]
    for items in (8 * VECTOR_BYTES // bits, decode.INTEGER_ITEMS):
        needed = {"q": VECTOR_BYTES, "k": items * bits // 8, "v": items * bits // 8}
        whole = problem.head_dim % items == 0
        if whole and rows_start_at(problem.starts, problem.layouts, needed):
            return items
    return 8 // bits


def row_tiles_of(problem: AttentionProblem, launch: decode.DecodeLaunch) -> int:
    """Return how many passes over a key-value head's keys all of its query rows take."""
    return -(-problem.sq * (problem.heads // problem.kv_heads) // launch.config.rows)


def units_of(problem: AttentionProblem, launch: decode.DecodeLaunch) -> int:
    """Return how many parts of the work there are at the most."""
    segments = problem.batch * problem.kv_heads * row_tiles_of(problem, launch)
    return segments * max(1, -(-problem.sk // (decode.TILE_KEYS * decode.WARPS)))
