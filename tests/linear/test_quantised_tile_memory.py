"""What products of many rows with a quantised weight do to memory, as the emulator counts it."""

from __future__ import annotations

import pytest
from support.linear_problems import LinearCase
from support.search import deep
from support.tensor_core_linear import tensor_core_alone

import cupyattn
from cupyattn.emulator import Report

pytestmark = pytest.mark.nvrtc

# Of a row of codes that lies along the sum a k-tile has half a sector, of its scales one number;
# the next k-tiles have the rest, which L1 keeps. Across the sum a sector of codes comes at once.
LEAST = {False: 0.65, True: 0.88}


@pytest.mark.parametrize(
    ("shape", "weights", "turned"),
    [
        ("narrow", "nf4", False),
        ("small", "int8", True),
        *deep(
            ("narrow", "int8", False),
            ("narrow", "nf4", True),
            ("small", "q4_k", False),
            ("small", "int4", True),
            ("narrow", "q4_1", True),
            ("small", "int4", False),
        ),
    ],
)
def test_no_bank_conflicts_and_few_sectors(shape, weights, turned):
    inner, outer = (256, 512) if turned else (512, 256)
    case = LinearCase((256,), inner, outer, "float16", None, turned, weights=weights, biased=False)
    x, w, _ = case.inputs()
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone(shape):
        cupyattn.linear(x, w, activation=None if turned else "gelu_tanh")
    assert report.instruction_mix["tensor"] > 0
    assert {access.worst for access in report.accesses if access.space == "shared"} == {1.0}
    assert report.sector_efficiency >= LEAST[turned]
