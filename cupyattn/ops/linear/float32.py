"""Products in float32 arithmetic, of every storage dtype: the plans."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.linear import kernels_float32 as configs
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.linear.structs import FLOAT_PRODUCT_PARAMS
from cupyattn.runtime.by_name import Step
from cupyattn.runtime.card import Card
from cupyattn.runtime.row_kernel import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import new_struct


def forward_plan(problem: LinearProblem, card: Card) -> Launches:
    """Plan out and preactivation: one launch."""
    matrices = problem.matrices
    x, w, out = matrices["x"], matrices["w"], matrices["out"]
    row = configs.product_row(card.arch, problem.rows, problem.weight_columns)
    columns = row.tile_n // 2 if problem.gated else row.tile_n
    kernel = configs.forward(
        problem.dtype.name,
        row,
        "kLines" if w.along_columns else "kDepth",
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "x", "w"),
        whole_out(problem, "b", "residual", "out", "preactivation"),
    )
    params = float_params(
        a=x,
        b=w,
        result=out,
        preactivation=matrices.get("preactivation"),
        residual=matrices.get("residual"),
        depth=problem.inner,
    )
    ctas = -(-problem.rows // row.tile_m) * -(-problem.outer // columns)
    return Launches((Step.of(kernel, ctas, params),))


def thin_plan(problem: LinearProblem, card: Card) -> Launches:
    """Plan out and preactivation of few rows: one launch that reads the weight once."""
    del card  # one configuration
    matrices = problem.matrices
    w, out = matrices["w"], matrices["out"]
    kernel = configs.thin(
        problem.dtype.name,
        next(rows for rows in configs.THIN_ROWS if problem.rows <= rows),
        "kLines" if w.along_columns else "kDepth",
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "x", "w"),
    )
    params = float_params(
        a=matrices["x"],
        b=w,
        result=out,
        preactivation=matrices.get("preactivation"),
        residual=matrices.get("residual"),
        depth=problem.inner,
    )
    columns = configs.THIN_COLUMNS // (2 if problem.gated else 1)
    return Launches((Step.of(kernel, -(-problem.outer // columns), params),))


def _is_thin(problem: LinearProblem) -> bool:
    return problem.rows <= configs.THIN_ROWS[-1]


def dx_plan(problem: LinearProblem, card: Card) -> Launches:
    """Plan dx: one launch."""
    matrices = problem.matrices
    w, result = matrices["w"], matrices["dx"]
    row = configs.product_row(card.arch, problem.rows, problem.inner, configs.GRADIENT_ROWS)
    kernel = configs.dx(
        problem.dtype.name,
        row,
        "kDepth" if w.along_columns else "kLines",
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "dout", "w", "preactivation"),
        whole_out(problem, "dx"),
    )
    params = float_params(
        a=matrices["dout"],
        b=w,
        result=result,
        preactivation=matrices.get("preactivation"),
        depth=problem.weight_columns,
        half=problem.outer if problem.gated else 0,
        accumulate=problem.accumulate,
    )
    ctas = -(-problem.rows // row.tile_m) * -(-problem.inner // row.tile_n)
    return Launches((Step.of(kernel, ctas, params),))


def dw_plan(problem: LinearProblem, card: Card) -> Launches:
    """Plan dw, in one launch, and db, in two more."""
    matrices = problem.matrices
    result = matrices["dw"]
    transposed = not result.along_columns
    result = result.transposed if transposed else result
    half = problem.outer if problem.gated else 0
    launches = db_plan(problem) if problem.biased else Launches(())
    if problem.inner == 0:
        return launches
    table = configs.GRADIENT_ROWS if transposed else configs.PRODUCTS
    row = configs.product_row(card.arch, result.rows, result.columns, table)
    kernel = configs.dw(
        problem.dtype.name,
        row,
        transposed,
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "x", "dout", "preactivation"),
        whole_out(problem, "dw"),
    )
    params = float_params(
        a=matrices["x"],
        b=matrices["dout"],
        result=result,
        preactivation=matrices.get("preactivation"),
        depth=problem.rows,
        half=half,
        accumulate=problem.accumulate,
    )
    ctas = -(-result.rows // row.tile_m) * -(-result.columns // row.tile_n)
    return launches._replace(steps=(Step.of(kernel, ctas, params), *launches.steps))


def db_plan(problem: LinearProblem) -> Launches:
    """Plan db: sums of parts of the rows, and the sum of these."""
    matrices, dtype = problem.matrices, problem.dtype.name
    dout, width = matrices["dout"], problem.weight_columns
    column_tiles = -(-width // (configs.DB_THREADS * vector_items(dtype)))
    parts = max(min(-(-configs.DB_CTAS // column_tiles), -(-problem.rows // 8)), 1)
    part_rows = -(-problem.rows // parts)
    parts = -(-problem.rows // part_rows)
    kernel = configs.db(
        dtype,
        problem.scalar_activation,
        problem.gated,
        whole_halves(problem, "dout", "preactivation"),
    )
    params = float_params(
        a=dout,
        b=dout,
        result=Matrix(problem.rows, width, width, 1, 4, 0),
        preactivation=matrices.get("preactivation"),
        depth=part_rows,
        half=problem.outer if problem.gated else 0,
    )
    sums = Step.of(
        column_sums(dtype),
        -(-width // COLUMN_SUMS_COLUMNS),
        *(parts, width, problem.accumulate),
        renamed={"partials": "dw_partials", "sums": "db"},
    )
    first = Step.of(kernel, parts * column_tiles, params, renamed={"partials": "dw_partials"})
    return Launches((first, sums), {"dw_partials": parts * width})


def whole(problem: LinearProblem, *names: str) -> int:
    """Return 16 bytes' worth of items where all lines of these are whole vectors, otherwise 1."""
    items = vector_items(problem.dtype.name)
    return items if problem.vector(*names) == items else 1


def whole_halves(problem: LinearProblem, *names: str) -> int:
    """Return likewise, but 1 where a vector may have items of both halves of a gated weight."""
    items = whole(problem, *names)
    return items if not problem.gated or problem.outer % items == 0 else 1


def whole_out(problem: LinearProblem, *names: str) -> int:
    """Return how many items an epilogue takes at once of all these."""
    whole = problem.vector(*names) >= configs.OUT_VECTOR
    halves = not problem.gated or problem.outer % configs.OUT_VECTOR == 0
    return configs.OUT_VECTOR if whole and halves else 1


def float_params(
    *,
    a: Matrix,
    b: Matrix,
    result: Matrix,
    depth: int,
    preactivation: Matrix | None = None,
    residual: Matrix | None = None,
    half: int = 0,
    accumulate: bool = False,
) -> Any:
    """Fill the C struct FloatProductParams."""
    params = new_struct(FLOAT_PRODUCT_PARAMS)
    params["a_stride"], params["b_stride"] = a.leading, b.leading
    params["result_stride"] = result.leading
    if preactivation is not None:
        params["preactivation_stride"] = preactivation.leading
    if residual is not None:
        params["residual_stride"] = residual.leading
    params["rows"], params["columns"] = result.rows, result.columns
    params["depth"], params["half"], params["accumulate"] = depth, half, accumulate
    return params[()]


PLANS = (
    LinearPlan("forward", tuple(STORAGE), thin_plan, _is_thin),
    LinearPlan("forward", tuple(STORAGE), forward_plan),
    LinearPlan("dx", tuple(STORAGE), dx_plan),
    LinearPlan("dw", tuple(STORAGE), dw_plan),
)
