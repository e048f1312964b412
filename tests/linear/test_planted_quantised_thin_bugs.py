"""Bugs planted in the kernels for few rows and a quantised weight are found."""

from __future__ import annotations

from typing import Any

import pytest
from linear.test_quantised_thin import case
from support.linear_problems import LinearCase
from support.planted_bugs import Bug, without_barrier

from cupyattn.emulator import KernelFault, OutOfBoundsError, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc

THIN, LOADS, CODES, SCALES, IN_FLOAT32 = (
    f"linear/quantised/thin{name}"
    for name in (".cu", "_loads.cuh", "_codes.cuh", "_scales.cuh", "_float32.cu")
)

NF4 = case(3, 37, 576, "nf4")
INT4 = case(1, 37, 640, "int4")
Q4_1 = case(7, 37, 608, "q4_1")
Q4_K = case(2, 37, 768, "q4_k")
INT8 = case(1, 37, 608, "int8")
MANY = case(28, 37, 192, "int8", block_size=32)
GATED = case(2, 20, 192, "nf4", "swiglu")
SIDE_BY_SIDE = case(1, 90, 64, "nf4", block_size=32)
LONG = case(3, 24, 16_448, "nf4")
F32_NF4 = case(2, 37, 1088, "nf4", dtype="float32")
F32_INT4 = case(9, 37, 1056, "int4", dtype="float32", block_size=32)
F32_INT8 = case(1, 37, 608, "int8", "swiglu", dtype="float32")

CLEAN = {
    "nf4": NF4, "int4": INT4, "q4_1": Q4_1, "q4_k": Q4_K, "int8": INT8, "many rows": MANY,
    "gated": GATED, "side by side": SIDE_BY_SIDE, "parts of K": LONG, "nf4 in float32": F32_NF4,
    "int4 in float32": F32_INT4, "int8 in float32": F32_INT8,
}  # fmt: skip


@pytest.mark.parametrize("problem", CLEAN.values(), ids=CLEAN)
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem, False) <= 1


