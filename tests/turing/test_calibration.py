"""The model of Turing stays as close to published figures as the reference page says."""

from __future__ import annotations

from statistics import mean

import pytest
from support.gates import require_gates_tools
from support.search import deep

from cupyattn.turing import MACHINES, T4, power

triton = pytest.importorskip("triton", reason='the calibration needs pip install ".[calibration]"')
TRITON = "3.2.0"
"""The last release that uses Turing's tensor cores."""
if not triton.__version__.startswith(TRITON):
    pytest.skip(
        f"figures hold for Triton {TRITON}, this is {triton.__version__}", allow_module_level=True
    )
comparison = pytest.importorskip("turing.calibration")

MEAN, LARGEST = 0.03, 0.06
"""Differences of utilisation."""


@pytest.fixture(autouse=True)
def tools():
    require_gates_tools()


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


def test_the_anchor_of_energies_is_met():
    """The product of this library sustains on a TITAN RTX what cuBLAS does."""
    predicted = comparison.OWN_PRODUCT(MACHINES["TITAN RTX"])
    assert predicted.sustained == pytest.approx(power.ANCHOR_TFLOPS, rel=0.03)


def test_a_t4_was_not_fitted_and_is_within_the_uncertainty():
    for figure in comparison.FIGURES["T4"]:
        sustained = figure.modelled(T4).sustained
        assert sustained == pytest.approx(figure.tflops, rel=power.UNCERTAINTY)


def test_the_table_has_every_figure():
    half = comparison.Prediction(0.5, 30.0, 50.0)
    figure = comparison.Figure("a kernel", 40.0, "somewhere", lambda machine: half)
    far = comparison.Comparison("T4", figure, 1.0, half)
    near = comparison.Comparison("T4", figure, 1.6, half)
    printed = comparison.table([far, near])
    assert "30.0 (-25%)" in printed and "-0.300" in printed and "+0.000" in printed
    assert printed.endswith("mean difference 0.150, largest 0.300.")
