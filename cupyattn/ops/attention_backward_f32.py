"""The launches of the float32 backward, which takes float32 and bfloat16."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.arrays import Layout
from cupyattn.kernels.configs import attention_backward_f32 as f32
from cupyattn.kernels.configs import attention_backward_naive as naive
from cupyattn.ops.attention_backward_naive import dbias_step
from cupyattn.ops.attention_backward_params import backward_params
from cupyattn.ops.attention_backward_steps import Plan, Step, lay_out_scratch
from cupyattn.ops.attention_layouts import score_options, whole_vectors
from cupyattn.ops.attention_problem import AttentionProblem

_VECTOR_ARRAYS = ("dout", "q", "k", "v")


def f32_plan(
    problem: AttentionProblem,
    results: dict[str, Layout],
    start_of: dict[str, int],
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Choose the kernels of a call and fill in their parameters."""
    options = score_options(problem)._replace(sinks="void")
    dims = problem.head_dim, problem.head_dim_v
    shape = problem.dtype.name, *dims
    rows_of = [(start_of[name], problem.layouts[name].strides) for name in _VECTOR_ARRAYS]
    vec = whole_vectors(f32.VECTOR_ITEMS, problem, rows_of)
    heads, rows = problem.batch * problem.heads, problem.batch * problem.heads * problem.sq
    every_score = "dbias" in results and (
        math.prod(results["dbias"].shape) == math.prod(problem.scores_shape)
    )
    dbias = results["dbias"].dtype.name if every_score else "void"
    params = backward_params(problem, results, accumulate=accumulate, dbias=results.get("dbias"))

    key_tiles = -(-problem.sk // f32.dkdv_config(*dims, options).tile_k)
    row_tiles = -(-problem.sq // f32.dq_config(*dims, options).tile_q)
    one_pass = not deterministic and problem.dtype == np.float32
    dkdv = f32.dkdv(*shape, vec, one_pass, options, dbias)
    steps = [
        Step(f32.delta(problem.dtype.name, problem.head_dim_v), -(-rows // f32.DELTA_ROWS), params),
        Step(dkdv, problem.batch * problem.kv_heads * key_tiles, params),
    ]
    if not one_pass:
        steps.append(Step(f32.dq(*shape, vec, options), heads * row_tiles, params))
    if "dbias" in results and not every_score:
        steps.append(dbias_step(problem, results["dbias"], options, params))
    if "dsinks" in results:
        dsinks = naive.dsinks(results["dsinks"].dtype.name)
        steps.append(Step(dsinks, problem.heads, params))
    added_to = (*(["dq"] if one_pass else []), *(["dbias"] if every_score else []))
    return Plan(tuple(steps), lay_out_scratch({"delta": rows}), () if accumulate else added_to)
