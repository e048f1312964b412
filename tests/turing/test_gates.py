"""What the model of Turing says of every row of the tuned kernels: not worse than is recorded.

`support.figures` reads the record, and says how it is made anew.
"""

from __future__ import annotations

import pytest
from support.costs import first_of_each_kernel
from support.figures import MODEL, NVRTC
from support.search import deep

from cupyattn.cli.table_rows import row_name, rows_of
from cupyattn.cli.turing import TUNED, kernel_row
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.turing import DisassemblerError, disassembler_version

ROWS = {(each.spec.entry, row_name(each)): each for each in rows_of(TUNED, None)}
FIRST = [(each.spec.entry, row_name(each)) for each in first_of_each_kernel(ROWS.values())]
OTHERS = [row for row in ROWS if row not in FIRST]

LSU_TOLERANCE = 0.005
UTILISATION_TOLERANCE = 0.03


def test_every_row_is_recorded():
    assert len(ROWS) == len(rows_of(TUNED, None)), "two rows have one name"
    assert set(MODEL) == set(ROWS)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("kernel", "name"), [*FIRST, *deep(*OTHERS)])
def test_a_row_is_as_good_as_recorded(kernel, name):
    try:
        disassembler_version()
    except DisassemblerError as missing:
        pytest.skip(str(missing))
    version = ".".join(map(str, nvrtc_version()))
    if version != NVRTC:
        pytest.skip(f"figures were recorded with NVRTC {NVRTC}, this is {version}")
    found, recorded = kernel_row(ROWS[kernel, name]), MODEL[kernel, name]
    assert found["ctas_per_sm"] >= recorded["ctas_per_sm"]
    loop, before = found["main"], recorded["main"]
    assert loop["spill_bytes"] <= before["spill_bytes"]
    assert loop["lsu_ratio"] <= before["lsu_ratio"] + LSU_TOLERANCE
    least = before["utilisation"]["mean"] - UTILISATION_TOLERANCE
    assert loop["utilisation"]["mean"] >= least, loop["utilisation"]
