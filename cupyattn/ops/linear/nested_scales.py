"""Weights whose scales are codes themselves: launches that make them, and that expand them.

Products expand them into their workspace and are those of float32 scales. A launch more is what
that costs, and of few rows some 5 bytes for each 32 of codes; kernels stay as many as they were.
"""

from __future__ import annotations

from dataclasses import replace

from cupyattn.ops.linear.implementations import Launches
from cupyattn.ops.linear.kernels_nested_scales import expand, expand_ctas, nest, nest_ctas
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.runtime.by_name import ABSENT, Step
from cupyattn.runtime.plan import SCRATCH_DTYPE

NESTED, EXPANDED = "nf4_nested", "nf4"
ABSMAX = "absmax"
"""The name of scales in float32, as scratch of a call that has codes of them."""


def nest_step(count: int) -> Step:
    """Return the launch from absmax of `count` blocks to scales, super_scales and scale_table."""
    return Step.of(nest(), nest_ctas(count), count)


def expand_step(count: int, absmax: str = ABSMAX) -> Step:
    """Return the launch the other way, to the array of that name."""
    return Step.of(expand(), expand_ctas(count), count, renamed={ABSMAX: absmax})


def reads_expanded(step: Step, absmax: str = ABSMAX) -> Step:
    """Return a launch that takes float32 scales from the array of that name."""
    return step.renamed({"scales": absmax, "super_scales": ABSENT})


def expanded(problem: LinearProblem) -> LinearProblem:
    """Return the same product with a weight whose scales are float32."""
    weight, matrices = problem.weight, {**problem.matrices}
    assert weight is not None
    for name in ("super_scales", "scale_table"):
        del matrices[name]
    rows, columns = matrices["scales"][:2]
    matrices["scales"] = Matrix(rows, columns, columns, 1, SCRATCH_DTYPE.itemsize, 0)
    return replace(problem, matrices=matrices, weight=weight._replace(format=EXPANDED))


def behind_expansion(product: str, problem: LinearProblem, launches: Launches) -> Launches:
    """Return launches of the expanded problem, behind the one that expands scales for them."""
    scales, absmax = problem.matrices["scales"], f"{product}_{ABSMAX}"
    count = scales.rows * scales.columns
    return Launches(
        (expand_step(count, absmax), *(reads_expanded(step, absmax) for step in launches.steps)),
        {**launches.scratch, absmax: count},
        launches.zero_first,
    )
