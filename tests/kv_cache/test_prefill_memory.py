"""What many query tokens over a paged cache do to memory, as the emulator counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.paged import PagedProblem, on_emulator, scales_of
from support.search import deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.emulator.report import Access
from cupyattn.kernels.configs.attention.tensor_core.forward_rows import flash_row
from cupyattn.reference.attention.paged import gathered

pytestmark = pytest.mark.nvrtc

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
    """Rows of keys are those of the dense kernel; beside them come entries of the table."""
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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("head_dim", [64, *deep(128, 96, 256, 48)])
def test_integers_are_read_as_they_are_kept(head_dim, bits):
    """Of the one CTA each item once, in whole sectors where rows are these."""
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
