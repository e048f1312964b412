"""Decoding on a device: the keys of all sequences in equal shares, then the shared rows merged."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.arrays import Array, Layout, Operands
from cupyattn.errors import error
from cupyattn.kernels.configs.attention import decode
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.device import Device
from cupyattn.kernels.structs import DECODE_PARAMS
from cupyattn.ops.attention.decode_problem import DecodeProblem
from cupyattn.ops.attention.layouts import require_lengths, score_options, whole_vectors
from cupyattn.ops.attention.params import attention_params
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.results import forward_outputs, result_layouts
from cupyattn.ops.checks import require_item_alignment, require_kernel_dtype
from cupyattn.ops.plan import Plan, Step, lay_out_scratch, run

_MOST_UNITS = 2**31 - 1
_PARTIAL_OUT, _PARTIAL_SUMS = "partial_out", "partial_sums"


def decode_attention(
    device: Device, problem: DecodeProblem, operands: Operands, *, return_lse: bool
) -> dict[str, Array]:
    """Run paged attention, into `out` and `lse` where they are given."""
    plan = _plan(problem, device.arch.number, device.multiprocessors, return_lse)
    return run(device, plan, operands.arrays)


@lru_cache(maxsize=4096)
def _plan(problem: DecodeProblem, arch: int, multiprocessors: int, return_lse: bool) -> Plan:
    attention = problem.attention
    require_kernel_dtype("q", attention.dtype)
    require_lengths(attention)
    require_item_alignment(attention.layouts, attention.starts)
    outputs = forward_outputs(attention, return_lse)
    if attention.batch == 0 or attention.heads == 0:
        return Plan((), outputs)
    launch = _launch(attention, arch)
    row_tiles = -(-attention.sq * _group(attention) // launch.config.rows)
    segments = attention.batch * attention.kv_heads * row_tiles
    units = segments * max(1, -(-attention.sk // (decode.TILE_KEYS * decode.WARPS)))
    _require_units(problem, units)
    ctas = min(units, multiprocessors * launch.config.ctas_per_sm)
    params = _params(problem, result_layouts(attention, outputs), row_tiles, ctas)
    options = score_options(attention)
    rows = attention.batch * attention.heads * attention.sq
    plan = Plan(
        (
            Step.of(decode.forward(launch, options), ctas, params),
            Step.of(
                decode.combine(launch, options.sinks), -(-rows // decode.COMBINE_WARPS), params
            ),
        ),
        outputs,
        lay_out_scratch(
            {
                _PARTIAL_OUT: 2 * ctas * launch.config.rows * attention.head_dim,
                _PARTIAL_SUMS: 2 * ctas * launch.config.rows * 2,
            }
        ),
    )
    plan.require_arrays(problem.layouts)
    return plan


def _group(problem: AttentionProblem) -> int:
    return problem.heads // problem.kv_heads


def _launch(problem: AttentionProblem, arch: int) -> decode.DecodeLaunch:
    """Choose the kernels by the rows that share a key-value head and how the arrays lie."""
    items = vector_items(problem.dtype.name)
    rows = [(problem.starts[name], problem.layouts[name].strides) for name in ("q", "k", "v")]
    vec = whole_vectors(items, problem, rows)
    together = problem.sq * _group(problem)
    return decode.decode_launch(arch, problem.dtype.name, problem.head_dim, together, vec)


def _require_units(problem: DecodeProblem, units: int) -> None:
    if units > _MOST_UNITS:
        keys = decode.TILE_KEYS * decode.WARPS
        raise error(
            ValueError,
            f"{problem.attention.batch} sequences of up to {problem.attention.sk} tokens",
            f"kernels count at most {_MOST_UNITS} parts of {keys} tokens of all heads",
            "pass fewer sequences in a call, or a block_table with fewer columns",
        )


def _params(problem: DecodeProblem, results: dict[str, Layout], row_tiles: int, ctas: int) -> Any:
    """Fill the C struct DecodeParams."""
    params = np.zeros((), DECODE_PARAMS)
    params["attention"] = attention_params(problem.attention, results)
    table = problem.layouts["block_table"]
    batch, block = (stride // table.dtype.itemsize for stride in table.strides)
    params["table_batch"], params["table_block"] = batch, block
    params["batch"], params["kv_heads"] = problem.attention.batch, problem.attention.kv_heads
    params["block_tiles"] = problem.block_size // decode.TILE_KEYS
    params["row_tiles"], params["ctas"] = row_tiles, ctas
    return params[()]
