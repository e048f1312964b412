"""Attention on a device: from a checked problem to a plan that ran."""

from __future__ import annotations

from functools import lru_cache, partial

from cupyattn.ops.attention import few_queries, float32, teaching, tensor_core
from cupyattn.ops.attention.choice import Implementation, implementation_of, register, turns
from cupyattn.ops.attention.modifiers import run_compiled
from cupyattn.ops.attention.options import ALL_OPTIONS, TEACHING_OPTIONS, DropoutSeed
from cupyattn.ops.attention.params import interleaved, placed, require_lengths, seeded
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.rotary import rotated
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.by_name import Operands, Plan
from cupyattn.runtime.card import Card
from cupyattn.runtime.checks import require_item_alignment
from cupyattn.runtime.device import Device
from cupyattn.runtime.storage import STORAGE

IMPLEMENTATIONS = register(
    ("flash", STORAGE, float32.forward_plan, ALL_OPTIONS),
    ("tiled", STORAGE, teaching.tiled_plan, TEACHING_OPTIONS),
    ("naive", STORAGE, teaching.naive_plan, TEACHING_OPTIONS),
)
ON_TENSOR_CORES = register(
    ("flash", ("float16",), tensor_core.forward_plan, ALL_OPTIONS),
)
"""What takes their place on cards that have them."""


def attention_forward(
    device: Device,
    problem: AttentionProblem,
    operands: Operands,
    *,
    seed: DropoutSeed,
    return_lse: bool,
) -> dict[str, Array]:
    """Run dense attention forward, into `out` and `lse` where they are given."""
    plan = _plan(problem, device.card, return_lse)
    if problem.dropout_p:
        plan = seeded(plan, seed)
    return run_compiled(device, plan, operands, problem.functions)


@lru_cache(maxsize=4096)
def _plan(problem: AttentionProblem, card: Card, return_lse: bool) -> Plan:
    """Choose the kernels and their grids, and fill in their parameters."""
    table = {**IMPLEMENTATIONS, **(ON_TENSOR_CORES if card.tensor_cores else {})}
    chosen = implementation_of(problem, table, "attention")
    require_lengths(problem)
    require_item_alignment(problem.layouts, problem.starts, problem.overlaps.shown_as)
    if few_queries.suits(problem, card):
        plan_of = partial(few_queries.few_queries_plan, card=card, return_lse=return_lse)
        plan = rotated(problem, card.arch, plan_of)
    else:
        plan = rotated_in_turns(problem, card, chosen, return_lse)
    return placed(plan, problem).for_arrays(problem.layouts)


def rotated_in_turns(
    problem: AttentionProblem, card: Card, chosen: Implementation, return_lse: bool
) -> Plan:
    """Return the plan of an implementation, dense or packed, in the order of its grid.

    The launches of rotary embedding stand around it.
    """
    together = turns(problem, card)

    def plan_of(turned: AttentionProblem) -> Plan:
        plan = chosen.plan(turned, turned.starts, card, return_lse=return_lse)
        return interleaved(plan, *together)

    on_tensor_cores = chosen.plan is tensor_core.forward_plan
    keys_alone = on_tensor_cores and tensor_core.rotates_queries(problem, card)
    return rotated(problem, card.arch, plan_of, keys_alone=keys_alone)
