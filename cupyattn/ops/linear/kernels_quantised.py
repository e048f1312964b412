"""Weights into four or eight bits and out of them: checks, kernels and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cupyattn.ops.linear.kernels_rows import RotatedSide, contiguous_rows, rotate_step
from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.linear.weight_formats import (
    FORMATS,
    INT4_LARGEST,
    TABLE,
    WEIGHT_FIELDS,
    Blocks,
    pieces,
    require_blocks,
    require_rotation,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import (
    FLOATS,
    Overlaps,
    integer,
    require_apart,
    require_dtype,
    require_given,
    require_item_alignment,
    require_kernel_dtype,
    require_own_items,
    require_rank,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.plan import SCRATCH_DTYPE, Output, Plan, Planner, Step, run
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.spec import (
    KernelSpec,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs
from cupyattn.runtime.value_checks import checks_values


def _weight_params(units: str) -> np.dtype:
    """Return a C struct: the strides of a weight, N, blocks or units of a row, and their size."""
    strides = ((field, np.int64) for field in ("inner_stride", "outer_stride"))
    return np.dtype(
        [*strides, *((field, np.uint32) for field in ("outer", units, "block_size"))], align=True
    )


# In cuda_src/linear/quantised: quantize.cu and dequantize.cu
QUANTIZE_PARAMS = _weight_params("blocks")
QUANTIZE_STRUCT = StructParameter("params", QUANTIZE_PARAMS, "QuantizeParams")
DEQUANTIZE_PARAMS = _weight_params("units")
DEQUANTIZE_STRUCT = StructParameter("params", DEQUANTIZE_PARAMS, "DequantizeParams")

QUANTIZE = KernelSpec(
    "quantize",
    "linear/quantised/quantize.cu",
    (*inputs("w"), Pointer("codes"), Pointer("scales"), QUANTIZE_STRUCT),
)
DEQUANTIZE = KernelSpec(
    "dequantize",
    "linear/quantised/dequantize.cu",
    (
        *inputs("codes", "scales"),
        *inputs("super_scales", optional=True),
        Pointer("out"),
        DEQUANTIZE_STRUCT,
    ),
)
_COUNT = Scalar("count", np.dtype(np.uint32))
NEST = KernelSpec(
    "nest_scales",
    "linear/quantised/nest_scales.cu",
    (*inputs("absmax"), *map(Pointer, ("scales", "super_scales", "scale_table")), _COUNT),
)
EXPAND = KernelSpec(
    "expand_scales",
    "linear/quantised/expand_scales.cu",
    (*inputs("scales", "super_scales", "scale_table"), Pointer("absmax"), _COUNT),
)
KERNELS = (QUANTIZE, DEQUANTIZE, NEST, EXPAND)


@dataclass(slots=True)
class QuantizeArrays(Record[T]):
    """Arrays of a call of quantize: w, and those of the quantised weight."""

    SHOWN_AS: ClassVar = MappingProxyType({name: f"out.{name}" for name in WEIGHT_FIELDS})

    w: T
    codes: T | None = None
    scales: T | None = None
    super_scales: T | None = None
    scale_table: T | None = None
    workspace: T | None = None


@dataclass(slots=True)
class DequantizeArrays(Record[T]):
    """Arrays of a call of dequantize: those of the quantised weight, and the result."""

    codes: T
    scales: T
    super_scales: T | None = None
    scale_table: T | None = None
    out: T | None = None
    workspace: T | None = None


FORMAT_STRUCTS = {"nf4": "Nf4", "int4": "Int4", "int8": "Int8", "q4_1": "Q4_1", "q4_k": "Q4_K"}
"""Formats by name, with the struct of formats.cuh that decodes each."""
MADE = ("nf4", "int4", "int8")
"""The formats that QUANTIZE writes. NEST derives "nf4_nested"; the others come from files."""

NESTED, EXPANDED = "nf4_nested", "nf4"
"""The format whose scales are codes themselves, and the same format with scales in float32."""
_MADE = (*MADE, NESTED)

THREADS = 256
LANE_WEIGHTS = 8
"""Weights of a lane of QUANTIZE at a time: 4 or 8 bytes of codes."""
UNITS = {True: 8, False: 32}
"""Weights of a thread of DEQUANTIZE, by whether lanes lie along K.

