"""The model of Turing stays as close to published figures as the reference page says."""

from __future__ import annotations

from statistics import mean

import pytest
from support.gates import require_gates_tools
from support.search import deep

pytest.importorskip("triton", reason='the calibration needs pip install ".[calibration]"')
comparison = pytest.importorskip("turing.calibration.comparison")

MEAN, LARGEST = 0.05, 0.15
"""Differences of utilisation."""


@pytest.fixture(autouse=True)
def tools():
    require_gates_tools()
    if comparison.version() != comparison.TRITON:
        pytest.skip(f"figures hold for Triton {comparison.TRITON}, this is {comparison.version()}")


def test_every_kernel_uses_tensor_cores():
    kernel = comparison.compiled(
        "attention_forward", 4, head_dim=64, tile_rows=64, tile_keys=32, pipelined=0
    )
    assert kernel.ctas >= 2
    assert "HMMA" in {each.name for each in kernel.code}


def test_a_tile_beyond_shared_memory_is_left_out():
    assert (
        comparison.compiled("product", 8, tile_rows=256, tile_columns=256, tile_depth=128) is None
    )


@pytest.mark.parametrize("device", deep(*comparison.FIGURES))
def test_targets_are_as_near_as_the_reference_page_says(device, monkeypatch):
    monkeypatch.setattr(comparison, "FIGURES", {device: comparison.FIGURES[device]})
    left = [abs(each.difference) for each in comparison.judged(list(comparison.compared()))]
    assert not left or (mean(left) <= MEAN and max(left) <= LARGEST)


def test_the_table_has_every_figure():
    figure = comparison.Figure("a kernel", 40.0, "somewhere", lambda machine: 0.5)
    far = comparison.Comparison("T4", figure, 1.5, 0.75, 0.5)
    near = comparison.Comparison("T4", figure, 1.5, 0.5, 0.5)
    printed = comparison.table([far, near])
    assert "40.0: 0.750" in printed and "-0.250" in printed
    assert printed.endswith("mean difference 0.125, largest 0.250.")
