"""What decoding does to memory, as the emulator counts it: K and V once, in whole sectors."""

from __future__ import annotations

import numpy as np
import pytest
from support.paged import PagedProblem, multiprocessors, scales_of
from support.search import deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.kernels.compile import nvrtc_version

pytestmark = pytest.mark.nvrtc

KERNELS = [
    ("float16", 64, 4),
    ("float32", 24, 4),
    *deep(("float16", 128, 8), ("float16", 256, 4), ("float16", 80, 4), ("bfloat16", 128, 4)),
]


EVERY_HEAD_DIM = [
    ("float16", 16, 4),
    *deep(*(("float16", head_dim, 4) for head_dim in (24, 32, 40, 48, *range(96, 256, 16)))),
    *deep(("bfloat16", 16, 4), ("float32", 8, 4), ("float32", 200, 4)),
]
"""Of rows in whole vectors of 16 bytes, from the smallest beside which the table is little."""


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
    ("float16", 128, 4, 4),
    *deep(
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
