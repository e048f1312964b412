"""Merging two results of attention, on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyattn.ops.attention.kernels.merge import ROWS, VEC, merge
from cupyattn.ops.attention.params import row_strides, sum_strides
from cupyattn.ops.attention.problem import LSE_DTYPE
from cupyattn.ops.attention.structs import MERGE_PARAMS
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.by_name import (
    Description,
    Operands,
    Overlaps,
    Plan,
    Step,
    layouts_of,
    run,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_rank,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output
from cupyattn.runtime.structs import new_struct

_OUTS, _LSES = ("out_a", "out_b"), ("lse_a", "lse_b")


@dataclass(frozen=True, eq=False)
class MergeProblem:
    """A valid call of merge_attention."""

    layouts: dict[str, Layout]
    starts: dict[str, int]
    overlaps: Overlaps

    @property
    def out(self) -> Output:
        """(B, S, H, D): in the dtype of what was given, otherwise in the wider of both."""
        given = self.layouts.get("out")
        return Output(self.layouts["out_a"].shape, given.dtype if given else self.wider)

    @property
    def wider(self) -> np.dtype:
        """The wider dtype of both parts."""
        return max((self.layouts[name].dtype for name in _OUTS), key=lambda kind: kind.itemsize)

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
    _require_kin(layouts)
    batch, seq, heads, _ = first.shape
    lse_dtype = first.dtype if first.dtype == np.float64 else LSE_DTYPE
    for name in _LSES:
        require_dtype(name, layouts[name], (lse_dtype.name,))
        require_shape(name, layouts[name], (batch, heads, seq), "(B, H, S) of out's axes")
        require_whole_item_strides(name, layouts[name])
    in_place = {"out": "out_a", "lse": "lse_a"}
    overlaps = Overlaps.of(layouts, in_place, in_place=in_place)
    problem = MergeProblem(layouts, starts_of(description), overlaps)
    for name, output in (("out", problem.out), ("lse", problem.lse)):
        if name in layouts:
            require_output(name, layouts[name], *output)
    return problem


def _require_kin(layouts: dict[str, Layout]) -> None:
    """Raise TypeError unless parts and result share one dtype, or some are in float32 instead.

    Of float64 all are.
    """
    names = [name for name in (*_OUTS, "out") if name in layouts]
    kinds = {layouts[name].dtype.name for name in names}
    if len(kinds) > (1 if "float64" in kinds else len(kinds & {"float32"}) + 1):
        listed = ", ".join(f"{name} has {layouts[name].dtype.name}" for name in names)
        raise error(
            TypeError,
            listed,
            f"{', '.join(names)} share one dtype, or are float32 beside one of 16 bits",
            "convert them with .astype(...)",
        )


def run_merge(device: Device, problem: MergeProblem, operands: Operands) -> dict[str, Array]:
    """Merge, into `out` and `lse` where they are given."""
    return run(device, _plan(problem), operands)


@lru_cache(maxsize=4096)
def _plan(problem: MergeProblem) -> Plan:
    require_kernel_dtype("out_a", problem.layouts["out_a"].dtype)
    require_item_alignment(problem.layouts, problem.starts)
    outputs = {"out": problem.out, "lse": problem.lse}
    layouts = {name: contiguous(*output) for name, output in outputs.items()} | problem.layouts
    params = new_struct(MERGE_PARAMS)
    vec = VEC if problem.out.shape[-1] % VEC == 0 else 1
    for name in (*_OUTS, "out"):
        layout = layouts[name]
        params[name] = row_strides(layout.strides, layout.dtype.itemsize)
        steps = (problem.starts.get(name, 0), *layout.strides[:-1])
        if any(step % (VEC * layout.dtype.itemsize) for step in steps):
            vec = 1
    for name in (*_LSES, "lse"):
        params[name] = sum_strides(layouts[name].strides)
    batch, seq, heads, dim = problem.out.shape
    rows = math.prod((batch, seq, heads))
    params["rows"], params["heads"], params["seq"], params["dim"] = rows, heads, seq, dim
    kinds = [layouts[name].dtype.name for name in (*_OUTS, "out")]
    step = Step.of(merge(*kinds, vec), -(-rows // ROWS), params[()])
    return Plan((step,), tuple(outputs.items()))
