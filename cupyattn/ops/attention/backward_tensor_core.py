"""The plan of the tensor-core backward: one pass with atomic additions, or two without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.attention.block_mask import NO_LISTS, block_lists
from cupyattn.ops.attention.kernels.modifiers import BLOCK_STATES
from cupyattn.ops.attention.kernels.options import PLAIN_BACKWARD, BackwardOptions
from cupyattn.ops.attention.kernels.tensor_core import (
    backward_dkdv,
    backward_dq,
    backward_summed_dbias,
    passes,
)
from cupyattn.ops.attention.kernels.tensor_core.forward import FlashConfig
from cupyattn.ops.attention.modifiers import modifiers_of, strides_of
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    backward_params,
    gradient_params,
    require_near_rows,
    score_options,
    score_strides,
    step_of,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    AttentionBackwardArrays,
    AttentionProblem,
    Outputs,
    with_results,
)
from cupyattn.ops.attention.structs import DBIAS_PARAMS, filled
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Plan, Step
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import round_up

_FLOAT32 = np.dtype(np.float32)
_ENOUGH_CTAS = 512
"""Two waves of two CTAs on each multiprocessor of the largest devices.

It is the same for every device, so that results are too, to the bit.
"""


class SummedDbias(NamedTuple):
    """How the kernel for a bias that broadcasts splits its work."""

    target: Layout
    """The layout of the array that it writes, as (B, H, Sq, Sk)."""
    scratch: bool
    """Whether that is scratch, which another kernel sums up to dbias; otherwise it is dbias."""
    ctas: int
    """CTAs of the kernel of sums; 0 if there is none for the head dims."""
    shares: tuple[int, ...]
    """The numbers of the split, which the kernel takes by value."""

    @property
    def every_score(self) -> bool:
        """Whether `target` has an item for each score, which the kernel of dk and dv writes."""
        return not self.ctas


def shared_out(
    problem: AttentionProblem, dbias: Layout, row: FlashConfig, accumulate: bool
) -> SummedDbias:
    """Share out the gradient of a bias that broadcasts.

    Each bias of a batch element and a head is summed over the pairs of those that share it. Where
    its tiles alone would keep few multiprocessors busy, CTAs have a part of these pairs each.
    """
    batches, heads, *extents = four_axes(dbias.shape)
    row_tiles, key_tiles = -(-problem.sq // row.tile_q), -(-problem.sk // row.tile_k)
    pairs = (problem.batch if batches == 1 else 1) * (problem.heads if heads == 1 else 1)
    ctas = batches * heads * row_tiles * key_tiles
    parts = min(pairs, max(_ENOUGH_CTAS // max(ctas, 1), 1))
    sums_rows, sums_keys = extents[0] != problem.sq, extents[1] != problem.sk
    scratch = parts > 1 or sums_rows or sums_keys
    in_batches, in_heads = (parts, 1) if batches == 1 else (1, parts)
    shape = (
        batches * in_batches,
        heads * in_heads,
        row_tiles * row.warps if sums_rows else problem.sq,
        key_tiles if sums_keys else problem.sk,
    )
    return SummedDbias(
        contiguous(shape, _FLOAT32) if scratch else dbias,
        scratch,
        ctas * parts,
        (batches, heads, parts, sums_rows, sums_keys, accumulate and not scratch),
    )


def sum_step(
    problem: AttentionProblem,
    dbias: Layout,
    source: Layout,
    accumulate: bool,
    planner: AttentionPlanner,
    **places: int | None,
) -> Step:
    """Return the launch that sums scratch memory, which lies so, to dbias."""
    shape = four_axes(dbias.shape)
    pairs = zip(shape, source.shape, strict=True)
    repeats = [1 if items == extent else extent for items, extent in pairs]
    params = filled(
        DBIAS_PARAMS,
        shape=shape,
        repeats=repeats,
        source=score_strides(source, problem.scores_shape),
        target=score_strides(dbias, problem.scores_shape),
        accumulate=accumulate,
    )
    ctas = passes.dbias_ctas(math.prod(shape), repeats[3] > 1)
    kernel = passes.dbias(dbias.dtype.name)
    return step_of(kernel, ctas, planner.slots, params, **places)


def four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array that broadcasts to (B, H, Sq, Sk), with every axis."""
    return (1,) * (4 - len(shape)) + shape


_MAX_ROWS = 2**32 - 1  # scratch rows are counted in 32 bits (scratch_row in backward_params.cuh)
_QUAD = 4  # neighbouring keys that are read together
_MOST_TILE_ROWS = 64  # the most rows of q, k, v or dout that one tile has
_VECTOR_ARRAYS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


_COPIED = {
    True: "tiles are copied to shared memory asynchronously, as on every GPU from sm_80 on",
    False: "rows that are not aligned to 16 bytes pass through registers",
}
"""The reason for how tiles get to shared memory, by whether kernels copy them."""


class _Options(NamedTuple):
    """Compile-time options of the kernels of one call; `summed_dbias` if the bias broadcasts."""

    dkdv: BackwardOptions
    dq: BackwardOptions
    summed_dbias: BackwardOptions = PLAIN_BACKWARD


