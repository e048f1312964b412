"""What the norms' kernels do to memory, as the emulator counts it."""

from __future__ import annotations

import numpy as np
import pytest
from support.norm_problems import NormProblem
from support.search import deep

import cupyattn
from cupyattn.emulator import Report

pytestmark = pytest.mark.nvrtc

ALL = ("weight", "bias", "residual")


def reported(problem: NormProblem) -> Report:
    """Forward and backward."""
    names = ("x", "weight", "bias", "residual", "dout")
    x, weight, bias, residual, dout = map(problem.array, names)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        _, total, mean, rstd = cupyattn.layer_norm(
            x, weight, bias, residual=residual, return_stats=True
        )
        cupyattn.layer_norm_backward(
            dout, total, weight, mean, rstd, bias=bias, dtotal=problem.array("dtotal")
        )
    return report


@pytest.mark.parametrize(
    ("rows", "length", "dtype"),
    [(37, 768, "float16"), (11, 2048, "float16"), *deep((37, 64, "float32"), (5, 8192, "float32"))],
)
def test_rows_in_registers_waste_no_sectors_and_have_no_bank_conflicts(rows, length, dtype):
    report = reported(NormProblem((rows, 1, length), dtype, arrays=ALL))
    assert report.sector_efficiency == 1.0
    assert report.bank_conflict_ways == 1.0
    wide = [
        a for a in report.accesses if a.space == "global" and a.instruction.opcode[-6:] == "v4.u32"
    ]
    assert len(wide) >= 8  # x, residual, weight, bias, out and total; dout, x, dtotal, weight, dx
    assert {access.worst for access in report.accesses if access.space == "shared"} == {1.0}


def test_longer_rows_read_what_was_normalised_again():
    """Their column sums, in global memory, are read and written by eight neighbouring floats."""
    report = reported(NormProblem((5, 1, 20_480), "float16", arrays=ALL))
    assert report.bank_conflict_ways == 1.0
    wasteful = {a.efficiency for a in report.accesses if a.space == "global" and a.efficiency < 1}
    assert wasteful == {0.5}


def test_every_item_is_read_and_written_once():
    """x and residual are read, out and the sum are written, and nothing else."""
    problem = NormProblem((8, 1, 1024), "float16", arrays=("residual",))
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.layer_norm(problem.array("x"), residual=problem.array("residual"))
    sectors = sum(a.sectors for a in report.accesses if a.space == "global")
    assert sectors == 4 * 8 * 1024 * 2 / 32


def test_scalar_loads_where_rows_do_not_start_at_vectors():
    problem = NormProblem((5, 1, 40), "float16", arrays=("weight",), view="sliced")
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.rms_norm(problem.array("x"), np.ones(40, np.float16))
    opcodes = {a.instruction.opcode for a in report.accesses if a.space == "global"}
    assert not any("v4" in opcode for opcode in opcodes)
