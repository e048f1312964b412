"""Many rows in float16: products on tensor cores."""

from __future__ import annotations

from functools import lru_cache

from cupyattn.ops.linear import kernels_tensor_core as configs
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.linear.structs import PREACTIVATION_GRADIENT_PARAMS
from cupyattn.ops.linear.tile_launches import forward_in_parts, product_launches
from cupyattn.ops.linear.tiles import VECTOR, Product, forward_tiling, whole_vector
from cupyattn.runtime.by_name import ABSENT, Step
from cupyattn.runtime.card import Card
from cupyattn.runtime.plan import SCRATCH_DTYPE
from cupyattn.runtime.row_kernel import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.runtime.structs import new_struct

_OFFSET_BYTES = 2**32  # from the lowest item of a tile to its highest
_MOST_TILE_LINES = 256
_GRADIENT_ROWS = 64  # of a CTA that forms dz
_WORTH_SPLITTING = 0.9  # of the forward's time, as the model sees both ways


def takes(problem: LinearProblem) -> bool:
    """Tell whether the kernels' offsets reach what one tile of each array spans."""
    return all(
        _spans(matrix, problem.gated) < _OFFSET_BYTES for matrix in problem.matrices.values()
    )


def _spans(matrix: Matrix, gated: bool) -> int:
    """Return the bytes between a tile's lines; where they may be of two halves, all of them."""
    lines = matrix.rows if matrix.along_columns else matrix.columns
    reached = lines if gated else min(lines, _MOST_TILE_LINES)
    return reached * abs(matrix.leading) * matrix.itemsize


