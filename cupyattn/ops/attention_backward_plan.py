"""Which kernels an attention backward launches, in which order, and the scratch they share."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Layout
from cupyattn.kernels.configs import attention_backward_naive as naive
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops.attention import score_options
from cupyattn.ops.attention_backward_params import backward_params
from cupyattn.ops.attention_problem import AttentionProblem
from cupyattn.ops.checks import require_item_alignment

SCRATCH_ALIGNMENT = 256  # bytes: what CuPy gives an array of its own
_SCRATCH_DTYPE = np.dtype(np.float32)


class Step(NamedTuple):
    """One launch."""

    specialisation: Specialisation
    ctas: int


class Scratch(NamedTuple):
    """A float32 array within the workspace."""

    name: str
    offset: int
    """In bytes."""
    items: int

    def within(self, workspace: Any) -> Any:
        """Return the array, of a flat workspace of bytes."""
        end = self.offset + self.items * _SCRATCH_DTYPE.itemsize
        return workspace[self.offset : end].view(_SCRATCH_DTYPE)


class Plan(NamedTuple):
    """All that the launches of a call need and that does not change from call to call.

    A kernel's arguments are looked up by the names of its parameters: among the call's arrays, its
    results, the scratch and the structs.
    """

    steps: tuple[Step, ...]
    scratch: tuple[Scratch, ...]
    workspace_bytes: int
    structs: dict[str, Any]
    zeroed: tuple[str, ...] = ()
    """Results that have to be zero before the first launch."""


@lru_cache(maxsize=4096)
def backward_plan(
    problem: AttentionProblem,
    result_strides: tuple[tuple[str, tuple[int, ...]], ...],
    starts: tuple[int, ...],
    accumulate: bool,
) -> Plan:
    """Choose the kernels and fill in their parameters.

    `starts` says by how much each array of the problem misses a vector's alignment.
    """
    start_of = dict(zip(problem.layouts, starts, strict=True))
    require_item_alignment(problem.layouts, start_of)
    results = {
        name: Layout((of := problem.layouts[name[1:]]).shape, strides, of.dtype)
        for name, strides in result_strides
    }
    return _naive_plan(problem, results, accumulate)


def _naive_plan(problem: AttentionProblem, results: dict[str, Layout], accumulate: bool) -> Plan:
    options = score_options(problem)._replace(sinks="void")
    shape = problem.dtype.name, problem.head_dim, problem.head_dim_v
    rows = problem.batch * problem.heads * problem.sq
    steps = [
        Step(naive.dq(*shape, options), rows),
        Step(naive.dkdv(*shape, options), problem.batch * problem.kv_heads * problem.sk),
    ]
    if "dbias" in results:
        items = math.prod(results["dbias"].shape)
        config = naive.dbias_config(math.prod(problem.scores_shape) // max(items, 1))
        items_per_cta = config.threads // config.lanes
        steps.append(Step(naive.dbias(*shape, options, config), -(-items // items_per_cta)))
    if "dsinks" in results:
        steps.append(Step(naive.dsinks(results["dsinks"].dtype.name), problem.heads))
    scratch, workspace_bytes = lay_out_scratch({"delta": rows})
    params = backward_params(problem, results, accumulate=accumulate, dbias=results.get("dbias"))
    return Plan(tuple(steps), scratch, workspace_bytes, {"params": params})


def lay_out_scratch(items: dict[str, int]) -> tuple[tuple[Scratch, ...], int]:
    """Place float32 arrays one behind the other, and return them with the bytes that they take.

    Examples
    --------
    >>> lay_out_scratch({"delta": 3, "dq_acc": 100})
    ((Scratch(name='delta', offset=0, items=3), Scratch(name='dq_acc', offset=256, items=100)), 656)
    """
    placed, end = [], 0
    for name, count in items.items():
        offset = -(-end // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        placed.append(Scratch(name, offset, count))
        end = offset + count * _SCRATCH_DTYPE.itemsize
    return tuple(placed), end
