"""What the model of Turing says of every row of the tuned kernels: not worse than is recorded.

So it is of every row of every kernel with products, on a card of each kind.
`support.figures` reads the records, and says how they are made anew.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import pytest
from support.costs import first_of_each, first_of_each_kernel
from support.figures import (
    CALLS,
    CALLS_RECORD,
    MODEL,
    NVRTC,
    ON_MACHINES,
    call_rate,
    compiler_version,
    modelled_of,
    of_machines,
    sm_of,
    worth_trying,
)
from support.search import deep, mostly_deep

from cupyattn.benchmark.frame.emulated import FLOAT32_FLOP_PER_CYCLE
from cupyattn.cli.table_rows import row_name, rows_of
from cupyattn.cli.turing import TUNED, kernel_row
from cupyattn.kernels.configs.linear.fma_rate import fma_rate
from cupyattn.turing import MACHINES, T4, DisassemblerError, analyse, disassembler_version

ROWS = {(each.spec.entry, row_name(each)): each for each in rows_of(TUNED, None)}
FIRST = [(each.spec.entry, row_name(each)) for each in first_of_each_kernel(ROWS.values())]
ON = of_machines()

LSU_TOLERANCE = 0.005
UTILISATION_TOLERANCE = 0.03


def test_every_row_is_recorded():
    assert len(ROWS) == len(rows_of(TUNED, None)), "two rows have one name"
    assert set(MODEL) == set(ROWS)


def test_every_machine_is_recorded():
    assert set(ON_MACHINES) == set(ON)
    recorded = {sm_of(MACHINES[name]) for name, _, _ in ON}
    assert recorded == {sm_of(machine) for machine in MACHINES.values()}


RECORDED = {**{(T4.name, *row): MODEL[row] for row in MODEL}, **ON_MACHINES}
FEW = [
    *((T4.name, *row) for row in FIRST[::8]),
    ("RTX 2080 Ti", "attention_forward", "D 40"),
    ("GTX 1650 Ti", "attention_forward_f32", "float32, D 256"),
]
SPECIALISATIONS = {**{(T4.name, *row): ROWS[row] for row in ROWS}, **ON}
TRIED = worth_trying(
    {row: partial(modelled_of, of) for row, of in SPECIALISATIONS.items()},
    RECORDED,
    [*FEW, *first_of_each(SPECIALISATIONS, itemgetter(0, 1))],
)
# A row on each card in turn: its code is read once for all of them.
IN_TURN = sorted(TRIED, key=itemgetter(1, 2, 0))


@pytest.mark.nvrtc
@pytest.mark.parametrize(("machine", "kernel", "name"), mostly_deep(IN_TURN, FEW))
def test_a_row_is_as_good_as_recorded(machine, kernel, name):
    require_the_recorded_tools()
    row = SPECIALISATIONS[machine, kernel, name]
    found = kernel_row(row, machine=MACHINES[machine])
    require_as_good(found, RECORDED[machine, kernel, name])


def test_every_call_is_recorded():
    assert set(CALLS_RECORD) == set(CALLS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("call", deep(*CALLS))
def test_a_call_is_as_good_as_recorded(call):
    require_the_recorded_tools()
    assert call_rate(call) >= 0.95 * CALLS_RECORD[call]


@pytest.mark.nvrtc
@pytest.mark.parametrize("head_dim", deep(64, 128))
def test_a_bias_of_all_sequences_takes_at_most_twice_as_long(head_dim):
    """By the model of a T4, of main loops: its gradient has a kernel of its own."""
    require_the_recorded_tools()
    plain = call_rate(f"backward with no option, D {head_dim}")
    assert call_rate(f"backward with a bias of all sequences, D {head_dim}") >= plain / 2


@pytest.mark.nvrtc
def test_the_ceiling_of_float32_is_that_of_the_units():
    require_the_recorded_tools()
    loop = analyse(fma_rate()).main
    assert loop is not None
    assert loop.flop_per_cycle == FLOAT32_FLOP_PER_CYCLE


def require_the_recorded_tools() -> None:
    try:
        disassembler_version()
    except DisassemblerError as missing:
        pytest.skip(str(missing))
    if compiler_version() != NVRTC:
        pytest.skip(f"figures were recorded with NVRTC {NVRTC}, this is {compiler_version()}")


def require_as_good(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    assert found["row"] == recorded["row"]
    assert found["ctas_per_sm"] >= recorded["ctas_per_sm"]
    loop, before = found["main"], recorded["main"]
    assert loop["spill_bytes"] <= before["spill_bytes"]
    assert loop["lsu_ratio"] <= before["lsu_ratio"] + LSU_TOLERANCE
    least = before["utilisation"]["mean"] - UTILISATION_TOLERANCE
    assert loop["utilisation"]["mean"] >= least, loop["utilisation"]
