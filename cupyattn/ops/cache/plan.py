"""Plans of the cache's kernels: vectors, strides and grids of append, copy blocks and gather."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.cache.kernels import (
    APPEND_PARAMS,
    COPIES_PASSED,
    COPY_AXES,
    COPY_BLOCKS_PARAMS,
    COPY_THREADS,
    GATHER_PARAMS,
    THREADS,
    WORDS,
    AppendArrays,
    AppendLaunch,
    CopyArrays,
    GatherArrays,
    append_config,
    specialise_append,
    specialise_copies,
    specialise_gather,
    stored_bytes,
)
from cupyattn.ops.cache.problems import RESULTS, AppendProblem, CopiesProblem, GatherProblem, Pairs
from cupyattn.runtime.arrays import Array, Layout, Operands, contiguous
from cupyattn.runtime.checks import most_tokens, require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Plan, Planner, Step, run
from cupyattn.runtime.records import given_of, values_of
from cupyattn.runtime.storage import rows_aligned, vector_items
from cupyattn.runtime.structs import merge_axes, new_struct

_MOST = 2**32 - 1
"""Threads, rows of lanes and slots of a launch: they are numbered with 32 bits."""


def run_append(
    device: Device, problem: AppendProblem, operands: Operands[AppendArrays[Array]]
) -> None:
    """Write new tokens into the caches."""
    run(device, append_plan(problem, device.arch.number), operands)


@lru_cache(maxsize=4096)
def append_plan(problem: AppendProblem, arch: int) -> Plan:
    """Plan a call of append_kv."""
    layouts, caches = problem.layouts, problem.caches
    require_item_alignment(given_of(layouts), given_of(problem.starts), layouts.SHOWN_AS)
    require_kernel_dtype("k", problem.dtype)
    if layouts.cos is not None:
        require_kernel_dtype("rotary's cos", layouts.cos.dtype)
    changes = problem.half or problem.q_norm is not None
    heads = layouts.q.shape[-2] if layouts.q is not None and changes else 0
    launch = _append_launch(problem)
    config = append_config(arch, max(heads, caches.kv_heads), launch.chunks)
    groups, kv_groups = (-(-count // config.heads) for count in (heads, caches.kv_heads))
    tokens = math.prod(problem.tokens)
    rows = tokens * (groups + 2 * kv_groups)
    planner = Planner(AppendArrays, layouts, {})
    if rows == 0:
        return planner.plan()
    rows_per_cta = config.threads // launch.lanes
    if max(rows + rows_per_cta, caches.slots) > _MOST:
        raise error(
            ValueError,
            f"{tokens} tokens, and caches of {caches.slots} slots",
            f"{most_tokens('append_kv', _MOST // (groups + 2 * kv_groups))}, and caches of at most "
            f"{_MOST} slots",
            "split the tokens or the heads over several calls",
        )
    params = _append_params(problem, (heads, groups), (caches.kv_heads, kv_groups))
    specialisation = specialise_append(config, launch)
    slots = values_of(planner.slots)
    values: tuple[object, ...] = (params,)
    if layouts.k_centre is None:
        slots = slots[:-1]
    else:
        values = params, _strides(layouts.k_centre)[0]
    return planner.plan(Step.of(specialisation, -(-rows // rows_per_cta), slots, *values))


def _append_launch(problem: AppendProblem) -> AppendLaunch:
    layouts = problem.layouts
    return AppendLaunch(
        problem.dtype.name,
        problem.caches.format,
        problem.caches.head_dim,
        _append_vector(problem),
        layouts.slot_mapping.dtype.name,
        "void" if layouts.cos is None else layouts.cos.dtype.name,
        "int32" if layouts.positions is None else layouts.positions.dtype.name,
        problem.interleaved and layouts.cos is not None,
        problem.q_norm is not None or problem.k_norm is not None,
        problem.caches.centred,
    )


def _append_params(
    problem: AppendProblem, heads: tuple[int, int], kv_heads: tuple[int, int]
) -> Any:
    """Return the C struct AppendParams; heads come with the number of their groups."""
    layouts, caches = problem.layouts, problem.caches
    (slots_batch, slots_seq), (positions_batch, positions_seq) = (
        (0, *_strides(numbers))[-2:] for numbers in (layouts.slot_mapping, layouts.positions)
    )
    return _struct(
        APPEND_PARAMS,
        q=_slot_strides(layouts.q),
        k=_slot_strides(layouts.k),
        v=_slot_strides(layouts.v),
        k_cache=_slot_strides(layouts.k_cache),
        v_cache=_slot_strides(layouts.v_cache),
        k_scales=_strides(layouts.k_scales),
        v_scales=_strides(layouts.v_scales),
        slots_batch=slots_batch,
        slots_seq=slots_seq,
        positions_batch=positions_batch,
        positions_seq=positions_seq,
        cos_stride=_strides(layouts.cos)[0],
        sin_stride=_strides(layouts.sin)[0],
        table_length=0 if layouts.cos is None else layouts.cos.shape[0],
        slots=caches.slots,
        tokens=math.prod(problem.tokens),
        seq=problem.tokens[-1],
        heads=heads[0],
        groups=heads[1],
        kv_heads=kv_heads[0],
        kv_groups=kv_heads[1],
        half=problem.half,
        dim=caches.head_dim,
        block_size=caches.block_size,
        q_eps=0 if problem.q_norm is None else problem.q_norm.eps,
        k_eps=0 if problem.k_norm is None else problem.k_norm.eps,
        q_offset=0 if problem.q_norm is None else problem.q_norm.weight_offset,
        k_offset=0 if problem.k_norm is None else problem.k_norm.weight_offset,
    )


def _append_vector(problem: AppendProblem) -> int:
    """Return the items in one load: a vector's if all pieces start at one, otherwise 1."""
    layouts, starts, caches = problem.layouts, problem.starts, problem.caches
    items = vector_items(problem.dtype.name)
    stored = stored_bytes(problem.dtype.name, caches.format, items)
    rotated = 2 * problem.half if problem.interleaved else problem.half
    loaded = (
        (layouts.q, starts.q),
        (layouts.k, starts.k),
        (layouts.v, starts.v),
        (layouts.cos, starts.cos),
        (layouts.sin, starts.sin),
        (layouts.q_weight, starts.q_weight),
        (layouts.k_weight, starts.k_weight),
        (layouts.k_centre, starts.k_centre),
    )
    of_keys = items if caches.centred else stored
    aligned = (
        rows_aligned(loaded)
        and rows_aligned([(layouts.k_cache, starts.k_cache)], of_keys)
        and rows_aligned([(layouts.v_cache, starts.v_cache)], stored)
        and caches.head_dim % items == rotated % items == 0
    )
    return items if aligned else 1


