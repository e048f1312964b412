"""Few rows and a quantised weight: kernels that stream its bytes once."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.kernels.configs.dtypes import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.kernels.configs.linear import quantised_thin_float32 as in_float32
from cupyattn.kernels.configs.linear.quantised_thin import MAX_ROWS, SPAN_BYTES, thin, thin_launch
from cupyattn.kernels.configs.linear.thin import merge, merge_ctas
from cupyattn.kernels.structs import THIN_PARAMS
from cupyattn.ops.card import Card
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.plan import Step
from cupyattn.weight_formats import FORMATS

_PARTIALS = "forward_partials"
_MOST_VECTORS = 2**31
"""Of codes: kernels count them in 32 bits."""


def _takes(problem: LinearProblem) -> bool:
    codes = problem.matrices["codes"]
    return (
        problem.weight is not None
        and not problem.weight.transposed
        and problem.rows <= MAX_ROWS
        and codes.rows * codes.columns <= _MOST_VECTORS * VECTOR_BYTES
    )


def _takes_in_float32(problem: LinearProblem) -> bool:
    return _takes(problem) and problem.rows <= in_float32.MAX_ROWS


def _forward(problem: LinearProblem, card: Card) -> Launches:
    """Return the product, and behind a split K the launch that adds its parts."""
    weight = problem.weight
    assert weight is not None
    launch = thin_launch(
        card.arch,
        card.multiprocessors,
        weight.format,
        weight.block_size,
        _vector(problem),
        vec_scales=_whole_spans(problem),
        rows=problem.rows,
        inner=problem.inner,
        outer=problem.outer,
        gated=problem.gated,
    )
    ends = (problem.scalar_activation, problem.gated)
    product = thin(launch, *ends)
    if launch.splits == 1:
        return Launches((Step.of(product, launch.ctas, _params(problem)),))
    sums = _params(problem, splits=launch.splits, outer=problem.weight_columns)
    sums["out_stride"] = problem.weight_columns
    absent = dict.fromkeys(("b", "residual", "preactivation"), "none")
    return Launches(
        (
            Step.of(product, launch.ctas, sums, renamed={**absent, "out": _PARTIALS}),
            Step.of(
                merge(*ends),
                merge_ctas(problem.rows * problem.outer),
                _params(problem, splits=launch.splits),
                renamed={"partials": _PARTIALS},
            ),
        ),
        {_PARTIALS: launch.splits * problem.rows * problem.weight_columns},
    )


def _forward_in_float32(problem: LinearProblem, card: Card) -> Launches:
    """Return the product in float32 arithmetic."""
    del card  # one configuration
    weight = problem.weight
    assert weight is not None
    whole = weight.format == "int8" and weight.block_size == problem.inner
    product = in_float32.thin(
        weight.format,
        0 if whole else weight.block_size,
        problem.dtype.name,
        in_float32.X_VECTOR if problem.vector("x") >= in_float32.X_VECTOR else 1,
        problem.rows,
        problem.scalar_activation,
        problem.gated,
    )
    ctas = in_float32.ctas(problem.rows, problem.outer, problem.gated)
    return Launches((Step.of(product, ctas, _params(problem)),))


def _vector(problem: LinearProblem) -> int:
    """Return 8 where all loads of x may bring 16 bytes, or 1."""
    whole = vector_items(problem.dtype.name)
    return whole if problem.vector("x") == whole else 1


def _whole_spans(problem: LinearProblem) -> bool:
    """Tell whether the scales of each span of codes may be loaded at once."""
    assert problem.weight is not None
    form = FORMATS[problem.weight.format]
    blocks = max(SPAN_BYTES * 8 // form.bits // problem.weight.block_size, 1)
    scales = problem.matrices["scales"]
    return scales.vector >= blocks * form.numbers


def _params(problem: LinearProblem, *, splits: int = 1, outer: int | None = None) -> Any:
    """Fill the C struct ThinParams."""
    params = np.zeros((), THIN_PARAMS)
    for name in ("x", "residual", "preactivation", "out"):
        if problem.has(name):
            params[f"{name}_stride"] = problem.matrices[name].leading
    params["rows"], params["inner"] = problem.rows, problem.inner
    params["outer"], params["splits"] = outer or problem.outer, splits
    return params


PLANS = (
    LinearPlan("forward", ("float16",), _forward, _takes, tensor_cores=True),
    LinearPlan("forward", tuple(STORAGE), _forward_in_float32, _takes_in_float32),
)
