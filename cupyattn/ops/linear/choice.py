"""The kernels of a product: the first of the table that take the problem."""

from __future__ import annotations

from cupyattn.ops.linear import (
    float32,
    quantised_float32,
    quantised_thin,
    quantised_tile,
    tensor_core,
    thin,
)
from cupyattn.ops.linear.implementations import Launches
from cupyattn.ops.linear.nested_scales import NESTED, behind_expansion, expanded
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.runtime.card import Card

PLANS = (*thin.PLANS, *tensor_core.PLANS, *float32.PLANS)
"""Kernels for few rows, then those on tensor cores for many, then those that take everything.

The last ones compute in float32: float16 too, on cards without tensor cores.
"""

QUANTISED_PLANS = (*quantised_thin.PLANS, *quantised_tile.PLANS, *quantised_float32.PLANS)
"""The same of a quantised weight, of which each plan takes the formats that it says."""


def launches_for(product: str, problem: LinearProblem, card: Card) -> Launches:
    """Return the launches of "forward", "dx", "dw", or of "db" where that is wanted alone."""
    if problem.weight is not None and problem.weight.format == NESTED:
        launches = launches_for(product, expanded(problem), card)
        return launches if product == "db" else behind_expansion(product, problem, launches)
    dtype = problem.dtype.name
    plans = PLANS if problem.weight is None else QUANTISED_PLANS
    # Without anything to sum over, K = 0, few kernels are right: those that take everything are.
    for entry in plans if problem.inner else float32.PLANS:
        runs = card.tensor_cores or not entry.tensor_cores
        if runs and entry.product == product and dtype in entry.dtypes and entry.takes(problem):
            return entry.plan(problem, card)
    raise NotImplementedError(f"no kernel has {product} of {dtype}")
