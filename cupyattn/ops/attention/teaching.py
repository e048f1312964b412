"""The plans of the kernels that are there to be read: naive and tiled."""

from __future__ import annotations

import math
from typing import Any

from cupyattn.arrays import Layout
from cupyattn.kernels.card import Card
from cupyattn.kernels.configs.attention.options import FlashOptions
from cupyattn.kernels.configs.attention.teaching import backward, forward
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.ops.attention.backward_params import backward_params
from cupyattn.ops.attention.layouts import Starts, score_options, whole_vectors
from cupyattn.ops.attention.params import attention_params
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.results import forward_outputs, gradient_outputs, result_layouts
from cupyattn.ops.plan import Plan, Step, lay_out_scratch


def naive_plan(
    problem: AttentionProblem, start_of: Starts, card: Card, *, return_lse: bool
) -> Plan:
    """Plan the forward, a CTA a query."""
    del start_of, card  # items are read one by one, by one configuration
    kernel = forward.naive(problem.dtype.name, problem.head_dim, problem.head_dim_v)
    outputs = forward_outputs(problem, return_lse)
    params = attention_params(problem, result_layouts(problem, outputs))
    ctas = problem.batch * problem.heads * problem.sq
    return Plan((Step.of(kernel, ctas, params),), outputs)


def tiled_plan(
    problem: AttentionProblem, start_of: Starts, card: Card, *, return_lse: bool
) -> Plan:
    """Plan the forward with tiles in shared memory."""
    dtype, dims = problem.dtype.name, (problem.head_dim, problem.head_dim_v)
    inputs = [(start_of[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    vec = whole_vectors(vector_items(dtype), problem, inputs)
    kernel = forward.tiled(card.arch, dtype, *dims, vec)
    outputs = forward_outputs(problem, return_lse)
    params = attention_params(problem, result_layouts(problem, outputs))
    tiles = -(-problem.sq // forward.tiled_row(card.arch, *dims).tile_q)
    return Plan((Step.of(kernel, problem.batch * problem.heads * tiles, params),), outputs)


def naive_backward_plan(
    problem: AttentionProblem,
    start_of: Starts,
    arch: int,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan the backward, a CTA a query or a key; always the same bits."""
    del start_of, deterministic
    options = score_options(problem)._replace(sinks="void")
    outputs = gradient_outputs(problem)
    results = result_layouts(problem, outputs)
    shape = problem.dtype.name, problem.head_dim, problem.head_dim_v
    rows = problem.batch * problem.heads * problem.sq
    keys = problem.batch * problem.kv_heads * problem.sk
    params = backward_params(problem, results, accumulate=accumulate, dbias=results.get("dbias"))
    steps = [
        Step.of(backward.dq(*shape, options), rows, params, *problem.modifier_strides),
        Step.of(backward.dkdv(*shape, options), keys, params, *problem.modifier_strides),
    ]
    if "dbias" in results:
        steps.append(dbias_step(problem, results["dbias"], arch, options, params))
    if "dsinks" in results:
        steps.append(dsinks_step(problem, results["dsinks"], params))
    return Plan(
        tuple(steps),
        outputs,
        lay_out_scratch({"delta": rows}),
        zero_new=accumulate,
    )


def dbias_step(
    problem: AttentionProblem, dbias: Layout, arch: int, options: FlashOptions, params: Any
) -> Step:
    """Return the launch that computes each item of dbias from all scores that it is the bias of."""
    items = math.prod(dbias.shape)
    row = backward.dbias_row(arch, math.prod(problem.scores_shape) // max(items, 1))
    shape = problem.dtype.name, problem.head_dim, problem.head_dim_v
    ctas = -(-items * row.lanes // row.threads)
    kernel = backward.dbias(*shape, options, row)
    return Step.of(kernel, ctas, params, *problem.modifier_strides)


def dsinks_step(problem: AttentionProblem, dsinks: Layout, params: Any) -> Step:
    """Return the launch that sums the gradients of the sinks over the rows."""
    return Step.of(backward.dsinks(dsinks.dtype.name), problem.heads, params)
