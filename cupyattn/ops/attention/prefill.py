"""Many query tokens over a paged cache: the forward kernels, with keys from blocks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from cupyattn.ops.attention.decode_problem import DecodeProblem
from cupyattn.ops.attention.grid_order import turns
from cupyattn.ops.attention.kernels import float32, tensor_core
from cupyattn.ops.attention.kernels.decode import cache_bits
from cupyattn.ops.attention.layouts import require_lengths, score_options
from cupyattn.ops.attention.params import attention_params, batch_integers, interleaved
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.structs import PAGED_PARAMS
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import Operands, Plan, Step, run
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.structs import new_struct

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
    return run(device, _plan(problem, device.card, return_lse), operands)


@lru_cache(maxsize=4096)
def _plan(problem: DecodeProblem, card: Card, return_lse: bool) -> Plan:
    attention = problem.attention
    require_kernel_dtype("q", attention.dtype)
    require_lengths(attention)
    require_item_alignment(attention.layouts, attention.starts)
    outputs = problem.outputs(return_lse)
    results = problem.result_layouts(outputs)
    kernel, tile_q = _kernel(problem, results["out"], card)
    step = Step.of(kernel, attention.heads * _tiles(problem, tile_q), _params(problem, results))
    together = turns(attention, card, prompts=problem.packed)
    plan = interleaved(Plan((step,), outputs), *together)
    return plan.for_arrays(problem.layouts)


def _kernel(problem: DecodeProblem, out: Layout, card: Card) -> tuple[Specialisation, int]:
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


def _params(problem: DecodeProblem, results: dict[str, Layout]) -> Any:
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
