"""The tokens of sequences out of a paged cache, on a device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from cupyattn.ops.cache.gather_problem import RESULTS, GatherProblem
from cupyattn.ops.cache.kernels import THREADS, specialise_gather, stored_bytes
from cupyattn.ops.cache.storage import CACHES, SCALES
from cupyattn.ops.cache.strides import rows_aligned, scale_strides, slot_strides
from cupyattn.ops.cache.structs import GATHER_PARAMS
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.by_name import Operands, Plan, Step, run
from cupyattn.runtime.checks import most_tokens, require_item_alignment, require_kernel_dtype
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct

_MOST_THREADS = 2**32 - 1


def run_gather(device: Device, problem: GatherProblem, operands: Operands) -> dict[str, Array]:
    """Gather k and v, into what is given."""
    return run(device, _plan(problem), operands)


@lru_cache(maxsize=4096)
def _plan(problem: GatherProblem) -> Plan:
    require_item_alignment(problem.layouts, problem.starts)
    computed = "k" if problem.caches.quantised else "k_cache"
    require_kernel_dtype(computed, problem.output.dtype)
    outputs = tuple((name, problem.output) for name in RESULTS)
    layouts = {name: contiguous(*problem.output) for name in RESULTS} | problem.layouts
    vec = _vector(problem, layouts)
    # Heads that lie one behind the other everywhere are one; scales are of each.
    heads, dim = problem.caches.kv_heads, problem.caches.head_dim
    if not problem.caches.quantised and all(
        layouts[name].strides[2] == dim * problem.output.dtype.itemsize or heads == 1
        for name in (*CACHES, *RESULTS)
    ):
        heads, dim = 1, heads * dim
    batch, length = problem.output.shape[:2]
    units = dim // vec
    threads = batch * length * heads * units
    if threads == 0:
        return Plan((), outputs)
    if threads > _MOST_THREADS - THREADS:
        raise error(
            ValueError,
            f"results of {batch} * {length} tokens",
            most_tokens("gather", _MOST_THREADS // (heads * units)),
            "gather fewer sequences or heads in a call",
        )
    params = _params(problem, layouts)
    params["heads"], params["units"] = heads, units
    specialisation = specialise_gather(
        problem.output.dtype.name, problem.caches.format, vec, layouts["seqlens_k"].dtype.name
    )
    plan = Plan((Step.of(specialisation, -(-threads // THREADS), params[()]),), outputs)
    return plan.for_arrays(problem.layouts)


def _params(problem: GatherProblem, layouts: dict[str, Layout]) -> Any:
    params = new_struct(GATHER_PARAMS)
    for name in (*CACHES, *RESULTS):
        params[name] = slot_strides(layouts[name])
    for name in SCALES:
        if name in layouts:
            params[name] = scale_strides(layouts[name])
    table, seqlens = layouts["block_table"], layouts["seqlens_k"]
    params["table_batch"], params["table_block"] = (
        s // table.dtype.itemsize for s in table.strides
    )
    params["seqlens_stride"] = seqlens.strides[0] // seqlens.dtype.itemsize
    params["tokens"], params["length"] = (
        math.prod(problem.output.shape[:2]),
        problem.output.shape[1],
    )
    params["block_size"] = problem.caches.block_size
    params["num_blocks"], params["max_blocks"] = problem.caches.num_blocks, table.shape[1]
    return params


def _vector(problem: GatherProblem, layouts: dict[str, Layout]) -> int:
    """Return how many items a thread has of k: a vector's where every row starts at one, or 1."""
    dtype, starts = problem.output.dtype.name, problem.starts
    items = vector_items(dtype)
    stored = stored_bytes(dtype, problem.caches.format, items)
    aligned = (
        rows_aligned(layouts, starts, RESULTS, VECTOR_BYTES)
        and rows_aligned(layouts, starts, CACHES, stored)
        and problem.caches.head_dim % items == 0
    )
    return items if aligned else 1
