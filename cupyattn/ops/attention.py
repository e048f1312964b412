"""Attention on a device: from a checked problem to a launched kernel."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, Layout, alignments
from cupyattn.errors import error
from cupyattn.kernels import configs
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES, vector_items
from cupyattn.kernels.device import Device
from cupyattn.kernels.launch import launch
from cupyattn.kernels.registry import ATTENTION_PARAMS, UNBOUNDED
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops.attention_problem import FORWARD_RESULTS, LSE_DTYPE, AttentionProblem
from cupyattn.ops.checks import require_disjoint, require_item_alignment

# What the kernels of today read; a problem with more is the reference's.
_KERNEL_ARRAYS = {"q", "k", "v", "q_offset", "seqused_k", *FORWARD_RESULTS}
_MAX_LENGTH = 2**30  # a length plus a tile stays within 32 bits


class _Plan(NamedTuple):
    """All that a launch needs and that does not change from call to call."""

    specialisation: Specialisation
    ctas: int
    params: Any


def attention_forward(
    device: Device,
    problem: AttentionProblem,
    arrays: dict[str, Array],
    *,
    return_lse: bool,
) -> tuple[Array, Array | None]:
    """Run dense attention forward, into `out` and `lse` where they are among `arrays`."""
    _require_kernel(problem)
    require_disjoint(FORWARD_RESULTS, arrays, problem.spans)

    out, lse = arrays.get("out"), arrays.get("lse")
    if out is None:
        out = device.empty(problem.out_shape, problem.dtype)
    if lse is None and return_lse:
        lse = device.empty(problem.lse_shape, LSE_DTYPE)

    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    lse_strides = None if lse is None else lse.strides
    starts = alignments(arrays.values(), VECTOR_BYTES)
    plan = _plan(problem, out.strides, lse_strides, starts)

    integers = (arrays.get("q_offset"), arrays.get("seqused_k"))
    launch(device, plan.specialisation, plan.ctas, (q, k, v, out, lse, *integers, plan.params))
    return out, lse


@lru_cache(maxsize=4096)
def _require_kernel(problem: AttentionProblem) -> None:
    missing = [name for name in problem.layouts if name not in _KERNEL_ARRAYS]
    missing += [name for name in ("softcap", "mask_mod") if getattr(problem, name) is not None]
    missing += ["dropout_p"] if problem.dropout_p else []
    if missing:
        names = ", ".join("rotary" if name in ("cos", "sin") else name for name in missing)
        raise error(
            NotImplementedError,
            f"{names} on a GPU or the emulator",
            "the kernels have causal, window_size, q_offset and seqused_k so far; the CPU path has "
            "every option",
            "pass NumPy arrays, for example cupy.asnumpy(q)",
        )
    if problem.implementation == "flash":
        raise error(
            NotImplementedError,
            "implementation='flash' on a GPU or the emulator",
            "the tensor-core kernel is not there yet; 'tiled' and 'naive' are",
            "pass implementation='tiled'",
        )
    if max(problem.sq, problem.sk) > _MAX_LENGTH:
        raise error(
            ValueError,
            f"Sq = {problem.sq}, Sk = {problem.sk} on a GPU",
            f"lengths are at most {_MAX_LENGTH}",
            "split the sequence",
        )


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem,
    out_strides: tuple[int, ...],
    lse_strides: tuple[int, ...] | None,
    starts: tuple[int, ...],
) -> _Plan:
    """Choose the specialisation and the grid, and fill in the kernel's parameters.

    `starts` says by how much each array of the problem misses a vector's alignment.
    """
    start_of = dict(zip(problem.layouts, starts, strict=True))
    require_item_alignment(problem.layouts, start_of)
    dtype, dims = problem.dtype.name, (problem.head_dim, problem.head_dim_v)
    if problem.implementation == "naive":
        specialisation, tile_q = configs.attention.naive(dtype, *dims), 1
    else:
        vec = _vector_items(problem, start_of)
        specialisation = configs.attention.tiled(dtype, *dims, vec)
        tile_q = configs.attention.tiled_config(*dims).tile_q
    ctas = problem.batch * problem.heads * -(-problem.sq // tile_q)
    return _Plan(specialisation, ctas, _params(problem, out_strides, lse_strides))


def _vector_items(problem: AttentionProblem, start_of: dict[str, int]) -> int:
    """Return 16 bytes' worth of items if every row of q, k and v starts at a multiple, else 1."""
    items = vector_items(problem.dtype.name)
    aligned = all(
        start_of[name] == 0
        and all(stride % VECTOR_BYTES == 0 for stride in problem.layouts[name].strides[:-1])
        for name in ("q", "k", "v")
    )
    whole = problem.head_dim % items == 0 and problem.head_dim_v % items == 0
    return items if aligned and whole else 1


def _params(
    problem: AttentionProblem,
    out_strides: tuple[int, ...],
    lse_strides: tuple[int, ...] | None,
) -> Any:
    """Fill the C struct AttentionParams."""
    params = np.zeros((), ATTENTION_PARAMS)
    itemsize = problem.dtype.itemsize
    for name in ("q", "k", "v"):
        params[name] = _strides(problem.layouts[name].strides, itemsize)
    params["out"] = _strides(out_strides, itemsize)
    if lse_strides is not None:
        batch, head, seq = (stride // LSE_DTYPE.itemsize for stride in lse_strides)
        params["lse"] = (batch, seq, head)
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
    return params[()]


def _strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Bytes of (batch, seq, head, dim) to items of (batch, seq, head)."""
    batch, seq, head, _ = strides
    return batch // itemsize, seq // itemsize, head // itemsize


def _batch_integers(layout: Layout) -> tuple[int, int]:
    return layout.strides[0] // layout.dtype.itemsize, int(layout.dtype.itemsize == 8)
