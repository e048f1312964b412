"""AdamW with running means of eight bits, on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyattn.ops.optimizer import kernels_8bit as config
from cupyattn.ops.optimizer.plan import AdamwNumbers
from cupyattn.runtime.arrays import Layout, is_contiguous
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
    require_arrays,
    require_dtype,
    require_item_alignment,
    require_own_items,
    require_shape,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.storage import VECTOR_BYTES

WRITTEN = ("param", "m", "v", "m_scales", "v_scales")
_DTYPES = {
    "param": "float32",
    "grad": "float32",
    "m": "int8",
    "v": "uint8",
    "m_scales": "float32",
    "v_scales": "float32",
}


@dataclass(frozen=True, eq=False)
class EightBitProblem:
    """A valid call."""

    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    overlaps: Overlaps

    @property
    def count(self) -> int:
        """All items."""
        return math.prod(self.layouts["param"].shape)


def eight_bit_problem(operands: Operands) -> EightBitProblem:
    """Check the arrays of a call, or find that they were checked before.

    Raises
    ------
    TypeError, ValueError
        As `adamw_step_8bit` documents.
    """
    problem = _cached_problem(operands.description)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=1024)
def _cached_problem(description: Description) -> EightBitProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, _DTYPES)
    shape = layouts["param"].shape
    blocks = (-(-math.prod(shape) // config.BLOCK),)
    for name, dtype in _DTYPES.items():
        scales = name.endswith("_scales")
        meaning = f"one for each {config.BLOCK} items of param" if scales else "shaped like param"
        fix = f"make {name} once before the first step, zeros of {dtype}, and keep it"
        fixes = {"param": made_beforehand("param"), "grad": ""}
        require_dtype(name, layouts[name], (dtype,), fixes.get(name, fix))
        require_shape(name, layouts[name], blocks if scales else shape, meaning)
        if not is_contiguous(layouts[name]):
            raise error(
                ValueError,
                f"{name} has strides {layouts[name].strides}",
                "items are side by side in C order: blocks run over all of them",
                f"make {name} contiguous before the call, and keep it so",
            )
        if name in WRITTEN:
            require_own_items(name, layouts[name])
    if "grad_scale" in layouts:
        require_dtype("grad_scale", layouts["grad_scale"], ("float32",))
        require_shape("grad_scale", layouts["grad_scale"], (), "an array of one number")
    overlaps = Overlaps.of(layouts, WRITTEN)
    return EightBitProblem(layouts, starts_of(description), overlaps)


def run_eight_bit(
    device: Device, problem: EightBitProblem, operands: Operands, numbers: AdamwNumbers
) -> None:
    """Run a step."""
    plan = _plan(problem)
    values = tuple(map(np.float32, numbers.scalars.values()))
    steps = tuple(step._replace(values=(*values, step.values[-1])) for step in plan.steps)
    run(device, plan._replace(steps=steps), operands)


@lru_cache(maxsize=1024)
def _plan(problem: EightBitProblem) -> Plan:
    require_item_alignment(problem.layouts, problem.starts)
    if not problem.count:
        return Plan((), ())
    items = VECTOR_BYTES // 4
    wide = {"param": VECTOR_BYTES, "grad": VECTOR_BYTES, "m": items, "v": items}
    aligned = not any(problem.starts[name] % size for name, size in wide.items())
    specialisation = config.specialise(items if aligned else 1)
    blocks = -(-problem.count // config.BLOCK)
    ctas = -(-blocks // (config.THREADS // config.WARP))
    unset = (0.0,) * len(config.NUMBERS)
    plan = Plan((Step.of(specialisation, ctas, *unset, problem.count),), ())
    return plan.for_arrays(problem.layouts)
