"""The C struct that attention kernels are passed, filled from a checked problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyattn.ops.attention.options import MAX_OFFSET, DropoutSeed
from cupyattn.ops.attention.packed import PackedProblem
from cupyattn.ops.attention.problem import LSE_DTYPE, AttentionProblem
from cupyattn.ops.attention.structs import (
    ATTENTION_PARAMS,
    BACKWARD_PARAMS,
    PAGED_PARAMS,
    SPLIT_PARAMS,
    UNBOUNDED,
    VARLEN_BACKWARD_PARAMS,
    VARLEN_PARAMS,
)
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Plan
from cupyattn.runtime.structs import new_struct

_WITH_ATTENTION: dict[np.dtype, tuple[str, ...]] = {
    ATTENTION_PARAMS: (),
    SPLIT_PARAMS: ("attention",),
    VARLEN_PARAMS: ("attention",),
    PAGED_PARAMS: ("attention",),
    BACKWARD_PARAMS: ("attention",),
    VARLEN_BACKWARD_PARAMS: ("backward", "attention"),
}
"""The C structs that hold AttentionParams, and where."""


def attention_params(problem: AttentionProblem, results: Mapping[str, Layout]) -> Any:
    """Fill the C struct AttentionParams, all but the seed; `results` are out and perhaps lse."""
    params = new_struct(ATTENTION_PARAMS)
    for name in ("q", "k", "v"):
        layout = problem.layouts[name]
        params[name] = row_strides(layout.strides, layout.dtype.itemsize)
    params["out"] = row_strides(results["out"].strides, problem.dtype.itemsize)
    if "lse" in results:
        params["lse"] = sum_strides(results["lse"].strides)
    if "seqused_k" in problem.layouts:
        params["seqused_k"] = batch_integers(problem.layouts["seqused_k"])
    _fill_offsets(params, problem)
    params["heads"] = problem.heads
    params["group"] = problem.heads // max(problem.kv_heads, 1)
    params["sq"], params["sk"] = problem.sq, problem.sk
    params["together"] = params["kv_together"] = params["batches"] = 1
    for side, keys in zip(("left", "right"), problem.window, strict=True):
        params[side] = UNBOUNDED if keys is None else min(keys, UNBOUNDED)
    params["scale_log2"] = problem.softmax_scale * math.log2(math.e)
    params["softmax_scale"] = problem.softmax_scale
    _fill_scores(params["scores"], problem)
    return params[()]


def forward_params(problem: AttentionProblem, results: Mapping[str, Layout]) -> Any:
    """Fill the C struct of the forward kernels: AttentionParams, or VarlenParams."""
    attention = attention_params(problem, results)
    if not isinstance(problem, PackedProblem):
        return attention
    params = new_struct(VARLEN_PARAMS)
    params["attention"] = attention
    _fill_packed(params["packed"], problem)
    return params[()]


def gradient_params(problem: AttentionProblem, backward: Any) -> Any:
    """Return the C struct of the backward kernels: BackwardParams, or VarlenBackwardParams."""
    if not isinstance(problem, PackedProblem):
        return backward
    params = new_struct(VARLEN_BACKWARD_PARAMS)
    params["backward"] = backward
    _fill_packed(params["packed"], problem)
    return params[()]


def _fill_packed(packed: Any, problem: PackedProblem) -> None:
    """Fill the C struct PackedBatch."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        packed[name] = batch_integers(problem.layouts[name])
    packed["batch"] = problem.batch
    packed["total_q"], packed["total_k"] = problem.total_q, problem.total_k
    packed["ends_with_keys"] = problem.q_offset is None and "q_offset" not in problem.layouts


def _fill_offsets(params: Any, problem: AttentionProblem) -> None:
    """Fill in where queries stand: a number, and beside it an array's value for each sequence."""
    layouts = problem.layouts
    params["offset_least"], params["offset_most"] = -MAX_OFFSET, MAX_OFFSET
    if "q_offset" in layouts:
        params["q_offsets"] = batch_integers(layouts["q_offset"])
    elif problem.ends_with_keys_in_use:
        params["q_offsets"] = params["seqused_k"]
        params["offset_least"], params["offset_most"] = 0, problem.sk
        params["q_offset"] = -problem.sq
    elif problem.q_offset is None:
        params["q_offset"] = problem.sk - problem.sq
    else:
        params["q_offset"] = problem.q_offset