class BlockBytes(NamedTuple):
    """A block of an array: the extents and strides of its bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The last one is 1."""
    block_stride: int

    @classmethod
    def of(cls, layout: Layout, block_axis: int) -> BlockBytes:
        """Merge the axes other than that of blocks; neighbours whose items lie evenly become one.

        Examples
        --------
        >>> BlockBytes.of(Layout((9, 2, 3), (24, 12, 4), np.dtype(np.float32)), 0)
        BlockBytes(shape=(24,), strides=(1,), block_stride=24)
        """
        axes = [axis for axis in range(len(layout.shape)) if axis != block_axis]
        axes.sort(key=lambda axis: -abs(layout.strides[axis]))  # as they lie in memory
        extents = (*(layout.shape[axis] for axis in axes), layout.dtype.itemsize)
        shape, (strides,) = merge_axes(extents, [(*(layout.strides[axis] for axis in axes), 1)])
        if not strides or strides[-1] != 1:  # of one byte, which is no axis
            shape, strides = (*shape, 1), (*strides, 1)
        return cls(shape, strides, layout.strides[block_axis])

    def fits(self, start: int, word: int) -> bool:
        """Tell whether it has whole words, in an array that starts `start` bytes after one."""
        places = (start, self.block_stride, *self.strides[:-1], self.shape[-1])
        return not any(place % word for place in places)


