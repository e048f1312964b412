"""What linear's tensor-core kernels do to memory, as the emulator counts it."""

from __future__ import annotations

import pytest
from support.linear_problems import LinearCase
from support.search import deep
from support.tensor_core_linear import tensor_core_alone

import cupyattn
from cupyattn.emulator import Report

pytestmark = pytest.mark.nvrtc


def require_frugal(report: Report) -> None:
    """Tensor cores, no bank conflicts, and whole sectors of 32 bytes."""
    assert report.instruction_mix["tensor"] > 0
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} == {1.0}
    assert report.sector_efficiency >= 0.98


@pytest.mark.parametrize(
    ("shape", "activation", "turned"),
    [
        ("wide", "swiglu", True),
        ("short", "gelu_tanh", False),
        *deep(
            ("wide", "gelu", False),
            ("narrow", "swiglu", True),
            ("narrow", "silu", False),
            ("small", "geglu", False),
            ("short", "relu", True),
        ),
    ],
)
def test_forward(shape, activation, turned):
    """The last tiles of a gated result are stored by 8 bytes a lane: whole sectors all the same."""
    case = LinearCase((272,), 96, 192, "float16", activation, turned, residual=True)
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone(shape):
        cupyattn.linear(
            *case.inputs(), residual=case.normal("residual", 272, 192), activation=activation,
            return_preactivation=True,
        )  # fmt: skip
    require_frugal(report)


@pytest.mark.parametrize(
    ("shape", "turned"),
    [("wide", True), *deep(("wide", False), ("small", True), ("narrow", False), ("short", True))],
)
def test_backward(shape, turned):
    """dx, dw, the pass that forms dz, and the sums that become db.

    dw lies as w does. Either way round its memory is 256 rows of 192 items: whole tiles, as lanes
    beyond a tile's last row read a part of a sector.
    """
    inner, outer = (192, 256) if turned else (256, 192)
    case = LinearCase((96,), inner, outer, "float16", "silu", turned)
    x, w, b = case.inputs()
    dout, z = (case.normal(name, 96, outer) for name in ("dout", "z"))
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone(shape):
        cupyattn.linear_backward(dout, x, w, b, activation="silu", preactivation=z)
    require_frugal(report)


def test_parts_of_a_long_sum():
    case = LinearCase((2048,), 64, 128, "float16", biased=False)
    x, w, _ = case.inputs()
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone():
        cupyattn.linear_backward(case.normal("dout", 2048, 128), x, w)
    require_frugal(report)
