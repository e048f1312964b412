"""Sectors and bank conflicts of the kernels of attention and softmax, counted by the emulator.

Each test asserts the sectors and bank conflicts of one call.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import dtype_of
from support.search import deep, mostly_deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.emulator.report import Access
from cupyattn.runtime.source import source_root

pytestmark = [pytest.mark.nvrtc, pytest.mark.deep]


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def accesses_of(report: Report, file: str, text: str) -> list[Access]:
    """The accesses of the one line of a source file that holds `text`."""
    lines = (source_root() / file).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return [
        access
        for line in report.lines
        if line.line == number and Path(line.file).name == Path(file).name
        for access in line.access_totals()
    ]


def report_of(function: Any, *arrays: np.ndarray, **options: Any) -> Report:
    """Return what the emulator counted in one call."""
    report = Report()
    with cupyattn.backend("emulator", report=report):
        function(*arrays, **options)
    return report


def worst_conflicts(report: Report) -> set[float]:
    """Return the most passes that an access to shared memory took, of each access."""
    return {access.worst for access in report.accesses if access.space == "shared"}


SHARED_READS = ("const float4 k =", "const float4 q =", "const float4 p =", "acc[r][c] += p.x")


@pytest.mark.parametrize("head_dim", [64, *deep(33, 128)])
def test_tiled_attention_reads_shared_memory_without_conflicts(head_dim):
    q, k, v = (normal(1, 40, 1, head_dim) for _ in range(3))
    report = report_of(cupyattn.attention, q, k, v, implementation="tiled")
    for text in SHARED_READS:
        accesses = accesses_of(report, "attention/teaching/tiled.cu", text)
        assert {(access.ways, access.worst) for access in accesses} == {(1.0, 1.0)}, text
    (store,) = accesses_of(report, "attention/teaching/tiled.cu", "[lane] = p;")
    assert store.ways == 1.0


@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    mostly_deep(itertools.product((24, 64, 128, 256), (False, True)), [(64, False)]),
)
def test_the_float_backward_has_no_bank_conflicts(head_dim, deterministic):
    """Staged rows and columns, P and dS by query and dS by key, and the operands of products.

    But for dS by key of head dim 256, where a thread's keys are two and not four.
    """
    q, k, v, dout = (normal(1, 130, 1, head_dim, dtype="float32") for _ in range(4))
    out, lse = cupyattn.attention(q, k, v, return_lse=True)
    report = report_of(
        cupyattn.attention_backward, dout, q, k, v, out, lse, deterministic=deterministic
    )
    assert any(access.write for access in report.accesses if access.space == "shared")
    assert worst_conflicts(report) == (
        {1.0, 2.0} if (head_dim, deterministic) == (256, False) else {1.0}
    )


@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    mostly_deep(
        itertools.product((64, 256, 24, 80, 128, 192), (False, True)),
        [(64, False), (64, True), (256, False)],
    ),
)
def test_the_backward_has_no_bank_conflicts_and_wastes_no_sectors(head_dim, deterministic):
    """Every launch: delta, dkdv of one warp or two for a key, dq or the conversion of its sums.

    The dq kernel reads l of its rows, then their delta, which lie in the same sectors. That of the
    scales reads a number or two for each CTA of delta's.
    """
    q, k, v, dout = (normal(1, 100, 1, head_dim) for _ in range(4))
    out, lse = cupyattn.attention(q, k, v, return_lse=True)
    report = report_of(
        cupyattn.attention_backward, dout, q, k, v, out, lse, deterministic=deterministic
    )
    assert report.instruction_mix["tensor"] > 0
    assert worst_conflicts(report) == {1.0}
    assert report.sector_efficiency >= (0.995 if head_dim % 16 == 0 else 0.98)
    wasteful = {
        Path(access.instruction.location[0]).name
        for access in report.accesses
        if access.space == "global" and access.efficiency < 1
    }
    if head_dim % 16 == 0:  # other rows straddle sectors
        allowed = {"row_statistics.cuh"} if deterministic else set()
        assert wasteful - {"backward_scales.cu"} == allowed


@pytest.mark.parametrize("head_dim", [64, 160, *deep(24, 80, 128, 256)])
def test_flash_attention_has_no_bank_conflicts_and_wastes_no_sectors(head_dim):
    """Rows of 24 items straddle sectors: 48 bytes."""
    report = report_of(cupyattn.attention, *(normal(1, 100, 1, head_dim) for _ in range(3)))
    assert report.instruction_mix["tensor"] > 0
    assert report.instruction_mix["ldsm"] > 0
    assert worst_conflicts(report) == {1.0}
    if head_dim % 16 == 0:
        assert report.sector_efficiency == 1.0
    else:
        assert report.sector_efficiency > 0.7


@pytest.mark.parametrize("head_dim", [64, *deep(40, 80, 128)])
@pytest.mark.parametrize(
    ("option", "load", "needed"),
    [
        ("float16", "ld.global.nc.v2.u32", 1.0),
        ("float32", "ld.global.v4.u32", 1.0),
        # Of a sector of 32 keys of a row, a tile takes 16 at a time.
        ("bool", '("ld.global.nc.u32', 0.5),
    ],
)
def test_bias_and_mask_are_read_four_keys_at_a_time(head_dim, option, load, needed):
    """Keys in another order in shared memory: without conflicts all the same."""
    given = {"mask": normal(100, 128) > 0} if option == "bool" else {}
    given = given or {"bias": normal(100, 128, dtype=option)}
    report = report_of(
        cupyattn.attention, *(normal(1, n, 1, head_dim) for n in (100, 128, 128)), **given
    )
    assert worst_conflicts(report) == {1.0}
    loads = accesses_of(report, "common/memory.cuh", load)
    assert loads
    assert min(access.efficiency for access in loads) >= needed


@pytest.mark.parametrize("head_dim", [64, 256, *deep(24, 72, 80, 128, 160)])
@pytest.mark.parametrize("dtype", ["float32", *deep("bfloat16")])
def test_float32_flash_attention_has_no_bank_conflicts_and_wastes_no_sectors(dtype, head_dim):
    """Every row of the table, output columns in quads alone and with one and two after them.

    Where head_dim is no multiple of 16, the last slice of 16 columns is narrower; rows of bfloat16
    then straddle sectors too, 48 bytes of three.
    """
    q, k, v = (normal(1, 100, 1, head_dim).astype(dtype_of(dtype)) for _ in range(3))
    report = report_of(cupyattn.attention, q, k, v)
    assert report.instruction_mix.get("tensor", 0) == 0
    assert worst_conflicts(report) == {1.0}
    if dtype == "float32" or head_dim % 16 == 0:
        assert report.sector_efficiency == 1.0
    else:
        assert report.sector_efficiency > 2 / 3


def test_tiled_attention_wastes_no_global_sectors():
    report = report_of(
        cupyattn.attention, *(normal(1, 64, 2, 64) for _ in range(3)), implementation="tiled"
    )
    assert report.sector_efficiency == 1.0
    loads = accesses_of(report, "attention/teaching/tiled.cu", "exists ? static_cast<float>")
    loads = [access for access in loads if access.space == "global"]
    assert {access.sectors_per_request for access in loads} == {2}  # 32 lanes of 2 bytes


def test_naive_attention_reads_keys_across_rows():
    """Its lanes own keys and loop over the columns: each lane another sector, for 2 bytes of it."""
    report = report_of(
        cupyattn.attention, *(normal(1, 32, 1, 64) for _ in range(3)), implementation="naive"
    )
    assert report.bank_conflict_ways == 1.0
    keys = min((a for a in report.accesses if a.space == "global"), key=lambda a: a.efficiency)
    assert keys.sectors_per_request == 32
    assert keys.efficiency == 2 / 32


def test_softmax_reads_and_stores_whole_vectors():
    """Each thread moves 16 bytes in one instruction, and every sector moves once."""
    report = report_of(cupyattn.softmax, normal(8, 1024))
    (load,) = accesses_of(report, "common/vec.cuh", "loaded = *reinterpret_cast")
    assert (load.sectors_per_request, load.efficiency) == (16, 1.0)
    assert report.bank_conflict_ways == 1.0
    stores = accesses_of(report, "common/memory.cuh", "st.global.v4.u32")
    assert {access.instruction.opcode for access in stores} == {"st.global.v4.u32"}
    assert report.sector_efficiency == 1.0
