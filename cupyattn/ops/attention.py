"""Attention on a device: from a checked problem to a launched kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, addresses, alignments
from cupyattn.errors import error
from cupyattn.kernels import configs
from cupyattn.kernels.configs.attention import FlashOptions
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES, vector_items
from cupyattn.kernels.device import Device
from cupyattn.kernels.launch import launch
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops.attention_layouts import (
    require_lengths,
    require_near_rows,
    score_options,
    whole_vectors,
)
from cupyattn.ops.attention_params import attention_params, score_strides, with_seed
from cupyattn.ops.attention_problem import FORWARD_RESULTS, LSE_DTYPE, AttentionProblem
from cupyattn.ops.checks import require_disjoint, require_item_alignment

# What each kernel reads; a problem with more is the reference's.
_EVERY_KERNEL = {"q", "k", "v", "q_offset", "seqused_k", *FORWARD_RESULTS}
_FLASH_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")
_QUAD_ROW_BYTES = 2**24  # between rows of a bias or mask read four keys at a time: 32-bit offsets


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
    seed: int,
    return_lse: bool,
) -> tuple[Array, Array | None]:
    """Run dense attention forward, into `out` and `lse` where they are among `arrays`."""
    _require_kernel(problem)
    places = addresses(arrays)
    require_disjoint(FORWARD_RESULTS, arrays, places, problem.spans)

    out, lse = arrays.get("out"), arrays.get("lse")
    if out is None:
        out = device.empty(problem.out_shape, problem.dtype)
    if lse is None and return_lse:
        lse = device.empty(problem.lse_shape, LSE_DTYPE)

    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    lse_strides = None if lse is None else lse.strides
    starts = alignments(places.values(), VECTOR_BYTES)
    plan = _plan(problem, out.strides, lse_strides, starts)
    params = with_seed(plan.params, seed) if problem.dropout_p else plan.params

    optional = [arrays.get("q_offset"), arrays.get("seqused_k")]
    if problem.implementation == "flash":
        optional += [arrays.get(name) for name in _FLASH_ARRAYS]
    launch(device, plan.specialisation, plan.ctas, (q, k, v, out, lse, *optional, params))
    return out, lse


@lru_cache(maxsize=4096)
def _require_kernel(problem: AttentionProblem) -> None:
    flash = problem.implementation == "flash"
    arrays = {*_EVERY_KERNEL, *_FLASH_ARRAYS} if flash else _EVERY_KERNEL
    missing = [
        "rotary" if name == "cos" else name
        for name in problem.layouts
        if name not in arrays and name != "sin"
    ]
    missing += ["mask_mod"] if problem.mask_mod is not None else []
    if not flash:
        missing += ["softcap"] if problem.softcap is not None else []
        missing += ["dropout_p"] if problem.dropout_p else []
    if missing:
        raise error(
            NotImplementedError,
            f"{', '.join(missing)} on a GPU or the emulator with "
            f"implementation={problem.implementation!r}",
            "that kernel does not have it; the CPU path has every option",
            "pass NumPy arrays, for example cupy.asnumpy(q), or leave backend('emulator')"
            + ("" if flash else ", or leave implementation out"),
        )
    if flash and problem.dtype == np.float16:
        tile_k = configs.attention.flash_longest_tile(problem.head_dim, problem.head_dim_v)
        require_near_rows(problem, ("k", "v"), tile_k, "tiled")
    require_lengths(problem)


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
    table, teaching = configs.attention, configs.attention_teaching
    inputs = [(start_of[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    rows = [*inputs, (start_of.get("out", 0), out_strides)]
    if problem.implementation == "naive":
        specialisation, tile_q = teaching.naive(dtype, *dims), 1
    elif problem.implementation == "tiled":
        vec = whole_vectors(vector_items(dtype), problem, inputs)
        specialisation = teaching.tiled(dtype, *dims, vec)
        tile_q = teaching.tiled_config(*dims).tile_q
    elif problem.dtype == np.float16:
        vec = whole_vectors(vector_items(dtype), problem, rows)
        together = 2 if problem.dropout_p else 4  # a Philox call serves pairs of keys
        options = _flash_options(problem, start_of, together)
        specialisation = table.flash(*dims, vec, options)
        tile_q = table.flash_config(*dims, options).tile_q
    else:
        vec = whole_vectors(table.F32_VECTOR_ITEMS, problem, rows)
        options = _flash_options(problem, start_of, together=2)
        specialisation = table.flash_f32(dtype, *dims, vec, options)
        tile_q = table.flash_f32_config(*dims).tile_q
    ctas = problem.batch * problem.heads * -(-problem.sq // tile_q)
    return _Plan(specialisation, ctas, attention_params(problem, out_strides, lse_strides))


def _flash_options(
    problem: AttentionProblem, start_of: dict[str, int], together: int
) -> FlashOptions:
    """Name the options for a kernel whose threads hold `together` neighbouring keys of a row."""
    return score_options(problem)._replace(
        bias_vec=_score_items("bias", problem, start_of, together),
        mask_vec=_score_items("mask", problem, start_of, together),
    )


def _score_items(
    name: str, problem: AttentionProblem, start_of: dict[str, int], together: int
) -> int:
    """Return how many neighbouring keys of a bias or mask can be read at once: 4, 2 or 1."""
    if name not in problem.layouts:
        return 1
    layout = problem.layouts[name]
    *others, key = score_strides(layout, problem.scores_shape)
    near = 0 <= others[-1] * layout.dtype.itemsize < _QUAD_ROW_BYTES
    for items in (4, 2):
        rows_aligned = all(stride % items == 0 for stride in others)
        start_aligned = start_of[name] % (items * layout.dtype.itemsize) == 0
        fits = items == 2 or (together == 4 and near)
        if key == 1 and rows_aligned and start_aligned and fits:
            return items
    return 1