Along K they are one store of 16 bytes; across K, where neighbouring threads read different rows,
the codes of one sector.
"""
CODEBOOK_BYTES = {"nf4": 64}
"""Bytes of shared memory for the codebook, by format."""
GROUP = FORMATS[NESTED].group or 0
"""Blocks that share a pair of super_scales."""
_NEST_THREADS = TABLE  # each loads an entry of the table, or computes one
_EXPAND_ITEMS = 4  # of a thread of EXPAND: 16 bytes of float32
_MOST_THREADS = 2**32 - THREADS


def lanes_of(block_size: int) -> int:
    """Return how many lanes share a block along K: a power of two.

    Examples
    --------
    >>> lanes_of(32), lanes_of(48), lanes_of(64), lanes_of(576)
    (4, 4, 8, 32)
    """
    return min(1 << (block_size // LANE_WEIGHTS).bit_length() - 1, WARP_SIZE)


@cache
def specialise_quantize(kind: str, dtype: str, lanes: int, vec: int) -> Specialisation:
    """Specialise QUANTIZE; lanes is 1 across K, vec 1 or 16 bytes' worth of weights."""
    return QUANTIZE.specialise(
        threads=THREADS,
        reason=f"w lies along K: {lanes} lanes share a block"
        if lanes > 1
        else "w lies along N: neighbouring lanes read neighbouring columns",
        FORMAT=FORMAT_STRUCTS[kind],
        DTYPE=dtype,
        LANES=lanes,
        VEC=vec,
    )


@cache
def specialise_dequantize(kind: str, dtype: str, along: bool, vec: int) -> Specialisation:
    """Specialise DEQUANTIZE; `along` has its lanes along K, vec is 1 or 16 bytes' worth."""
    return DEQUANTIZE.specialise(
        threads=THREADS,
        static_shared_bytes=CODEBOOK_BYTES.get(kind, 0),
        reason="the result lies along K: threads store 8 neighbours each"
        if along
        else "the result lies along N: neighbouring threads store neighbours, each along its own K",
        FORMAT=FORMAT_STRUCTS[kind],
        DTYPE=dtype,
        UNIT=UNITS[along],
        ALONG=cpp_bool(along),
        VEC=vec,
    )


@cache
def nest() -> Specialisation:
    """Specialise NEST."""
    reason = f"a warp computes the pair of {GROUP} blocks that share it"
    return NEST.specialise(threads=_NEST_THREADS, reason=reason, GROUP=GROUP)


