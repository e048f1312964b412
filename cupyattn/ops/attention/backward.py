"""Attention's backward on a device: from a checked problem, dense or packed, to a plan that ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.attention.backward_tensor_core import sum_step, tensor_core_plan
from cupyattn.ops.attention.block_mask import block_lists
from cupyattn.ops.attention.choice import (
    IMPLEMENTATIONS,
    arithmetic,
    interleaving,
    require_kernels,
)
from cupyattn.ops.attention.forward import place_queries, require_sizes, teaching_params
from cupyattn.ops.attention.kernels import teaching
from cupyattn.ops.attention.kernels.float32 import backward
from cupyattn.ops.attention.modifiers import expression_error, require_gradient
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    backward_params,
    gradient_params,
    interleaved,
    score_options,
    seeded,
    step_of,
    whole_vectors,
)
from cupyattn.ops.attention.problem import (
    AttentionBackwardArrays,
    AttentionProblem,
    Outputs,
    gradient_outputs,
    with_results,
)
from cupyattn.ops.attention.rotary import (
    Rotated,
    in_scratch,
    rotate_inputs,
    rotation_step,
    take_scratch,
)
from cupyattn.ops.attention.structs import TEACHING_BACKWARD_PARAMS
from cupyattn.runtime.arrays import Array, Operands, contiguous
from cupyattn.runtime.compile import CompilationError
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Plan, Planner, run

_FLOAT32 = np.dtype(np.float32)
_PlanOf = Callable[..., Plan]


def attention_backward(
    device: Device,
    problem: AttentionProblem,
    operands: Operands[AttentionBackwardArrays[Array]],
    *,
    seed: DropoutSeed,
    deterministic: bool,
    accumulate: bool,
) -> AttentionBackwardArrays[Array]:
    """Run the backward; return the arrays with the gradients of those that are given."""
    plan = _plan(problem, device.traits, deterministic, accumulate)
    if problem.options.dropout_p:
        plan = seeded(plan, seed)
    try:
        return run(device, plan, operands)
    except CompilationError as failure:
        raise expression_error(failure, problem.functions) from failure


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem, traits: DeviceTraits, deterministic: bool, accumulate: bool
) -> Plan:
    """Choose the kernels and fill in their parameters."""
    function = "attention_varlen_backward" if problem.packed else "attention_backward"
    require_kernels(problem, IMPLEMENTATIONS[function], function)
    require_gradient(problem.functions)
    require_sizes(problem)
    outputs = gradient_outputs(problem)
    planner = Planner(type(problem.given), problem.given, outputs)
    if problem.batch * problem.heads == 0:
        return _nothing_to_add(problem, planner, outputs, accumulate)
    place_queries(problem, planner)
    plan_of, reasons = _choose(problem, traits, deterministic)
    traits.choices.because(*reasons)
    how = {"deterministic": deterministic, "accumulate": accumulate}
    if problem.layouts.cos is not None:
        return _rotated(problem, planner, outputs, plan_of, traits, how)
    plan = plan_of(problem, planner, outputs, traits, **how)
    return interleaved(plan, *interleaving(problem, traits, backward=True))


def _choose(
    problem: AttentionProblem, traits: DeviceTraits, deterministic: bool
) -> tuple[_PlanOf, tuple[str, ...]]:
    """Choose the kernels of a backward call; return what plans them, and why."""
    if problem.options.implementation == "naive":
        return _naive_plan, ("implementation='naive' was passed",)
    dtype = problem.dtype.name
    on_tensor_cores = traits.multiplies(dtype)
    if deterministic:
        passes = "dq has a kernel of its own: deterministic=True excludes atomic additions"
    elif on_tensor_cores or _float32_in_one_pass(problem):
        passes = "one kernel computes dk and dv, and adds to dq atomically"
    else:
        passes = f"dq has a kernel of its own: packed rows of {dtype} are not summed in float32"
    return tensor_core_plan if on_tensor_cores else _float32_plan, (
        arithmetic("tensor_core" if on_tensor_cores else "float32", dtype),
        passes,
    )


def _float32_in_one_pass(problem: AttentionProblem) -> bool:
    """Return whether float32 arithmetic has kernels of one pass for a call.

    What rounds its sums to other dtypes has dense arrays alone.
    """
    return not problem.packed or problem.dtype == _FLOAT32


def _rotated(
    problem: AttentionProblem,
    planner: AttentionPlanner,
    outputs: Outputs,
    plan_of: _PlanOf,
    traits: DeviceTraits,
    how: dict[str, bool],
) -> Plan:
    """Plan a call with rotary: dq and dk are rotated back in place.

    Where they are added to what is there, they are made in scratch memory.
    """
    slots: Any = planner.slots
    apart = ("dq", "dk") if how["accumulate"] else ()
    inner = in_scratch(problem, ("q", "k", *apart))
    given = {name: getattr(slots, name) for name in ("q", "k", "dq", "dk")}
    take_scratch(planner, inner, ("q", "k", *apart))
    plan = plan_of(inner, planner, outputs, traits, **how)
    plan = interleaved(plan, *interleaving(problem, traits, backward=True))
    made, results = with_results(inner, outputs), with_results(problem, outputs)
    gradients = []
    for name in ("dq", "dk"):
        start = getattr(problem.starts, name) or 0
        source = getattr(made, name), 0 if apart else start, getattr(slots, name)
        gradients.append(Rotated(*source, getattr(results, name), start, given[name]))
    inputs = {name: given[name] for name in ("q", "k")}
    first = rotate_inputs(problem, inner, inputs, planner, traits.arch)
    last = rotation_step(problem, gradients, planner, traits.arch, how["accumulate"])
    return plan._replace(
        steps=(first, *plan.steps, last),
        zero_first=(*plan.zero_first, *(getattr(slots, name) for name in apart)),
    )


def _nothing_to_add(
    problem: AttentionProblem, planner: AttentionPlanner, outputs: Outputs, accumulate: bool
) -> Plan:
    """Return the plan of a call without sequences or heads: gradients are 0, and no kernel runs.

    Rows of packed arrays are of no sequence then, and stay as they are.
    """
    kept = ("dq", "dk", "dv") if problem.packed else ()
    names = () if accumulate else tuple(name for name in outputs if name not in kept)
    zero_first = [getattr(planner.slots, name) for name in names]
    return planner.plan(zero_first=zero_first, zero_new=True)


def _naive_plan(
    problem: AttentionProblem,
    planner: AttentionPlanner,
    outputs: Outputs,
    traits: DeviceTraits,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan the kernel to be read, one CTA per query row and one per key; always the same bits."""
    del traits, deterministic
    kernel = teaching.backward.naive(problem.dtype.name, problem.head_dim, problem.head_dim_v)
    laid, more = with_results(problem, outputs), {"batch": problem.batch, "accumulate": accumulate}
    params = teaching_params(TEACHING_BACKWARD_PARAMS, problem, laid, **more)
    ctas = problem.batch * (problem.heads * problem.sq + problem.kv_heads * problem.sk)
    return planner.plan(step_of(kernel, ctas, planner.slots, params), zero_new=accumulate)


