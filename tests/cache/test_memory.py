"""The memory accesses of the cache's kernels, as the emulator counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.paged import AppendProblem, PagedProblem, multiprocessors, on_emulator, scales_of
from support.search import deep, mostly_deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.emulator.report import Access
from cupyattn.ops.attention.kernels.tensor_core.forward import flash_row
from cupyattn.ops.attention.reference.cache_formats import quantise
from cupyattn.ops.attention.reference.paged import gathered
from cupyattn.runtime.compile import nvrtc_version

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("default_architecture")]


KERNELS = [
    ("float16", 64, 4),
    *deep(
        ("float32", 24, 4),
        ("float16", 128, 8),
        ("float16", 256, 4),
        ("float16", 80, 4),
        ("bfloat16", 128, 4),
    ),
]


EVERY_HEAD_DIM = [
    *deep(*(("float16", head_dim, 4) for head_dim in (16, 24, 32, 40, 48, *range(96, 256, 16)))),
    *deep(("bfloat16", 16, 4), ("float32", 8, 4), ("float32", 200, 4)),
]
"""Head dims with rows of whole 16-byte vectors, from the smallest that outweighs the table."""


@pytest.mark.parametrize(("dtype", "head_dim", "group"), [*KERNELS, *EVERY_HEAD_DIM])
def test_k_and_v_are_read_once_in_whole_sectors(dtype, head_dim, group):
    """All that is moved stays within 5 % of K and V, in the layout of a `PagedKVCache`.

    Of the block table a lane looks up every fourth tile: a sector has more than it wants.
    """
    problem = PagedProblem((2048, 4096), Sq=1, G=2, group=group, D=head_dim, dtype=dtype)
    q, k, v, *tables = problem.arrays()
    of_heads = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
    arrays = (q, *of_heads, *tables)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.paged_attention(*arrays)
    once = 2 * sum(problem.lengths) * problem.G * head_dim * arrays[0].dtype.itemsize
    streams = [
        access for access in report.accesses if "L1::no_allocate" in access.instruction.opcode
    ]
    # Without tensor cores q comes the same way, once for each warp and part of a sequence.
    assert once <= sum(access.bytes for access in streams) <= 1.08 * once
    assert all(access.efficiency == 1 for access in streams)
    assert report.sector_efficiency > (0.99 if head_dim > 16 else 0.98)
    assert report.dram_sectors_bytes <= 1.05 * once


@pytest.mark.parametrize(("dtype", "head_dim", "group"), KERNELS)
def test_parts_meet_in_shared_memory(dtype, head_dim, group):
    """Reads have no bank conflicts; a segment's one store of wide vectors two ways at the most."""
    problem = PagedProblem((100,), Sq=1, G=1, group=group, D=head_dim, dtype=dtype)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.paged_attention(*problem.arrays())
    shared = [access for access in report.accesses if access.space == "shared"]
    assert all(access.ways == 1 for access in shared if not access.write)
    assert max(access.worst for access in shared) <= 2


STORED = [
    ("float16", 64, 4, 8),
    *deep(
        ("float16", 128, 4, 4),
        ("float16", 128, 4, 8), ("float16", 64, 4, 4), ("float16", 256, 4, 4),
        ("float32", 128, 4, 8), ("float32", 128, 4, 4),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "head_dim", "group", "bits"), STORED)
