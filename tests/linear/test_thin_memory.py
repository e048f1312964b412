"""What the kernels for few rows do to memory, and how they are laid out."""

from __future__ import annotations

import pytest
from linear.test_thin import case
from support.search import deep

import cupyattn
from cupyattn.emulator import Report
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.linear import thin


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("rows", "along_k", "activation"),
    [
        (1, True, "gelu"),
        (1, False, "gelu"),
        (8, True, "geglu"),
        (8, False, "geglu"),
        (64, True, "gelu_tanh"),
        (64, False, "gelu_tanh"),
        *deep(
            (1, True, "swiglu"),
            (1, False, "swiglu"),
            (16, True, None),
            (16, False, None),
            (32, True, "swiglu"),
            (64, False, "swiglu"),
        ),
    ],
)
def test_every_sector_is_needed_and_no_bank_is_wanted_twice(rows, along_k, activation):
    problem = case(rows, 320, 256, along_k=along_k, activation=activation)
    x, w, b, residual = (array.copy(order="K") for array in problem[:4])
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w, b, residual=residual, activation=activation)
    assert report.bank_conflict_ways == 1.0
    assert report.sector_efficiency >= 0.98
    loads = {a.instruction.opcode for a in report.accesses if "no_allocate" in a.instruction.opcode}
    assert len(loads) == 1
    items = 8 if along_k or rows == 1 else 4
    assert loads.pop().endswith({8: "v4.u32", 4: "v2.u32"}[items])


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("rows", "along_k", "activation"),
    [(3, False, None), (20, True, "swiglu"), *deep((20, False, "swiglu"), (3, False, "swiglu"))],
)
def test_wide_weights_too(rows, along_k, activation):
    problem = case(rows, 64, 4160, along_k=along_k, activation=activation)
    x, w, b = (array.copy(order="K") for array in problem[:3])
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w, b, activation=activation)
    assert report.bank_conflict_ways == 1.0
    assert report.sector_efficiency >= 0.98


ROWS = [
    (along_k, limit, columns, config)
    for along_k, by_rows in thin.TABLE[75].items()
    for limit, by_columns in by_rows.items()
    for columns, config in by_columns.items()
]


def test_tables_are_in_order_and_reach_every_size():
    for by_rows in thin.TABLE[75].values():
        assert list(by_rows) == sorted(by_rows)
        assert max(by_rows) == thin.MAX_ROWS
        for by_columns in by_rows.values():
            *limits, last = by_columns
            assert limits == sorted(limits)
            assert last is None


@pytest.mark.parametrize(("along_k", "limit", "columns", "config"), ROWS)
def test_a_row_fits_turing(along_k, limit, columns, config):
    """Its shared memory and threads, as often as it says."""
    assert config.reason.strip()
    assert config.threads * config.ctas_per_sm <= TURING.threads_per_sm
    for gated in (False, True):
        launch = thin.thin_launch(
            75, 40, 8, along_k=along_k, rows=limit, inner=4096, outer=columns or 2**20, gated=gated
        )
        assert launch.config is config
        shared = thin.thin(launch, "silu", gated).static_shared_bytes
        assert shared <= thin.SHARED_BYTES
        assert shared * config.ctas_per_sm <= TURING.shared_bytes_per_sm


@pytest.mark.parametrize(
    ("inner", "steps"), [(2560, 5), (4096, 4), (2048, 4), (10240, 5), (8192, 4), (1, 4)]
)
def test_a_burst_is_the_one_that_covers_k_with_the_fewest_zeros(inner, steps):
    """Of 4 and 5 steps of 32, for eight warps; of two the longer."""
    launch = thin.thin_launch(
        75, 40, 8, along_k=True, rows=8, inner=inner, outer=10_000, gated=False
    )
    assert launch.steps == steps


@pytest.mark.parametrize(
    ("outer", "inner", "splits"),
    [
        (16384, 4096, 1),
        (2560, 10240, 1),
        (2048, 2**20, 1),  # 128 CTAs fill a T4
        (256, 2048, 1),  # two turns round the warps: nothing to save
        (256, 8192, 4),
        (16, 2**20, 80),
    ],
)
def test_k_is_split_only_where_ctas_are_few_and_k_is_long(outer, inner, splits):
    launch = thin.thin_launch(
        75, 40, 8, along_k=True, rows=8, inner=inner, outer=outer, gated=False
    )
    assert launch.splits == splits


def test_a_gated_product_has_a_cta_for_half_as_many_results():
    for along_k in (True, False):
        for rows in (1, 8, 64):
            plain, gated = (
                thin.thin_launch(
                    75, 40, 8, along_k=along_k, rows=rows, inner=64, outer=1000, gated=gated
                )
                for gated in (False, True)
            )
            assert plain.config is gated.config
            assert gated.tiles in (2 * plain.tiles, 2 * plain.tiles - 1)
