"""Many rows and a quantised weight: the plans."""

from __future__ import annotations

from cupyattn.ops.linear import kernels_quantised_tile as configs
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.linear.quantised_weights import blocks_of, weight_matrix
from cupyattn.ops.linear.tensor_core import addend, db_launches, dz, dz_name, gradient
from cupyattn.ops.linear.tile_launches import forward_in_parts, product_launches
from cupyattn.ops.linear.tiles import VECTOR, Product, forward_tiling, whole_vector
from cupyattn.runtime.by_name import ABSENT, Step
from cupyattn.runtime.card import Card

_OFFSET_BYTES = 2**32  # from the first item of a tile to its last
_MOST_TILE_LINES = 256
# Of the forward's time; the loop of parts is slower than its row says (configs).
_WORTH_SPLITTING = 0.8


def takes(problem: LinearProblem) -> bool:
    """Tell whether the kernels' offsets reach what one tile of each array spans."""
    return all(
        (matrix.rows if problem.gated else min(matrix.rows, _MOST_TILE_LINES))
        * abs(matrix.leading)
        * matrix.itemsize
        < _OFFSET_BYTES
        for matrix in problem.matrices.values()
    )


def forward_launches(problem: LinearProblem, card: Card) -> Launches:
    """Plan the forward: one launch where columns of w are rows of codes, as they mostly are."""
    matrices, w = problem.matrices, weight_matrix(problem)
    blocks, operands = blocks_of(problem), {"a": "x"}
    plain = Product(configs.PRODUCT, matrices["x"], w, quantised=blocks)
    if w.along_columns and problem.activation is None and not problem.biased:
        return product_launches(
            plain,
            plain.chosen(card, may_split=True),
            card,
            operands,
            result=("out", matrices["out"]),
            addend="residual" if problem.has("residual") else ABSENT,
            added=matrices.get("residual"),
        )
    results = [name for name in ("out", "residual", "preactivation") if name in matrices]
    half = problem.outer if problem.gated else VECTOR  # of preactivation, at a whole vector too
    out_vec = whole_vector(problem.vector(*results), half)
    halves = 2 if problem.gated else 1
    product = Product(configs.FORWARD, matrices["x"], w, halves, out_vec, blocks)
    if w.along_columns:
        tiling = plain.chosen(card, may_split=True)
    else:
        tiling = forward_tiling(product, plain, card, _WORTH_SPLITTING)
    if w.along_columns or tiling.splits > 1:
        return forward_in_parts(problem, plain, tiling, card, operands)
    specialisation = configs.forward(
        card.arch,
        blocks.format,
        tiling.shape,
        product.vec,
        out_vec,
        activation=problem.scalar_activation,
        paired=problem.gated,
    )
    ctas, params = product.geometry(card.arch, tiling)
    for name, stride in {**dict(zip(results, results, strict=True)), "residual": "addend"}.items():
        if name in matrices:
            params[f"{stride}_stride"] = matrices[name].leading
    return Launches((Step.of(specialisation, ctas, product.passed(params)),))


def dx_launches(problem: LinearProblem, card: Card) -> Launches:
    """Plan dx = dz w^T."""
    dx, w = problem.matrices["dx"], weight_matrix(problem).transposed
    product = Product(configs.PRODUCT, dz(problem), w, quantised=blocks_of(problem))
    steps, scratch, _ = product_launches(
        product,
        product.chosen(card, may_split=True),
        card,
        {"a": dz_name(problem)},
        result=("dx", dx),
        addend=addend(problem, "dx"),
    )
    formed = gradient(problem) if problem.activation else Launches(())
    return Launches((*formed.steps, *steps), {**formed.scratch, **scratch})


_DTYPES = ("float16",)
PLANS: tuple[LinearPlan, ...] = (
    LinearPlan("forward", _DTYPES, forward_launches, takes, tensor_cores=True),
    LinearPlan("dx", _DTYPES, dx_launches, takes, tensor_cores=True),
    LinearPlan("db", _DTYPES, db_launches, tensor_cores=True),
)
