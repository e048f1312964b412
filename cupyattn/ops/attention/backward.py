"""Attention's backward on a device: from a checked problem to a plan that ran."""

from __future__ import annotations

from functools import lru_cache

from cupyattn.ops.attention import float32, teaching, tensor_core_backward
from cupyattn.ops.attention.choice import Implementation, implementation_of, register, turns
from cupyattn.ops.attention.modifiers import require_gradient, run_compiled
from cupyattn.ops.attention.options import ALL_OPTIONS, TEACHING_OPTIONS, DropoutSeed
from cupyattn.ops.attention.params import interleaved, placed, require_lengths, seeded
from cupyattn.ops.attention.problem import AttentionProblem, PackedProblem, gradient_outputs
from cupyattn.ops.attention.rotary import rotated_backward
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import Operands, Plan
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment
from cupyattn.runtime.device import Device
from cupyattn.runtime.storage import STORAGE

IMPLEMENTATIONS = register(
    ("flash", STORAGE, float32.backward_plan, ALL_OPTIONS),
    ("naive", STORAGE, teaching.naive_backward_plan, TEACHING_OPTIONS),
)
ON_TENSOR_CORES = register(("flash", ("float16",), tensor_core_backward.backward_plan, ALL_OPTIONS))
"""What takes their place on cards that have them."""


def attention_backward(
    device: Device,
    problem: AttentionProblem,
    operands: Operands,
    *,
    seed: DropoutSeed,
    deterministic: bool,
    accumulate: bool,
) -> dict[str, Array]:
    """Run the backward of dense attention, into the results and scratch that are given.

    Returns
    -------
    dict
        The gradients by name; dbias and dsinks only where there are bias and sinks.
    """
    plan = _plan(problem, device.card, deterministic, accumulate)
    if problem.dropout_p:
        plan = seeded(plan, seed)
    return run_compiled(device, plan, operands, problem.functions)


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem,
    card: Card,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Choose the kernels and fill in their parameters."""
    table = {**IMPLEMENTATIONS, **(ON_TENSOR_CORES if card.tensor_cores else {})}
    chosen = implementation_of(problem, table, "attention_backward")
    require_gradient(problem.functions)
    require_lengths(problem)
    require_item_alignment(problem.layouts, problem.starts, problem.overlaps.shown_as)
    if problem.batch * problem.heads == 0:
        return nothing_to_add(problem, accumulate)
    plan = rotated_in_turns(problem, card, chosen, deterministic, accumulate)
    return placed(plan, problem).for_arrays(problem.layouts)


def rotated_in_turns(
    problem: AttentionProblem,
    card: Card,
    chosen: Implementation,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Return the plan of an implementation, dense or packed, in the order of its grid.

    The launches of rotary embedding stand around it.
    """
    together = turns(problem, card, backward=True)

    def plan_of(turned: AttentionProblem) -> Plan:
        plan = chosen.plan(
            turned, turned.starts, card.arch, deterministic=deterministic, accumulate=accumulate
        )
        return interleaved(plan, *together)

    return rotated_backward(problem, card.arch, accumulate, plan_of)


def nothing_to_add(problem: AttentionProblem, accumulate: bool) -> Plan:
    """Return the plan of a call without sequences or heads: gradients are 0, and no kernel runs.

    Rows of packed arrays are of no sequence then, and stay as they are.
    """
    outputs = gradient_outputs(problem)
    kept = ("dq", "dk", "dv") if isinstance(problem, PackedProblem) else ()
    names = () if accumulate else tuple(name for name, _ in outputs if name not in kept)
    return Plan((), outputs, zero_first=names, zero_new=True)
