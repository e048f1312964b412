"""Merging two results of attention, on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyattn.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.kernels.configs.attention.merge import ROWS, merge
from cupyattn.kernels.device import Device
from cupyattn.kernels.structs import MERGE_PARAMS
from cupyattn.ops.attention.params import row_strides, sum_strides
from cupyattn.ops.attention.problem import LSE_DTYPE
from cupyattn.ops.checks import (
    CPU_FLOATS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.ops.overlaps import Overlaps
from cupyattn.ops.plan import Output, Plan, Step, run

_OUTS, _LSES = ("out_a", "out_b"), ("lse_a", "lse_b")


@dataclass(frozen=True, eq=False)
class MergeProblem:
    """A valid call of merge_attention."""

    layouts: dict[str, Layout]
    starts: dict[str, int]
    overlaps: Overlaps

    @property
    def out(self) -> Output:
        """(B, S, H, D)."""
        return Output(self.layouts["out_a"].shape, self.layouts["out_a"].dtype)

    @property
    def lse(self) -> Output:
        """(B, H, S)."""
        return Output(self.layouts["lse_a"].shape, self.layouts["lse_a"].dtype)


def merge_problem(operands: Operands) -> MergeProblem:
    """Check a call.

    Raises
    ------
    TypeError, ValueError
        As the public function documents.
    """
    problem = _checked(operands.description)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _checked(description: Description) -> MergeProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, ("out_a", "lse_a", "out_b", "lse_b"))
    first = layouts["out_a"]
    for name in _OUTS:
        require_dtype(name, layouts[name], CPU_FLOATS)
        require_rank(name, layouts[name], "B S H D")
        require_shape(name, layouts[name], first.shape, "(B, S, H, D) like out_a")
        require_contiguous_rows(name, layouts[name])
    require_same_dtype(layouts, _OUTS)
    batch, seq, heads, _ = first.shape
    lse_dtype = first.dtype if first.dtype == np.float64 else LSE_DTYPE
    for name in _LSES:
        require_dtype(name, layouts[name], (lse_dtype.name,))
        require_shape(name, layouts[name], (batch, heads, seq), "(B, H, S) of out's axes")
        require_whole_item_strides(name, layouts[name])
    problem = MergeProblem(layouts, starts_of(description), Overlaps.of(layouts, ("out", "lse")))
    for name, output in (("out", problem.out), ("lse", problem.lse)):
        if name in layouts:
            require_output(name, layouts[name], *output)
    return problem


def run_merge(device: Device, problem: MergeProblem, operands: Operands) -> dict[str, Array]:
    """Merge, into `out` and `lse` where they are given."""
    return run(device, _plan(problem), operands.arrays)


@lru_cache(maxsize=4096)
def _plan(problem: MergeProblem) -> Plan:
    require_kernel_dtype("out_a", problem.out.dtype)
    require_item_alignment(problem.layouts, problem.starts)
    outputs = {"out": problem.out, "lse": problem.lse}
    layouts = {name: contiguous(*output) for name, output in outputs.items()} | problem.layouts
    params = np.zeros((), MERGE_PARAMS)
    for name in (*_OUTS, "out"):
        params[name] = row_strides(layouts[name].strides, problem.out.dtype.itemsize)
    for name in (*_LSES, "lse"):
        params[name] = sum_strides(layouts[name].strides)
    batch, seq, heads, dim = problem.out.shape
    rows = math.prod((batch, seq, heads))
    params["rows"], params["heads"], params["seq"], params["dim"] = rows, heads, seq, dim
    step = Step.of(merge(problem.out.dtype.name), -(-rows // ROWS), params[()])
    return Plan((step,), tuple(outputs.items()))
