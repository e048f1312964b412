"""Calls of linear: their checks, the kernels of each product, and their launches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.linear import (
    kernels_float32,
    kernels_int8,
    kernels_quantised_skinny,
    kernels_quantised_tile,
    kernels_skinny,
    kernels_tensor_core,
)
from cupyattn.ops.linear.kernels_quantised import EXPANDED, NESTED, expand_step
from cupyattn.ops.linear.kernels_rows import (
    RotatedSide,
    contiguous_rows,
    rotate_step,
    rows_matrix,
    scratch_items,
)
from cupyattn.ops.linear.problem import (
    ACTIVATIONS,
    GATES,
    BackwardCall,
    BackwardDraft,
    BackwardProblem,
    D,
    ForwardCall,
    ForwardDraft,
    ForwardProblem,
    LinearArrays,
    LinearBackwardArrays,
    Matrix,
    Plans,
    QuantisedOperand,
    RowFormat,
    WeightFormat,
    float_layouts,
    weight_fields,
)
from cupyattn.ops.linear.weight_formats import FORMATS, QuantizedWeight
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    adopt,
    contiguous,
    layouts_of,
    overlaps_itself,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    Overlaps,
    contiguous_copy,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error, made_beforehand, shown
from cupyattn.runtime.plan import SCRATCH_DTYPE, Output, Plan, Planner, Step
from cupyattn.runtime.records import fields_of, given_of

MAX_EXTENT = 2**31 - 1024
"""Maximum of M, K and the columns of w: kernels count them, tile by tile, in 32 bits."""

_GRADS = LinearBackwardArrays.SHOWN_AS


def forward_call(
    operands: Operands[LinearArrays[Array]],
    activation: Any,
    return_preactivation: bool,
    weight: WeightFormat | None,
    row_format: RowFormat | None = None,
) -> ForwardCall:
    """Check a forward call, or find that its description was checked before.

    `weight` describes the codes and scales if the weight is quantised, `row_format` those of x if
    the call multiplies int8 by int8.
    """
    _require_activation(activation)
    options = (activation, return_preactivation, weight, row_format)
    call = described_forward(operands.description, *options)
    call.overlaps.check(operands)
    return call


def backward_call(
    operands: Operands[LinearBackwardArrays[Array]],
    activation: Any,
    accumulate: bool,
    weight: WeightFormat | None,
) -> BackwardCall:
    """Check a backward call, or find that its description was checked before."""
    _require_activation(activation)
    call = described_backward(operands.description, activation, accumulate, weight)
    call.overlaps.check(operands)
    return call


def _require_activation(activation: Any) -> None:
    allowed = (*ACTIVATIONS, *GATES)
    if activation is not None and not (isinstance(activation, str) and activation in allowed):
        raise error(
            ValueError if isinstance(activation, str) else TypeError,
            f"activation = {shown(activation)}",
            f"allowed are None, {', '.join(map(repr, allowed))}",
            "pass one of them",
        )


@lru_cache(maxsize=4096)
def described_forward(
    description: Description,
    activation: str | None,
    return_preactivation: bool,
    weight: WeightFormat | None,
    row_format: RowFormat | None = None,
) -> ForwardCall:
    """Check a forward call by the description of its `LinearArrays`."""
    given = layouts = layouts_of(LinearArrays[Layout], description)
    starts = starts_of(LinearArrays[int], description)
    if row_format is not None:
        layouts = float_layouts(layouts, weight, row_format)
    kept = return_preactivation and activation is not None
    inputs = _inputs(layouts, starts, activation, weight, {"residual": layouts.residual})
    lead, dtype = layouts.x.shape[:-1], inputs.dtype
    residual = None
    if layouts.residual is not None:
        shape = (*lead, inputs.outer)
        _require_rows_like_x("residual", layouts.residual, shape, "(..., N)")
        residual = rows_matrix("residual", layouts.residual, starts.residual)
    outputs = {"out": Output((*lead, inputs.outer), dtype)}
    if kept:
        outputs["preactivation"] = Output((*lead, inputs.w.columns), dtype)
    results = {}
    for name, output in outputs.items():
        layout = getattr(layouts, name)
        if layout is not None:
            require_output(name, layout, *output)
        results[name] = rows_matrix(name, layout or contiguous(*output), getattr(starts, name))
    preactivation = results.get("preactivation")
    problem = ForwardProblem(*inputs, results["out"], residual, preactivation, row_format)
    overlaps = Overlaps.of(given, ("out", "preactivation", "workspace"))
    return ForwardCall(problem, given, starts, outputs, overlaps)


@lru_cache(maxsize=4096)
def described_backward(
    description: Description, activation: str | None, accumulate: bool, weight: WeightFormat | None
) -> BackwardCall:
    """Check a backward call by the description of its `LinearBackwardArrays`."""
    layouts = layouts_of(LinearBackwardArrays[Layout], description)
    starts = starts_of(LinearBackwardArrays[int], description)
    require_given("dout", layouts.dout)
    require_dtype("dout", layouts.dout, CPU_FLOATS)
    others = {"dout": layouts.dout, "preactivation": layouts.preactivation}
    inputs = _inputs(layouts, starts, activation, weight, others)
    lead, dtype = layouts.x.shape[:-1], inputs.dtype
    _require_rows_like_x("dout", layouts.dout, (*lead, inputs.outer), "(..., N)")
    dout = rows_matrix("dout", layouts.dout, starts.dout)
    given, preactivation = layouts.preactivation, None
    if given is not None and activation is None:
        raise error(
            ValueError,
            "preactivation was given without an activation",
            "it is what an activation was applied to",
            "pass the activation that linear was given, or no preactivation",
        )
    if activation is not None:
        shape = (*lead, inputs.w.columns)
        if given is not None:
            _require_rows_like_x("preactivation", given, shape, "(..., W)")
        preactivation = rows_matrix(
            "preactivation", given or contiguous(shape, dtype), starts.preactivation
        )
    outputs = {}
    for name, shown_as in _GRADS.items():
        of = getattr(layouts, name[1:])
        if of is not None:
            outputs[name] = Output(of.shape, of.dtype)
        elif getattr(layouts, name) is not None:
            quantised = name == "dw" and weight is not None
            raise error(
                ValueError,
                f"{shown_as} was given",
                "a quantised weight has no gradient"
                if quantised
                else f"this call has no {name[1:]}",
                "leave None there",
            )
    for name in ("dx", "db"):
        layout = getattr(layouts, name)
        if layout is not None:
            require_output(_GRADS[name], layout, *outputs[name])
    dx = rows_matrix(_GRADS["dx"], layouts.dx or contiguous(*outputs["dx"]), starts.dx)
    turns_dw = (
        weight is None and not inputs.w.along_columns and min(inputs.w.rows, inputs.w.columns) > 1
    )
    dw = None
    if layouts.dw is not None:
        dw = _given_dw(layouts.dw, starts.dw or 0, outputs["dw"])
    elif weight is None:
        dw = _new_dw(outputs["dw"], turns_dw)
    problem = BackwardProblem(*inputs, dout, dx, dw, preactivation, accumulate)
    overlaps = Overlaps.of(layouts, ("dx", "dw", "db", "workspace"))
    return BackwardCall(problem, layouts, starts, outputs, overlaps, turns_dw)


def _given_dw(dw: Layout, start: int, output: Output) -> Matrix:
    """Check a dw that the caller gave, and describe it as a matrix."""
    if dw.shape != output.shape or dw.dtype != output.dtype or overlaps_itself(dw):
        require_output(_GRADS["dw"], dw, *output)
    _require_a_contiguous_axis(_GRADS["dw"], dw, made_beforehand(_GRADS["dw"]))
    return _as_matrix(dw, start)


def _new_dw(output: Output, turned: bool) -> Matrix:
    shape, dtype = output
    if turned:
        return _as_matrix(contiguous(shape[::-1], dtype), 0).transposed
    return _as_matrix(contiguous(shape, dtype), 0)


class _Inputs(NamedTuple):
    """The fields of a `LinearProblem`: the checked x, w and b of a call."""

    rows: int
    inner: int
    outer: int
    dtype: np.dtype
    activation: str | None
    x: Matrix
    w: Matrix
    weight: QuantisedOperand | None
    b: Matrix | None


def _inputs(
    layouts: LinearArrays[Layout] | LinearBackwardArrays[Layout],
    starts: LinearArrays[int] | LinearBackwardArrays[int],
    activation: str | None,
    weight: WeightFormat | None,
    others: dict[str, Layout | None],
) -> _Inputs:
    """Check x, w, b and the workspace; `others` are arrays that share their dtype."""
    require_given("x", layouts.x)
    for name in ("codes", "scales") if weight else ("w",):
        require_given(name, getattr(layouts, name))
    x, w, b = layouts.x, layouts.w, layouts.b
    require_dtype("x", x, CPU_FLOATS)
    if not x.shape:
        raise error(ValueError, "x has no axes", "x is (..., K)", "pass x[None]")
    shape = _plain_shape(w) if w is not None else _quantised_shape(layouts.codes, weight)
    require_same_dtype(_in_order({"x": x, "w": w, "b": b, **others}))
    require_contiguous_rows("x", x)
    if shape[0] != x.shape[-1]:
        turned = " (w is the transpose of what some libraries keep)"
        raise error(
            ValueError,
            f"x has shape {x.shape}, w {shape}",
            f"w is (K, N) with K = {x.shape[-1]}, the last axis of x",
            f"pass w.T{turned}" if shape[1] == x.shape[-1] else "pass a w of that height",
        )
    columns = shape[1]
    if activation in GATES and columns % 2:
        raise error(
            ValueError,
            f"w has {columns} columns with activation={activation!r}",
            "a gated activation takes a w of shape (K, 2 N), N columns of the gate, then N others",
            "pass both halves side by side, for example numpy.concatenate([w_gate, w_up], axis=1)",
        )
    if b is not None:
        require_shape("b", b, (columns,), "(N,), an item for each column of w")
        require_contiguous_rows("b", b)
    is_turned = weight is not None and weight.transposed and weight.rotation is not None
    if is_turned and (activation is not None or b is not None):
        raise error(
            ValueError,
            f"w is a rotated weight {shape}, the transpose of the (K, N) that was quantised",
            "its products are rotated back, and take neither an activation nor b",
            "apply both to the result, or pass dequantize(w)",
        )
    if layouts.workspace is not None:
        require_workspace(layouts.workspace)
    rows = math.prod(x.shape[:-1])
    for name, extent in (("M", rows), ("K", x.shape[-1]), ("N", columns)):
        if extent > MAX_EXTENT:
            raise error(
                ValueError,
                f"{name} = {extent}",
                f"M, K and the columns of w are at most {MAX_EXTENT}",
                "split the call",
            )
    if w is not None:
        matrix, operand = _as_matrix(w, starts.w or 0), None
    else:
        assert weight is not None
        strides = (columns, 1) if weight.transposed else (1, shape[0])
        matrix = Matrix(shape[0], columns, *strides, x.dtype.itemsize, 0)
        operand = _operand(weight, layouts, starts)
    return _Inputs(
        rows,
        x.shape[-1],
        columns // 2 if activation in GATES else columns,
        x.dtype,
        activation,
        rows_matrix("x", x, starts.x),
        matrix,
        operand,
        None if b is None else Matrix(1, columns, columns, 1, b.dtype.itemsize, starts.b or 0),
    )


def _operand(
    weight: WeightFormat,
    layouts: LinearArrays[Layout] | LinearBackwardArrays[Layout],
    starts: LinearArrays[int] | LinearBackwardArrays[int],
) -> QuantisedOperand:
    """Describe the arrays of a quantised weight."""
    codes = _as_lines(layouts.codes, starts.codes)
    scales = _as_lines(layouts.scales, starts.scales)
    assert codes is not None
    assert scales is not None
    super_scales = _as_lines(layouts.super_scales, starts.super_scales)
    return QuantisedOperand(*weight, codes, scales, super_scales)


def _in_order(layouts: dict[str, Layout | None]) -> dict[str, Layout]:
    """Return the arrays that are present, in the order of the public functions' parameters."""
    names = ("dout", "x", "w", "b", "preactivation", "residual")
    return {name: layout for name in names if (layout := layouts.get(name)) is not None}


