"""The C struct that attention kernels are passed, filled from a checked problem."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyattn.arrays import Layout
from cupyattn.kernels.structs import ATTENTION_PARAMS, UNBOUNDED
from cupyattn.ops.attention_problem import LSE_DTYPE, AttentionProblem


def attention_params(
    problem: AttentionProblem,
    out_strides: tuple[int, ...],
    lse_strides: tuple[int, ...] | None,
) -> Any:
    """Fill the C struct AttentionParams, all but the seed."""
    params = np.zeros((), ATTENTION_PARAMS)
    itemsize = problem.dtype.itemsize
    for name in ("q", "k", "v"):
        params[name] = row_strides(problem.layouts[name].strides, itemsize)
    params["out"] = row_strides(out_strides, itemsize)
    if lse_strides is not None:
        params["lse"] = sum_strides(lse_strides)
    for name, field in (("q_offset", "q_offsets"), ("seqused_k", "seqused_k")):
        if name in problem.layouts:
            params[field] = _batch_integers(problem.layouts[name])
    params["heads"] = problem.heads
    params["group"] = problem.heads // max(problem.kv_heads, 1)
    params["sq"], params["sk"] = problem.sq, problem.sk
    params["q_offset"] = problem.q_offset
    for side, keys in zip(("left", "right"), problem.window, strict=True):
        params[side] = UNBOUNDED if keys is None else min(keys, UNBOUNDED)
    params["scale_log2"] = problem.softmax_scale * math.log2(math.e)
    params["softmax_scale"] = problem.softmax_scale
    _fill_scores(params["scores"], problem)
    return params[()]


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


def with_seed(params: Any, seed: int) -> Any:
    """Return the C struct AttentionParams, or one that holds it, with a seed for dropout."""
    seeded = params.copy()
    attention = seeded["attention"] if "attention" in seeded.dtype.names else seeded
    attention["scores"]["seed"] = seed
    return seeded


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


def _batch_integers(layout: Layout) -> tuple[int, int]:
    return layout.strides[0] // layout.dtype.itemsize, int(layout.dtype.itemsize == 8)
