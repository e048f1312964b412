"""Plans of calls of linear: the kernels of each product, and the launches of a call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from cupyattn.ops.linear import (
    kernels_float32,
    kernels_quantised_skinny,
    kernels_quantised_tile,
    kernels_skinny,
    kernels_tensor_core,
)
from cupyattn.ops.linear.checks import described_backward, described_forward
from cupyattn.ops.linear.kernels_quantised import EXPANDED, NESTED, expand_step
from cupyattn.ops.linear.problem import (
    BackwardCall,
    BackwardDraft,
    D,
    ForwardCall,
    ForwardDraft,
    LinearArrays,
    LinearBackwardArrays,
    Matrix,
    Plans,
    weight_fields,
)
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.runtime.arrays import Array, Layout, adopt
from cupyattn.runtime.checks import require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import SCRATCH_DTYPE, Plan, Planner, Step
from cupyattn.runtime.records import fields_of, given_of

PLANS: Plans = (
    *kernels_skinny.PLANS,
    *kernels_tensor_core.PLANS,
    *kernels_float32.PLANS,
)
"""Implementations by preference: skinny, on tensor cores, and in float32 arithmetic.

The last ones take every problem: float16 too, on devices without tensor cores.
"""

QUANTISED_PLANS: Plans = (
    *kernels_quantised_skinny.PLANS,
    *kernels_quantised_tile.PLANS,
)
"""Implementations for a quantised weight, in the same order."""


def _steps(product: str, draft: D) -> tuple[Step, ...]:
    """Return the launches of a product by the first implementation that takes it."""
    problem = draft.problem
    plans = PLANS if problem.weight is None else QUANTISED_PLANS
    # Without anything to sum over, K = 0, only the kernels that take everything are right.
    for entry in plans if problem.inner else kernels_float32.PLANS:
        runs = draft.traits.tensor_cores or not entry.tensor_cores
        fits = entry.product == product and problem.dtype.name in entry.dtypes
        if runs and fits and entry.takes(problem):
            reason = entry.reason if problem.inner else "K = 0 leaves nothing to multiply"
            if product != "db" or problem.biased:
                reason = reason.format(rows=problem.rows, dtype=problem.dtype.name)
                draft.traits.choices.because(f"{product}: {reason}")
            return entry.plan(draft)
    raise NotImplementedError(f"no kernel has {product} of {problem.dtype.name}")


@lru_cache(maxsize=4096)
def forward_plan(call: ForwardCall, traits: DeviceTraits) -> Plan:
    """Return the launches of a forward call."""
    problem = call.problem
    _require_for_kernels(call)
    planner = Planner(LinearArrays, call.layouts, call.outputs)
    if problem.rows * problem.outer == 0:
        return planner.plan()
    draft = ForwardDraft(problem, planner.slots, traits, planner)
    before, draft = _with_expanded_scales(draft)
    return planner.plan(*before, *_steps("forward", draft))


@lru_cache(maxsize=4096)
def backward_plan(call: BackwardCall, traits: DeviceTraits) -> Plan:
    """Return the launches of a backward call."""
    problem = call.problem
    _require_for_kernels(call)
    planner = Planner(LinearBackwardArrays, call.layouts, call.outputs)
    slots = planner.slots
    transposed = [made.slot for made in planner.results if made.field == "dw" and call.turns_dw]
    if problem.rows * problem.outer == 0:  # nothing to add up: no kernel runs
        zero = () if problem.accumulate else [made.slot for made in planner.results]
        return planner.plan(zero_first=zero, zero_new=problem.accumulate, transposed=transposed)
    draft = BackwardDraft(problem, slots, traits, planner)
    before, draft = _with_expanded_scales(draft)
    if problem.activation is not None and slots.preactivation is None:
        size = problem.rows * problem.weight_columns * problem.dtype.itemsize
        preactivation = planner.scratch(-(-size // SCRATCH_DTYPE.itemsize))
        draft = replace(draft, slots=replace(draft.slots, preactivation=preactivation))
        before = (*before, *_steps("forward", _recomputing(draft)))
    products = ("dx", "dw" if problem.weight is None else "db")
    steps = [step for product in products for step in _steps(product, draft)]
    # Products share the step that forms dz: one object, which runs once.
    once = {id(step): step for step in steps}
    return planner.plan(*before, *once.values(), zero_new=problem.accumulate, transposed=transposed)


def _require_for_kernels(call: ForwardCall | BackwardCall) -> None:
    """Raise for arrays that only NumPy's path accepts."""
    require_kernel_dtype("x", call.problem.dtype)
    require_item_alignment(given_of(call.layouts), given_of(call.starts))


def _recomputing(draft: BackwardDraft) -> ForwardDraft:
    """Return the draft that computes x w + b into the slot of the preactivation."""
    slots = draft.slots
    weight = (slots.w, slots.codes, slots.scales, slots.super_scales)
    arrays = LinearArrays(slots.x, *weight, b=slots.b, out=slots.preactivation)
    return ForwardDraft(draft.problem.recomputed, arrays, draft.traits, draft.planner)


def _with_expanded_scales(draft: D) -> tuple[tuple[Step, ...], D]:
    """Return the launch that expands nested scales into scratch, and the draft that reads those.

    One more launch is the cost, and for few rows about 5 bytes for each 32 of codes; products need
    no kernels for nested scales.
    """
    problem, slots = draft.problem, draft.slots
    weight = problem.weight
    if weight is None or weight.format != NESTED:
        return (), draft
    rows, columns = weight.scales[:2]
    absmax = draft.planner.scratch(rows * columns)
    step = expand_step(
        rows * columns, (slots.scales, slots.super_scales, slots.scale_table, absmax)
    )
    scales = Matrix(rows, columns, columns, 1, SCRATCH_DTYPE.itemsize, 0)
    expanded = weight._replace(format=EXPANDED, scales=scales, super_scales=None)
    return (step,), replace(
        draft,
        problem=replace(problem, weight=expanded),
        slots=replace(slots, scales=absmax, super_scales=None, scale_table=None),
    )


def require_product(x: Array, w: Array | QuantizedWeight) -> None:
    """Raise unless ``linear(x, w)`` is a valid call.

    Raises
    ------
    TypeError, ValueError
        As `linear` documents.
    """
    weight, form = weight_fields(w)
    described_forward(adopt(LinearArrays(x, *weight)).description, None, False, form)


def workspace_bytes(device: Device, x: Array, w: Array | QuantizedWeight, out: Layout) -> int:
    """Return the bytes of scratch memory of ``linear(x, w, out=out)``.

    `out` starts at a multiple of 16 bytes.
    """
    weight, form = weight_fields(w)
    description = [*adopt(LinearArrays(x, *weight)).description]
    description[fields_of(LinearArrays).index("out")] = (*out, 0)
    call = described_forward(tuple(description), None, False, form)
    return forward_plan(call, device.traits).workspace_bytes


def backward_workspace_bytes(
    device: Device,
    dout: Layout,
    x: Array,
    w: Array | QuantizedWeight,
    dx: Array | None,
    dw: Array | None,
    *,
    accumulate: bool,
) -> int:
    """Return the bytes of scratch memory of `linear_backward` into dx and dw.

    `dout` starts at a multiple of 16 bytes.
    """
    weight, form = weight_fields(w)
    arrays: LinearBackwardArrays[Any] = LinearBackwardArrays(None, x, *weight)
    arrays.dx, arrays.dw = dx, dw
    description = ((*dout, 0), *adopt(arrays).description[1:])
    call = described_backward(description, None, accumulate, form)
    return backward_plan(call, device.traits).workspace_bytes