def forward_launches(problem: LinearProblem, card: Card) -> Launches:
    """Plan the forward."""
    matrices = problem.matrices
    results = [name for name in ("out", "residual", "preactivation") if name in matrices]
    half = problem.outer if problem.gated else VECTOR  # of preactivation, at a whole vector too
    out_vec = whole_vector(problem.vector(*results), half)
    halves = 2 if problem.gated else 1
    product = Product(configs.FORWARD, matrices["x"], matrices["w"], halves, out_vec)
    in_parts = Product(configs.PRODUCT, matrices["x"], matrices["w"])
    tiling = forward_tiling(product, in_parts, card, _WORTH_SPLITTING)
    if tiling.splits > 1:
        return forward_in_parts(problem, in_parts, tiling, card, {"a": "x", "b": "w"})
    specialisation = configs.forward(
        card.arch,
        tiling.shape,
        product.vec,
        out_vec,
        w_along=product.lines.b,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    ctas, params = product.geometry(card.arch, tiling)
    for name, stride in {**dict(zip(results, results, strict=True)), "residual": "addend"}.items():
        if name in matrices:
            params[f"{stride}_stride"] = matrices[name].leading
    return Launches((Step.of(specialisation, ctas, params[()]),))


def dx_launches(problem: LinearProblem, card: Card) -> Launches:
    """Plan dx = dz w^T."""
    dx, w = problem.matrices["dx"], problem.matrices["w"].transposed
    product = Product(configs.PRODUCT, dz(problem), w, out_vec=whole_vector(dx.vector))
    names = {"a": dz_name(problem), "b": "w"}
    steps, scratch, _ = product_launches(
        product, product.chosen(card), card, names, result=("dx", dx), addend=addend(problem, "dx")
    )
    formed = gradient(problem) if problem.activation else Launches(())
    return Launches((*formed.steps, *steps), {**formed.scratch, **scratch})


def dw_launches(problem: LinearProblem, card: Card) -> Launches:
    """Plan dw = x^T dz, and db."""
    dw, names = problem.matrices["dw"], {"a": "x", "b": dz_name(problem)}
    product = Product(configs.PRODUCT, problem.matrices["x"].transposed, dz(problem))
    if not dw.along_columns:  # its transpose has contiguous rows
        dw, names = dw.transposed, {"a": names["b"], "b": names["a"]}
        product = Product(configs.PRODUCT, product.b.transposed, product.a.transposed)
    tiling = product.chosen(card, may_split=True)
    steps, scratch, _ = product_launches(
        product, tiling, card, names, result=("dw", dw), addend=addend(problem, "dw")
    )
    before, formed, _ = gradient(problem)
    return Launches((*before, *steps, *_sums_of_dz(problem)), {**formed, **scratch})


def db_launches(problem: LinearProblem, card: Card) -> Launches:
    """Plan db alone."""
    del card  # one configuration
    if not problem.biased:
        return Launches(())
    steps, scratch, _ = gradient(problem)
    return Launches((*steps, *_sums_of_dz(problem)), scratch)


def _sums_of_dz(problem: LinearProblem) -> tuple[Step, ...]:
    """Return what adds the parts of db, where there is one."""
    if not problem.biased:
        return ()
    width = problem.weight_columns
    counts = (_gradient_blocks(problem), width, problem.accumulate)
    renamed = {"partials": "dz_partials", "sums": "db"}
    ctas = -(-width // COLUMN_SUMS_COLUMNS)
    return (Step.of(column_sums(problem.dtype.name), ctas, *counts, renamed=renamed),)


def addend(problem: LinearProblem, name: str) -> str:
    """Return what a gradient is added to, by name."""
    return name if problem.accumulate else ABSENT


def dz_name(problem: LinearProblem) -> str:
    """Return the array that is dz, by name."""
    return "dz" if problem.activation else "dout"


def dz(problem: LinearProblem) -> Matrix:
    """Return dz as a matrix: dout, or what is formed of it in scratch memory."""
    if problem.activation is None:
        return problem.matrices["dout"]
    width = problem.weight_columns
    return Matrix(problem.rows, width, width, 1, problem.dtype.itemsize, 0)


def _gradient_blocks(problem: LinearProblem) -> int:
    return -(-problem.rows // _GRADIENT_ROWS)


@lru_cache(maxsize=4096)
def gradient(problem: LinearProblem) -> Launches:
    """Return what forms dz and its sums over rows; one object, which dx and dw share."""
    if problem.activation is None and not problem.biased:
        return Launches(())
    names = ("dout", "preactivation") if problem.activation else ("dout",)
    halves = problem.outer if problem.gated else VECTOR
    vec = whole_vector(*(problem.matrices[name].vector for name in names), halves)
    params = new_struct(PREACTIVATION_GRADIENT_PARAMS)
    for name in names:
        params[f"{name}_stride"] = problem.matrices[name].leading
    params["rows"], params["columns"] = problem.rows, problem.outer
    params["block_rows"] = _GRADIENT_ROWS
    specialisation = configs.preactivation_gradient(
        vec, problem.scalar_activation, paired=problem.gated
    )
    params["column_blocks"] = -(-problem.outer // (configs.WARP_SIZE * vec))
    blocks = _gradient_blocks(problem)
    ctas = int(params["column_blocks"]) * blocks
    scratch, size = {}, problem.rows * problem.weight_columns
    renamed = {"dz": ABSENT, "partials": ABSENT}
    if problem.activation:
        renamed["dz"] = "dz"
        scratch["dz"] = -(-size * problem.dtype.itemsize // SCRATCH_DTYPE.itemsize)
    else:
        renamed["preactivation"] = ABSENT
    if problem.biased:
        renamed["partials"] = "dz_partials"
        scratch["dz_partials"] = blocks * problem.weight_columns
    return Launches((Step.of(specialisation, ctas, params[()], renamed=renamed),), scratch)


_DTYPES = ("float16",)
PLANS: tuple[LinearPlan, ...] = (
    LinearPlan("forward", _DTYPES, forward_launches, takes, tensor_cores=True),
    LinearPlan("dx", _DTYPES, dx_launches, takes, tensor_cores=True),
    LinearPlan("dw", _DTYPES, dw_launches, takes, tensor_cores=True),
)
