"""The launches of the naive backward."""

from __future__ import annotations

import math
from typing import Any

from cupyattn.arrays import Layout
from cupyattn.kernels.configs import attention_backward_naive as naive
from cupyattn.kernels.configs.attention import FlashOptions
from cupyattn.ops.attention_backward_params import backward_params
from cupyattn.ops.attention_backward_steps import Plan, Step, lay_out_scratch
from cupyattn.ops.attention_layouts import score_options
from cupyattn.ops.attention_problem import AttentionProblem


def naive_plan(problem: AttentionProblem, results: dict[str, Layout], *, accumulate: bool) -> Plan:
    """Choose the kernels of a call and fill in their parameters."""
    options = score_options(problem)._replace(sinks="void")
    shape = problem.dtype.name, problem.head_dim, problem.head_dim_v
    rows = problem.batch * problem.heads * problem.sq
    keys = problem.batch * problem.kv_heads * problem.sk
    params = backward_params(problem, results, accumulate=accumulate, dbias=results.get("dbias"))
    steps = [
        Step(naive.dq(*shape, options), rows, params),
        Step(naive.dkdv(*shape, options), keys, params),
    ]
    if "dbias" in results:
        steps.append(dbias_step(problem, results["dbias"], options, params))
    if "dsinks" in results:
        dsinks = naive.dsinks(results["dsinks"].dtype.name)
        steps.append(Step(dsinks, problem.heads, params))
    return Plan(tuple(steps), lay_out_scratch({"delta": rows}))


def dbias_step(
    problem: AttentionProblem, dbias: Layout, options: FlashOptions, params: Any
) -> Step:
    """Return the launch that computes each item of dbias from all scores that it is the bias of."""
    items = math.prod(dbias.shape)
    config = naive.dbias_config(math.prod(problem.scores_shape) // max(items, 1))
    shape = problem.dtype.name, problem.head_dim, problem.head_dim_v
    ctas = -(-items * config.lanes // config.threads)
    return Step(naive.dbias(*shape, options, config), ctas, params)
