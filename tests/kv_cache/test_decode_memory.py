"""What decoding does to memory, as the emulator counts it: K and V once, in whole sectors."""

from __future__ import annotations

import pytest
from support.paged import PagedProblem
from support.search import deep

import cupyattn
from cupyattn.emulator import Report

pytestmark = pytest.mark.nvrtc

KERNELS = [
    ("float16", 64, 4),
    ("float32", 24, 4),
    *deep(("float16", 128, 8), ("float16", 256, 4), ("float16", 80, 4), ("bfloat16", 128, 4)),
]


@pytest.mark.parametrize(("dtype", "head_dim", "group"), KERNELS)
def test_k_and_v_are_read_once_in_whole_sectors(dtype, head_dim, group):
    """All that is moved stays within 5 % of K and V, or where they are small within 9 %.

    Of the block table a lane looks up every fourth tile: a sector has more than it wants.
    """
    lengths = (128 * group, 400 * group)  # what else is moved grows with the group
    problem = PagedProblem(lengths, Sq=1, G=2, group=group, D=head_dim, dtype=dtype)
    arrays = problem.arrays()
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
    assert report.sector_efficiency > 0.99
    assert report.dram_sectors_bytes <= (1.05 if head_dim > 64 else 1.09) * once


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