class CopyLaunches(NamedTuple):
    """The part of a plan that all launches of a call of copy_blocks share."""

    params: np.ndarray
    """The C struct, without copies that are passed by value."""
    ctas: int
    word: int
    """Bytes that a thread copies."""
    slots: tuple[int | None, ...]


def run_copies(
    device: Device,
    problem: CopiesProblem,
    operands: Operands[CopyArrays[Array]],
    pairs: Pairs | None,
) -> None:
    """Copy; `pairs` go by value, some in each launch, and are None where copies are an array."""
    plan = _array_plan(problem) if pairs is None else _pairs_plan(problem, pairs)
    run(device, plan, operands)


@lru_cache(maxsize=4096)
def _array_plan(problem: CopiesProblem) -> Plan:
    params, ctas, word, slots = copy_launches(problem)
    copies = problem.layouts.copies
    assert copies is not None
    specialisation = specialise_copies(word, copies.dtype.name)
    return Plan((Step.of(specialisation, ctas, slots, params[()]),), ())


def _pairs_plan(problem: CopiesProblem, pairs: Pairs) -> Plan:
    params, ctas, word, slots = copy_launches(problem)
    specialisation, steps = specialise_copies(word, "int32"), []
    for first in range(0, len(pairs), COPIES_PASSED):
        ids = np.array(pairs[first : first + COPIES_PASSED], np.int32)
        mine = params.copy()
        mine["passed"] = len(ids)
        mine["src"][: len(ids)], mine["dst"][: len(ids)] = ids.T
        steps.append(Step.of(specialisation, ctas, slots, mine[()]))
    return Plan(tuple(steps), ())


