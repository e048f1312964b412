"""The norm of many arrays, on a device: one number, which is not waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cupyattn.ops.optimizer import kernels_global_norm as configs
from cupyattn.ops.optimizer.kernels_global_norm import NORM_ARRAYS, NORM_PARAMS
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.axes import merge_axes
from cupyattn.runtime.by_name import (
    Description,
    Operands,
    Overlaps,
    Plan,
    Step,
    lay_out_scratch,
    layouts_of,
    run,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct

OUTPUT = Output((), np.dtype(np.float32))
_OWN = ("out", "workspace")


class Rows(NamedTuple):
    """An array as rows of neighbouring items, in the order of memory: a norm asks for no other."""

    rows: int
    stride: int
    """From row to row, in items."""
    length: int

    @classmethod
    def of(cls, name: str, layout: Layout) -> Rows:
        """Find them.

        Raises
        ------
        ValueError
            If two axes or more remain beside the rows.
        """
        size = layout.dtype.itemsize
        axes = sorted(  # an axis that repeats its items is one of rows
            zip(layout.strides, layout.shape, strict=True),
            key=lambda axis: (axis[0] != 0, -abs(axis[0])),
        )
        steps = tuple(stride // size for stride, _ in axes)
        shape, (strides,) = merge_axes(tuple(extent for _, extent in axes), [steps])
        length = 1
        if shape and strides[-1] == 1:
            length, shape, strides = shape[-1], shape[:-1], strides[:-1]
        if len(shape) > 1:
            raise error(
                ValueError,
                f"{name} has shape {layout.shape} and strides {layout.strides}",
                "it is rows of neighbouring items, evenly apart",
                "copy it with ascontiguousarray(...)",
            )
        return cls(shape[0], strides[0], length) if shape else cls(1, 0, length)


@dataclass(frozen=True, eq=False)
class NormProblem:
    """A valid call."""

    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    overlaps: Overlaps

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays whose norm is taken."""
        return tuple(name for name in self.layouts if name not in _OWN)


def norm_problem(operands: Operands) -> NormProblem:
    """Check the arrays of a call, or find that they were checked before.

    Raises
    ------
    TypeError, ValueError
        As `global_norm` documents.
    """
    problem = _cached_problem(operands.description)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=1024)
def _cached_problem(description: Description) -> NormProblem:
    layouts = layouts_of(description)
    problem = NormProblem(layouts, starts_of(description), Overlaps.of(layouts, _OWN))
    if not problem.names:
        raise error(
            TypeError,
            "no arrays were given",
            "a norm is that of one array or more",
            "pass arrays, as in global_norm(*gradients)",
        )
    for name in problem.names:
        require_dtype(name, layouts[name], CPU_FLOATS)
        require_whole_item_strides(name, layouts[name])
    if "out" in layouts:
        require_output("out", layouts["out"], *OUTPUT)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return problem


def run_norm(device: Device, problem: NormProblem, operands: Operands) -> Array:
    """Run it."""
    return run(device, _plan(problem), operands)["out"]


@lru_cache(maxsize=1024)
def _plan(problem: NormProblem) -> Plan:
    require_item_alignment(problem.layouts, problem.starts)
    # Arrays of one dtype and width of loads share launches.
    alike: defaultdict[tuple[str, int], list[tuple[str, Rows]]] = defaultdict(list)
    for name in problem.names:
        layout = problem.layouts[name]
        require_kernel_dtype(name, layout.dtype)
        if 0 in layout.shape:
            continue
        rows = Rows.of(name, layout)
        items = vector_items(layout.dtype.name)
        aligned = (
            not problem.starts[name] and rows.stride * layout.dtype.itemsize % VECTOR_BYTES == 0
        )
        alike[layout.dtype.name, items if aligned else 1].append((name, rows))
    steps, partials = [], 0
    for (dtype, vec), arrays in alike.items():
        for start in range(0, len(arrays), NORM_ARRAYS):
            step = _partials(dtype, vec, arrays[start : start + NORM_ARRAYS], partials)
            steps.append(step)
            partials += step.ctas
    steps.append(Step.of(configs.specialise_root(), 1, partials))
    plan = Plan(tuple(steps), (("out", OUTPUT),), lay_out_scratch({"partials": max(partials, 1)}))
    return plan.for_arrays(problem.layouts)


def _partials(dtype: str, vec: int, arrays: list[tuple[str, Rows]], before: int) -> Step:
    """Make the launch that sums the squares of up to eight arrays."""
    unit = configs.THREADS * configs.loads(vec) * vec
    params = new_struct(NORM_PARAMS)
    ends: list[int] = []
    for i, (_, rows) in enumerate(arrays):
        units = -(-rows.length // unit)
        ends.append((ends[-1] if ends else 0) + min(rows.rows * units, configs.MOST_CTAS))
        params["length"][i], params["stride"][i] = rows.length, rows.stride
        params["units"][i], params["rows"][i] = units, rows.rows
    params["first_cta"] = [0, *ends, *[ends[-1]] * (NORM_ARRAYS - len(ends))]
    params["first_partial"] = before
    renamed = {f"x{i}": name for i, (name, _) in enumerate(arrays)}
    specialisation = configs.specialise_partials(dtype, vec)
    return Step.of(specialisation, ends[-1], params[()], renamed=renamed)
