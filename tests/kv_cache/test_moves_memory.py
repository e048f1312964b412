"""What append_kv, copy_blocks and gather do to memory, as the emulator counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.appends import AppendProblem
from support.search import deep, mostly_deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.emulator.report import Access
from cupyattn.reference.kv_cache.quantisation import quantise

pytestmark = pytest.mark.nvrtc

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
    """In 16 bytes a lane and whole sectors; beside them there are the slots alone."""
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
