"""A quantised weight in float32 arithmetic, for every dtype of x: the plans."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.linear import kernels_float32 as float_configs
from cupyattn.ops.linear import kernels_quantised_float32 as configs
from cupyattn.ops.linear.float32 import db_plan, float_params, whole_halves, whole_out
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.linear.quantised_weights import blocks_of, weight_matrix
from cupyattn.ops.linear.structs import QUANTISED_FLOAT_PARAMS
from cupyattn.runtime.by_name import Step
from cupyattn.runtime.card import Card
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.structs import new_struct


def forward_plan(problem: LinearProblem, card: Card) -> Launches:
    """Plan out and preactivation: one launch."""
    matrices, w = problem.matrices, weight_matrix(problem)
    row = float_configs.product_row(card.arch, problem.rows, problem.weight_columns)
    kernel = configs.product(
        configs.FORWARD,
        blocks_of(problem).format,
        problem.dtype.name,
        row,
        "kLines" if w.along_columns else "kDepth",
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "x"),
        whole_out(problem, "b", "residual", "out", "preactivation"),
    )
    params = float_params(
        a=matrices["x"],
        b=w,
        result=matrices["out"],
        preactivation=matrices.get("preactivation"),
        residual=matrices.get("residual"),
        depth=problem.inner,
    )
    columns = row.tile_n // 2 if problem.gated else row.tile_n
    ctas = -(-problem.rows // row.tile_m) * -(-problem.outer // columns)
    return Launches((Step.of(kernel, ctas, _passed(params, problem)),))


def dx_plan(problem: LinearProblem, card: Card) -> Launches:
    """Plan dx: one launch."""
    matrices, w = problem.matrices, weight_matrix(problem)
    row = float_configs.product_row(
        card.arch, problem.rows, problem.inner, float_configs.GRADIENT_ROWS
    )
    kernel = configs.product(
        configs.DX,
        blocks_of(problem).format,
        problem.dtype.name,
        row,
        "kDepth" if w.along_columns else "kLines",
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "dout", "preactivation"),
        whole_out(problem, "dx"),
    )
    params = float_params(
        a=matrices["dout"],
        b=w,
        result=matrices["dx"],
        preactivation=matrices.get("preactivation"),
        depth=problem.weight_columns,
        half=problem.outer if problem.gated else 0,
        accumulate=problem.accumulate,
    )
    ctas = -(-problem.rows // row.tile_m) * -(-problem.inner // row.tile_n)
    return Launches((Step.of(kernel, ctas, _passed(params, problem)),))


def _passed(params: Any, problem: LinearProblem) -> Any:
    """Return the C struct QuantisedFloatParams."""
    own, blocks = new_struct(QUANTISED_FLOAT_PARAMS), blocks_of(problem)
    own["product"], own["blocks"], own["block_log2"] = params, blocks.blocks, blocks.block_log2
    return own[()]


def _db_plan(problem: LinearProblem, card: Card) -> Launches:
    del card  # one configuration
    return db_plan(problem) if problem.biased else Launches(())


PLANS = (
    LinearPlan("forward", tuple(STORAGE), forward_plan),
    LinearPlan("dx", tuple(STORAGE), dx_plan),
    LinearPlan("db", tuple(STORAGE), _db_plan),
)