FAULTS: dict[str, tuple[LinearCase, Bug, Any]] = {
    "k beyond K are read": (
        NF4,
        Bug(LOADS, "own / Traits::kLaneItems), own < end);", "own / Traits::kLaneItems), true);"),
        OutOfBoundsError,
    ),
    "x beyond K is read": (
        NF4,
        Bug(LOADS, "source, 8 * j < rows ? count : 0)", "source, 8 * j < rows ? 8 : 0)"),
        OutOfBoundsError,
    ),
    "rows beyond M are read": (
        MANY, Bug(LOADS, "8 * j < rows ? count : 0", "count"), OutOfBoundsError,
    ),
    "scales of blocks beyond K are read": (
        Q4_1, Bug(SCALES, "ld_u32_if(source + i, i < count)", "ld_u32_if(source + i, true)"),
        OutOfBoundsError,
    ),
    "columns beyond N are read": (
        INT4,
        Bug(LOADS, "min(Tile::result(first, column), params.outer - 1)",
            "Tile::result(first, column)"),
        OutOfBoundsError,
    ),
    "a column too many is stored": (
        INT4, Bug(THIN, "if (result >= params.outer) continue;", ""), OutOfBoundsError,
    ),
    "a row too many is stored": (
        NF4, Bug(THIN, "first_row + row >= params.rows", "first_row + row > params.rows"),
        OutOfBoundsError,
    ),
    "products of a part with the x of another are stored": (
        INT4,
        Bug(THIN, "n / Traits::kRows != lane_group() % Traits::kParts) continue;",
            "n < 0) continue;"),
        SharedMemoryRaceError,
    ),
    "the table is read while it is written": (
        NF4, without_barrier(THIN, "smem.pairs: written by every warp",
                             "if (Pairs::Table::kEntries > 0) __syncthreads();"),
        KernelFault,
    ),
    "sums are read while they are written": (
        Q4_1, without_barrier(THIN, "group: written by its warps", "group_barrier();"),
        SharedMemoryRaceError,
    ),
    "sums are written while those of the tile before are read": (
        NF4, without_barrier(THIN, "group: the tile before has been read",
                             "if (tile != first) group_barrier();"),
        SharedMemoryRaceError,
    ),
    "float32: x is read while it is written": (
        F32_NF4, without_barrier(IN_FLOAT32, "smem.x: written by all threads"),
        KernelFault,
    ),
    "float32: x is written while it is read": (
        F32_NF4, without_barrier(IN_FLOAT32, "smem.x: the run before has been read",
                                 "if (k > 0) __syncthreads();"),
        SharedMemoryRaceError,
    ),
    "float32: codes beyond K are read": (
        F32_NF4, Bug(IN_FLOAT32, "params.inner - Traits::kLaneItems);", "1 << 30);"),
        OutOfBoundsError,
    ),
    "float32: a column too many is stored": (
        F32_INT8, Bug(IN_FLOAT32, "|| result >= params.outer) return;", ") return;"),
        OutOfBoundsError,
    ),
    "float32: a row too many is stored": (
        F32_INT4, Bug(IN_FLOAT32, "row >= params.rows", "row > params.rows"), OutOfBoundsError,
    ),
    "float32: rows beyond M are read": (
        F32_INT4, Bug(IN_FLOAT32, "exists ? params.inner - k - 4 * i : 0",
                      "params.inner - k - 4 * i"),
        OutOfBoundsError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, ratio_with):
    problem, bug, fault = FAULTS[name]
    with pytest.raises(fault):
        ratio_with(problem, False, bug)


MISTAKES = {
    "loads that run ahead stay in their tile": (
        SIDE_BY_SIDE, Bug(THIN, "next = Traits::Part(params, tile + step);", "next = part;"),
    ),
    "words are not traded": (NF4, Bug(THIN, "trade(w.codes[step][i]);", ";")),
    "the lanes of a transpose are mixed up": (
        Q4_1, Bug(LOADS, "make_uint4(v.x, a, v.z, b)", "make_uint4(v.x, b, v.z, a)"),
    ),
    "x is that of words that were not traded": (
        NF4, Bug(LOADS, "(t % 2 * 2 + t / 2)", "t"),
    ),
    "a block has the scale of the first": (
        Q4_1, Bug(THIN, "scales[step][2 * tile + half].of(block)",
                  "scales[step][2 * tile + half].of(0)"),
    ),
    "columns of the second half have the scales of the first": (
        INT4, Bug(THIN, "scales[step][2 * tile + half].of(block)",
                  "scales[step][2 * tile].of(block)"),
    ),
    "the nibbles of a byte are swapped": (
        Q4_K, Bug(CODES, "return word >> 4 * i & 0x000f000fu;",
                  "return word >> 4 * (i ^ 1) & 0x000f000fu;"),
    ),
    "both chains have one factor": (
        INT4, Bug(CODES, "fmaf(16.f, low, high)", "low + high"),
    ),
    "bytes are not signed": (INT8, Bug(CODES, "word ^ 0x80808080u", "word")),
    "both weights of a byte are the first": (
        NF4, Bug(CODES, "own, entry % kCodes) << 16", "own, entry / kCodes) << 16"),
    ),
    "the zero point is left out": (
        INT4, Bug(SCALES, "? -own.x * own.y : own.y", "? 0.f : own.y"),
    ),
    "the minimum is added": (
        Q4_K, Bug(SCALES, "-super.y * float_of_byte", "super.y * float_of_byte"),
    ),
    "a super-block is that of the first columns": (
        Q4_K, Bug(SCALES, "super_scales_g + block / 8", "super_scales_g + block / 8 % 3"),
    ),
    "the last part is left out": (
        NF4, Bug(THIN, "part < Traits::kParts; part++", "part < Traits::kParts - 1; part++"),
    ),
    "the last warp is left out": (
        Q4_1, Bug(THIN, "warp < Traits::kKWarps; warp++", "warp < Traits::kKWarps - 1; warp++"),
    ),
    "a scale of a column is that of the first": (
        INT8, Bug(THIN, "fmaf(group.scale[column]", "fmaf(group.scale[0]"),
    ),
    "what a gate acts on has no bias": (
        GATED, Bug(THIN, "total(group, row, column + Tile::kResults) : 0.f",
                   "total(group, row, column + Tile::kResults) - group.bias[column] : 0.f"),
    ),
    "groups have the tile of the first": (
        SIDE_BY_SIDE, Bug(THIN, "blockIdx.x * Traits::kGroups + group_index()",
                          "blockIdx.x * Traits::kGroups"),
    ),
    "float32: the codebook's nibbles are swapped": (
        F32_NF4, Bug(IN_FLOAT32, "(4 * i ^ 4)", "(4 * i)"),
    ),
    "float32: all of a lane's x is its first": (
        F32_INT4, Bug(IN_FLOAT32, "place_of(piece, lane_index())]", "place_of(0, lane_index())]"),
    ),
    "float32: scales are those of the first block": (
        F32_INT4, Bug(IN_FLOAT32, "item / Traits::kBlockItems;", "line[i];"),
    ),
    "float32: rows of the second tile are the first": (
        F32_INT4, Bug(IN_FLOAT32, "blockIdx.x % row_tiles * Traits::kRows;", "0;"),
    ),
    "float32: up is the gate": (
        F32_INT8, Bug(IN_FLOAT32, "(column < Tile::kResults ? z : up) = total;",
                      "z = total, up = total;"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_of_the_bounds(name, ratio_with):
    problem, bug = MISTAKES[name]
    assert not ratio_with(problem, False, bug) <= 10
