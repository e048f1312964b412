"""Attention on a device: from a checked problem to a launched kernel."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, Layout, address
from cupyattn.errors import error
from cupyattn.kernels import configs
from cupyattn.kernels.configs.attention import FlashOptions
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES, vector_items
from cupyattn.kernels.device import Device
from cupyattn.kernels.launch import launch
from cupyattn.kernels.registry import ATTENTION_PARAMS, UNBOUNDED
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops.attention_problem import FORWARD_RESULTS, LSE_DTYPE, AttentionProblem
from cupyattn.ops.checks import require_disjoint

# What each kernel reads; a problem with more is the reference's.
_EVERY_KERNEL = {"q", "k", "v", "q_offset", "seqused_k", *FORWARD_RESULTS}
_FLASH_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")
_MAX_LENGTH = 2**30 - 2**10  # a row of the last tile stays below kFar (mask.cuh)


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
    misalignment = (address(q) | address(k) | address(v) | address(out)) % VECTOR_BYTES
    bias_misalignment = address(arrays["bias"]) % VECTOR_BYTES if "bias" in arrays else 0
    lse_strides = None if lse is None else lse.strides
    plan = _plan(problem, out.strides, lse_strides, misalignment, bias_misalignment)

    optional = [arrays.get("q_offset"), arrays.get("seqused_k")]
    if problem.options.implementation == "flash":
        optional += [arrays.get(name) for name in _FLASH_ARRAYS]
    launch(device, plan.specialisation, plan.ctas, (q, k, v, out, lse, *optional, plan.params))
    return out, lse


@lru_cache(maxsize=4096)
def _require_kernel(problem: AttentionProblem) -> None:
    options = problem.options
    flash = options.implementation == "flash"
    arrays = {*_EVERY_KERNEL, *_FLASH_ARRAYS} if flash else _EVERY_KERNEL
    missing = [
        "rotary" if name == "cos" else name for name in problem.layouts if name not in arrays
    ]
    missing += ["mask_mod"] if options.mask_mod is not None else []
    if not flash:
        missing += ["softcap"] if options.softcap is not None else []
        missing += ["dropout_p"] if options.dropout_p else []
    if missing:
        raise error(
            NotImplementedError,
            f"{', '.join(name for name in missing if name != 'sin')} on a GPU with "
            f"implementation={options.implementation!r}",
            "its kernel does not have that; the CPU path has every option",
            "pass NumPy arrays, for example cupy.asnumpy(q)"
            + ("" if flash else ", or leave implementation out"),
        )
    if flash and problem.dtype != np.float16:
        raise error(
            NotImplementedError,
            f"implementation='flash' with {problem.dtype.name} on a GPU",
            "the tensor-core kernel takes float16; 'tiled' and 'naive' take every dtype",
            "pass implementation='tiled', or float16 arrays",
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
    misalignment: int,
    bias_misalignment: int,
) -> _Plan:
    """Choose the specialisation and the grid, and fill in the kernel's parameters."""
    dtype, dims = problem.dtype.name, (problem.head_dim, problem.head_dim_v)
    if problem.options.implementation == "naive":
        specialisation, tile_q = configs.attention.naive(dtype, *dims), 1
    elif problem.options.implementation == "tiled":
        vec = _vector_items(problem, out_strides, misalignment)
        specialisation = configs.attention.tiled(dtype, *dims, vec)
        tile_q = configs.attention.tiled_config(*dims).tile_q
    else:
        vec = _vector_items(problem, out_strides, misalignment)
        options = _flash_options(problem, bias_misalignment)
        specialisation = configs.attention.flash(*dims, vec, options)
        tile_q = configs.attention.flash_config(*dims).tile_q
    ctas = problem.batch * problem.heads * -(-problem.sq // tile_q)
    return _Plan(specialisation, ctas, _params(problem, out_strides, lse_strides))


def _flash_options(problem: AttentionProblem, bias_misalignment: int) -> FlashOptions:
    layouts = problem.layouts

    def dtype(name: str) -> str:
        return layouts[name].dtype.name if name in layouts else "void"

    return FlashOptions(
        bias=dtype("bias"),
        bias_vec=_bias_pairs(problem, bias_misalignment),
        mask="mask" in layouts,
        slopes=dtype("alibi_slopes"),
        softcap=problem.options.softcap is not None,
        sinks=dtype("sinks"),
        dropout=problem.options.dropout_p > 0,
    )


def _bias_pairs(problem: AttentionProblem, misalignment: int) -> int:
    """Return 2 if two neighbouring keys of the bias can be read at once, else 1."""
    if "bias" not in problem.layouts:
        return 1
    strides = score_strides(problem.layouts["bias"], problem.scores_shape)
    pair = 2 * problem.layouts["bias"].dtype.itemsize
    even = strides[3] == 1 and all(stride % 2 == 0 for stride in strides[:3])
    return 2 if even and misalignment % pair == 0 else 1


def _vector_items(
    problem: AttentionProblem, out_strides: tuple[int, ...], misalignment: int
) -> int:
    """Return 16 bytes' worth of items if every row of q, k, v and out starts at a multiple."""
    items = vector_items(problem.dtype.name)
    strides = [problem.layouts[name].strides for name in ("q", "k", "v")]
    aligned = misalignment == 0 and all(
        stride % VECTOR_BYTES == 0 for axes in (*strides, out_strides) for stride in axes[:-1]
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
    _fill_scores(params["scores"], problem)
    return params[()]


def _fill_scores(scores: Any, problem: AttentionProblem) -> None:
    """Fill the C struct ScoreParams."""
    options, layouts = problem.options, problem.layouts
    for name in ("bias", "mask"):
        if name in layouts:
            scores[name] = score_strides(layouts[name], problem.scores_shape)
    if "alibi_slopes" in layouts:
        slopes = layouts["alibi_slopes"]
        *batch, head = (stride // slopes.dtype.itemsize for stride in slopes.strides)
        scores["slopes_batch"], scores["slopes_head"] = (*batch, head) if batch else (0, head)
    if "sinks" in layouts:
        scores["sinks_stride"] = layouts["sinks"].strides[0] // layouts["sinks"].dtype.itemsize
    if options.softcap is not None:
        scores["softcap_in"] = 2 * math.log2(math.e) * problem.softmax_scale / options.softcap
        scores["softcap_log2"] = options.softcap * math.log2(math.e)
    scores["seed"] = options.seed or 0
    scores["keep_from"] = round(65536 * options.dropout_p)
    scores["keep_scale"] = 1 / (1 - options.dropout_p)


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


def _strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Bytes of (batch, seq, head, dim) to items of (batch, seq, head)."""
    batch, seq, head, _ = strides
    return batch // itemsize, seq // itemsize, head // itemsize


def _batch_integers(layout: Layout) -> tuple[int, int]:
    return layout.strides[0] // layout.dtype.itemsize, int(layout.dtype.itemsize == 8)
