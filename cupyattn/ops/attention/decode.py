"""Decoding on a device: the keys of all sequences in equal shares, then the shared rows merged.

Plans are those of paged attention; `few_queries` makes the same of dense keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cupyattn.ops.attention.decode_problem import DecodeProblem
from cupyattn.ops.attention.kernels import decode
from cupyattn.ops.attention.layouts import require_lengths, score_options, whole_vectors
from cupyattn.ops.attention.params import attention_params
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.results import Outputs, forward_outputs, result_layouts
from cupyattn.ops.attention.structs import DECODE_PARAMS
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import Operands, Plan, Step, lay_out_scratch, run
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct

WHOLE_KEYS = 512
"""Of a block table: sequences up to there are not shared, which saves the second launch. A step of
GPT-2 and of Llama 3.2 1B gains 7 and 3 % by it with up to 256 tokens each, and loses 11 and 7 %
with 850 (one sequence, `Generator.generate` with this set to 0, 512 or 1024, an H200 as compute_75
code, 2026-11-22). Without tensor cores one CTA is too slow for that: Phi-2's heads of 80 lose 5 %,
but for as many of them as the card has multiprocessors, where 32 sequences gain 2 %."""
MOST_UNITS = 2**31 - 1
"""That kernels count."""
_PARTIAL_OUT, _PARTIAL_SUMS = "partial_out", "partial_sums"


def decode_attention(
    device: Device, problem: DecodeProblem, operands: Operands, *, return_lse: bool
) -> dict[str, Array]:
    """Run paged attention, into `out` and `lse` where they are given."""
    plan = _plan(problem, device.card, return_lse)
    return run(device, plan, operands)


@lru_cache(maxsize=4096)
def _plan(problem: DecodeProblem, card: Card, return_lse: bool) -> Plan:
    attention = problem.attention
    require_kernel_dtype("q", attention.dtype)
    require_lengths(attention)
    require_item_alignment(attention.layouts, attention.starts)
    outputs = forward_outputs(attention, return_lse)
    if attention.batch == 0 or attention.heads == 0:
        return Plan((), outputs)
    launch = launch_of(attention, card)
    _require_units(problem, units_of(attention, launch))
    plan = shared_keys_plan(
        attention,
        launch,
        card.multiprocessors,
        outputs,
        feed="BlockFeed",
        fields=_table_fields(problem),
        renamed={"q_offset": "seqlens_k"},
        whole=_is_whole(attention, launch, card),
    )
    return plan.for_arrays(problem.layouts)


def _is_whole(attention: AttentionProblem, launch: decode.DecodeLaunch, card: Card) -> bool:
    """Return whether each key-value head of each sequence has a CTA for itself."""
    heads = attention.batch * attention.kv_heads
    busy = launch.tensor_cores or heads >= card.multiprocessors
    return busy and attention.sk <= WHOLE_KEYS


def shared_keys_plan(
    attention: AttentionProblem,
    launch: decode.DecodeLaunch,
    multiprocessors: int,
    outputs: Outputs,
    *,
    feed: str,
    fields: Mapping[str, Any],
    renamed: Mapping[str, str],
    whole: bool = False,
) -> Plan:
    """Plan both kernels: the keys in equal shares, then the rows that several CTAs shared.

    `fields` of DecodeParams say where the feed finds keys; `renamed` is as in `Step.of`. With
    `whole` nothing is shared: one kernel, a CTA for each key-value head of each sequence.
    """
    slots = multiprocessors * launch.config.ctas_per_sm
    ctas = 0 if whole else min(units_of(attention, launch), slots)
    params = _params(attention, result_layouts(attention, outputs), fields, launch, ctas)
    options = score_options(attention)
    rows = attention.batch * attention.heads * attention.sq
    segments = attention.batch * attention.kv_heads * row_tiles_of(attention, launch)
    forward = decode.forward(launch, options, feed)
    if whole:
        return Plan((Step.of(forward, segments, params, renamed=renamed),), outputs)
    parts = -(-ctas // segments) + 1  # a share begins and ends anywhere
    combine = decode.combine(launch, options.sinks, parts)
    return Plan(
        (
            Step.of(forward, ctas, params, renamed=renamed),
            Step.of(combine, rows, params, renamed=renamed),
        ),
        outputs,
        lay_out_scratch(
            {
                _PARTIAL_OUT: 2 * ctas * launch.config.rows * attention.head_dim,
                _PARTIAL_SUMS: 2 * ctas * launch.config.rows * 2,
            }
        ),
    )


def launch_of(problem: AttentionProblem, card: Card) -> decode.DecodeLaunch:
    """Choose the kernels by the rows that share a key-value head and how the arrays lie."""
    dtype, cache = problem.dtype.name, problem.layouts["k"].dtype.name
    together = problem.sq * (problem.heads // problem.kv_heads)
    vec = _integer_items(problem, cache) if cache in decode.INTEGER_BITS else _floats(problem)
    return decode.decode_launch(
        card.arch,
        dtype,
        problem.head_dim,
        together,
        vec,
        cache,
        tensor_cores=card.has_mma(dtype),
    )


def _floats(problem: AttentionProblem) -> int:
    """Return how many items of rows can be loaded at once: 16 bytes' worth, or 1."""
    rows = [(problem.starts[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    return whole_vectors(vector_items(problem.dtype.name), problem, rows)


def _integer_items(problem: AttentionProblem, cache: str) -> int:
    """Return the same of caches of integers: of so many q's are whole vectors anyway."""
    bits = decode.INTEGER_BITS[cache]
    for items in (8 * VECTOR_BYTES // bits, decode.INTEGER_ITEMS):
        needed = {"q": VECTOR_BYTES, "k": items * bits // 8, "v": items * bits // 8}
        if problem.head_dim % items == 0 and all(
            _starts_at_multiples(problem, name, size) for name, size in needed.items()
        ):
            return items
    return 8 // bits


def _starts_at_multiples(problem: AttentionProblem, name: str, size: int) -> bool:
    """Whether every row of an array starts at a multiple of so many bytes."""
    places = (problem.starts[name], *problem.layouts[name].strides[:-1])
    return all(place % size == 0 for place in places)


def row_tiles_of(problem: AttentionProblem, launch: decode.DecodeLaunch) -> int:
    """Return how many passes over a key-value head's keys all of its query rows take."""
    return -(-problem.sq * (problem.heads // problem.kv_heads) // launch.config.rows)


def units_of(problem: AttentionProblem, launch: decode.DecodeLaunch) -> int:
    """Return how many parts of the work there are at the most."""
    segments = problem.batch * problem.kv_heads * row_tiles_of(problem, launch)
    return segments * max(1, -(-problem.sk // (decode.TILE_KEYS * decode.WARPS)))


def _require_units(problem: DecodeProblem, units: int) -> None:
    if units > MOST_UNITS:
        keys = decode.TILE_KEYS * decode.WARPS
        raise error(
            ValueError,
            f"{problem.attention.batch} sequences of up to {problem.attention.sk} tokens",
            f"kernels count at most {MOST_UNITS} parts of {keys} tokens of all heads",
            "pass fewer sequences in a call, or a block_table with fewer columns",
        )


def _table_fields(problem: DecodeProblem) -> dict[str, Any]:
    """Name where the feed of blocks finds a tile, and its scales."""
    table = problem.layouts["block_table"]
    batch, block = (stride // table.dtype.itemsize for stride in table.strides)
    tiles = problem.block_size // decode.TILE_KEYS
    scales = {
        name: tuple(stride // layout.dtype.itemsize for stride in layout.strides)
        for name, layout in problem.layouts.items()
        if name in ("k_scales", "v_scales")
    }
    return {"table_batch": batch, "table_block": block, "block_tiles": tiles, **scales}


def _params(
    problem: AttentionProblem,
    results: dict[str, Layout],
    fields: Mapping[str, Any],
    launch: decode.DecodeLaunch,
    ctas: int,
) -> Any:
    """Fill the C struct DecodeParams."""
    params = new_struct(DECODE_PARAMS)
    params["attention"] = attention_params(problem, results)
    for name, value in fields.items():
        params[name] = value
    params["batch"], params["kv_heads"] = problem.batch, problem.kv_heads
    params["row_tiles"], params["ctas"] = row_tiles_of(problem, launch), ctas
    return params[()]
