"""Launches of products with few rows, whatever the weight: of a split K, and without."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.linear.implementations import Launches
from cupyattn.ops.linear.kernels_thin import merge, merge_ctas
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.linear.structs import THIN_PARAMS
from cupyattn.runtime.by_name import ABSENT, Step
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.structs import new_struct

_PARTIALS = "forward_partials"


def thin_launches(
    problem: LinearProblem, product: Specialisation, *, ctas: int, splits: int
) -> Launches:
    """Return the product, and behind a split K the launch that adds its parts."""
    if splits == 1:
        return Launches((Step.of(product, ctas, thin_params(problem)),))
    sums = thin_params(problem, splits=splits, outer=problem.weight_columns)
    sums["out_stride"] = problem.weight_columns
    absent = dict.fromkeys(("b", "residual", "preactivation"), ABSENT)
    return Launches(
        (
            Step.of(product, ctas, sums, renamed={**absent, "out": _PARTIALS}),
            Step.of(
                merge(problem.scalar_activation, problem.gated),
                merge_ctas(problem.rows * problem.outer),
                thin_params(problem, splits=splits),
                renamed={"partials": _PARTIALS},
            ),
        ),
        {_PARTIALS: splits * problem.rows * problem.weight_columns},
    )


def thin_params(problem: LinearProblem, *, splits: int = 1, outer: int | None = None) -> Any:
    """Fill the C struct ThinParams; rows of a quantised weight lie one behind the other."""
    params = new_struct(THIN_PARAMS)
    for name in ("x", "w", "residual", "preactivation", "out"):
        if problem.has(name):
            params[f"{name}_stride"] = problem.matrices[name].leading
    params["rows"], params["inner"] = problem.rows, problem.inner
    params["outer"], params["splits"] = outer or problem.outer, splits
    return params
