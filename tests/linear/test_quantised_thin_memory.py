"""What few rows and a quantised weight do to memory, and how their kernels are laid out."""

from __future__ import annotations

import pytest
from linear.test_quantised_thin import case
from support.search import deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.linear import quantised_thin, quantised_thin_rows
from cupyattn.kernels.registry import catalogue


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("rows", "weights", "dtype"),
    [
        (1, "nf4", "float16"),
        (3, "int4", "float16"),
        (8, "q4_k", "float16"),
        (1, "int8", "float32"),
        *deep(
            (1, "int4", "float16"),
            (1, "int8", "float16"),
            (2, "nf4", "float16"),
            (16, "q4_1", "float16"),
            (32, "int8", "float16"),
            (32, "nf4", "float16"),
            (2, "nf4", "float32"),
            (8, "q4_k", "float32"),
        ),
    ],
)
def test_codes_are_read_once_16_bytes_at_a_time_and_no_bank_is_wanted_twice(rows, weights, dtype):
    x, w, b = case(rows, 192, 1024, weights, dtype=dtype).inputs()
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w, b)
    assert report.bank_conflict_ways == 1.0
    streamed = [a for a in report.accesses if "no_allocate" in a.instruction.opcode]
    assert {access.instruction.opcode.split(".")[-2:][0] for access in streamed} == {"v4"}
    times = -(-rows // 32)  # more rows than 32 find the codes in L2
    assert sum(access.sectors for access in streamed) * 32 == times * w.codes.nbytes


def test_tables_are_in_order_and_reach_every_size():
    for by_rows in quantised_thin_rows.TABLE[75].values():
        assert list(by_rows) == sorted(by_rows)
        assert quantised_thin.MAX_ROWS % max(by_rows) == 0
        for by_columns in by_rows.values():
            *limits, last = by_columns
            assert limits == sorted(limits)
            assert last is None


SHAPES = [(16384, 4096), (2560, 2560), (576, 1536), (2048, 8192), (128256, 2048), (1, 256)]
FORMATS = (("nf4", 64), ("int4", 128), ("int4", 32), ("int8", 0), ("int8", 32), ("q4_k", 32))


def launch(weights: str, block_size: int, rows: int, inner: int, outer: int, gated: bool = False):
    return quantised_thin.thin_launch(
        75, 40, weights, block_size or inner, 8,
        vec_scales=True, rows=rows, inner=inner, outer=outer, gated=gated,
    )  # fmt: skip


@pytest.mark.parametrize(("weights", "block_size"), FORMATS)
def test_a_launch_fits_turing(weights, block_size):
    """Its shared memory and threads, as often as its row says; its groups have all tiles."""
    for rows in (1, 2, 4, 8, 16, 32):
        for outer, inner in SHAPES:
            for gated in (False, True):
                found = launch(weights, block_size, rows, inner, outer, gated)
                specialisation = quantised_thin.thin(found, "silu", gated)
                shared, often = specialisation.static_shared_bytes, found.config.ctas_per_sm
                assert found.config.reason.strip()
                assert specialisation.threads * often <= TURING.threads_per_sm
                assert shared * often <= TURING.shared_bytes_per_sm
                work = found.tiles * found.splits * -(-rows // 32)
                if weights == "nf4":
                    assert found.ctas <= 40 * often
                else:
                    assert (found.ctas - 1) * found.groups < work <= found.ctas * found.groups


@pytest.mark.parametrize(
    ("inner", "rows", "k_warps"),
    [(4096, 1, 2), (2560, 1, 3), (576, 1, 1), (8192, 1, 4), (10_240, 1, 5), (768, 8, 3)],
)
def test_warps_share_k_so_that_few_of_them_have_none(inner, rows, k_warps):
    assert launch("nf4", 64, rows, inner, 16384).k_warps == k_warps


@pytest.mark.parametrize(
    ("outer", "inner", "splits"),
    [(16384, 4096, 1), (2560, 10_240, 1), (256, 2048, 1), (256, 16_384, 8), (16, 2**18, 80)],
)
def test_k_is_split_only_where_tiles_are_few_and_k_is_long(outer, inner, splits):
    assert launch("int4", 128, 8, inner, outer).splits == splits


def test_little_work_is_spread_over_all_multiprocessors():
    found = launch("nf4", 64, 1, 576, 576)
    assert found.ctas * 2 > 40


def test_every_format_is_compiled_ahead():
    labels = [each.label for each in catalogue() if "quantised_thin" in each.spec.entry]
    for name in ("Nf4", "Int4", "Int8", "Q4_1", "Q4_K"):
        for entry in ("linear_quantised_thin[", "linear_quantised_thin_f32["):
            assert any(label.startswith(entry) and f"={name}," in label for label in labels)