def placed(plan: Plan, problem: AttentionProblem) -> Plan:
    """Return a plan whose kernels read where queries stand from seqused_k, if it decides that."""
    if not problem.ends_with_keys_in_use:
        return plan
    names = {"q_offset": "seqused_k"}
    return plan._replace(steps=tuple(step.renamed(names) for step in plan.steps))


def _fill_scores(scores: Any, problem: AttentionProblem) -> None:
    """Fill the C struct ScoreParams."""
    layouts = problem.layouts
    for name in ("bias", "mask"):
        if name in layouts:
            scores[name] = score_strides(layouts[name], problem.scores_shape)
    if "alibi_slopes" in layouts:
        slopes = layouts["alibi_slopes"]
        *batch, head = (stride // slopes.dtype.itemsize for stride in slopes.strides)
        scores["slopes_batch"], scores["slopes_head"] = (*batch, head) if batch else (0, head)
    if "sinks" in layouts:
        scores["sinks_stride"] = layouts["sinks"].strides[0] // layouts["sinks"].dtype.itemsize
    if problem.softcap is not None:
        scores["softcap_in"] = 2 * math.log2(math.e) * problem.softmax_scale / problem.softcap
        scores["softcap"] = problem.softcap
    keep_from = round(65536 * problem.dropout_p)
    scores["keep_from"] = keep_from
    # Of 65,536 a kernel may see only the lower 16 bits, and keep everything.
    scores["keep_scale"] = 1 / (1 - problem.dropout_p) if keep_from < 65536 else 0


def seeded(plan: Plan, seed: DropoutSeed) -> Plan:
    """Return a plan with a seed for dropout in the structs of its kernels."""

    def change(attention: Any) -> None:
        scores = attention["scores"]
        scores["seed"] = seed.seed
        scores["first_batch"], scores["first_query"] = seed.batch, seed.query
        scores["first_counter"] = seed.key // 8

    return _changed(plan, change)


def interleaved(plan: Plan, kv_together: int, batches: int) -> Plan:
    """Return a plan in whose grids so many key-value heads, and their queries' heads, take turns.

    None of them, not even those of one group, where it is 0. Like heads of so many batch elements
    are neighbours.
    """
    if kv_together == 0:
        return plan

    def change(attention: Any) -> None:
        attention["together"] = kv_together * attention["group"]
        attention["kv_together"] = kv_together
        attention["batches"] = batches

    return _changed(plan, change)


def _changed(plan: Plan, change: Callable[[Any], None]) -> Plan:
    """Return a plan after a change to each C struct AttentionParams, and to those within others."""
    return plan._replace(
        steps=tuple(
            step._replace(values=tuple(_changed_params(value, change) for value in step.values))
            for step in plan.steps
        )
    )


def _changed_params(params: Any, change: Callable[[Any], None]) -> Any:
    if params.dtype not in _WITH_ATTENTION:
        return params
    # Its own copy() takes NumPy 36 us, field by field.
    part = changed = np.frombuffer(bytearray(params.tobytes()), params.dtype)[0]
    for name in _WITH_ATTENTION[params.dtype]:
        part = part[name]
    change(part)
    return changed


def score_strides(layout: Layout, scores_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in items, of an array broadcast to (B, H, Sq, Sk).

    Examples
    --------
    >>> score_strides(Layout((3, 1, 5), (20, 20, 4), np.dtype(np.float32)), (2, 3, 7, 5))
    (0, 5, 0, 1)
    """
    missing = len(scores_shape) - len(layout.shape)
    strides = [
        0 if extent == 1 else stride // layout.dtype.itemsize
        for extent, stride in zip(layout.shape, layout.strides, strict=True)
    ]
    return (0,) * missing + tuple(strides)


def row_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Bytes of (batch, seq, head, dim) to the struct's items of (batch, seq, head)."""
    batch, seq, head, _ = strides
    return batch // itemsize, seq // itemsize, head // itemsize


def sum_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of lse (batch, head, seq), or of its gradient, to items of (batch, seq, head)."""
    batch, head, seq = (stride // LSE_DTYPE.itemsize for stride in strides)
    return batch, seq, head


def batch_integers(layout: Layout) -> tuple[int, int]:
    """Return what the C struct BatchIntegers says of an array."""
    return layout.strides[0] // layout.dtype.itemsize, int(layout.dtype.itemsize == 8)
