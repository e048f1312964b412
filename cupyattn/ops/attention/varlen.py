"""Attention over packed sequences on a device: from a checked problem to a plan that ran."""

from __future__ import annotations

from functools import lru_cache

from cupyattn.ops.attention import (
    backward,
    float32,
    forward,
    tensor_core,
    tensor_core_backward,
)
from cupyattn.ops.attention.choice import (
    Implementation,
    Implementations,
    implementation_of,
    register,
)
from cupyattn.ops.attention.modifiers import require_gradient, run_compiled
from cupyattn.ops.attention.options import ALL_OPTIONS, DropoutSeed
from cupyattn.ops.attention.params import seeded
from cupyattn.ops.attention.problem import MAX_LENGTH, PackedProblem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import Operands, Plan
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import STORAGE

FORWARD = register(("flash", STORAGE, float32.forward_plan, ALL_OPTIONS))
BACKWARD = register(("flash", STORAGE, float32.backward_plan, ALL_OPTIONS))
ON_TENSOR_CORES = {
    "attention_varlen": register(("flash", ("float16",), tensor_core.forward_plan, ALL_OPTIONS)),
    "attention_varlen_backward": register(
        ("flash", ("float16",), tensor_core_backward.backward_plan, ALL_OPTIONS)
    ),
}
"""What takes their place on cards that have them."""


def varlen_forward(
    device: Device,
    problem: PackedProblem,
    operands: Operands,
    *,
    seed: DropoutSeed,
    return_lse: bool,
) -> dict[str, Array]:
    """Run attention forward, into `out` and `lse` where they are given."""
    plan = _forward_plan(problem, device.card, return_lse)
    if problem.dropout_p:
        plan = seeded(plan, seed)
    return run_compiled(device, plan, operands, problem.functions)


@lru_cache(maxsize=4096)
def _forward_plan(problem: PackedProblem, card: Card, return_lse: bool) -> Plan:
    chosen = _implementation(problem, FORWARD, card, "attention_varlen")
    _require_kernel_sizes(problem)
    plan = forward.rotated_in_turns(problem, card, chosen, return_lse)
    return plan.for_arrays(problem.layouts)


def varlen_backward(
    device: Device,
    problem: PackedProblem,
    operands: Operands,
    *,
    seed: DropoutSeed,
    deterministic: bool,
    accumulate: bool,
) -> dict[str, Array]:
    """Run the backward, into the results and scratch that are given.

    Returns
    -------
    dict
        The gradients by name; dbias and dsinks only where there are bias and sinks.
    """
    plan = _backward_plan(problem, device.card, deterministic, accumulate)
    if problem.dropout_p:
        plan = seeded(plan, seed)
    return run_compiled(device, plan, operands, problem.functions)


@lru_cache(maxsize=4096)
def _backward_plan(
    problem: PackedProblem, card: Card, deterministic: bool, accumulate: bool
) -> Plan:
    chosen = _implementation(problem, BACKWARD, card, "attention_varlen_backward")
    require_gradient(problem.functions)
    _require_kernel_sizes(problem)
    if problem.batch * problem.heads == 0:
        return backward.nothing_to_add(problem, accumulate)
    plan = backward.rotated_in_turns(problem, card, chosen, deterministic, accumulate)
    return plan.for_arrays(problem.layouts)


def _implementation(
    problem: PackedProblem, table: Implementations, card: Card, function: str
) -> Implementation:
    on_card = {**table, **(ON_TENSOR_CORES[function] if card.tensor_cores else {})}
    return implementation_of(problem, on_card, function)


def _require_kernel_sizes(problem: PackedProblem) -> None:
    require_item_alignment(problem.layouts, problem.starts, problem.overlaps.shown_as)
    if max(problem.total_q, problem.total_k) > MAX_LENGTH:
        raise error(
            ValueError,
            f"q has {problem.total_q} rows, k and v have {problem.total_k}, on a GPU",
            f"packed arrays have at most {MAX_LENGTH} rows",
            "split the batch over several calls",
        )
