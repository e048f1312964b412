"""The model of Turing stays as close to published figures as the reference page says."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from support.gates import require_gates_tools
from support.readme import ROOT
from support.search import deep

from cupyattn.turing import MACHINES, power

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


@pytest.mark.deep
def test_targets_of_a_titan_rtx_are_near(monkeypatch):
    """The one device with several targets: the model of the others only has their clocks."""
    targets = [each for each in comparison.FIGURES["TITAN RTX"] if each.is_target]
    monkeypatch.setattr(comparison, "FIGURES", {"TITAN RTX": targets})
    left = [abs(each.difference) for each in comparison.judged(list(comparison.compared()))]
    assert len(left) == 4
    assert mean(left) <= MEAN
    assert max(left) <= LARGEST


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("T4", "product, cuBLAS"),
        *deep(("RTX 2080 Ti", "forward D 64"), ("TITAN RTX", "forward D 64")),
    ],
)
def test_a_rate_that_set_no_value_is_within_the_uncertainty(device, kernel):
    (figure,) = (each for each in comparison.FIGURES[device] if each.kernel == kernel)
    sustained = figure.modelled(MACHINES[device]).sustained
    assert sustained == pytest.approx(figure.tflops, rel=power.UNCERTAINTY)


@pytest.mark.parametrize(
    ("device", "kernel", "error"),
    [
        ("TITAN RTX", "product, cuBLAS", 0.01),
        *deep(("T4", "int8 product, cublasLt", 0.05), ("T4", "float32 product", 0.16)),
    ],
)
def test_a_fitted_rate_is_met(device, kernel, error):
    """The energies of an instruction and of an int8 product: the T4's figures, as well as both."""
    (figure,) = (each for each in comparison.FIGURES[device] if each.kernel == kernel)
    assert figure.modelled(MACHINES[device]).sustained == pytest.approx(figure.tflops, rel=error)


@pytest.mark.deep
def test_the_reference_page_has_the_table():
    """After an edit of the model copy what the command prints into the page."""
    page = (ROOT / ".github" / "reference" / "calibration.rst").read_text("utf-8")
    assert comparison.table(list(comparison.compared())) in page


def test_the_table_has_every_figure():
    half = comparison.Prediction(0.5, 30.0, 50.0)
    figure = comparison.Figure("a kernel", 40.0, "somewhere", lambda machine: half)
    far = comparison.Comparison("T4", figure, 1.0, half)
    near = comparison.Comparison("T4", figure, 1.6, half)
    printed = comparison.table([far, near])
    assert "30.0 (-25%)" in printed and "-0.300" in printed and "+0.000" in printed
    assert printed.endswith("mean difference 0.150, largest 0.300.")
    elsewhere = far._replace(figure=replace(figure, is_target=False, has_its_clock=False))
    printed = comparison.table([far, near, elsewhere])
    assert "-0.300" in printed and "0.500     another clock" in printed
