"""New tokens into a paged cache, on a device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from cupyattn.ops.cache.append_problem import TABLES, AppendProblem
from cupyattn.ops.cache.kernels import AppendLaunch, append_config, specialise_append, stored_bytes
from cupyattn.ops.cache.storage import CACHES, SCALES
from cupyattn.ops.cache.strides import rows_aligned, scale_strides, slot_strides, token_strides
from cupyattn.ops.cache.structs import APPEND_PARAMS
from cupyattn.runtime.by_name import Operands, Plan, Step, run
from cupyattn.runtime.checks import most_tokens, require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct

_MOST = 2**32 - 1
"""Rows of lanes of a launch, and slots of caches: they are numbered with 32 bits."""


def run_append(device: Device, problem: AppendProblem, operands: Operands) -> None:
    """Write the tokens."""
    run(device, _plan(problem, device.arch.number), operands)


@lru_cache(maxsize=4096)
def _plan(problem: AppendProblem, arch: int) -> Plan:
    layouts, caches = problem.layouts, problem.caches
    require_item_alignment(layouts, problem.starts)
    require_kernel_dtype("k", problem.dtype)
    if "cos" in layouts:
        require_kernel_dtype("rotary's cos", layouts["cos"].dtype)
    heads = layouts["q"].shape[-2] if "q" in layouts and problem.half else 0
    launch = _launch(problem)
    config = append_config(arch, max(heads, caches.kv_heads), launch.chunks)
    groups, kv_groups = (-(-count // config.heads) for count in (heads, caches.kv_heads))
    tokens = math.prod(problem.tokens)
    rows = tokens * (groups + 2 * kv_groups)
    if rows == 0:
        return Plan((), ())
    rows_per_cta = config.threads // launch.lanes
    slots = caches.num_blocks * caches.block_size
    if max(rows + rows_per_cta, slots) > _MOST:
        raise error(
            ValueError,
            f"{tokens} tokens, and caches of {slots} slots",
            f"{most_tokens('append_kv', _MOST // (groups + 2 * kv_groups))}, and caches of at most "
            f"{_MOST} slots",
            "split the tokens or the heads over several calls",
        )
    params = _params(problem)
    params["heads"], params["groups"] = heads, groups
    params["kv_heads"], params["kv_groups"] = caches.kv_heads, kv_groups
    specialisation = specialise_append(config, launch)
    plan = Plan((Step.of(specialisation, -(-rows // rows_per_cta), params[()]),), ())
    return plan.for_arrays(layouts)


def _launch(problem: AppendProblem) -> AppendLaunch:
    layouts = problem.layouts
    rotary = "cos" in layouts
    return AppendLaunch(
        problem.dtype.name,
        problem.caches.format,
        problem.caches.head_dim,
        _vector(problem),
        layouts["slot_mapping"].dtype.name,
        layouts["cos"].dtype.name if rotary else "void",
        layouts["positions"].dtype.name if rotary else "int32",
        problem.interleaved and rotary,
    )


def _params(problem: AppendProblem) -> Any:
    layouts, caches = problem.layouts, problem.caches
    params = new_struct(APPEND_PARAMS)
    for name in ("q", "k", "v", *CACHES):
        if name in layouts:
            params[name] = slot_strides(layouts[name])
    for name in SCALES:
        if name in layouts:
            params[name] = scale_strides(layouts[name])
    for name, field in (("slot_mapping", "slots"), ("positions", "positions")):
        if name in layouts:
            strides = token_strides(layouts[name])
            params[f"{field}_batch"], params[f"{field}_seq"] = strides
    if "cos" in layouts:
        for name in TABLES:
            params[f"{name}_stride"] = layouts[name].strides[0] // layouts[name].dtype.itemsize
        params["table_length"] = layouts["cos"].shape[0]
    params["slots"] = caches.num_blocks * caches.block_size
    params["tokens"], params["seq"] = math.prod(problem.tokens), problem.tokens[-1]
    params["half"], params["dim"] = problem.half, caches.head_dim
    params["block_size"] = caches.block_size
    return params


def _vector(problem: AppendProblem) -> int:
    """Return how many items one load brings: a vector's if all pieces start at one, or 1."""
    layouts, starts, caches = problem.layouts, problem.starts, problem.caches
    items = vector_items(problem.dtype.name)
    stored = stored_bytes(problem.dtype.name, caches.format, items)
    rotated = 2 * problem.half if problem.interleaved else problem.half
    aligned = (
        rows_aligned(layouts, starts, ("q", "k", "v", *TABLES), VECTOR_BYTES)
        and rows_aligned(layouts, starts, CACHES, stored)
        and caches.head_dim % items == rotated % items == 0
    )
    return items if aligned else 1
