"""The plans of the kernels that are there to be read: naive and tiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn.ops.attention.kernels.teaching import backward, forward
from cupyattn.ops.attention.params import Starts, row_strides, sum_strides
from cupyattn.ops.attention.problem import (
    AttentionProblem,
    forward_outputs,
    gradient_outputs,
    result_layouts,
)
from cupyattn.ops.attention.structs import TEACHING_BACKWARD_PARAMS, TEACHING_PARAMS
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Plan, Step
from cupyattn.runtime.card import Card
from cupyattn.runtime.spec import Specialisation


def naive_plan(
    problem: AttentionProblem, start_of: Starts, card: Card, *, return_lse: bool
) -> Plan:
    """Plan the forward, one CTA per query row."""
    del start_of, card  # items are read one by one, by one configuration
    kernel = forward.naive(problem.dtype.name, problem.head_dim, problem.head_dim_v)
    return _forward_plan(problem, kernel, rows=1, return_lse=return_lse)


def tiled_plan(
    problem: AttentionProblem, start_of: Starts, card: Card, *, return_lse: bool
) -> Plan:
    """Plan the forward with tiles in shared memory."""
    del start_of
    dims = problem.head_dim, problem.head_dim_v
    kernel = forward.tiled(card.arch, problem.dtype.name, *dims)
    rows = forward.tiled_row(card.arch, *dims).tile_q
    return _forward_plan(problem, kernel, rows=rows, return_lse=return_lse)


def _forward_plan(
    problem: AttentionProblem, kernel: Specialisation, *, rows: int, return_lse: bool
) -> Plan:
    """Plan the launch of a kernel whose CTAs own so many query rows of one head."""
    outputs = forward_outputs(problem, return_lse)
    params = _filled(TEACHING_PARAMS, problem, result_layouts(problem, outputs))
    return Plan((Step.of(kernel, problem.heads * problem.query_tiles(rows), params),), outputs)


def naive_backward_plan(
    problem: AttentionProblem,
    start_of: Starts,
    arch: int,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan the backward, one CTA per query row and one per key; always the same bits."""
    del start_of, arch, deterministic
    kernel = backward.naive(problem.dtype.name, problem.head_dim, problem.head_dim_v)
    outputs = gradient_outputs(problem)
    params = _filled(TEACHING_BACKWARD_PARAMS, problem, result_layouts(problem, outputs))
    params["batch"], params["accumulate"] = problem.batch, accumulate
    ctas = problem.batch * (problem.heads * problem.sq + problem.kv_heads * problem.sk)
    return Plan((Step.of(kernel, ctas, params),), outputs, zero_new=accumulate)


def _filled(struct: np.dtype, problem: AttentionProblem, results: Mapping[str, Layout]) -> Any:
    """Fill what the C structs TeachingParams and TeachingBackwardParams have in common."""
    params = np.zeros((), struct)[()]
    layouts = {**problem.layouts, **results}
    for name in {*(struct.names or ())} & layouts.keys():
        strides = layouts[name].strides
        of_row = name in ("lse", "dlse")
        itemsize = problem.dtype.itemsize
        params[name] = sum_strides(strides) if of_row else row_strides(strides, itemsize)
    params["heads"], params["group"] = problem.heads, problem.heads // max(problem.kv_heads, 1)
    params["sq"], params["sk"] = problem.sq, problem.sk
    params["causal"] = problem.window == (None, 0)
    params["softmax_scale"] = problem.softmax_scale
    return params