@cache
def expand() -> Specialisation:
    """Specialise EXPAND."""
    return EXPAND.specialise(
        threads=_NEST_THREADS,
        static_shared_bytes=TABLE * FLOAT_BYTES,
        reason="nested scales are expanded before the kernels that read them",
        GROUP=GROUP,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield formats, dtypes, lanes and loads in pairs."""
    del arch  # one configuration serves all
    for kind, dtype, lanes, whole in pairs(MADE, STORAGE, (1, 4, 8, 16, 32), (True, False)):
        vec = vector_items(dtype) if whole and lanes > 1 else 1
        yield specialise_quantize(kind, dtype, lanes, vec)
    for kind, dtype, along, whole in pairs(FORMAT_STRUCTS, STORAGE, (True, False), (True, False)):
        vec = vector_items(dtype) if whole and along else 1
        yield specialise_dequantize(kind, dtype, along, vec)
    yield from (nest(), expand())


class RowBlocks(NamedTuple):
    """The division of the rows of codes of a weight into blocks."""

    format: str
    blocks: int
    """Blocks of a row."""
    block_log2: int
    """Logarithm of a block's weights; 31 if a row is one block."""


_WHOLE_ROW_LOG2 = 31


def row_blocks(problem: LinearProblem) -> RowBlocks:
    """Return the division of the rows of a problem's codes into blocks."""
    weight = problem.quantised
    row = problem.weight_columns if weight.transposed else problem.inner
    blocks = row // weight.block_size
    block_log2 = weight.block_size.bit_length() - 1 if blocks > 1 else _WHOLE_ROW_LOG2
    return RowBlocks(weight.format, blocks, block_log2)


def expand_step(count: int, slots: tuple[int | None, ...]) -> Step:
    """Return the launch from `count` nested scales to absmax of blocks in float32.

    `slots` are those of scales, super_scales, scale_table and absmax.
    """
    return Step.of(expand(), -(-count // (_EXPAND_ITEMS * _NEST_THREADS)), slots, count)


def quantize_blocks(
    operands: Operands[QuantizeArrays[Array]], kind: Any, block_size: Any, rotation: int | None
) -> Blocks:
    """Check a call of quantize, and its values where these are checked."""
    size = None if block_size is None else integer("block_size", block_size)
    if not isinstance(kind, str) or kind not in _MADE:
        raise error(
            ValueError if isinstance(kind, str) else TypeError,
            f"format = {shown(kind)}",
            f"weights are quantised to {', '.join(map(repr, _MADE))}; others are read from files",
            "pass one of these",
        )
    if rotation is not None and kind != "int8":
        raise error(
            ValueError,
            f"format = {kind!r} with rotation = {rotation}",
            'weights of "int8" are rotated, no others',
            'pass format="int8", or rotation=None',
        )
    blocks = _checked_blocks(operands.description, kind, size, rotation)
    require_apart(operands, dict.fromkeys(WEIGHT_FIELDS))
    if checks_values(operands):
        _require_values(operands.arrays.w, blocks)
    return blocks


def _require_values(w: Any, blocks: Blocks) -> None:
    """Raise for weights whose blocks would be NaN."""
    if not bool(np.isfinite(w).all()):
        raise error(
            ValueError,
            "w holds NaN or an infinity",
            "weights are finite: a block that is not would be NaN as a whole",
            "find where it comes from",
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
def _checked_blocks(
    description: Description, kind: str, block_size: int | None, rotation: int | None
) -> Blocks:
    w = layouts_of(QuantizeArrays[Layout], description).w
    require_given("w", w)
    require_dtype("w", w, FLOATS)
    require_rank("w", w, "K N")
    require_whole_item_strides("w", w)
    inner, outer = w.shape
    size = (FORMATS[kind].block_size or inner) if block_size is None else block_size
    require_blocks(kind, size, inner)
    require_rotation(rotation, inner)
    if outer == 0:
        raise error(
            ValueError, f"w has shape {w.shape}", "N is at least 1", "pass a w with columns"
        )
    return Blocks(kind, size)


def run_quantize(
    device: Device,
    blocks: Blocks,
    rotation: int | None,
    operands: Operands[QuantizeArrays[Array]],
) -> QuantizeArrays[Array]:
    """Quantise w into the given arrays of a weight, or into new ones."""
    return run(device, _quantize_plan(operands.description, blocks, rotation), operands)


@lru_cache(maxsize=4096)
def _quantize_plan(description: Description, blocks: Blocks, rotation: int | None) -> Plan:
    layouts = layouts_of(QuantizeArrays[Layout], description)
    starts = starts_of(QuantizeArrays[int], description)
    require_item_alignment(given_of(layouts), given_of(starts))
    w, (kind, block_size) = layouts.w, blocks
    inner, outer = w.shape
    outputs = pieces(kind, outer, inner, block_size)
    planner = Planner(QuantizeArrays, layouts, outputs)
    slots, start = planner.slots, starts.w
    source: int | None = slots.w
    before: tuple[Step, ...] = ()
    if rotation is not None:
        rows = _as_rows(w, start, inner_axis=0)
        source, w = planner.scratch(outer * inner), contiguous((outer, inner), SCRATCH_DTYPE)
        rotated = contiguous_rows(outer, inner, SCRATCH_DTYPE)
        before = (
            rotate_step(
                RotatedSide(rows, layouts.w.dtype.name, slots.w),
                RotatedSide(rotated, SCRATCH_DTYPE.name, source),
            ),
        )
        w, start = Layout((inner, outer), w.strides[::-1], w.dtype), 0
    whole = _whole_vectors(w, start, axis=0)
    # Lanes go along the axis whose items lie closer together.
    strides = [abs(stride) for stride in w.strides]
    lanes = lanes_of(block_size) if strides[0] <= strides[1] or outer == 1 else 1
    vec = vector_items(w.dtype.name) if whole and lanes > 1 else 1
    params = _params(QUANTIZE_PARAMS, w, inner_axis=0)
    params["blocks"], params["block_size"] = inner // block_size, block_size
    count = outer * (inner // block_size)
    _require_launch("quantize", count * lanes, w)
    nested = kind == NESTED
    scales = planner.scratch(count) if nested else slots.scales
    step = Step.of(
        specialise_quantize(EXPANDED if nested else kind, w.dtype.name, lanes, vec),
        -(-count * lanes // THREADS),
        (source, slots.codes, scales),
        params[()],
    )
    if not nested:
        return planner.plan(*before, step)
    made = (scales, slots.scales, slots.super_scales, slots.scale_table)
    return planner.plan(
        step, Step.of(nest(), -(-count // (GROUP * (_NEST_THREADS // WARP_SIZE))), made, count)
    )


@dataclass(frozen=True, eq=False)
class DequantizeProblem:
    """A valid call of dequantize; equal calls share one object."""

    blocks: Blocks
    transposed: bool
    rotation: int | None
    layouts: DequantizeArrays[Layout]
    starts: DequantizeArrays[int]
    output: Output
    overlaps: Overlaps


def dequantize_problem(
    operands: Operands[DequantizeArrays[Array]],
    blocks: Blocks,
    transposed: bool,
    rotation: int | None,
    dtype: np.dtype,
) -> DequantizeProblem:
    """Check the out of a call, or find that it was checked before."""
    problem = _described_problem(operands.description, blocks, transposed, rotation, dtype)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _described_problem(
    description: Description,
    blocks: Blocks,
    transposed: bool,
    rotation: int | None,
    dtype: np.dtype,
) -> DequantizeProblem:
    layouts = layouts_of(DequantizeArrays[Layout], description)
    starts = starts_of(DequantizeArrays[int], description)
    outer, bytes_of_row = layouts.codes.shape
    inner = bytes_of_row * 8 // FORMATS[blocks.format].bits
    output = Output((outer, inner) if transposed else (inner, outer), dtype)
    out = layouts.out
    if out is not None:
        if (out.shape, out.dtype) != output:
            raise error(
                ValueError if out.dtype == dtype else TypeError,
                f"out is {out}",
                f"the result is {dtype.name} {output.shape}",
                "pass an array of that shape and dtype, or none",
            )
        require_whole_item_strides("out", out)
        require_own_items("out", out)
    if layouts.workspace is not None:
        require_workspace(layouts.workspace)
    overlaps = Overlaps.of(layouts, ("out", "workspace"))
    return DequantizeProblem(blocks, transposed, rotation, layouts, starts, output, overlaps)


def run_dequantize(
    device: Device, problem: DequantizeProblem, operands: Operands[DequantizeArrays[Array]]
) -> Array:
    """Write the weights into the given array, or into a new one with blocks in C order."""
    out = run(device, _dequantize_plan(problem), operands).out
    assert out is not None
    return out


@lru_cache(maxsize=4096)
def _dequantize_plan(problem: DequantizeProblem) -> Plan:
    layouts, starts, (shape, dtype) = problem.layouts, problem.starts, problem.output
    require_item_alignment(given_of(layouts), given_of(starts))
    require_kernel_dtype("out", dtype)
    inner_axis = 1 if problem.transposed else 0
    outer, inner = shape[1 - inner_axis], shape[inner_axis]
    out = layouts.out
    if out is None:
        new = contiguous((outer, inner), dtype)
        out = new if problem.transposed else Layout(shape, new.strides[::-1], dtype)
    planner = Planner(DequantizeArrays, layouts, {"out": problem.output})
    transposed = [made.slot for made in planner.results if not problem.transposed]
    if problem.rotation is not None:
        return planner.plan(*_rotated_back(problem, planner, out), transposed=transposed)
    strides = [abs(stride) for stride in out.strides]
    along = strides[inner_axis] <= strides[1 - inner_axis] or outer == 1
    whole = along and _whole_vectors(out, starts.out or 0, inner_axis)
    params = _params(DEQUANTIZE_PARAMS, out, inner_axis)
    params["units"], params["block_size"] = inner // UNITS[along], problem.blocks.block_size
    threads = outer * (inner // UNITS[along])
    _require_launch("dequantize", threads, out)
    vec = vector_items(dtype.name) if whole else 1
    kind, nested = problem.blocks.format, problem.blocks.format == NESTED
    slots = planner.slots
    scales, super_scales = slots.scales, slots.super_scales
    before: tuple[Step, ...] = ()
    if nested:
        count = outer * (inner // problem.blocks.block_size)
        scales, super_scales = planner.scratch(count), None
        nested_slots = (slots.scales, slots.super_scales, slots.scale_table, scales)
        before = (expand_step(count, nested_slots),)
    step = Step.of(
        specialise_dequantize(EXPANDED if nested else kind, dtype.name, along, vec),
        -(-threads // THREADS),
        (slots.codes, scales, super_scales, slots.out),
        params[()],
    )
    return planner.plan(*before, step, transposed=transposed)


def _rotated_back(
    problem: DequantizeProblem, planner: Planner[DequantizeArrays[Any]], out: Layout
) -> tuple[Step, ...]:
    """Return the launches from rotated codes to float32 in scratch memory, and to out."""
    slots, inner_axis = planner.slots, 1 if problem.transposed else 0
    outer, inner = out.shape[1 - inner_axis], out.shape[inner_axis]
    _require_launch("dequantize", outer * (inner // UNITS[True]), out)
    scratch, rotated = planner.scratch(outer * inner), contiguous_rows(outer, inner, SCRATCH_DTYPE)
    arrays = (slots.codes, slots.scales, slots.super_scales, scratch)
    kind, block_size = problem.blocks
    result = _as_rows(out, problem.starts.out or 0, inner_axis)
    return (
        dequantize_step(kind, SCRATCH_DTYPE.name, rotated, block_size, arrays),
        rotate_step(
            RotatedSide(rotated, SCRATCH_DTYPE.name, scratch),
            RotatedSide(result, out.dtype.name, slots.out),
        ),
    )


def dequantize_step(
    kind: str, dtype: str, out: Matrix, block_size: int, slots: tuple[int | None, ...]
) -> Step:
    """Return the launch from rows of codes to rows of numbers in C order.

    `slots` are those of codes, scales, super_scales and the numbers.
    """
    params = new_struct(DEQUANTIZE_PARAMS)
    params["inner_stride"], params["outer_stride"] = 1, out.row_stride
    params["outer"], params["units"] = out.rows, out.columns // UNITS[True]
    params["block_size"] = block_size
    specialisation = specialise_dequantize(kind, dtype, True, vector_items(dtype))
    threads = out.rows * (out.columns // UNITS[True])
    return Step.of(specialisation, -(-threads // THREADS), slots, params[()])


def _as_rows(weight: Layout, start: int, inner_axis: int) -> Matrix:
    """Describe a weight of any strides as rows of N, each of the items along K."""
    itemsize = weight.dtype.itemsize
    outer, inner = weight.shape[1 - inner_axis], weight.shape[inner_axis]
    strides = (weight.strides[1 - inner_axis] // itemsize, weight.strides[inner_axis] // itemsize)
    return Matrix(outer, inner, *strides, itemsize, start)


def _params(dtype: np.dtype, weight: Layout, inner_axis: int) -> np.ndarray:
    """Fill the fields that the structs of both kernels have in common."""
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
