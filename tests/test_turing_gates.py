"""What the model of Turing says of every row of the tuned kernels: not worse than is recorded.

Record anew, after a change that is for the better or cannot be helped, by

    python -m cupyattn turing --json > tests/turing_figures.json

with the compiler that CI pins, and look at the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupyattn.cli.turing import TUNED, kernel_row, row_name, rows_of
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.turing import DisassemblerError, disassembler_version

RECORD = json.loads((Path(__file__).parent / "turing_figures.json").read_text(encoding="utf-8"))
RECORDED = {(row["kernel"], row["row"]): row for row in RECORD["rows"]}
ROWS = {(each.spec.entry, row_name(each)): each for each in rows_of(TUNED, None)}

LSU_TOLERANCE = 0.005
UTILISATION_TOLERANCE = 0.03


def test_every_row_is_recorded():
    assert len(ROWS) == len(rows_of(TUNED, None)), "two rows have one name"
    assert set(RECORDED) == set(ROWS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("row", ROWS, ids=": ".join)
def test_a_row_is_as_good_as_recorded(row):
    try:
        disassembler_version()
    except DisassemblerError as missing:
        pytest.skip(str(missing))
    version = ".".join(map(str, nvrtc_version()))
    if version != RECORD["nvrtc"]:
        pytest.skip(f"figures were recorded with NVRTC {RECORD['nvrtc']}, this is {version}")
    found, recorded = kernel_row(ROWS[row]), RECORDED[row]
    assert found["ctas_per_sm"] >= recorded["ctas_per_sm"]
    loop, before = found["main"], recorded["main"]
    assert loop["spill_bytes"] <= before["spill_bytes"]
    assert loop["lsu_ratio"] <= before["lsu_ratio"] + LSU_TOLERANCE
    least = before["utilisation"]["mean"] - UTILISATION_TOLERANCE
    assert loop["utilisation"]["mean"] >= least, loop["utilisation"]
