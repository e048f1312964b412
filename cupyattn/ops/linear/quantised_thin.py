"""Few rows and a quantised weight: kernels that stream its bytes once."""

from __future__ import annotations

from cupyattn.ops.linear import kernels_quantised_thin_float32 as in_float32
from cupyattn.ops.linear.implementations import Launches, LinearPlan
from cupyattn.ops.linear.kernels_quantised_thin import MAX_ROWS, SPAN_BYTES, thin, thin_launch
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.ops.linear.thin_launches import thin_launches, thin_params
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.runtime.by_name import Step
from cupyattn.runtime.card import Card
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items

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
    product = thin(launch, problem.scalar_activation, problem.gated)
    return thin_launches(problem, product, ctas=launch.ctas, splits=launch.splits)


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
    return Launches((Step.of(product, ctas, thin_params(problem)),))


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


PLANS = (
    LinearPlan("forward", ("float16",), _forward, _takes, tensor_cores=True),
    LinearPlan("forward", tuple(STORAGE), _forward_in_float32, _takes_in_float32),
)
