"""Weights into four or eight bits and out of them, on a device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.linear.kernels_quantised import (
    MADE,
    THREADS,
    UNITS,
    lanes_of,
    specialise_dequantize,
    specialise_quantize,
)
from cupyattn.ops.linear.nested_scales import (
    ABSMAX,
    EXPANDED,
    NESTED,
    expand_step,
    nest_step,
    reads_expanded,
)
from cupyattn.ops.linear.structs import DEQUANTIZE_PARAMS, QUANTIZE_PARAMS
from cupyattn.ops.linear.weight_formats import FORMATS, INT4_LARGEST, Blocks, pieces, require_blocks
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.by_name import (
    Operands,
    Overlaps,
    Plan,
    Step,
    lay_out_scratch,
    layouts_of,
    require_apart,
    run,
    starts_of,
)
from cupyattn.runtime.checks import (
    FLOATS,
    require_arrays,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_own_items,
    require_rank,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.plan import Output
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.value_checks import checks_values

_OF_OUT = {name: f"out.{name}" for name in ("codes", "scales", "super_scales", "scale_table")}
_MADE = (*MADE, NESTED)
_MOST_THREADS = 2**32 - THREADS


def require_made(kind: Any) -> str:
    """Return a format that weights are quantised to, or raise."""
    if isinstance(kind, str) and kind in _MADE:
        return kind
    raise error(
        ValueError if isinstance(kind, str) else TypeError,
        f"format = {shown(kind)}",
        f"weights are quantised to {', '.join(map(repr, _MADE))}; others are read from files",
        "pass one of these",
    )


def quantize_blocks(operands: Operands, kind: Any, block_size: Any) -> Blocks:
    """Check a call of quantize, and its values where these are checked.

    Raises
    ------
    TypeError, ValueError
        As `quantize` documents.
    """
    size = None if block_size is None else integer("block_size", block_size)
    blocks = _checked_blocks(operands.description, require_made(kind), size)
    require_apart(operands, dict.fromkeys(_OF_OUT), _OF_OUT)
    if checks_values(operands):
        _require_values(operands.arrays["w"], blocks)
    return blocks


def _require_values(w: Array, blocks: Blocks) -> None:
    """Raise for weights that would make blocks NaN."""
    if not bool(np.isfinite(w).all()):
        raise error(
            ValueError,
            "w holds NaN or an infinity",
            "weights are finite: a block that is not would be NaN as a whole",
            "look where it comes from",
        )
    if blocks.format != "int4" or float(abs(w).max()) <= INT4_LARGEST:
        return
    parts = w.astype(np.float32).reshape(-1, blocks.block_size, w.shape[1])
    with np.errstate(over="ignore"):
        span = float((parts.max(axis=1).clip(min=0) - parts.min(axis=1).clip(max=0)).max())
    if span > 2 * INT4_LARGEST:
        raise error(
            ValueError,
            f"a block of w spans {span:g}, with format = 'int4'",
            f"its scale is float16: a block spans {2 * INT4_LARGEST:g} at most, or would be NaN",
            "take 'nf4' or 'int8', whose scales are float32",
        )


@lru_cache(maxsize=4096)
def _checked_blocks(description: Any, kind: str, block_size: int | None) -> Blocks:
    layouts = layouts_of(description)
    require_arrays(layouts, ("w",))
    w = layouts["w"]
    require_dtype("w", w, FLOATS)
    require_rank("w", w, "K N")
    require_whole_item_strides("w", w)
    inner, outer = w.shape
    size = (FORMATS[kind].block_size or inner) if block_size is None else block_size
    require_blocks(kind, size, inner)
    if outer == 0:
        raise error(
            ValueError, f"w has shape {w.shape}", "N is at least 1", "pass a w with columns"
        )
    return Blocks(kind, size)


def run_quantize(device: Device, blocks: Blocks, operands: Operands) -> dict[str, Array]:
    """Quantise w, into the arrays of a weight that are given or new ones."""
    return run(device, _quantize_plan(operands.description, blocks), operands)


@lru_cache(maxsize=4096)
def _quantize_plan(description: Any, blocks: Blocks) -> Plan:
    layouts, starts = layouts_of(description), starts_of(description)
    require_item_alignment(layouts, starts)
    w, (kind, block_size) = layouts["w"], blocks
    inner, outer = w.shape
    outputs = tuple(
        (name, Output(*piece)) for name, piece in pieces(kind, outer, inner, block_size).items()
    )
    whole = _whole_vectors(w, starts["w"], axis=0)
    # Lanes go along the axis whose items lie closer together.
    strides = [abs(stride) for stride in w.strides]
    lanes = lanes_of(block_size) if strides[0] <= strides[1] or outer == 1 else 1
    vec = vector_items(w.dtype.name) if whole and lanes > 1 else 1
    params = _params(QUANTIZE_PARAMS, w, inner_axis=0)
    params["blocks"], params["block_size"] = inner // block_size, block_size
    threads = outer * (inner // block_size) * lanes
    _require_launch("quantize", threads, w)
    nested, count = kind == NESTED, outer * (inner // block_size)
    step = Step.of(
        specialise_quantize(EXPANDED if nested else kind, w.dtype.name, lanes, vec),
        -(-threads // THREADS),
        params[()],
        renamed={"scales": ABSMAX} if nested else None,
    )
    if not nested:
        return Plan((step,), outputs)
    return Plan((step, nest_step(count)), outputs, lay_out_scratch({ABSMAX: count}))


class DequantizeProblem(NamedTuple):
    """A valid call; one object for equal calls."""

    blocks: Blocks
    transposed: bool
    layouts: dict[str, Layout]
    starts: dict[str, int]
    output: Output
    overlaps: Overlaps

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def dequantize_problem(
    operands: Operands, blocks: Blocks, transposed: bool, dtype: np.dtype
) -> DequantizeProblem:
    """Check the out of a call, or find that it was checked before.

    Raises
    ------
    TypeError, ValueError
        As `dequantize` documents.
    """
    problem = _cached_problem(operands.description, blocks, transposed, dtype)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(
    description: Any, blocks: Blocks, transposed: bool, dtype: np.dtype
) -> DequantizeProblem:
    layouts = layouts_of(description)
    codes = layouts["codes"]
    outer, inner = codes.shape[0], codes.shape[1] * 8 // FORMATS[blocks.format].bits
    output = Output((outer, inner) if transposed else (inner, outer), dtype)
    if "out" in layouts:
        out = layouts["out"]
        if (out.shape, out.dtype) != output:
            raise error(
                ValueError if out.dtype == dtype else TypeError,
                f"out is {out}",
                f"the result is {dtype.name} {output.shape}",
                "pass an array of that shape and dtype, or none",
            )
        require_whole_item_strides("out", out)
        require_own_items("out", out)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    overlaps = Overlaps.of(layouts, ("out", "workspace"))
    return DequantizeProblem(blocks, transposed, layouts, starts_of(description), output, overlaps)


def run_dequantize(device: Device, problem: DequantizeProblem, operands: Operands) -> Array:
    """Compute the weights, into what is given or a new array whose blocks lie in C order."""
    return run(device, _dequantize_plan(problem), operands)["out"]


@lru_cache(maxsize=4096)
def _dequantize_plan(problem: DequantizeProblem) -> Plan:
    require_item_alignment(problem.layouts, problem.starts)
    shape, dtype = problem.output
    require_kernel_dtype("out", dtype)
    inner_axis = 1 if problem.transposed else 0
    outer, inner = shape[1 - inner_axis], shape[inner_axis]
    out = problem.layouts.get("out")
    if out is None:
        new = contiguous((outer, inner), dtype)
        out = new if problem.transposed else Layout(shape, new.strides[::-1], dtype)
    strides = [abs(stride) for stride in out.strides]
    along = strides[inner_axis] <= strides[1 - inner_axis] or outer == 1
    whole = along and _whole_vectors(out, problem.starts.get("out", 0), inner_axis)
    params = _params(DEQUANTIZE_PARAMS, out, inner_axis)
    params["units"], params["block_size"] = inner // UNITS[along], problem.blocks.block_size
    threads = outer * (inner // UNITS[along])
    _require_launch("dequantize", threads, out)
    vec = vector_items(dtype.name) if whole else 1
    nested = problem.blocks.format == NESTED
    step = Step.of(
        specialise_dequantize(
            EXPANDED if nested else problem.blocks.format, dtype.name, along, vec
        ),
        -(-threads // THREADS),
        params[()],
    )
    turned = () if problem.transposed else ("out",)
    plan = Plan((step,), (("out", problem.output),), transposed=turned)
    if nested:
        count = outer * (inner // problem.blocks.block_size)
        plan = plan._replace(
            steps=(expand_step(count), reads_expanded(step)),
            scratch=lay_out_scratch({ABSMAX: count}),
        )
    return plan.for_arrays(problem.layouts)


def _params(dtype: np.dtype, weight: Layout, inner_axis: int) -> Any:
    """Fill in what the structs of both kernels have in common."""
    params = new_struct(dtype)
    itemsize = weight.dtype.itemsize
    params["inner_stride"] = weight.strides[inner_axis] // itemsize
    params["outer_stride"] = weight.strides[1 - inner_axis] // itemsize
    params["outer"] = weight.shape[1 - inner_axis]
    return params


def _whole_vectors(weight: Layout, start: int, axis: int) -> bool:
    """Tell whether every 16 bytes along an axis are one vector."""
    lines = weight.strides[1 - axis] if weight.shape[1 - axis] > 1 else 0
    contiguous_axis = weight.strides[axis] == weight.dtype.itemsize
    return contiguous_axis and start == 0 and lines % VECTOR_BYTES == 0


def _require_launch(name: str, threads: int, weight: Layout) -> None:
    if threads > _MOST_THREADS:
        raise error(
            ValueError,
            f"a weight {weight.shape}",
            f"a launch of {name} has up to {_MOST_THREADS} threads, of {threads}",
            "take fewer columns of N in a call",
        )
