"""Merging two results of attention, on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.attention.kernels.merge import ROWS, VEC, merge
from cupyattn.ops.attention.params import row_strides, rows_start_at, step_of, sum_strides
from cupyattn.ops.attention.problem import LSE_DTYPE, Outputs, require_results
from cupyattn.ops.attention.structs import MERGE_PARAMS, filled
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    Overlaps,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_rank,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, run
from cupyattn.runtime.records import Record, T, given_of


@dataclass(slots=True)
class MergeArrays(Record[T]):
    """The arrays of one call of merge_attention."""

    out_a: T
    lse_a: T
    out_b: T
    lse_b: T
    out: T | None = None
    lse: T | None = None


@dataclass(frozen=True, eq=False)
class MergeProblem:
    """A valid call of merge_attention."""

    layouts: MergeArrays[Layout]
    starts: MergeArrays[int]
    overlaps: Overlaps

    @property
    def out(self) -> Output:
        """(B, S, H, D): in the dtype of what was given, otherwise in the wider of both."""
        given = self.layouts.out
        parts = self.layouts.out_a, self.layouts.out_b
        wider = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
        return Output(parts[0].shape, given.dtype if given else wider)

    @property
    def lse(self) -> Output:
        """(B, H, S)."""
        return Output(self.layouts.lse_a.shape, self.layouts.lse_a.dtype)

    @property
    def outputs(self) -> Outputs:
        """Both results."""
        return {"out": self.out, "lse": self.lse}


def merge_problem(operands: Operands[MergeArrays[Array]]) -> MergeProblem:
    """Check a call."""
    problem = _checked(operands.description)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _checked(description: Description) -> MergeProblem:
    layouts = layouts_of(MergeArrays[Layout], description)
    require_arrays(given_of(layouts), ("out_a", "lse_a", "out_b", "lse_b"))
    first = layouts.out_a
    for name, layout in (("out_a", first), ("out_b", layouts.out_b)):
        require_dtype(name, layout, CPU_FLOATS)
        require_rank(name, layout, "B S H D")
        require_shape(name, layout, first.shape, "(B, S, H, D) like out_a")
        require_contiguous_rows(name, layout)
    _require_kin(given_of(layouts))
    batch, seq, heads, _ = first.shape
    lse_dtype = first.dtype if first.dtype == np.float64 else LSE_DTYPE
    for name, layout in (("lse_a", layouts.lse_a), ("lse_b", layouts.lse_b)):
        require_dtype(name, layout, (lse_dtype.name,))
        require_shape(name, layout, (batch, heads, seq), "(B, H, S) of out's axes")
        require_whole_item_strides(name, layout)
    in_place = {"out": "out_a", "lse": "lse_a"}
    overlaps = Overlaps.of(layouts, in_place, in_place=in_place)
    problem = MergeProblem(layouts, starts_of(MergeArrays[int], description), overlaps)
    require_results(layouts, problem.outputs)
    return problem


def _require_kin(layouts: dict[str, Layout]) -> None:
    """Raise TypeError unless parts and result share one dtype, or some are in float32 instead.

    Of float64 all are.
    """
    names = [name for name in ("out_a", "out_b", "out") if name in layouts]
    kinds = {layouts[name].dtype.name for name in names}
    if len(kinds) > (1 if "float64" in kinds else len(kinds & {"float32"}) + 1):
        listed = ", ".join(f"{name} has {layouts[name].dtype.name}" for name in names)
        raise error(
            TypeError,
            listed,
            f"{', '.join(names)} share one dtype, or some are float32 and the others share one of "
            "16 bits",
            "convert them with .astype(...)",
        )


def run_merge(
    device: Device, problem: MergeProblem, operands: Operands[MergeArrays[Array]]
) -> MergeArrays[Array]:
    """Merge, into `out` and `lse` where they are given."""
    return run(device, _plan(problem), operands)


@lru_cache(maxsize=4096)
def _plan(problem: MergeProblem) -> Plan:
    require_kernel_dtype("out_a", problem.layouts.out_a.dtype)
    require_item_alignment(given_of(problem.layouts), given_of(problem.starts))
    planner = Planner(MergeArrays, problem.layouts, problem.outputs)
    laid: Any = replace(
        problem.layouts,
        out=problem.layouts.out or contiguous(*problem.out),
        lse=problem.layouts.lse or contiguous(*problem.lse),
    )
    batch, seq, heads, dim = problem.out.shape
    sizes = {name: VEC * getattr(laid, name).dtype.itemsize for name in ("out_a", "out_b", "out")}
    vec = VEC if dim % VEC == 0 and rows_start_at(problem.starts, laid, sizes) else 1
    rows = math.prod((batch, seq, heads))
    params = filled(
        MERGE_PARAMS,
        out_a=row_strides(laid.out_a),
        lse_a=sum_strides(laid.lse_a),
        out_b=row_strides(laid.out_b),
        lse_b=sum_strides(laid.lse_b),
        out=row_strides(laid.out),
        lse=sum_strides(laid.lse),
        rows=rows,
        heads=heads,
        seq=seq,
        dim=dim,
    )
    kernel = merge(laid.out_a.dtype.name, laid.out_b.dtype.name, problem.out.dtype.name, vec)
    return planner.plan(step_of(kernel, -(-rows // ROWS), planner.slots, params))