def _plain_shape(w: Layout) -> tuple[int, ...]:
    require_dtype("w", w, CPU_FLOATS)
    require_rank("w", w, "K N")
    _require_a_contiguous_axis("w", w)
    return w.shape


def _quantised_shape(codes: Layout | None, weight: WeightFormat | None) -> tuple[int, ...]:
    """Return the shape of a quantised weight; its class has checked the arrays."""
    assert codes is not None
    assert weight is not None
    rows, width = codes.shape
    width = width * 8 // FORMATS[weight.format].bits
    return (rows, width) if weight.transposed else (width, rows)


def _as_lines(layout: Layout | None, start: int | None) -> Matrix | None:
    """Describe an array in C order as a matrix: its first axis by all others."""
    if layout is None:
        return None
    columns = math.prod(layout.shape[1:])
    return Matrix(layout.shape[0], columns, columns, 1, layout.dtype.itemsize, start or 0)


def _require_rows_like_x(name: str, layout: Layout, shape: tuple[int, ...], meaning: str) -> None:
    require_shape(name, layout, shape, f"{meaning} with the axes of x before its last")
    require_contiguous_rows(name, layout)


def _require_a_contiguous_axis(name: str, layout: Layout, fix: str = "") -> None:
    """Raise unless one of the two axes is contiguous and the strides are whole items."""
    itemsize = layout.dtype.itemsize
    if 0 in layout.shape:
        return
    if not any(
        extent == 1 or stride == itemsize
        for extent, stride in zip(layout.shape, layout.strides, strict=True)
    ):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {itemsize} bytes",
            "one of its two axes is contiguous, as in an array in C order, its transpose, and "
            "slices of either",
            fix or contiguous_copy(name),
        )
    require_whole_item_strides(name, layout, fix)


