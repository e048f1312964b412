"""Paged attention: a checked call, and its plan: few queries are decoded, many are a forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.attention.checks import (
    checked_longest,
    require_bounds,
    require_cache_dtypes,
    require_caches,
    require_half_sums,
    require_heads_options,
    require_int8_call,
    require_scales,
)
from cupyattn.ops.attention.choice import (
    DECODED_SUMS,
    HALF_SUMS,
    MAX_QUERIES,
    arithmetic,
    interleaving,
    kernels_of,
    require_half_sum_kernels,
)
from cupyattn.ops.attention.decode import (
    DECODE_ARITHMETIC,
    MOST_UNITS,
    launch_of,
    shared_keys_steps,
    units_of,
)
from cupyattn.ops.attention.kernels import decode, float32, int8, native, tensor_core
from cupyattn.ops.attention.kernels.decode import cache_bits
from cupyattn.ops.attention.options import AttentionOptions
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    attention_params,
    batch_integers,
    interleaved,
    item_strides,
    quantized_keys_params,
    require_aligned_items,
    require_lengths,
    rows_start_at,
    score_options,
    step_of,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    FORWARD_RESULTS,
    AttentionProblem,
    PagedArrays,
    QuantizedPagedArrays,
    as_batch,
    forward_outputs,
    require_results,
    with_results,
)
from cupyattn.ops.attention.structs import PAGED_PARAMS, SCALE_LAYOUT, filled
from cupyattn.ops.attention.values import (
    counts_of,
    require_alibi,
    require_half_sum_values,
    require_sinks,
)
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.runtime.checks import (
    INTEGERS,
    Overlaps,
    contiguous_copy,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_kernel_dtype,
    require_rank,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Plan, Planner, Step, run
from cupyattn.runtime.records import given_of
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.value_checks import checks_values, on_host


@dataclass(frozen=True, eq=False)
class PagedProblem(AttentionProblem):
    """A valid call of paged attention: the caches are k and v, and Sk is what the table can hold.

    Packed queries are those of a batch, (B, max_seqlen_q, H, D) with a batch stride of 0.
    """

    given: PagedArrays[Layout]
    layouts: PagedArrays[Layout]
    num_blocks: int
    block_size: int

    @property
    def block_table(self) -> Layout:
        """The layout of the table."""
        assert self.layouts.block_table is not None
        return self.layouts.block_table


def paged_problem(
    operands: Operands[PagedArrays[Array]],
    options: tuple[Any, ...],
    max_seqlen_q: Any,
    accumulator: Any = "float32",
) -> PagedProblem:
    """Check a call; its description, unless that was checked before, and its values.

    `options` are the first ones of `AttentionOptions`, in that order.
    """
    window = options[AttentionOptions._fields.index("window_size")]
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    kind: Any = type(operands.arrays)
    try:
        problem = _checked(kind, operands.description, sides, max_seqlen_q, accumulator, *options)
    except TypeError:  # perhaps of an option without a hash, of which its check says more
        given = sides, max_seqlen_q, accumulator, *options
        problem = _checked.__wrapped__(kind, operands.description, *given)
    if checks_values(operands):
        _check_values(problem, operands.arrays)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096, typed=True)
def _checked(
    kind: Any,
    description: Description,
    _: Any,
    max_seqlen_q: Any,
    accumulator: Any,
    *options: Any,
) -> PagedProblem:
    given = layouts_of(kind, description)
    layouts = {given.SHOWN_AS.get(n, n): layout for n, layout in given_of(given).items()}
    require_arrays(layouts, ("q", "k_cache", "v_cache", "block_table", "seqlens_k"))
    q, k, v = layouts["q"], layouts["k_cache"], layouts["v_cache"]
    table, seqlens = layouts["block_table"], layouts["seqlens_k"]
    packed = "cu_seqlens_q" in layouts
    require_rank("q", q, "total H D" if packed else "B Sq H D")
    for name in ("k_cache", "v_cache"):
        require_rank(name, layouts[name], "num_blocks block_size G D")
    for name in ("q", "k_cache", "v_cache"):
        require_contiguous_rows(name, layouts[name])
    quantised = isinstance(given, QuantizedPagedArrays)
    require_cache_dtypes(layouts, quantised)
    *_, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k.shape
    batch, sq, *_ = q.shape
    of = "q"
    if packed:
        batch, of = require_bounds("cu_seqlens_q", layouts["cu_seqlens_q"]), "cu_seqlens_q"
        sq = checked_longest("max_seqlen_q", max_seqlen_q, q)
    require_caches(q, k, v)
    if not quantised:
        require_scales(layouts)
    require_dtype("block_table", table, ("int32",))
    require_rank("block_table", table, "B max_blocks")
    require_shape("block_table", table, (batch, table.shape[1]), f"(B, max_blocks) with {of}'s B")
    require_dtype("seqlens_k", seqlens, INTEGERS)
    require_shape("seqlens_k", seqlens, (batch,), f"(B,) with {of}'s B")
    for name in ("block_table", "seqlens_k", "k_scales", "v_scales"):
        if name in layouts:
            require_whole_item_strides(name, layouts[name])
    placed = {
        name: as_batch(name, layout, batch, sq, 0)
        for name in ("q", *FORWARD_RESULTS)
        if packed and (layout := getattr(given, name)) is not None
    }
    checked = AttentionOptions(*options)._replace(accumulator=accumulator)
    problem = PagedProblem(
        batch=batch,
        sq=sq,
        sk=table.shape[1] * block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=q.dtype,
        given=given,
        layouts=replace(given, **placed),
        starts=starts_of(kind, description),
        options=checked.checked(head_dim),
        overlaps=Overlaps.of(given, (*FORWARD_RESULTS, "workspace")),
        num_blocks=num_blocks,
        block_size=block_size,
    )
    require_heads_options(problem)
    require_half_sums(problem)
    require_results(given, forward_outputs(problem, return_lse=True))
    if given.workspace is not None:
        require_workspace(given.workspace)
    return problem


def _check_values(problem: PagedProblem, arrays: PagedArrays[Array]) -> None:
    """Check lengths and the block ids that will be read, sinks and slopes."""
    queries = np.full(problem.batch, problem.sq, np.int64)
    if (bounds := arrays.cu_seqlens_q) is not None:
        queries = counts_of("cu_seqlens_q", bounds, problem.total_q, problem.sq, whole=False)
    assert arrays.seqused_k is not None
    assert arrays.block_table is not None
    lengths = on_host(arrays.seqused_k).astype(np.int64)
    capacity, size = problem.sk, problem.block_size
    table = on_host(arrays.block_table)
    if ((lengths < 0) | (lengths > capacity)).any():
        at = int(np.argmax((lengths < 0) | (lengths > capacity)))
        raise error(
            ValueError,
            f"seqlens_k[{at}] = {lengths[at]}",
            f"each is at least 0 and at most {capacity}: {table.shape[1]} blocks of {size}",
            "pass a block_table with more columns, or shorter sequences",
        )
    left = problem.window[0]
    first = np.zeros_like(lengths)
    if left is not None:  # of the first query's window
        first = np.clip(lengths - queries - left, 0, lengths) // size
    columns = np.arange(table.shape[1])
    read = (columns >= first[:, None]) & (columns < -(-lengths // size)[:, None])
    read &= (queries > 0)[:, None]
    wrong = read & ((table < 0) | (table >= problem.num_blocks))
    if wrong.any():
        b, column = (int(axis[0]) for axis in np.nonzero(wrong))
        raise error(
            ValueError,
            f"block_table[{b}, {column}] = {table[b, column]}",
            f"the caches have blocks 0 to {problem.num_blocks - 1}, and sequence {b} of "
            f"{lengths[b]} tokens reads this entry",
            "pass the ids of blocks that hold the tokens; -1 is for entries where a window hides "
            "all of a block",
        )
    if problem.options.accumulator == "float16":
        v = on_host(arrays.v)
        for b in np.flatnonzero(queries).tolist():
            values = v[table[b][read[b]]].reshape(-1, *v.shape[2:])
            require_half_sum_values(values[: lengths[b] - first[b] * size])
    if arrays.sinks is not None:
        require_sinks(arrays.sinks)
    if arrays.alibi_slopes is not None:
        require_alibi(problem, arrays.alibi_slopes, lengths - queries, queries, lengths)


WHOLE_KEYS = 512
"""Tokens up to which sequences are not split over CTAs, which saves the second launch. A step of
GPT-2 and of Llama 3.2 1B gains 7 and 3 % by it with up to 256 tokens each, and loses 11 and 7 %
with 850 (one sequence, `Generator.generate` with this set to 0, 512 or 1024, an H200 as compute_75
code, 2026-11-22). Without tensor cores one CTA is too slow for that: Phi-2's heads of 80 lose 5 %,
but for as many of them as the device has multiprocessors, where 32 sequences gain 2 %."""
_GROUP_KEYS = 16  # kGroupKeys in paged_keys.cuh: blocks are whole groups of tokens
_LARGEST_UNIT = 2**20
_INT32 = 2**31
# Bytes from token to token of a block: those of a tile have 32-bit offsets.
_FARTHEST_TOKENS = 2**26
TABLE_FIXES = {
    "block_table": "pass an int32 array of shape (B, max_blocks)",
    "seqlens_k": "pass an int32 array of shape (B,), for example numpy.full(B, length, 'int32')",
}


def paged_forward(
    device: Device,
    problem: PagedProblem,
    operands: Operands[PagedArrays[Array]],
    *,
    return_lse: bool,
) -> PagedArrays[Array]:
    """Run paged attention, into `out` and `lse` where they are given."""
    return run(device, _plan(problem, device.traits, return_lse), operands)


@lru_cache(maxsize=4096)
def _plan(problem: PagedProblem, traits: DeviceTraits, return_lse: bool) -> Plan:
    decoded, reason = _choose(problem)
    require_kernel_dtype("q", problem.dtype)
    require_lengths(problem)
    require_aligned_items(problem)
    outputs = forward_outputs(problem, return_lse)
    planner = Planner(type(problem.given), problem.given, outputs)
    planner.slots.q_offset = planner.slots.seqused_k  # it decides where queries are
    laid = with_results(problem, outputs)
    dtype = problem.dtype.name
    quantised = isinstance(problem.layouts, QuantizedPagedArrays)
    half_sums = problem.options.accumulator == "float16"
    if half_sums and not quantised:
        dims = problem.head_dim, problem.head_dim
        require_half_sum_kernels(kernels_of(dtype, traits), dims, traits)
    if not decoded:
        traits.choices.because(reason, *_reasons_of_prompts(problem, traits))
        if half_sums:
            traits.choices.because(HALF_SUMS)
        plan = planner.plan(_prefill_step(problem, laid, planner, traits))
        return interleaved(plan, *interleaving(problem, traits, prompts=problem.packed))
    if problem.batch == 0 or problem.heads == 0:
        return planner.plan()
    launch = launch_of(problem, traits)
    traits.choices.because(reason, DECODE_ARITHMETIC[launch.tensor_cores].format(dtype=dtype))
    traits.choices.because(*int8.DECODE_REASONS if quantised else (), *[DECODED_SUMS] * half_sums)
    _require_units(problem, units_of(problem, launch))
    steps = shared_keys_steps(
        problem,
        laid,
        planner,
        launch,
        traits.multiprocessors,
        loader="BlockFeed",
        fields=_table_fields(problem),
        whole=_is_whole(problem, launch, traits),
    )
    return planner.plan(*steps)


def decodes_int8_keys(problem: PagedProblem) -> bool:
    """Tell whether queries of `QuantizedKeys` are few, so that they need not be quantised."""
    return problem.sq <= MAX_QUERIES and not problem.packed


def _choose(problem: PagedProblem) -> tuple[bool, str]:
    """Return whether decode kernels run the call, otherwise the forward's, and why.

    A forward has a CTA for every 64 to 128 query rows of a head, and computes those rows whole;
    decoding takes the rows of a group of heads together, in passes of 4 to 16, and cuts the keys.
    It also has what the forward has not: caches whose strides are different.

    Raises
    ------
    ValueError
        For caches of such strides with packed queries.
    """
    layouts = problem.layouts
    if isinstance(layouts, QuantizedPagedArrays):
        if decodes_int8_keys(problem):
            return True, f"up to {MAX_QUERIES} queries are decoded, and not quantised themselves"
        return False, "int8 keys and more queries, or packed ones, have the kernel of a forward"
    few, has = problem.sq <= MAX_QUERIES, has_prefill(problem)
    if problem.packed and not has:
        caches = {"k_cache": layouts.k, "v_cache": layouts.v}
        scales = {"k_scales": layouts.k_scales, "v_scales": layouts.v_scales}
        arrays = {name: layout for name, layout in (caches | scales).items() if layout}
        raise error(
            ValueError,
            ", ".join(f"{name} has strides {layout.strides}" for name, layout in arrays.items()),
            "with cu_seqlens_q a GPU takes caches of equal strides, those of tokens less than "
            "64 MiB, and so their scales",
            "make both alike, for example as halves of one array",
        )
    if problem.packed:
        return False, "packed queries run the kernels of a forward, with keys from blocks"
    if few:
        return (
            True,
            f"up to {MAX_QUERIES} queries of a sequence are decoded: its keys are shared out",
        )
    if not has:
        return True, "caches, or scales, of unequal strides are decoded"
    return False, f"more than {MAX_QUERIES} queries of a sequence run the kernels of a forward"


def _is_whole(problem: PagedProblem, launch: decode.DecodeLaunch, traits: DeviceTraits) -> bool:
    """Return whether each key-value head of each sequence has a CTA for itself."""
    heads = problem.batch * problem.kv_heads
    busy = launch.tensor_cores or heads >= traits.multiprocessors
    return busy and problem.sk <= WHOLE_KEYS


def _require_units(problem: PagedProblem, units: int) -> None:
    if units > MOST_UNITS:
        keys = decode.TILE_KEYS * decode.WARPS
        raise error(
            ValueError,
            f"{problem.batch} sequences of up to {problem.sk} tokens",
            f"kernels count at most {MOST_UNITS} parts of {keys} tokens of all heads",
            "pass fewer sequences in a call, or a block_table with fewer columns",
        )


def _table_fields(problem: PagedProblem) -> dict[str, Any]:
    """Return the fields of DecodeParams that locate a tile of a block, and its scales."""
    batch, block = item_strides(problem.block_table)
    scales = {"k_scales": problem.layouts.k_scales, "v_scales": problem.layouts.v_scales}
    return {
        "table_batch": batch,
        "table_block": block,
        "block_tiles": problem.block_size // decode.TILE_KEYS,
        **{name: item_strides(layout) for name, layout in scales.items() if layout},
    }


def has_prefill(problem: PagedProblem) -> bool:
    """Tell whether the kernels read the caches: one place serves K and V, and one their scales."""
    layouts, blocks = problem.layouts, problem.num_blocks
    if not _alike(layouts.k.strides[:2], layouts.v.strides[:2], blocks):
        return False
    if layouts.k_scales is None or layouts.v_scales is None:
        return True
    return _alike(layouts.k_scales.strides, layouts.v_scales.strides, blocks)


def _alike(k: tuple[int, ...], v: tuple[int, ...], blocks: int) -> bool:
    """Tell whether blocks and what follows lie equally far apart in both."""
    return k[1:] == v[1:] and (k[0] == v[0] or blocks <= 1) and 0 <= k[1] < _FARTHEST_TOKENS


def _prefill_step(
    problem: PagedProblem,
    laid: PagedArrays[Layout],
    planner: AttentionPlanner,
    traits: DeviceTraits,
) -> Step:
    """Return the launch of the forward kernel, whose keys come from blocks."""
    more: tuple[Any, ...] = ()
    if isinstance(problem.layouts, QuantizedPagedArrays):
        kernel, tile_q = _int8_kernel(problem, laid, traits)
        more = (quantized_keys_params(problem),)
    else:
        kernel, tile_q = _prefill_kernel(problem, laid, traits)
    slots = planner.slots
    places = {"k_cache": slots.k, "v_cache": slots.v, "seqlens_k": slots.seqused_k}
    ctas = problem.heads * problem.query_tiles(tile_q)
    return step_of(kernel, ctas, slots, _prefill_params(problem, laid), *more, **places)


def _int8_kernel(
    problem: PagedProblem, laid: PagedArrays[Layout], traits: DeviceTraits
) -> tuple[Specialisation, int]:
    """Choose the kernel over int8 keys, and say its query rows."""
    require_int8_call(problem, traits)
    caches = {"k_cache": laid.k, "v_cache": laid.v, "k_cache.scales": laid.k_scales}
    for name, layout in caches.items():
        if layout is not None and max(map(abs, layout.strides[:2])) >= _INT32:
            raise error(
                ValueError,
                f"{name} has strides {layout.strides}",
                f"a GPU takes less than {_INT32} bytes from block to block and token to token",
                contiguous_copy(name),
            )
    dim, options = problem.head_dim, score_options(problem)
    vec = whole_vectors(vector_items("float16"), problem, laid, ("q", "v", "out"))
    row = int8.paged_row(dim, options, problem.options.accumulator)
    return int8.flash(dim, dim, vec, options, int8.PAGED, row), row.tile_q


def _family_of_prompts(problem: PagedProblem, traits: DeviceTraits) -> str:
    """Name the kernels of prompts: "native", "tensor_core" or "float32"."""
    dtype, stored = problem.dtype.name, problem.layouts.k.dtype.name
    if traits.native and dtype in native.DTYPES and stored == dtype:
        return "native"
    return "tensor_core" if traits.multiplies(dtype) else "float32"


def _reasons_of_prompts(problem: PagedProblem, traits: DeviceTraits) -> tuple[str, ...]:
    """Return the reasons for the kernels of prompts."""
    if isinstance(problem.layouts, QuantizedPagedArrays):
        return int8.reasons(traits)
    kernels = "float32" if _family_of_prompts(problem, traits) == "float32" else "tensor_core"
    return (arithmetic(kernels, problem.dtype.name),)


def _prefill_kernel(
    problem: PagedProblem, laid: PagedArrays[Layout], traits: DeviceTraits
) -> tuple[Specialisation, int]:
    """Choose the kernel by dtype, head dim, options and how rows lie; and say its query rows."""
    dtype, cache = problem.dtype.name, problem.layouts.k.dtype.name
    dim, options = problem.head_dim, score_options(problem)
    family = _family_of_prompts(problem, traits)
    if family == "native":
        vec = _together(problem, laid, vector_items(dtype))
        native_row = native.flash_row(traits.arch, dim, dim, options)
        shape = traits.arch, dtype, dim, dim, vec, options
        return native.flash(*shape, native.PAGED), native_row.tile_q
    if family == "tensor_core":
        vec = _together(problem, laid, vector_items(dtype))
        row = tensor_core.forward.paged_row(traits.arch, dim, cache)
        if problem.options.accumulator == "float16":
            row = tensor_core.forward.half_sums_row(traits.arch, dim, dim)
        kernel = tensor_core.forward.paged(traits.arch, dim, vec, options, cache, dtype, row)
        return kernel, row.tile_q
    vec = _together(problem, laid, float32.forward.VECTOR_ITEMS)
    tile_q = float32.forward.flash_row(traits.arch, dim, dim).tile_q
    shape = traits.arch, dtype, dim, dim, vec, options
    return float32.forward.flash(*shape, float32.forward.PAGED, cache), tile_q


def _together(problem: PagedProblem, laid: PagedArrays[Layout], items: int) -> int:
    """Return `items` if every row of every array starts at a multiple of so many, otherwise 1."""
    laid_arrays = {name: getattr(laid, name) for name in ("q", "k", "v", "out")}
    sizes = {name: items * cache_bits(x.dtype.name) // 8 for name, x in laid_arrays.items()}
    whole = problem.head_dim % items == 0 and rows_start_at(problem.starts, laid, sizes)
    return items if whole else 1


def _prefill_params(problem: PagedProblem, laid: PagedArrays[Layout]) -> Any:
    """Fill the C struct PagedParams."""
    block = problem.block_table.strides[1]
    if abs(block) >= _INT32:
        raise error(
            ValueError,
            f"block_table has {block} bytes from one entry of a row to the next",
            f"a GPU takes less than {_INT32}",
            contiguous_copy("block_table"),
        )
    groups = problem.block_size // _GROUP_KEYS
    shift = (groups - 1).bit_length()
    quantised = isinstance(laid, QuantizedPagedArrays)  # places of int8 keys are not in units
    units = (0, 0, 0) if quantised else _units(problem, "k_cache", laid.k)
    scales = filled(SCALE_LAYOUT, block_groups=groups)
    if laid.k_scales is not None and not quantised:
        _, token, head = laid.k_scales.strides
        of_scales = _units(problem, "k_scales", laid.k_scales)
        scales = filled(SCALE_LAYOUT, head=head, token=token, block_groups=groups, units=of_scales)
    return filled(
        PAGED_PARAMS,
        attention=attention_params(problem, laid),
        cu_seqlens_q=batch_integers(laid.cu_seqlens_q),
        table_batch=item_strides(problem.block_table)[0],
        table_block=block,
        batch=problem.batch,
        total=problem.total_q if problem.packed else 0,
        block_reciprocal=-(-(2 ** (31 + shift)) // groups),
        block_shift=shift,
        block_span=groups * units[2],
        units=units,
        scales=scales,
    )


def _units(problem: PagedProblem, name: str, layout: Layout) -> tuple[int, int, int]:
    """Return a unit in bytes, and how many of it blocks and groups of tokens lie apart."""
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
