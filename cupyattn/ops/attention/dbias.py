"""The gradient of a bias that broadcasts: a kernel of its own, and sums of what that leaves."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.attention.kernels.tensor_core import passes
from cupyattn.ops.attention.kernels.tensor_core.backward_summed_dbias import SummedDbiasConfig
from cupyattn.ops.attention.params import score_strides, step_of
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.structs import DBIAS_PARAMS
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.plan import Planner, Step
from cupyattn.runtime.structs import new_struct

_FLOAT32 = np.dtype(np.float32)
_ENOUGH_CTAS = 512
"""Two waves of two on each multiprocessor of the largest cards, whatever the card: so are bits."""


class SummedDbias(NamedTuple):
    """How the kernel for a bias that broadcasts splits its work."""

    target: Layout
    """The layout of the array that it writes, as (B, H, Sq, Sk)."""
    scratch: bool
    """Whether that is scratch, which another kernel sums up to dbias; otherwise it is dbias."""
    ctas: int
    shares: tuple[int, ...]
    """The numbers of the split, which the kernel takes by value."""


def shared_out(
    problem: AttentionProblem, dbias: Layout, row: SummedDbiasConfig, accumulate: bool
) -> SummedDbias:
    """Share out the gradient of a bias that broadcasts.

    Each bias of a batch element and a head is summed over the pairs of those that share it. Where
    its tiles alone would keep few multiprocessors busy, CTAs have a part of these pairs each.
    """
    batches, heads, *extents = four_axes(dbias.shape)
    row_tiles, key_tiles = -(-problem.sq // row.tile_rows), -(-problem.sk // row.tile_k)
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
    planner: Planner[Any],
    **places: int | None,
) -> Step:
    """Return the launch that sums scratch memory, which lies so, to dbias."""
    shape = four_axes(dbias.shape)
    params = new_struct(DBIAS_PARAMS)
    params["shape"] = shape
    params["repeats"] = [
        1 if items == extent else extent for items, extent in zip(shape, source.shape, strict=True)
    ]
    params["source"] = score_strides(source, problem.scores_shape)
    params["target"] = score_strides(dbias, problem.scores_shape)
    params["accumulate"] = accumulate
    ctas = passes.dbias_ctas(math.prod(shape), bool(params["repeats"][3] > 1))
    kernel = passes.dbias(dbias.dtype.name)
    return step_of(kernel, ctas, planner.slots, params[()], **places)


def four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array that broadcasts to (B, H, Sq, Sk), with every axis."""
    return (1,) * (4 - len(shape)) + shape
