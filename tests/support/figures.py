"""The pinned figures of sm_75: what rows cost, what the model says of them, what calls move.

`python -m support.figures`, with PYTHONPATH=.:tests and the compiler and disassembler that CI pins,
compiles every row and writes the files anew: after a change that is for the better or cannot be
helped. Look at the difference. Figures of another compiler are not compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.costs import Cost, rows, worst

from cupyattn.benchmark.memory.calls import modelled_calls
from cupyattn.benchmark.memory.command import describe as describe_memory
from cupyattn.cli.table_rows import rows_of
from cupyattn.cli.turing import TUNED, describe
from cupyattn.kernels.arch import TURING

FILE = Path(__file__).resolve().parent.parent / "figures" / "sm_75.json"
RECORD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
NVRTC: str = RECORD["nvrtc"]
MODEL = {(row["kernel"], row["row"]): row for row in RECORD["rows"]}
"""The model of Turing's main loops, by kernel and row."""
MEMORY_FILE = FILE.with_name("memory.json")
MEMORY_RECORD: dict[str, Any] = json.loads(MEMORY_FILE.read_text(encoding="utf-8"))
MEMORY = {row["call"]: row for row in MEMORY_RECORD["rows"]}
"""What memory-bound calls ask of Turing, by call."""
GATES = {row: Cost(**figures) for row, figures in RECORD["gates"].items()}
"""The most registers, shared bytes and spills and the fewest CTAs of any dtype and load, by row."""


def measured() -> dict[str, Any]:
    """What the file should hold."""
    model = describe(rows_of(TUNED, None), simulate=True, all_loops=False)
    gates = {row: worst(members, TURING)._asdict() for row, members in rows().items()}
    versions = {name: model[name] for name in ("nvrtc", "nvdisasm")}
    return {**versions, "rows": model["rows"], "gates": gates}


def moved() -> dict[str, Any]:
    """What the file of memory-bound calls should hold."""
    found = describe_memory(modelled_calls())
    return {name: found[name] for name in ("nvrtc", "rows")}


if __name__ == "__main__":
    for file, content in ((FILE, measured()), (MEMORY_FILE, moved())):
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