def test_integers_and_scales_are_read_once_in_whole_sectors(dtype, head_dim, group, bits):
    """All that is moved stays within 5 % of K, V and their scales, which lie side by side."""
    problem = PagedProblem((2048, 6400), 1, 2, group, head_dim, dtype, block_size=256, bits=bits)
    arrays = problem.arrays()
    report = Report()
    with multiprocessors(1), cupyattn.backend("emulator", report=report):
        cupyattn.paged_attention(*arrays[:5], **scales_of(arrays))
    once = 2 * sum(problem.lengths) * problem.G * (head_dim * bits // 8 + 4)
    assert report.sector_efficiency > 0.98
    assert once <= report.dram_sectors_bytes <= (1.05 if nvrtc_version() < (13,) else 1.06) * once


def test_scales_of_all_heads_side_by_side_cost_sectors():
    """So it is said of k_scales: of each sector one of 8 heads wants 4 bytes."""
    problem = PagedProblem((512,), 1, 8, 1, 64, "float16", bits=8)
    arrays = problem.arrays()
    moved = []
    for scales in (arrays[5:], tuple(map(np.ascontiguousarray, arrays[5:]))):
        report = Report()
        with cupyattn.backend("emulator", report=report):
            cupyattn.paged_attention(*arrays[:5], **scales_of((*arrays[:5], *scales)))
        moved.append(report.sector_efficiency)
    assert moved[0] > 0.95
    assert moved[1] < 0.8


CHUNK = PagedProblem(
    lengths=(200,), Sq=100, G=1, group=1, D=64, dtype="float16", options=(("causal", True),)
)


def report_of(run: Callable[[], object]) -> Report:
    report = Report()
    with cupyattn.backend("emulator", report=report):
        run()
    return report


def call(problem: PagedProblem, arrays: tuple[np.ndarray, ...]) -> None:
    """Within the present report."""
    cupyattn.paged_attention(*arrays[:5], **scales_of(arrays), **problem.keywords())


def key_loads(report: Report) -> list[Access]:
    """The vector loads of rows, Q's among them, by their file."""
    return [
        access
        for access in report.accesses
        if access.space == "global"
        and not access.write
        and ".v4" in access.instruction.opcode
        and Path(access.instruction.location[0]).name != "resident_rows.cuh"
    ]


@pytest.mark.parametrize("head_dim", [64, *deep(128, 96, 256, 48)])
@pytest.mark.parametrize("block_size", [16, *deep(48, 256)])
def test_as_many_bytes_as_dense_in_whole_sectors(head_dim, block_size):
    """Rows of keys are those of the dense kernel, plus entries of the table."""
    problem = PagedProblem(**{**vars(CHUNK), "D": head_dim, "block_size": block_size})
    q, k, v, table, lengths = arrays = problem.arrays()
    keys, values = (gathered(cache, table, lengths) for cache in (k, v))
    paged = report_of(lambda: call(problem, arrays))
    dense = report_of(lambda: cupyattn.attention(q, keys, values, causal=True))
    loads = key_loads(paged)
    assert loads
    assert all(access.efficiency == 1 for access in loads)
    assert sum(a.bytes for a in loads) == sum(a.bytes for a in key_loads(dense))
    more = sum(a.bytes for a in paged.accesses if a.space == "global") - sum(
        a.bytes for a in dense.accesses if a.space == "global"
    )
    row = flash_row(75, head_dim, head_dim)
    tiles = -(-problem.lengths[0] // row.tile_k)
    # Each thread an entry of 4 bytes for each tile and two ahead, and the length twice.
    assert 0 < more <= 4 * 32 * row.warps * (tiles + 4)


@pytest.mark.parametrize("bits", [8, *deep(4)])
@pytest.mark.parametrize("head_dim", [64, *deep(128, 96, 256, 48)])
def test_integers_are_read_as_they_are_kept(head_dim, bits):
    """One CTA reads each item once, in whole sectors if rows are whole sectors."""
    problem = PagedProblem(**{**vars(CHUNK), "D": head_dim, "bits": bits, "options": ()})
    report = report_of(lambda: call(problem, problem.arrays()))
    loads = [a for a in report.accesses if "no_allocate" in a.instruction.opcode]
    if head_dim * bits % 256 == 0:
        assert all(access.efficiency == 1 for access in loads)
    assert sum(a.bytes for a in loads) == 2 * problem.lengths[0] * head_dim * bits // 8


@pytest.mark.parametrize(
    ("dtype", "head_dim", "bits"),
    [
        ("float16", 64, None), ("float16", 64, 8),
        *deep(
            ("float16", 40, None), ("float16", 80, None), ("float16", 256, None),
            ("float32", 128, None), ("float16", 96, 4), ("float16", 256, 8), ("float32", 128, 4),
        ),
    ],
)  # fmt: skip
def test_no_bank_conflicts(dtype, head_dim, bits):
    problem = PagedProblem(**{**vars(CHUNK), "D": head_dim, "dtype": dtype, "bits": bits})
    report = report_of(lambda: call(problem, problem.arrays()))
    shared = [access for access in report.accesses if access.space == "shared"]
    assert shared
    assert {access.worst for access in shared} == {1.0}


def test_a_window_reads_the_tiles_that_it_shows_and_no_others():
    """The rest of the cache is not there at all."""
    problem = PagedProblem(
        **{**vars(CHUNK), "lengths": (2000,), "options": (("window_size", (20, 0)),)}
    )
    arrays = problem.arrays()
    assert (arrays[3] == -1).sum() >= 100
    report = report_of(lambda: call(problem, arrays))
    read = sum(access.bytes for access in key_loads(report))
    tile = 64 * 64 * 2
    assert read <= 2 * 4 * tile + 100 * 64 * 2
    assert problem.ratio(*on_emulator(problem, arrays), arrays) <= 1


SECTOR = 32
PLAIN = AppendProblem((16,), H=8, G=4, D=64, dtype="float16", block_size=16)


def appended(problem: AppendProblem) -> tuple[list[Access], int]:
    """Its accesses of global memory, and the tokens that were stored."""
    memory = problem.memory()
    report = Report()
    with cupyattn.backend("emulator", report=report):
        problem.call(memory)
    assert all(access.space == "global" for access in report.accesses)
    return report.accesses, int((memory["slot_mapping"] >= 0).sum())


def sectors(accesses: list[Access], suffix: str, *, write: bool) -> int:
    """Those of the instructions that end so."""
    return sum(
        access.sectors
        for access in accesses
        if access.write == write and access.instruction.opcode.endswith(suffix)
    )


@pytest.mark.parametrize("dtype", mostly_deep(["float16", "float32", "bfloat16"], ["float16"]))
def test_k_and_v_are_read_once_and_written_once(dtype):
    """In 16 bytes a lane and whole sectors; only the slots are read as well."""
    problem = replace(PLAIN, dtype=dtype)
    accesses, stored = appended(problem)
    row_sectors = problem.D * (4 if dtype == "float32" else 2) // SECTOR
    once = 2 * stored * problem.G * row_sectors
    assert sum(a.sectors for a in accesses if "v4" in a.instruction.opcode) == 2 * once
    assert sum(a.sectors for a in accesses if a.write) == once
    assert all(access.efficiency == 1 for access in accesses)
    rest = [a for a in accesses if "v4" not in a.instruction.opcode]
    assert sum(a.sectors for a in rest) <= problem.tokens[0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_reads_no_more_than_its_pairs_and_tables(interleaved):
    """The other features of pairs that other lanes hold are read again, in whole sectors too."""
    problem = replace(PLAIN, half=32, interleaved=interleaved)
    accesses, stored = appended(problem)
    row_sectors = problem.D * 2 // SECTOR
    queries = problem.tokens[0] * problem.H
    rotated = (queries + stored * problem.G) * row_sectors
    values = stored * problem.G * row_sectors
    assert sectors(accesses, "v4.u32", write=True) == rotated + values
    again = 0 if interleaved else rotated
    assert sectors(accesses, "v4.u32", write=False) == rotated + values + again
    tables = sectors(accesses, "f32", write=False)
    # Once for four heads, whose every lane reads 32 bytes of each of two tables by two loads.
    groups = problem.tokens[0] * 2 + stored
    assert tables <= 2 * groups * problem.D * 4 // SECTOR
    assert all(a.efficiency == 1 for a in accesses if not a.instruction.opcode.endswith("v4.f32"))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_items_are_written_in_whole_sectors(bits):
    problem = replace(PLAIN, bits=bits)
    accesses, stored = appended(problem)
    read = 2 * stored * problem.G * problem.D * 2 // SECTOR
    assert sectors(accesses, "v4.u32", write=False) == read
    suffix = {8: "v2.u32", 4: "global.u32"}[bits]
    assert sectors(accesses, suffix, write=True) == read * bits // 16
    assert all(
        access.efficiency == 1 for access in accesses if access.instruction.opcode[-3:] != "f32"
    )
    scales = sum(a.bytes for a in accesses if a.write and a.instruction.opcode.endswith(".f32"))
    assert scales == 2 * stored * problem.G * 4


@pytest.mark.parametrize("problem", [replace(PLAIN, margin=1), *deep(replace(PLAIN, D=34))])
def test_rows_that_do_not_start_at_vectors_are_read_item_by_item(problem):
    accesses, _ = appended(problem)
    assert not any("v4" in access.instruction.opcode for access in accesses)
    assert all(access.efficiency > 0.6 for access in accesses)


@pytest.mark.parametrize("as_array", [False, True])
def test_blocks_are_read_once_and_written_once(as_array):
    caches = np.zeros((2, 6, 16, 4, 64), np.float16)
    copies = [(0, 1), (1, 2), (4, 3)]
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.copy_blocks(*caches, np.array(copies, np.int32) if as_array else copies)
    block = caches[0, 0].nbytes
    wide = [a for a in report.accesses if "v4" in a.instruction.opcode]
    assert sum(a.sectors for a in wide) * SECTOR == len(copies) * 2 * 2 * block
    assert report.sector_efficiency == 1
    ids = [a for a in report.accesses if "v4" not in a.instruction.opcode]
    assert bool(ids) == as_array


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_gathered_tokens_are_read_once_and_results_written_once(bits):
    caches = np.zeros((2, 6, 16, 4, 64), np.float16)
    scales: dict[str, np.ndarray] = {}
    stored = caches
    if bits:
        stored, both = quantise(caches, bits)
        scales = {"k_scales": both[0], "v_scales": both[1]}
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    lengths = np.array([48, 20], np.int32)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        k, _ = cupyattn.gather(*stored, table, lengths, **scales)
    assert report.sector_efficiency == 1
    written = [a for a in report.accesses if a.write]
    assert all("v4" in a.instruction.opcode for a in written)
    assert sum(a.sectors for a in written) * SECTOR == 2 * k.nbytes
    token = 2 * 4 * 64 * (bits or 16) // 8
    suffix = {None: "v4.u32", 8: "v2.u32", 4: "u32"}[bits]
    read = sectors(report.accesses, suffix, write=False)
    assert read * SECTOR >= int(lengths.sum()) * token
    looked_up = 2 * k[..., 0, 0].size * 4  # warps: each looks up its length and its block
    assert read * SECTOR <= int(lengths.sum()) * token + (looked_up * SECTOR if bits == 4 else 0)
