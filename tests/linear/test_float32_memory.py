"""What linear's float32 kernels do to memory, as the emulator counts it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from support.linear_problems import LinearCase
from support.search import deep, mostly_deep

import cupyattn
from cupyattn import LinearGrads
from cupyattn.emulator import Report

pytestmark = pytest.mark.nvrtc


def require_frugal(report: Report, wasteful: set[str]) -> None:
    """No bank conflicts, no sector fetched for a part of it but in those files."""
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} <= {1.0}
    partly = {
        Path(access.instruction.location[0]).name
        for access in report.accesses
        if access.space == "global" and access.efficiency < 1
    }
    assert partly == wasteful


@pytest.mark.parametrize(
    ("rows", "turned"), mostly_deep(product((8, 64), (False, True)), [(8, False), (64, True)])
)
@pytest.mark.parametrize("dtype", ["bfloat16", *deep("float32")])
def test_forward(rows, turned, dtype):
    case = LinearCase((rows,), 256, 64, dtype, "relu", turned)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(*case.inputs(), activation="relu")
    require_frugal(report, set())
    assert report.sector_efficiency == 1


@pytest.mark.parametrize("turned", [False, *deep(True)])
@pytest.mark.parametrize("dtype", ["bfloat16", *deep("float32")])
def test_backward(turned, dtype):
    """Each thread of db stores eight sums of bfloat16 columns in two pieces of 16 bytes."""
    case = LinearCase((64,), 64, 128, dtype, "relu", turned)
    x, w, b = case.inputs()
    dout, z = (case.normal(name, 64, 128) for name in ("dout", "z"))
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear_backward(
            dout,
            x,
            w,
            b,
            activation="relu",
            preactivation=z,
            grads=LinearGrads(dw=case.weight("dw")),
        )
    require_frugal(report, {"memory.cuh"} if dtype == "bfloat16" else set())
    assert report.sector_efficiency > 0.95
