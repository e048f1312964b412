"""Attention on a device: from a checked problem, dense or packed, to a plan that ran."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.attention.block_mask import NO_LISTS, block_lists
from cupyattn.ops.attention.choice import (
    IMPLEMENTATIONS,
    LEAST_KEYS,
    ForwardChoice,
    choose_forward,
    require_kernels,
)
from cupyattn.ops.attention.decode import launch_of, shared_keys_steps
from cupyattn.ops.attention.kernels import float32, int8, native, teaching, tensor_core
from cupyattn.ops.attention.kernels.combine import ROWS, combine
from cupyattn.ops.attention.modifiers import expression_error
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    attention_params,
    forward_params,
    interleaved,
    item_strides,
    quantized_keys_params,
    require_aligned_items,
    require_lengths,
    row_strides,
    score_options,
    seeded,
    step_of,
    sum_strides,
)
from cupyattn.ops.attention.problem import (
    MAX_LENGTH,
    AttentionArrays,
    AttentionProblem,
    forward_outputs,
    whole,
)
from cupyattn.ops.attention.rotary import rotate_inputs, take_scratch
from cupyattn.ops.attention.structs import ROTARY_TABLES, SPLIT_PARAMS, TEACHING_PARAMS, filled
from cupyattn.runtime.arrays import Array, Layout, Operands
from cupyattn.runtime.compile import CompilationError
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Plan, Planner, Step, run
from cupyattn.runtime.records import Record, given_of
from cupyattn.runtime.spec import Specialisation


def attention_forward(
    device: Device,
    problem: AttentionProblem,
    operands: Operands[AttentionArrays[Array]],
    *,
    seed: DropoutSeed,
    return_lse: bool,
) -> AttentionArrays[Array]:
    """Run attention forward, into `out` and `lse` where they are given."""
    plan = _plan(problem, device.traits, return_lse)
    if problem.options.dropout_p:
        plan = seeded(plan, seed)
    try:
        return run(device, plan, operands)
    except CompilationError as failure:
        raise expression_error(failure, problem.functions) from failure


@lru_cache(maxsize=4096)
def _plan(problem: AttentionProblem, traits: DeviceTraits, return_lse: bool) -> Plan:
    """Choose the kernels and their grids, and fill in their parameters."""
    function = "attention_varlen" if problem.packed else "attention"
    require_kernels(problem, IMPLEMENTATIONS[function], function)
    require_sizes(problem)
    outputs = forward_outputs(problem, return_lse)
    choice = choose_forward(problem, outputs, traits)
    traits.choices.because(*choice.reasons)
    planner = Planner(type(problem.given), problem.given, outputs)
    place_queries(problem, planner)
    given = {name: getattr(planner.slots, name) for name in choice.rotated}
    if choice.rotated:
        take_scratch(planner, choice.problem, choice.rotated)
    plan = interleaved(
        planner.plan(*_STEPS[choice.kernels](choice, planner, traits)), *choice.interleaving
    )
    if not given:
        return plan
    rotation = rotate_inputs(problem, choice.problem, given, planner, traits.arch)
    return plan._replace(steps=(rotation, *plan.steps))


def require_sizes(problem: AttentionProblem) -> None:
    """Raise ValueError for lengths that kernels do not reach, and for arrays within an item."""
    if not problem.packed:
        require_lengths(problem)
    require_aligned_items(problem)
    if problem.packed and max(problem.total_q, problem.total_k) > MAX_LENGTH:
        raise error(
            ValueError,
            f"q has {problem.total_q} rows, k and v have {problem.total_k}, on a GPU",
            f"packed arrays have at most {MAX_LENGTH} rows",
            "split the batch over several calls",
        )


def place_queries(problem: AttentionProblem, planner: AttentionPlanner) -> None:
    """Have kernels read where queries are from seqused_k, if it decides that."""
    if problem.ends_with_keys_in_use and not problem.packed:
        planner.slots = whole(planner.slots)
        planner.slots.q_offset = planner.slots.seqused_k


def _teaching_steps(
    choice: ForwardChoice, planner: AttentionPlanner, traits: DeviceTraits
) -> list[Step]:
    problem = choice.problem
    shape = problem.dtype.name, problem.head_dim, problem.head_dim_v
    if choice.kernels == "naive":
        kernel, rows = teaching.forward.naive(*shape), 1
    else:
        kernel = teaching.forward.tiled(traits.arch, *shape)
        rows = teaching.forward.tiled_row(traits.arch, *shape[1:]).tile_q
    params = teaching_params(TEACHING_PARAMS, problem, choice.laid)
    ctas = problem.heads * problem.query_tiles(rows)
    return [step_of(kernel, ctas, planner.slots, params)]


def teaching_params(
    struct: np.dtype, problem: AttentionProblem, laid: Record[Layout], **more: int
) -> Any:
    """Fill the C struct TeachingParams, or TeachingBackwardParams with `more` fields."""
    arrays = given_of(laid)
    strides = {
        name: (sum_strides if name in ("lse", "dlse") else row_strides)(arrays[name])
        for name in struct.names or ()
        if name in arrays
    }
    return filled(
        struct,
        **strides,
        **more,
        heads=problem.heads,
        group=problem.heads // max(problem.kv_heads, 1),
        sq=problem.sq,
        sk=problem.sk,
        causal=problem.window == (None, 0),
        softmax_scale=problem.softmax_scale,
    )


def _decode_steps(
    choice: ForwardChoice, planner: AttentionPlanner, traits: DeviceTraits
) -> list[Step]:
    problem, sms = choice.problem, traits.multiprocessors
    launch = launch_of(problem, traits)
    dense: dict[str, Any] = {"loader": "DenseFeed", "fields": {}}
    return shared_keys_steps(problem, choice.laid, planner, launch, sms, **dense)


def _float32_steps(
    choice: ForwardChoice, planner: AttentionPlanner, traits: DeviceTraits
) -> list[Step]:
    problem, options, forward = choice.problem, choice.options, float32.forward
    shape = traits.arch, problem.dtype.name, problem.head_dim, problem.head_dim_v, choice.vec
    if choice.splits > 1:
        kernel = forward.flash(*shape, options._replace(sinks="void"), forward.SPLIT)
        return _split_steps(choice, planner, kernel)
    spec = forward.VARLEN if problem.packed else forward.KERNEL
    return _whole_steps(choice, planner, forward.flash(*shape, options, spec))


def _tensor_core_steps(
    choice: ForwardChoice, planner: AttentionPlanner, traits: DeviceTraits
) -> list[Step]:
    problem, options = choice.problem, choice.options
    forward, cos = tensor_core.forward, problem.layouts.cos
    row: Any = choice.configuration
    shape = traits.arch, problem.head_dim, problem.head_dim_v, choice.vec
    if cos is not None:
        tables = cos.dtype.name, problem.options.interleaved, problem.packed
        sums = row if row.accumulator == "float16" else None
        kernel = forward.rotary(*shape, options, *tables, row=sums)
        return _whole_steps(choice, planner, kernel, _tables(problem))
    if choice.splits > 1:
        kernel = forward.flash(*shape, options._replace(sinks="void"), row, forward.SPLIT)
        return _split_steps(choice, planner, kernel)
    spec = forward.VARLEN if problem.packed else forward.KERNEL
    return _whole_steps(choice, planner, forward.flash(*shape, options, row, spec))


def _int8_steps(
    choice: ForwardChoice, planner: AttentionPlanner, traits: DeviceTraits
) -> list[Step]:
    problem = choice.problem
    spec = int8.VARLEN if problem.packed else int8.KERNEL
    dims = problem.head_dim, problem.head_dim_v
    row: Any = choice.configuration
    kernel = int8.flash(*dims, choice.vec, choice.options, spec, row)
    return _whole_steps(choice, planner, kernel, quantized_keys_params(problem))


def _native_steps(
    choice: ForwardChoice, planner: AttentionPlanner, traits: DeviceTraits
) -> list[Step]:
    problem, options = choice.problem, choice.options
    row: Any = choice.configuration
    shape = traits.arch, problem.dtype.name, problem.head_dim, problem.head_dim_v, choice.vec
    if choice.splits > 1:
        kernel = native.flash(*shape, options._replace(sinks="void"), native.SPLIT, row)
        return _split_steps(choice, planner, kernel)
    spec = native.VARLEN if problem.packed else native.KERNEL
    return _whole_steps(choice, planner, native.flash(*shape, options, spec, row))


_STEPS: Mapping[str, Any] = {
    "native": _native_steps,
    "naive": _teaching_steps,
    "tiled": _teaching_steps,
    "decode": _decode_steps,
    "float32": _float32_steps,
    "int8": _int8_steps,
    "tensor_core": _tensor_core_steps,
}


def _tables(problem: AttentionProblem) -> Any:
    """Fill the C struct RotaryTables."""
    cos, sin = problem.layouts.cos, problem.layouts.sin
    assert cos is not None
    assert sin is not None
    return filled(
        ROTARY_TABLES,
        cos_stride=item_strides(cos)[0],
        sin_stride=item_strides(sin)[0],
        length=cos.shape[0],
        half=cos.shape[1],
    )


def _whole_steps(
    choice: ForwardChoice, planner: AttentionPlanner, kernel: Specialisation, *tables: Any
) -> list[Step]:
    """Return the launch of CTAs that read all keys of their rows, after a block mask's lists.

    `tables` is the C struct RotaryTables, for a kernel that takes it.
    """
    problem, row = choice.problem, choice.configuration
    assert row is not None
    lists = NO_LISTS
    if problem.layouts.block_mask is not None:
        lists = block_lists(problem, planner, row.tile_q, row.tile_k, row.warp_rows)
    step = step_of(
        kernel,
        problem.heads * problem.query_tiles(row.tile_q),
        planner.slots,
        forward_params(problem, choice.laid),
        *tables,
        *problem.block_modifier_strides,
        block_lists=lists.slot,
    )
    return [*lists.steps, step]


def _split_steps(
    choice: ForwardChoice, planner: AttentionPlanner, kernel: Specialisation
) -> list[Step]:
    """Return both launches: each part of the keys, then the sum of the parts of each row."""
    problem, row, splits = choice.problem, choice.configuration, choice.splits
    assert row is not None
    params = filled(
        SPLIT_PARAMS,
        attention=attention_params(problem, choice.laid),
        splits=splits,
        least_keys=LEAST_KEYS,
        batch=problem.batch,
    )
    rows = math.prod(problem.lse_shape)
    tiles = problem.heads * problem.query_tiles(row.tile_q)
    places = {
        "partial_out": planner.scratch(rows * splits * problem.head_dim_v),
        "partial_sums": planner.scratch(rows * splits * 2),
    }
    sinks = score_options(problem).sinks
    adder = combine(problem.dtype.name, problem.head_dim_v, row.tile_q, row.tile_k, sinks)
    values = params, *problem.modifier_strides
    return [
        step_of(kernel, tiles * splits, planner.slots, *values, **places),
        step_of(adder, -(-rows // ROWS), planner.slots, params, **places),
    ]