@lru_cache(maxsize=4096)
def copy_launches(problem: CopiesProblem) -> CopyLaunches:
    """Lay out the words that the threads of a copy_blocks own.

    Raises
    ------
    ValueError
        For blocks of too many words, and arrays that are not aligned to their items.
    """
    layouts, starts = problem.layouts, problem.starts
    require_item_alignment(given_of(layouts), given_of(starts))
    pools = (
        (layouts.k_cache, starts.k_cache),
        (layouts.v_cache, starts.v_cache),
        (layouts.k_scales, starts.k_scales),
        (layouts.v_scales, starts.v_scales),
    )
    block_axis = 1 if problem.pooled else 0
    blocks = [layout and BlockBytes.of(layout, block_axis) for layout, _ in pools]
    word = next(
        word
        for word in WORDS
        if all(
            block is None or block.fits(start or 0, word)
            for block, (_, start) in zip(blocks, pools, strict=True)
        )
    )
    params = new_struct(COPY_BLOCKS_PARAMS)
    params["shape"] = 1
    params["src"] = params["dst"] = -1
    threads = 0
    for i, block in enumerate(blocks):
        params["first_thread"][i] = threads
        if block is None:
            continue
        shape = (*block.shape[:-1], block.shape[-1] // word)
        strides = (*(stride // word for stride in block.strides[:-1]), 1)
        params["shape"][i][COPY_AXES - len(shape) :] = shape
        params["strides"][i][COPY_AXES - len(shape) :] = strides
        params["block_stride"][i] = block.block_stride // word
        threads += math.prod(shape)
        if threads > _MOST - COPY_THREADS:
            raise error(
                ValueError,
                f"a block of all layers has more than {threads} words of {word} bytes",
                f"a launch of copy_blocks takes at most {_MOST - COPY_THREADS}",
                "copy the layers in several calls",
            )
    params["first_thread"][len(blocks)] = threads
    params["num_blocks"] = problem.caches.num_blocks
    copies = layouts.copies
    if copies is not None:
        params["copies"] = copies.shape[0]
        params["copy_stride"], params["end_stride"] = _strides(copies)
    nothing = copies is not None and copies.shape[0] == 0
    slots = values_of(Planner(CopyArrays, layouts, {}).slots)
    return CopyLaunches(params, 0 if nothing else -(-threads // COPY_THREADS), word, slots)


def run_gather(
    device: Device, problem: GatherProblem, operands: Operands[GatherArrays[Array]]
) -> tuple[Array, Array]:
    """Gather k and v into the given arrays, or new ones."""
    results = run(device, gather_plan(problem), operands)
    assert results.k is not None
    assert results.v is not None
    return results.k, results.v


@lru_cache(maxsize=4096)
def gather_plan(problem: GatherProblem) -> Plan:
    """Plan a call of gather."""
    layouts, caches, output = problem.layouts, problem.caches, problem.output
    require_item_alignment(given_of(layouts), given_of(problem.starts), layouts.SHOWN_AS)
    require_kernel_dtype("k" if caches.quantised else "k_cache", output.dtype)
    planner = Planner(GatherArrays, layouts, dict.fromkeys(RESULTS, output))
    k, v = (contiguous(*output) if each is None else each for each in (layouts.k, layouts.v))
    vec = _gather_vector(problem, k, v)
    # Heads that are neighbours in all arrays are treated as one; a scale belongs to one head.
    heads, dim = caches.kv_heads, caches.head_dim
    if not caches.quantised and all(
        each.strides[2] == dim * output.dtype.itemsize or heads == 1
        for each in (layouts.k_cache, layouts.v_cache, k, v)
    ):
        heads, dim = 1, heads * dim
    batch, length = output.shape[:2]
    units = dim // vec
    threads = batch * length * heads * units
    if threads == 0:
        return planner.plan()
    if threads > _MOST - THREADS:
        raise error(
            ValueError,
            f"results of {batch} * {length} tokens",
            most_tokens("gather", _MOST // (heads * units)),
            "gather fewer sequences or heads in a call",
        )
    params = _struct(
        GATHER_PARAMS,
        k_cache=_slot_strides(layouts.k_cache),
        v_cache=_slot_strides(layouts.v_cache),
        k_scales=_strides(layouts.k_scales),
        v_scales=_strides(layouts.v_scales),
        k=_slot_strides(k),
        v=_slot_strides(v),
        table_batch=_strides(layouts.block_table)[0],
        table_block=_strides(layouts.block_table)[1],
        seqlens_stride=_strides(layouts.seqlens_k)[0],
        tokens=batch * length,
        length=length,
        heads=heads,
        units=units,
        block_size=caches.block_size,
        num_blocks=caches.num_blocks,
        max_blocks=layouts.block_table.shape[1],
    )
    lengths = layouts.seqlens_k.dtype.name
    specialisation = specialise_gather(output.dtype.name, caches.format, vec, lengths)
    slots = values_of(planner.slots)
    return planner.plan(Step.of(specialisation, -(-threads // THREADS), slots, params))


def _gather_vector(problem: GatherProblem, k: Layout, v: Layout) -> int:
    """Return the items of k in one load: a vector's if every row starts at one, otherwise 1."""
    layouts, starts, dtype = problem.layouts, problem.starts, problem.output.dtype.name
    items = vector_items(dtype)
    stored = stored_bytes(dtype, problem.caches.format, items)
    kept = (layouts.k_cache, starts.k_cache), (layouts.v_cache, starts.v_cache)
    aligned = (
        rows_aligned(((k, starts.k), (v, starts.v)))
        and rows_aligned(kept, stored)
        and problem.caches.head_dim % items == 0
    )
    return items if aligned else 1


def _struct(dtype: np.dtype, **fields: object) -> Any:
    """Return a C struct with these fields."""
    params = new_struct(dtype)
    for name, value in fields.items():
        params[name] = value
    return params[()]


def _strides(layout: Layout | None) -> tuple[int, ...]:
    """Return the strides in items; zeros of an absent array."""
    if layout is None:
        return (0, 0, 0)
    return tuple(stride // layout.dtype.itemsize for stride in layout.strides)


def _slot_strides(layout: Layout | None) -> tuple[int, ...]:
    """Return strides in items of (outer, inner, head): a block or batch element, a token, a head.

    An array without a batch axis is one batch element.
    """
    axes = _strides(layout)
    return (0, *axes[:-1])[-3:]
