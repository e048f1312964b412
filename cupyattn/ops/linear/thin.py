"""Few rows (M up to 64) in float16: kernels that stream the weight once."""

from __future__ import annotations

from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.kernels_thin import MAX_ROWS, thin, thin_launch
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.linear.thin_launches import thin_launches
from cupyattn.runtime.card import Card
from cupyattn.runtime.storage import vector_items

_MOST = (MAX_ROWS, 2**27, 2**30)
"""M, K and N at most: kernels count bursts times parts of K, and columns, in 32 bits."""


def _takes(problem: LinearProblem) -> bool:
    sizes = (problem.rows, problem.inner, problem.outer)
    return all(size <= most for size, most in zip(sizes, _MOST, strict=True))


def _forward(problem: LinearProblem, card: Card) -> Launches:
    """Return the product, and behind a split K the launch that adds its parts."""
    w = problem.matrices["w"]
    launch = thin_launch(
        card.arch,
        card.multiprocessors,
        _vector(problem),
        along_k=not w.along_columns,
        rows=problem.rows,
        inner=problem.inner,
        outer=problem.outer,
        gated=problem.gated,
        choices=card.choices,
    )
    product = thin(launch, problem.scalar_activation, problem.gated)
    ctas = launch.splits * launch.tiles
    return thin_launches(problem, product, ctas=ctas, splits=launch.splits)


def _vector(problem: LinearProblem) -> int:
    """Return 8 where all loads of x and w may bring 16 bytes, or 1."""
    w = problem.matrices["w"]
    halves = [w.columns_from(n, problem.outer).vector for n in range(0, w.columns, problem.outer)]
    whole = vector_items(problem.dtype.name)
    return whole if min(problem.vector("x"), *halves) == whole else 1


def _is_row(problem: LinearProblem) -> bool:
    """Tell whether the kernel of one row takes it, which has no use for tensor cores."""
    return problem.rows == 1 and _takes(problem)


_DTYPES = ("float16",)
PLANS = (
    LinearPlan("forward", _DTYPES, _forward, _is_row),
    LinearPlan("forward", _DTYPES, _forward, _takes, tensor_cores=True),
)
