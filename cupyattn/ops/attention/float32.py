"""The plans of the kernels in float32 arithmetic, which take every dtype."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.ops.attention.block_mask import block_lists
from cupyattn.ops.attention.dbias import sum_step
from cupyattn.ops.attention.kernels.float32 import backward, forward
from cupyattn.ops.attention.params import (
    Starts,
    backward_params,
    flash_options,
    gradient_params,
    score_options,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    AttentionProblem,
    PackedProblem,
    forward_outputs,
    gradient_outputs,
    result_layouts,
)
from cupyattn.ops.attention.split_keys import num_splits, split_plan, whole_plan
from cupyattn.runtime.arrays import contiguous
from cupyattn.runtime.by_name import Plan, Step, lay_out_scratch
from cupyattn.runtime.card import Card

_FLOAT32 = np.dtype(np.float32)
_SCORES_TOGETHER = 2  # neighbouring keys of a row that a thread holds


def forward_plan(
    problem: AttentionProblem, start_of: Starts, card: Card, *, return_lse: bool
) -> Plan:
    """Plan the forward."""
    arch, dims = card.arch, (problem.head_dim, problem.head_dim_v)
    outputs = forward_outputs(problem, return_lse)
    results = result_layouts(problem, outputs)
    rows = [(start_of[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    rows += [(start_of.get("out", 0), results["out"].strides)]
    vec = whole_vectors(forward.VECTOR_ITEMS, problem, rows)
    options = flash_options(problem, start_of, _SCORES_TOGETHER)
    row, dtype = forward.flash_row(arch, *dims), problem.dtype.name
    splits = num_splits(problem, row, card)
    if splits > 1:
        kernel = forward.split(arch, dtype, *dims, vec, options._replace(sinks="void"))
        return split_plan(problem, kernel, row, splits, outputs)
    specialise = forward.varlen if isinstance(problem, PackedProblem) else forward.flash
    kernel = specialise(arch, dtype, *dims, vec, options)
    return whole_plan(problem, kernel, row, outputs)


def backward_plan(
    problem: AttentionProblem,
    start_of: Starts,
    arch: int,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan the backward: in one pass with atomic additions to dq, or in two kernels.

    Additions go to float32: to dq itself, or to scratch memory that is rounded to dq at the end.
    """
    outputs = gradient_outputs(problem)
    results = result_layouts(problem, outputs)
    options = score_options(problem)._replace(sinks="void")
    dims = problem.head_dim, problem.head_dim_v
    shape = problem.dtype.name, *dims
    inputs = [(start_of[name], problem.layouts[name].strides) for name in ("dout", "q", "k", "v")]
    vec = whole_vectors(backward.VECTOR_ITEMS, problem, inputs)
    packed = isinstance(problem, PackedProblem)
    rows = math.prod(problem.lse_shape)
    every_score = "dbias" in results and (
        math.prod(results["dbias"].shape) == math.prod(problem.scores_shape)
    )
    # Each score's, which another kernel sums. (The kernel of dbias has dense arrays alone.)
    gathered = packed and "dbias" in results and not every_score
    target = contiguous(problem.scores_shape, _FLOAT32) if gathered else results.get("dbias")
    written = "dbias" in results and (every_score or gathered)
    dbias = target.dtype.name if written and target is not None else "void"
    dense = backward_params(problem, results, accumulate=accumulate, dbias=target)
    params = gradient_params(problem, dense)

    # (What rounds the sums of one pass has dense arrays alone, too.)
    one_pass = not deterministic and (not packed or problem.dtype == _FLOAT32)
    rounded = one_pass and problem.dtype != _FLOAT32
    scratch, in_one_pass, renamed = {"delta": rows}, params, {}
    if rounded:
        scratch["dq_acc"], renamed["dq"] = rows * problem.head_dim, "dq_acc"
        sequence = problem.sq * problem.head_dim  # of a head: (B, H, Sq, D)
        in_one_pass = params.copy()
        in_one_pass["dq"] = problem.heads * sequence, problem.head_dim, sequence
    if gathered:
        scratch["scratch"], renamed["dbias"] = math.prod(problem.scores_shape), "scratch"
    in_tiles = options._replace(modified=problem.block_modifiers)
    strides = problem.block_modifier_strides
    row = backward.dkdv_row(arch, *dims, in_tiles)
    lists = block_lists(problem, "key_lists", rows=row.tile_q, keys=row.tile_k, of_keys=True)
    scratch |= lists.scratch
    dtype, head_dim_v = problem.dtype.name, problem.head_dim_v
    delta = backward.delta(dtype, head_dim_v)
    if packed:
        zeroed_dim = problem.head_dim if one_pass and not accumulate else 0
        delta = backward.delta_varlen(dtype, head_dim_v, zeroed_dim)
    dkdv = backward.dkdv(arch, *shape, vec, one_pass, in_tiles, dbias, packed)
    key_ctas = problem.kv_heads * problem.key_tiles(row.tile_k)
    steps = [
        Step.of(delta, -(-rows // backward.CTA_ROWS), params),
        *lists.steps,
        Step.of(dkdv, key_ctas, in_one_pass, *strides, renamed=renamed | lists.renamed),
    ]
    if rounded:
        convert = backward.convert(problem.dtype.name, problem.head_dim)
        steps.append(Step.of(convert, -(-rows // backward.CTA_ROWS), params))
    if not one_pass:
        dq = backward.dq(arch, *shape, vec, in_tiles, packed)
        row = backward.dq_row(arch, *dims, in_tiles)
        lists = block_lists(problem, "row_lists", rows=row.tile_q, keys=row.tile_k)
        scratch |= lists.scratch
        row_ctas = problem.heads * problem.query_tiles(row.tile_q)
        steps += [*lists.steps, Step.of(dq, row_ctas, params, *strides, renamed=lists.renamed)]
    if gathered:
        assert target is not None
        steps.append(sum_step(problem, results["dbias"], target, accumulate))
    elif "dbias" in results and not every_score:
        items = math.prod(results["dbias"].shape)
        config = backward.dbias_row(arch, math.prod(problem.scores_shape) // max(items, 1))
        kernel = backward.dbias(*shape, options, config)
        item_ctas = -(-items * config.lanes // config.threads)
        steps.append(Step.of(kernel, item_ctas, params, *problem.modifier_strides))
    if "dsinks" in results:
        of_sinks = backward.dsinks_varlen if packed else backward.dsinks
        kernel = of_sinks(results["dsinks"].dtype.name)
        steps.append(Step.of(kernel, problem.heads, params))
    # (Of packed rows those that belong to a sequence are zeroed, by the kernel of delta.)
    dense_sums = one_pass and not rounded and not packed
    added_to = [*(["dq"] if dense_sums else []), *(["dbias"] if every_score else [])]
    first = [*(["dq_acc"] if rounded else []), *(["scratch"] if gathered else [])]
    return Plan(
        tuple(steps),
        outputs,
        lay_out_scratch(scratch),
        zero_first=(*first, *([] if accumulate else added_to)),
        zero_new=accumulate,
    )
