"""Few rows (M up to 64) in float16: kernels that stream the weight once."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.linear.thin import MAX_ROWS, merge, merge_ctas, thin, thin_launch
from cupyattn.kernels.structs import THIN_PARAMS
from cupyattn.ops.card import Card
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.plan import Step

_PARTIALS = "forward_partials"
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
    ends = (problem.scalar_activation, problem.gated)
    product = thin(launch, *ends)
    if launch.splits == 1:
        return Launches((Step.of(product, launch.tiles, _params(problem)),))
    sums = _params(problem, splits=launch.splits, outer=problem.weight_columns)
    sums["out_stride"] = problem.weight_columns
    absent = dict.fromkeys(("b", "residual", "preactivation"), "none")
    return Launches(
        (
            Step.of(
                product, launch.splits * launch.tiles, sums, renamed={**absent, "out": _PARTIALS}
            ),
            Step.of(
                merge(*ends),
                merge_ctas(problem.rows * problem.outer),
                _params(problem, splits=launch.splits),
                renamed={"partials": _PARTIALS},
            ),
        ),
        {_PARTIALS: launch.splits * problem.rows * problem.weight_columns},
    )


def _vector(problem: LinearProblem) -> int:
    """Return 8 where all loads of x and w may bring 16 bytes, or 1."""
    w = problem.matrices["w"]
    halves = [w.columns_from(n, problem.outer).vector for n in range(0, w.columns, problem.outer)]
    whole = vector_items(problem.dtype.name)
    return whole if min(problem.vector("x"), *halves) == whole else 1


def _params(problem: LinearProblem, *, splits: int = 1, outer: int | None = None) -> Any:
    """Fill the C struct ThinParams."""
    params = np.zeros((), THIN_PARAMS)
    for name in ("x", "w", "residual", "preactivation", "out"):
        if problem.has(name):
            params[f"{name}_stride"] = problem.matrices[name].leading
    params["rows"], params["inner"] = problem.rows, problem.inner
    params["outer"], params["splits"] = outer or problem.outer, splits
    return params


def _is_row(problem: LinearProblem) -> bool:
    """Tell whether the kernel of one row takes it, which has no use for tensor cores."""
    return problem.rows == 1 and _takes(problem)


_DTYPES = ("float16",)
PLANS = (
    LinearPlan("forward", _DTYPES, _forward, _is_row),
    LinearPlan("forward", _DTYPES, _forward, _takes, tensor_cores=True),
)
