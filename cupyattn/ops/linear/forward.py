"""Linear on a device: from a checked problem to a plan that ran."""

from __future__ import annotations

from functools import lru_cache

from cupyattn.ops.linear.choice import launches_for
from cupyattn.ops.linear.problem import LinearProblem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import Operands, Plan, lay_out_scratch, run
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device


def linear_forward(device: Device, problem: LinearProblem, operands: Operands) -> dict[str, Array]:
    """Run linear, into `out` and `preactivation` where they are given."""
    return run(device, _plan(problem, device.card), operands)


def scratch_bytes(device: Device, problem: LinearProblem) -> int:
    """Return the bytes of scratch memory that it takes."""
    return _plan(problem, device.card).workspace_bytes


@lru_cache(maxsize=4096)
def _plan(problem: LinearProblem, card: Card) -> Plan:
    require_kernel_dtype("x", problem.dtype)
    require_item_alignment(problem.layouts, problem.starts)
    outputs = tuple(problem.outputs.items())
    if problem.rows * problem.outer == 0:
        return Plan((), outputs)
    steps, scratch, zero_first = launches_for("forward", problem, card)
    plan = Plan(steps, outputs, lay_out_scratch(scratch), zero_first)
    return plan.for_arrays(problem.layouts)
