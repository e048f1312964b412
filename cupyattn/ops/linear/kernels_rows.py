"""Quantised and rotated rows: kernels, checks and launches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from cupyattn.ops.linear.problem import Matrix
from cupyattn.ops.linear.row_formats import require_row_length, row_pieces
from cupyattn.ops.linear.weight_formats import ROTATION
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.runtime.checks import (
    FLOATS,
    Overlaps,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_item_alignment,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, Step
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import merge_axes, new_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)

# RotateParams in cuda_src/linear/int8/rotate.cu
ROTATE_PARAMS = np.dtype(
    [
        *((f"{name}_stride", np.int64) for name in ("x_row", "x_item", "out_row", "out_item")),
        ("addend_row_stride", np.int64),
        ("rows", np.int64),
        ("units", np.int32),
    ],
    align=True,
)
ROTATE_STRUCT = StructParameter("params", ROTATE_PARAMS, "RotateParams")

QUANTIZE_ROWS = KernelSpec(
    "quantize_rows",
    "linear/int8/quantize_rows.cu",
    (
        *inputs("x"),
        *map(Pointer, ("codes", "scales")),
        *(Scalar(name, _INT64) for name in ("x_stride", "rows")),
        Scalar("length", _INT32),
    ),
)
ROTATE = KernelSpec(
    "rotate_rows",
    "linear/int8/rotate.cu",
    (*inputs("x"), *inputs("addend", optional=True), Pointer("out"), ROTATE_STRUCT),
)
KERNELS = (QUANTIZE_ROWS, ROTATE)


class RowCodesConfig(NamedTuple):
    """A configuration of QUANTIZE_ROWS."""

    threads: int
    lanes: int
    """Threads that share a row: a warp, or all."""
    pieces: int
    """Times 8 items of a row that a thread holds, or loads at a time."""
    resident: bool = True
    """Whether the threads hold all of a row; otherwise they read it twice."""


_ITEMS = 8  # of a thread in a piece

# The row is read once, and as many threads share it as keep 8 to 32 items each.
ROW_CODES: Mapping[int | None, RowCodesConfig] = MappingProxyType(
    {
        256: RowCodesConfig(128, WARP_SIZE, 1),
        512: RowCodesConfig(128, WARP_SIZE, 2),
        1024: RowCodesConfig(128, WARP_SIZE, 4),
        2048: RowCodesConfig(256, 256, 1),
        4096: RowCodesConfig(256, 256, 2),
        8192: RowCodesConfig(256, 256, 4),
        16_384: RowCodesConfig(512, 512, 4),
        None: RowCodesConfig(512, 512, 4, resident=False),
    }
)
"""Configurations by the longest row of each; one serves all architectures."""


@cache
def quantize_rows_of(dtype: str, limit: int | None, vec: int, *, rotated: bool) -> Specialisation:
    """Specialise QUANTIZE_ROWS for rows of up to `limit` items; `vec` is 1 or a whole vector."""
    threads, lanes, pieces, resident = ROW_CODES[limit]
    shared_by = "a warp" if lanes == WARP_SIZE else f"{threads} threads"
    return QUANTIZE_ROWS.specialise(
        threads=threads,
        static_shared_bytes=threads // WARP_SIZE * FLOAT_BYTES,
        gates=Gates(registers=80),
        reason=f"{shared_by} a row, read {'once' if resident else 'twice'}",
        DTYPE=dtype,
        LANES=lanes,
        STRIPS=_ITEMS // vector_items(dtype) * pieces,
        VEC=vec,
        RESIDENT=cpp_bool(resident),
        ROTATED=cpp_bool(rotated),
    )


_ROTATE_THREADS = 256


@cache
def rotate_of(
    dtype: str, out_dtype: str, vec: int, out_vec: int, *, added: bool = False
) -> Specialisation:
    """Specialise ROTATE; `vec` and `out_vec` are 1 or a whole vector's items of each dtype."""
    return ROTATE.specialise(
        threads=_ROTATE_THREADS,
        reason=f"blocks of {ROTATION} lie in 8 threads",
        IN_DTYPE=dtype,
        OUT_DTYPE=out_dtype,
        IN_VEC=vec,
        OUT_VEC=out_vec,
        ADDED=cpp_bool(added),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows of each length, dtypes and accesses in pairs."""
    del arch  # one configuration serves all
    for dtype, limit, whole, rotated in pairs(STORAGE, ROW_CODES, (True, False), (True, False)):
        vec = vector_items(dtype) if whole else 1
        yield quantize_rows_of(dtype, limit, vec, rotated=rotated)
    for dtype in STORAGE:
        vec = vector_items(dtype)
        for added in (False, True):
            yield rotate_of(dtype, dtype, vec, vec, added=added)
        yield rotate_of(dtype, "float32", 1, vector_items("float32"))
        yield rotate_of("float32", dtype, vector_items("float32"), 1)


@dataclass(slots=True)
class RowsArrays(Record[T]):
    """Arrays of a call of quantize_rows: the rows, their codes and their scales."""

    SHOWN_AS: ClassVar = MappingProxyType({"codes": "out.codes", "scales": "out.scales"})

    x: T
    codes: T | None = None
    scales: T | None = None


@dataclass(frozen=True, eq=False)
class RowsProblem:
    """A valid call of quantize_rows; equal calls share one object."""

    layouts: RowsArrays[Layout]
    starts: RowsArrays[int]
    x: Matrix
    rotation: int | None
    outputs: dict[str, Output]
    overlaps: Overlaps


def rows_problem(operands: Operands[RowsArrays[Array]], rotation: int | None) -> RowsProblem:
    """Check a call of quantize_rows, or find that its description was checked before."""
    problem = _described_rows(operands.description, rotation)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096)
def _described_rows(description: Description, rotation: int | None) -> RowsProblem:
    layouts = layouts_of(RowsArrays[Layout], description)
    starts = starts_of(RowsArrays[int], description)
    x = layouts.x
    require_given("x", x)
    require_dtype("x", x, FLOATS)
    require_row_length(x.shape, rotation)
    require_contiguous_rows("x", x)
    outputs = row_pieces(x.shape)
    overlaps = Overlaps.of(layouts, ("codes", "scales"))
    matrix = rows_matrix("x", x, starts.x)
    return RowsProblem(layouts, starts, matrix, rotation, outputs, overlaps)


def rows_matrix(name: str, layout: Layout, start: int | None) -> Matrix:
    """Describe an array of contiguous rows as a matrix; all axes before its last are M rows."""
    *lead, columns = layout.shape
    itemsize = layout.dtype.itemsize
    shape, (strides,) = merge_axes(
        tuple(lead), [tuple(stride // itemsize for stride in layout.strides[:-1])]
    )
    rows = math.prod(lead)
    if len(shape) > 1 and rows * columns:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape} and strides {layout.strides}",
            "the axes before the last lie evenly in memory, so that they are M rows",
            f"copy it with ascontiguousarray({name.removeprefix('grads.')}), or call for each part",
        )
    row_stride = strides[0] if len(shape) == 1 else columns
    return Matrix(rows, columns, row_stride, 1, itemsize, start or 0)


@lru_cache(maxsize=4096)
def rows_plan(problem: RowsProblem) -> Plan:
    """Return the launch of quantize_rows."""
    require_item_alignment(given_of(problem.layouts), given_of(problem.starts))
    planner = Planner(RowsArrays, problem.layouts, problem.outputs)
    slots = planner.slots
    if problem.x.rows == 0:
        return planner.plan()
    dtype = problem.layouts.x.dtype.name
    codes = (slots.codes, slots.scales)
    return planner.plan(rows_step(problem.x, dtype, problem.rotation, slots.x, codes))


Slot = int | None


def rows_step(
    x: Matrix, dtype: str, rotation: int | None, x_slot: Slot, codes: tuple[Slot, Slot]
) -> Step:
    """Return the launch that quantises rows into the slots of codes and scales."""
    limit = next(most for most in ROW_CODES if most is None or x.columns <= most)
    vec = vector_items(dtype)
    specialisation = quantize_rows_of(
        dtype, limit, vec if x.vector == vec else 1, rotated=rotation is not None
    )
    ctas = -(-x.rows // (specialisation.threads // ROW_CODES[limit].lanes))
    values = (x.row_stride, x.rows, x.columns)
    return Step.of(specialisation, ctas, (x_slot, *codes), *values)


class RotatedSide(NamedTuple):
    """One side of a rotation: rows by items along the rotated axis, the dtype, and the slot."""

    rows: Matrix
    dtype: str
    slot: Slot

    @property
    def vec(self) -> int:
        """Items of a load or a store: a whole vector, or 1."""
        vec = vector_items(self.dtype)
        return vec if self.rows.along_columns and self.rows.vector == vec else 1


def rotate_step(x: RotatedSide, out: RotatedSide, addend: RotatedSide | None = None) -> Step:
    """Return the launch out = x H / 8 + addend; the addend has contiguous rows, as out then has."""
    params = new_struct(ROTATE_PARAMS)
    for name, side in (("x", x), ("out", out)):
        params[f"{name}_row_stride"] = side.rows.row_stride
        params[f"{name}_item_stride"] = side.rows.column_stride
    units = x.rows.columns // _ITEMS
    params["rows"], params["units"] = x.rows.rows, units
    out_vec = out.vec
    if addend is not None:
        params["addend_row_stride"] = addend.rows.row_stride
        out_vec = min(out_vec, addend.vec)
    specialisation = rotate_of(x.dtype, out.dtype, x.vec, out_vec, added=addend is not None)
    ctas = -(-x.rows.rows * units // specialisation.threads)
    slots = (x.slot, None if addend is None else addend.slot, out.slot)
    return Step.of(specialisation, ctas, slots, params[()])


def contiguous_rows(rows: int, columns: int, dtype: np.dtype) -> Matrix:
    """Return the layout of scratch rows in C order."""
    return Matrix(rows, columns, columns, 1, dtype.itemsize, 0)


def scratch_items(count: int, itemsize: int) -> int:
    """Return the float32 items of scratch memory for `count` items."""
    return -(-count * itemsize // FLOAT_BYTES)
