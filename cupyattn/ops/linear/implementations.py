"""Which kernels compute a product of linear or of its backward, for which problems.

Every module of plans has a tuple PLANS of `LinearPlan`; `choice.launches_for` takes the first that
has the dtype, takes the problem and needs no tensor cores that the card lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.runtime.by_name import Step
from cupyattn.runtime.card import Card


class Launches(NamedTuple):
    """What one product comes to: a part of the call's plan."""

    steps: tuple[Step, ...]
    """In their order. Arrays go by the names of the problem's matrices and by b and db."""
    scratch: Mapping[str, int] = {}
    """Float32 items of scratch memory by name; names begin with that of the product."""
    zero_first: tuple[str, ...] = ()
    """Scratch (or results) that must be zero before the first step. Mostly there is none."""


PlanFunction = Callable[[LinearProblem, Card], Launches]
"""From a problem and a card to the launches of one product.

What it receives
    A problem with M, N and K at least 1 and item-aligned arrays, of a dtype in `LinearPlan.dtypes`
    and for which `takes` is true. Nothing else is promised: lines may be odd in length and strides,
    so `problem.vector("x", "w")` and `Matrix.vector` choose between vector and scalar loads.
    `problem.matrices[name]` has sizes, strides and alignment of each.
What it returns
    `Launches`. Kernel parameters are named as the arrays are, or renamed in `Step.of`.
"forward"
    out = activation(x w + b) + residual, rounded once to the dtype; reads x, w, and b (null
    without: `problem.biased`) and residual (null without: `problem.has("residual")`); writes out,
    and preactivation = x w + b, in the dtype, where `problem.has("preactivation")` (otherwise
    null). The activation acts on the float32 sum, not on the rounded preactivation. Where
    `problem.gated`, w has 2 N columns, preactivation too, and out = scalar_activation(gate) * up +
    residual.
"dx"
    dx = dz w^T, with dz = dout * activation'(preactivation) (of N or 2 N columns), dout itself
    without an activation.
"dw"
    dw = x^T dz, and db = the sum of dz over rows where `problem.biased`; in one kernel or two.
    The same bits from run to run, of both: no float atomics. Where `problem.accumulate`, results
    are added to what is there, before the one rounding.
"db"
    db alone, or no launches without a bias: of a quantised weight, which has no dw.
    In the other products codes, scales and super_scales stand in the place of w, and
    `problem.weight` says what they are.
"""


def _every(problem: LinearProblem) -> bool:
    del problem
    return True


class LinearPlan(NamedTuple):
    """One entry of the table."""

    product: str
    """"forward", "dx", "dw" or "db"."""
    dtypes: tuple[str, ...]
    plan: PlanFunction
    takes: Callable[[LinearProblem], bool] = _every
    tensor_cores: bool = False
    """Whether its kernels need them."""