def tensor_core_plan(
    problem: AttentionProblem,
    planner: AttentionPlanner,
    outputs: Outputs,
    traits: DeviceTraits,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan the row statistics, dsinks, the range of ds, dk and dv, dq, and a summed dbias."""
    arch, packed, dtype = traits.arch, problem.packed, problem.dtype.name
    dims = problem.head_dim, problem.head_dim_v
    require_near_rows(problem, ("q", "k", "v", "dout"), _MOST_TILE_ROWS)
    laid: AttentionBackwardArrays[Layout] = with_results(problem, outputs)
    rows, dbias = _countable_rows(problem), laid.dbias
    score_vec = _score_items(problem, _score_arrays(problem, dbias))
    summed = _summed_dbias(problem, arch, dbias, score_vec, accumulate)
    options = _options(problem, dbias, score_vec, summed, accumulate)

    vec = whole_vectors(vector_items(dtype), problem, laid, _VECTOR_ARRAYS)
    of_keys = backward_dkdv.dkdv_row(arch, *dims, not deterministic, vec)
    if traits.native:
        traits.choices.because(_COPIED[of_keys.native])
    of_rows = backward_dq.dq_row(arch, *dims, options.dq)  # its kernel is in deterministic calls
    delta_ctas = _ctas_of_delta(problem, rows)
    key_ctas = problem.kv_heads * problem.key_tiles(of_keys.tile_keys)
    row_ctas = problem.heads * problem.query_tiles(of_rows.tile_q) if deterministic else 0
    names = ("sizes", "scales", "cta_scales", "dq_acc", "zeroed")
    scratch: dict[str, int | None] = {"stats": planner.scratch(2 * rows), **dict.fromkeys(names)}
    scaled = passes.scales_gradients(dtype)
    if scaled:
        scratch["sizes"] = planner.scratch(2 * delta_ctas)
        scratch["scales"] = planner.scratch(2 * problem.batch * problem.heads)
        scratch["cta_scales"] = planner.scratch(max(key_ctas, row_ctas))
    key_tile = of_keys.tile_q, of_keys.tile_keys, of_keys.warp_keys
    key_lists, row_lists = block_lists(problem, planner, *key_tile, of_keys=True), NO_LISTS
    if deterministic:
        row_tile = of_rows.tile_q, of_rows.tile_k, of_rows.warp_rows
        row_lists = block_lists(problem, planner, *row_tile)
    written: dict[str, int | None] = {}  # where a kernel writes dbias, if not to dbias
    if summed and summed.scratch:
        scratch["scratch"] = planner.scratch(math.prod(summed.target.shape))
        written = {"dbias": scratch["scratch"]}
    sums = 0 if deterministic else rows * round_up(problem.head_dim, 8)
    if sums:
        scratch["dq_acc"] = scratch["zeroed"] = planner.scratch(sums)

    params = backward_params(
        problem,
        laid,
        accumulate=accumulate,
        dbias=dbias if summed is None else summed.target,
        zeroed=sums,
        rows_padded=_scratch_rows(problem)[1],
    )
    gradient = gradient_params(problem, params)
    shape, values = (arch, *dims, vec), (gradient, *problem.block_modifier_strides)
    kind = {"packed": packed, "dtype": dtype}

    def step(kernel: Specialisation, ctas: int, *values: Any, **places: int | None) -> Step:
        return step_of(kernel, ctas, planner.slots, *values, **{**scratch, **places})

    steps = [step(passes.delta(dims[1], vec, **kind), delta_ctas, gradient)]
    if laid.dsinks is not None:  # of statistics that are not scaled yet
        dsinks = passes.dsinks(laid.dsinks.dtype.name, dtype)
        steps.append(step(dsinks, problem.heads, params))
    if scaled:
        scales = passes.scales(dims[1], packed)
        steps.append(step(scales, problem.batch * problem.kv_heads, gradient))
    dkdv = backward_dkdv.dkdv(*shape, not deterministic, options.dkdv, **kind)
    places = {"block_lists": key_lists.slot, **written}
    steps += [*key_lists.steps, step(dkdv, key_ctas, *values, **places)]
    if deterministic:
        dq = backward_dq.dq(*shape, options.dq, **kind)
        steps += [*row_lists.steps, step(dq, row_ctas, *values, block_lists=row_lists.slot)]
    else:
        convert = passes.convert(problem.head_dim, vec, **kind)
        steps.append(step(convert, -(-rows // passes.ROW_PAD), gradient))
    if dbias is not None and summed is not None:
        if not summed.every_score:
            of_dbias = options.summed_dbias
            kernel = backward_summed_dbias.summed_dbias(*shape, of_dbias, **kind)
            numbers = *summed.shares, *strides_of(of_dbias.modified, problem.layouts)
            steps.append(step(kernel, summed.ctas, gradient, *numbers, **written))
        if summed.scratch:
            steps.append(sum_step(problem, dbias, summed.target, accumulate, planner, **scratch))
    # Tiles that no query sees are skipped, and with them their part of dbias.
    skipped = dbias is not None and summed is None and not accumulate
    zero_first = [planner.slots.dbias] if skipped else []
    if summed is not None and summed.every_score:
        zero_first = [scratch["scratch"]]
    return planner.plan(*steps, zero_first=zero_first, zero_new=accumulate)


def _scratch_rows(problem: AttentionProblem) -> tuple[int, int]:
    """Return the batch elements of scratch memory, and the rows that each has of a head.

    Whole CTAs of the first kernel. The rows of packed sequences are in one element, those of each
    from a multiple of ROW_PAD on (scratch_begin in varlen_backward_params.cuh).
    """
    if problem.packed:
        return 1, (problem.total_q // passes.ROW_PAD + problem.batch) * passes.ROW_PAD
    return problem.batch, round_up(max(problem.sq, 1), passes.ROW_PAD)


def _ctas_of_delta(problem: AttentionProblem, rows: int) -> int:
    """Return the CTAs of the first kernel: for the rows of all heads, then for those of v.

    Those of v are read only where their sizes count.
    """
    if not passes.scales_gradients(problem.dtype.name):
        return -(-rows // passes.delta_rows(problem.head_dim_v))
    if problem.packed:
        keys = (problem.total_k // passes.ROW_PAD + problem.batch) * passes.ROW_PAD
    else:
        keys = problem.batch * round_up(problem.sk, passes.ROW_PAD)
    return -(-(rows + problem.kv_heads * keys) // passes.delta_rows(problem.head_dim_v))


def _countable_rows(problem: AttentionProblem) -> int:
    """Return the rows of all heads in scratch memory, or raise if kernels do not count so far."""
    batch, rows_padded = _scratch_rows(problem)
    rows = batch * problem.heads * rows_padded
    if rows > _MAX_ROWS:
        raise error(
            ValueError,
            f"B = {problem.batch}, H = {problem.heads}, Sq = {problem.sq}",
            f"implementation='flash' takes B * H sequences of up to {_MAX_ROWS} rows together, "
            f"each rounded up to {passes.ROW_PAD}",
            "split the batch over several calls",
        )
    return rows


def _options(
    problem: AttentionProblem,
    dbias: Layout | None,
    score_vec: int,
    summed: SummedDbias | None,
    accumulate: bool,
) -> _Options:
    """Name the options of a call's kernels; those that write dbias take `score_vec` at a time."""
    dq = BackwardOptions.of(
        score_options(problem)._replace(modified=problem.block_modifiers),
        score_vec=_score_items(problem, _score_arrays(problem, None)),
    )
    if dbias is None:
        return _Options(dq, dq)
    target = dbias if summed is None else summed.target
    writing = dq._replace(score_vec=score_vec, dbias=target.dtype.name)
    if summed is not None and not summed.every_score:
        functions = problem.functions
        modifiers = modifiers_of(functions, problem.layouts, blocks=BLOCK_STATES)
        return _Options(dq, dq, writing._replace(modified=modifiers))
    return _Options(writing._replace(dbias_accumulate=accumulate and summed is None), dq)


def _score_arrays(problem: AttentionProblem, dbias: Layout | None) -> list[tuple[Layout, int]]:
    """Return what has an item for each score: the layout, and what its start misses."""
    layouts, starts = problem.layouts, problem.starts
    pairs = [(layouts.bias, starts.bias), (layouts.mask, starts.mask)]
    if dbias is not None:
        pairs.append((dbias, getattr(starts, "dbias", None)))
    return [(layout, start or 0) for layout, start in pairs if layout is not None]


def _score_items(problem: AttentionProblem, arrays: Sequence[tuple[Layout, int]]) -> int:
    """Return how many neighbouring keys of these arrays can be read or written at once: 4 or 1.

    Each array comes with what it misses of a vector's alignment.
    """
    if (
        not arrays or problem.options.dropout_p or problem.sk % _QUAD
    ):  # Philox calls serve pairs of keys
        return 1
    for layout, start in arrays:
        *others, key = score_strides(layout, problem.scores_shape)
        rows_aligned = all(stride % _QUAD == 0 for stride in others)
        if key != 1 or not rows_aligned or start % (_QUAD * layout.dtype.itemsize):
            return 1
    return _QUAD


def _summed_dbias(
    problem: AttentionProblem, arch: int, dbias: Layout | None, score_vec: int, accumulate: bool
) -> SummedDbias | None:
    """Share out the gradient of a bias that broadcasts; None for any other.

    That of every score has one term: the kernel of dk and dv writes it. It also writes every score
    where head dims are larger than the kernel of sums supports.
    """
    if dbias is None or four_axes(dbias.shape) == problem.scores_shape:
        return None
    dims = problem.head_dim, problem.head_dim_v
    if max(dims) > backward_summed_dbias.LARGEST_HEAD_DIM:
        return SummedDbias(contiguous(problem.scores_shape, _FLOAT32), True, 0, ())
    row = backward_summed_dbias.summed_dbias_row(arch, *dims, score_vec)
    return shared_out(problem, dbias, row, accumulate)
