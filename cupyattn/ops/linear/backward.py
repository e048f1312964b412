"""The backward of linear on a device: from a checked problem to a plan that ran."""

from __future__ import annotations

from functools import lru_cache

from cupyattn.ops.linear.choice import launches_for
from cupyattn.ops.linear.implementations import Launches
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import ABSENT, Operands, Plan, lay_out_scratch, run
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.plan import SCRATCH_DTYPE


def linear_backward(device: Device, problem: LinearProblem, operands: Operands) -> dict[str, Array]:
    """Run the backward of linear, into the results and scratch that are given."""
    return run(device, _plan(problem, device.card), operands)


def scratch_bytes(device: Device, problem: LinearProblem) -> int:
    """Return the bytes of scratch memory that it takes."""
    return _plan(problem, device.card).workspace_bytes


@lru_cache(maxsize=4096)
def _plan(problem: LinearProblem, card: Card) -> Plan:
    require_kernel_dtype("x", problem.dtype)
    require_item_alignment(problem.layouts, problem.starts)
    outputs = tuple(problem.outputs.items())
    if problem.rows * problem.outer == 0:  # nothing to add up: no kernel runs
        names = () if problem.accumulate else tuple(problem.outputs)
        return Plan(
            (),
            outputs,
            zero_first=names,
            zero_new=problem.accumulate,
            transposed=problem.transposed,
        )
    products = ("dx", "dw") if problem.weight is None else ("dx", "db")
    parts = [launches_for(product, problem, card) for product in products]
    if problem.activation is not None and "preactivation" not in problem.layouts:
        parts.insert(0, _preactivation(problem, card))
    # A step that two products share, such as forming dz, is one object and runs once.
    steps = {id(step): step for part in parts for step in part.steps}
    plan = Plan(
        tuple(steps.values()),
        outputs,
        lay_out_scratch({name: n for part in parts for name, n in part.scratch.items()}),
        zero_first=tuple(name for part in parts for name in part.zero_first),
        zero_new=problem.accumulate,
        transposed=problem.transposed,
    )
    return plan.for_arrays(problem.layouts)


def _preactivation(problem: LinearProblem, card: Card) -> Launches:
    """Return what computes x w + b into scratch memory that takes the place of an array."""
    steps, scratch, zero_first = launches_for("forward", problem.plain_preactivation(), card)
    others = {"out": "preactivation", "preactivation": ABSENT, "residual": ABSENT}
    steps = tuple(step.renamed(others) for step in steps)
    size = problem.rows * problem.weight_columns * problem.dtype.itemsize
    items = -(-size // SCRATCH_DTYPE.itemsize)
    return Launches(steps, {**scratch, "preactivation": items}, zero_first)
