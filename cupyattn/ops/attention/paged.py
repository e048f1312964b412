"""Paged attention on a device: few query tokens are decoded, many are a forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cupyattn.ops.attention.choice import turns
from cupyattn.ops.attention.kernels import decode, float32, tensor_core
from cupyattn.ops.attention.kernels.decode import cache_bits
from cupyattn.ops.attention.paged_problem import MAX_QUERIES, DecodeProblem
from cupyattn.ops.attention.params import (
    attention_params,
    batch_integers,
    interleaved,
    require_lengths,
    score_options,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    AttentionProblem,
    Outputs,
    forward_outputs,
    result_layouts,
)
from cupyattn.ops.attention.structs import DECODE_PARAMS, PAGED_PARAMS
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import Operands, Plan, Step, lay_out_scratch, run
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.spec import Specialisation
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
    plan = _decode_plan(problem, device.card, return_lse)
    return run(device, plan, operands)


@lru_cache(maxsize=4096)
def _decode_plan(problem: DecodeProblem, card: Card, return_lse: bool) -> Plan:
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
    params = _decode_params(attention, result_layouts(attention, outputs), fields, launch, ctas)
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


def _decode_params(
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


_GROUP_KEYS = 16  # kGroupKeys in paged_keys.cuh: blocks are whole groups of tokens
_LARGEST_UNIT = 2**20
_INT32 = 2**31
# Bytes from token to token of a block: those of a tile have 32-bit offsets.
_FARTHEST_TOKENS = 2**26


def has_prefill(problem: DecodeProblem) -> bool:
    """Tell whether the kernels read the caches: one place serves K and V, and one their scales."""
    layouts, blocks = problem.layouts, problem.num_blocks
    if not _alike(layouts["k_cache"].strides[:2], layouts["v_cache"].strides[:2], blocks):
        return False
    if "k_scales" not in layouts:
        return True
    return _alike(layouts["k_scales"].strides, layouts["v_scales"].strides, blocks)


def _alike(k: tuple[int, ...], v: tuple[int, ...], blocks: int) -> bool:
    """Tell whether blocks and what follows lie equally far apart in both."""
    return k[1:] == v[1:] and (k[0] == v[0] or blocks <= 1) and 0 <= k[1] < _FARTHEST_TOKENS


def prefill_attention(
    device: Device, problem: DecodeProblem, operands: Operands, *, return_lse: bool
) -> dict[str, Array]:
    """Run paged attention by the forward kernels, into `out` and `lse` where they are given."""
    return run(device, _prefill_plan(problem, device.card, return_lse), operands)


@lru_cache(maxsize=4096)
def _prefill_plan(problem: DecodeProblem, card: Card, return_lse: bool) -> Plan:
    attention = problem.attention
    require_kernel_dtype("q", attention.dtype)
    require_lengths(attention)
    require_item_alignment(attention.layouts, attention.starts)
    outputs = problem.outputs(return_lse)
    results = problem.result_layouts(outputs)
    kernel, tile_q = _prefill_kernel(problem, results["out"], card)
    step = Step.of(
        kernel, attention.heads * _tiles(problem, tile_q), _prefill_params(problem, results)
    )
    together = turns(attention, card, prompts=problem.packed)
    plan = interleaved(Plan((step,), outputs), *together)
    return plan.for_arrays(problem.layouts)


def _prefill_kernel(problem: DecodeProblem, out: Layout, card: Card) -> tuple[Specialisation, int]:
    """Choose the kernel by dtype, head dim, options and how rows lie; and say its query rows."""
    attention = problem.attention
    dtype, cache = attention.dtype.name, attention.layouts["k"].dtype.name
    dim, options = attention.head_dim, score_options(attention)
    if card.has_mma(dtype):
        vec = _together(attention, out, vector_items(dtype))
        row = tensor_core.forward_rows.paged_row(card.arch, dim, cache)
        return tensor_core.forward.paged(card.arch, dim, vec, options, cache), row.tile_q
    vec = _together(attention, out, float32.forward.VECTOR_ITEMS)
    tile_q = float32.forward.flash_row(card.arch, dim, dim).tile_q
    return float32.forward.paged(card.arch, dtype, dim, vec, options, cache), tile_q


def _together(attention: AttentionProblem, out: Layout, items: int) -> int:
    """Return `items` if every row of every array starts at a multiple of so many, otherwise 1."""
    layouts = {**attention.layouts, "out": out}
    sizes = {
        name: items * cache_bits(layouts[name].dtype.name) // 8 for name in ("q", "k", "v", "out")
    }
    aligned = all(
        place % size == 0
        for name, size in sizes.items()
        for place in (attention.starts.get(name, 0), *layouts[name].strides[:-1])
    )
    return items if aligned and attention.head_dim % items == 0 else 1


def _tiles(problem: DecodeProblem, tile_q: int) -> int:
    """Return how many tiles of query rows the sequences have, or packed ones could have."""
    attention = problem.attention
    tiles = attention.batch * -(-attention.sq // tile_q)
    if not problem.packed:
        return tiles
    total = problem.layouts["q"].shape[0]
    return min(tiles, (total + attention.batch * (tile_q - 1)) // tile_q)


def _prefill_params(problem: DecodeProblem, results: dict[str, Layout]) -> Any:
    """Fill the C struct PagedParams."""
    params = new_struct(PAGED_PARAMS)
    params["attention"] = attention_params(problem.attention, results)
    if problem.packed:
        params["cu_seqlens_q"] = batch_integers(problem.layouts["cu_seqlens_q"])
        params["total"] = problem.layouts["q"].shape[0]
    table = problem.layouts["block_table"]
    batch, block = table.strides
    if abs(block) >= _INT32:
        raise error(
            ValueError,
            f"block_table has {block} bytes from one entry of a row to the next",
            f"a GPU takes less than {_INT32}",
            "copy it with ascontiguousarray(block_table)",
        )
    params["table_batch"], params["table_block"] = batch // table.dtype.itemsize, block
    params["batch"] = problem.attention.batch
    groups = problem.block_size // _GROUP_KEYS
    params["block_shift"] = shift = (groups - 1).bit_length()
    params["block_reciprocal"] = -(-(2 ** (31 + shift)) // groups)
    params["units"] = *_, group = _units(problem, "k_cache")
    params["block_span"] = groups * group
    if "k_scales" in problem.layouts:
        scales = params["scales"]
        _, scales["token"], scales["head"] = problem.layouts["k_scales"].strides
        scales["block_groups"], scales["units"] = groups, _units(problem, "k_scales")
    return params[()]


def _units(problem: DecodeProblem, name: str) -> tuple[int, int, int]:
    """Return a unit in bytes, and how many of it blocks and groups of tokens lie apart."""
    layout = problem.layouts[name]
    block, group = layout.strides[0], _GROUP_KEYS * layout.strides[1]
    unit = math.gcd(block, group, _LARGEST_UNIT)
    groups = problem.block_size // _GROUP_KEYS
    reach = problem.num_blocks * abs(block // unit) + groups * abs(group // unit)
    if reach >= _INT32:
        raise error(
            ValueError,
            f"{name} has strides {layout.strides}: its last block lies {reach} units of {unit} "
            "bytes from the first one",
            f"a GPU counts less than {_INT32} units of what divides the strides of blocks and of "
            f"{_GROUP_KEYS} tokens",
            f"make {name} with strides that are multiples of 16 bytes",
        )
    return unit, block // unit, group // unit


TABLE_FIXES = {
    "block_table": "pass an int32 array of shape (B, max_blocks)",
    "seqlens_k": "pass an int32 array of shape (B,), for example numpy.full(B, length, 'int32')",
}


def paged_forward(
    device: Device, problem: DecodeProblem, operands: Operands, *, return_lse: bool
) -> dict[str, Array]:
    """Run paged attention, into `out` and `lse` where they are given."""
    return _way(problem)(device, problem, operands, return_lse=return_lse)


@lru_cache(maxsize=4096)
def _way(problem: DecodeProblem) -> Callable[..., dict[str, Array]]:
    """Return what runs it.

    A forward has a CTA for every 64 to 128 query rows of a head, and computes those rows whole;
    decoding takes the rows of a group of heads together, in passes of 4 to 16, and cuts the keys.
    It also has what the forward has not: caches whose strides are different.

    Raises
    ------
    ValueError
        For caches of such strides with packed queries.
    """
    layouts = problem.layouts
    few, has = problem.attention.sq <= MAX_QUERIES, has_prefill(problem)
    if problem.packed and not has:
        arrays = [
            name for name in ("k_cache", "v_cache", "k_scales", "v_scales") if name in layouts
        ]
        raise error(
            ValueError,
            ", ".join(f"{name} has strides {layouts[name].strides}" for name in arrays),
            "with cu_seqlens_q a GPU takes caches of equal strides, those of tokens less than "
            "64 MiB, and so their scales",
            "make both alike, for example as halves of one array",
        )
    return decode_attention if (few or not has) and not problem.packed else prefill_attention