def _float32_plan(
    problem: AttentionProblem,
    planner: AttentionPlanner,
    outputs: Outputs,
    traits: DeviceTraits,
    *,
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Plan float32 arithmetic: one pass with atomic additions to dq, or two kernels.

    Additions go to float32: to dq itself, or to scratch memory that is rounded to dq at the end.
    """
    laid: AttentionBackwardArrays[Any] = with_results(problem, outputs)
    slots: Any = planner.slots
    arch, packed = traits.arch, problem.packed
    options = score_options(problem)._replace(sinks="void")
    dims = problem.head_dim, problem.head_dim_v
    dtype, rows = problem.dtype.name, math.prod(problem.lse_shape)
    inputs = ("dout", "q", "k", "v")
    vec = whole_vectors(backward.VECTOR_ITEMS, problem, problem.layouts, inputs)
    scores = math.prod(problem.scores_shape)
    every_score = laid.dbias is not None and math.prod(laid.dbias.shape) == scores
    # Each score's, which another kernel sums. (The kernel of dbias has dense arrays alone.)
    gathered = packed and laid.dbias is not None and not every_score
    target = contiguous(problem.scores_shape, _FLOAT32) if gathered else laid.dbias
    written = "void" if target is None or not (every_score or gathered) else target.dtype.name
    dense = backward_params(problem, laid, accumulate=accumulate, dbias=target)
    params = gradient_params(problem, dense)

    one_pass = not deterministic and _float32_in_one_pass(problem)
    rounded = one_pass and problem.dtype != _FLOAT32
    scratch: dict[str, int] = {"delta": planner.scratch(rows)}
    places, in_one_pass, zero_first = {**scratch}, params, []
    if rounded:
        places["dq"] = scratch["dq_acc"] = planner.scratch(rows * problem.head_dim)
        zero_first.append(scratch["dq_acc"])
        sequence = problem.sq * problem.head_dim  # of a head: (B, H, Sq, D)
        in_one_pass = params.copy()
        in_one_pass["dq"] = problem.heads * sequence, problem.head_dim, sequence
    if gathered:
        places["dbias"] = scratch["scratch"] = planner.scratch(scores)
        zero_first.append(scratch["scratch"])
    in_tiles = options._replace(modified=problem.block_modifiers)
    strides = problem.block_modifier_strides
    row = backward.dkdv_row(arch, *dims, in_tiles)
    lists = block_lists(problem, planner, rows=row.tile_q, keys=row.tile_k, of_keys=True)
    zeroed_dim = dims[0] if one_pass and not accumulate else 0
    delta = backward.delta(dtype, dims[1], zeroed_dim if packed else None)
    dkdv = backward.dkdv(arch, dtype, *dims, vec, one_pass, in_tiles, written, packed)
    key_ctas = problem.kv_heads * problem.key_tiles(row.tile_k)
    places["block_lists"] = lists.slot  # type: ignore[assignment]
    steps = [
        step_of(delta, -(-rows // backward.CTA_ROWS), slots, params, **scratch),
        *lists.steps,
        step_of(dkdv, key_ctas, slots, in_one_pass, *strides, **places),
    ]
    if rounded:
        convert = backward.convert(dtype, dims[0])
        steps.append(step_of(convert, -(-rows // backward.CTA_ROWS), slots, params, **scratch))
    if not one_pass:
        dq = backward.dq(arch, dtype, *dims, vec, in_tiles, packed)
        row = backward.dq_row(arch, *dims, in_tiles)
        lists = block_lists(problem, planner, rows=row.tile_q, keys=row.tile_k)
        ctas = problem.heads * problem.query_tiles(row.tile_q)
        places = {**scratch, "block_lists": lists.slot}  # type: ignore[dict-item]
        steps += [*lists.steps, step_of(dq, ctas, slots, params, *strides, **places)]
    if gathered:
        assert target is not None
        assert laid.dbias is not None
        steps.append(sum_step(problem, laid.dbias, target, accumulate, planner, **scratch))
    elif laid.dbias is not None and not every_score:
        items = math.prod(laid.dbias.shape)
        config = backward.dbias_row(arch, scores // max(items, 1))
        kernel = backward.dbias(dtype, *dims, options, config)
        item_ctas = -(-items * config.lanes // config.threads)
        values = params, *problem.modifier_strides
        steps.append(step_of(kernel, item_ctas, slots, *values, **scratch))
    if laid.dsinks is not None:
        kernel = backward.dsinks(laid.dsinks.dtype.name, packed)
        steps.append(step_of(kernel, problem.heads, slots, params, **scratch))
    # (Of packed rows those that belong to a sequence are zeroed, by the kernel of delta.)
    dense_sums = one_pass and not rounded and not packed
    if not accumulate:
        zero_first += [slots.dq] if dense_sums else []
        zero_first += [slots.dbias] if every_score else []
    return planner.plan(*steps, zero_first=zero_first, zero_new=accumulate)