def _as_matrix(layout: Layout, start: int) -> Matrix:
    """Describe a two-dimensional array that is contiguous along one of its axes."""
    itemsize = layout.dtype.itemsize
    rows, columns = layout.shape
    row_stride, column_stride = (stride // itemsize for stride in layout.strides)
    if column_stride == 1 and columns > 1:
        return Matrix(rows, columns, row_stride, 1, itemsize, start)
    if row_stride == 1 and rows > 1:
        return Matrix(rows, columns, 1, column_stride, itemsize, start)
    if columns == 1:
        return Matrix(rows, columns, row_stride, 1, itemsize, start)
    return Matrix(rows, columns, 1, column_stride, itemsize, start)


_SKINNY: Plans = (*kernels_skinny.PLANS, *kernels_float32.FEW_ROWS)
PLANS: Plans = (*_SKINNY, *kernels_tensor_core.PLANS, *kernels_float32.PLANS)
"""Implementations by preference: skinny, on tensor cores, and in float32 arithmetic.

The last ones take every problem: float16 too, on devices without tensor cores.
"""

QUANTISED_PLANS: Plans = (*kernels_quantised_skinny.PLANS, *kernels_quantised_tile.PLANS)
"""Implementations for a quantised weight, in the same order."""


def _steps(product: str, draft: D) -> tuple[Step, ...]:
    """Return the launches of a product by the first implementation that takes it."""
    problem = draft.problem
    plans = PLANS if problem.weight is None else QUANTISED_PLANS
    # Without anything to sum over, K = 0, only the kernels that take everything are right.
    for entry in plans if problem.inner else kernels_float32.PLANS:
        fits = entry.product == product and problem.dtype.name in entry.dtypes
        if fits and entry.runs(draft.traits, problem.dtype.name) and entry.takes(problem):
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
    return planner.plan(*_whole_forward(ForwardDraft(problem, planner.slots, traits, planner)))


def _whole_forward(draft: ForwardDraft) -> tuple[Step, ...]:
    """Return the launches of a forward, with those that prepare its operands."""
    problem = draft.problem
    if kernels_int8.is_chosen(problem, draft.traits):
        return kernels_int8.forward_steps(draft)
    weight = problem.weight
    if weight is not None and weight.rotation is not None and weight.transposed:
        return _rotated_forward(draft)
    expanding, draft = _with_expanded_scales(draft)
    rotating, draft = kernels_int8.float_rows(draft) if problem.weight else ((), draft)
    return (*expanding, *rotating, *_steps("forward", draft))


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
        before = (*before, *_whole_forward(_recomputing(draft)))
    if problem.weight is None or problem.weight.rotation is None:
        products = ("dx", "dw" if problem.weight is None else "db")
        steps = [step for product in products for step in _steps(product, draft)]
    else:
        steps = [*_rotated_dx(draft), *_steps("db", draft)]
    # Products share the step that forms dz: one object, which runs once.
    once = {id(step): step for step in steps}
    return planner.plan(*before, *once.values(), zero_new=problem.accumulate, transposed=transposed)


def _rotated_forward(draft: ForwardDraft) -> tuple[Step, ...]:
    """Return the launches of a product whose columns are rotated: it is rotated back."""
    problem, slots, dtype = draft.problem, draft.slots, draft.problem.dtype
    out = contiguous_rows(problem.rows, problem.outer, dtype)
    slot = draft.planner.scratch(scratch_items(problem.rows * problem.outer, dtype.itemsize))
    inner = replace(problem, out=out, residual=None)
    inner_slots = replace(slots, out=slot, residual=None)
    steps = _steps("forward", replace(draft, problem=inner, slots=inner_slots))
    result, addend = RotatedSide(problem.out, dtype.name, slots.out), None
    if problem.residual is not None:
        addend = RotatedSide(problem.residual, dtype.name, slots.residual)
    return (*steps, rotate_step(RotatedSide(out, dtype.name, slot), result, addend))


def _rotated_dx(draft: BackwardDraft) -> tuple[Step, ...]:
    """Return the launches of dx for a rotated weight: the product, which is rotated back."""
    problem, dtype = draft.problem, draft.problem.dtype
    rotated = contiguous_rows(problem.rows, problem.inner, dtype)
    slot = draft.planner.scratch(scratch_items(problem.rows * problem.inner, dtype.itemsize))
    inner = replace(problem, dx=rotated, accumulate=False)
    inner_draft = replace(draft, problem=inner, slots=replace(draft.slots, dx=slot))
    steps = _steps("dx", inner_draft)
    draft.formed = inner_draft.formed  # the launch that forms dz, if both products need it
    dx = RotatedSide(problem.dx, dtype.name, draft.slots.dx)
    addend = dx if problem.accumulate else None
    return (*steps, rotate_step(RotatedSide(rotated, dtype.name, slot), dx, addend))


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
    """Raise unless ``linear(x, w)`` is a valid call."""
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
