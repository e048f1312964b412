"""The pinned figures of sm_75: what rows cost, what the model says of them, what calls move.

`python -m support.figures`, with PYTHONPATH=.:tests and the compiler and disassembler that CI pins,
compiles every row and writes the files anew: after a change that is for the better or cannot be
helped. Look at the difference. Figures of another compiler are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.costs import Cost, made_of, rows, worst
from support.search import Search

from cupyattn import turing
from cupyattn.benchmark import block_mask
from cupyattn.benchmark.attention import cases
from cupyattn.benchmark.attention.contenders import backward_contenders
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.benchmark.frame.turing_model import Model
from cupyattn.benchmark.memory.calls import modelled_calls
from cupyattn.benchmark.memory.command import describe as describe_memory
from cupyattn.cli import turing as cli_turing
from cupyattn.cli.table_rows import row_name, rows_of
from cupyattn.cli.turing import (
    IN_FLOAT32,
    LIKE_FLOAT32,
    LIKE_TUNED,
    TUNED,
    describe,
    kernel_row,
)
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.spec import Specialisation
from cupyattn.turing import MACHINES, T4, Machine, disassembler_version

FILE = Path(__file__).resolve().parent.parent / "figures" / "sm_75.json"
RECORD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
NVRTC: str = RECORD["nvrtc"]
MODEL = {(row["kernel"], row["row"]): row for row in RECORD["rows"]}
"""The model of Turing's main loops, by kernel and row."""
MEMORY_FILE = FILE.with_name("memory.json")
MEMORY_RECORD: dict[str, Any] = json.loads(MEMORY_FILE.read_text(encoding="utf-8"))
MEMORY = {row["call"]: row for row in MEMORY_RECORD["rows"]}
"""What memory-bound calls ask of Turing, by call."""
MACHINES_FILE = FILE.with_name("machines.json")
MACHINES_RECORD: dict[str, Any] = json.loads(MACHINES_FILE.read_text(encoding="utf-8"))
ON_MACHINES = {(row["machine"], row["kernel"], row["row"]): row for row in MACHINES_RECORD["rows"]}
"""The model of every row of the kernels with products, by card, kernel and row."""
GATES = {
    row: Cost(**{name: figures[name] for name in Cost._fields})
    for row, figures in RECORD["gates"].items()
}
"""The most registers, shared bytes and spills and the fewest CTAs of any dtype and load, by row."""


CALLS_RECORD: dict[str, float] = RECORD["calls"]
"""TFLOP/s of calls on a T4, by the model: of kernels that no table lists, and of several."""


def _with_block_mask(direction: str, head_dim: int) -> Any:
    """Prepare a call with a block mask of documents."""
    case = block_mask.Case(512, 2, 1, head_dim, "float16")
    masks = block_mask.masks_of(case, np)
    return block_mask.calls_of("block_mask", masks, case.unfilled(), direction)


def _backward(option: str, head_dim: int) -> Any:
    """Prepare a backward of two sequences, which share a bias."""
    case = cases.Case(2, 2, 2048, head_dim, head_dim, "float16", causal=False, window=0)
    arguments = partial(cases.arguments_of, option, case, np)
    inputs = cases.Inputs(case, option, cases.unfilled(case), arguments)
    return backward_contenders(("flash",), (False,), inputs, Gauge.idle(np))[0].prepare()[0]


CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"{direction} with a block mask, D {head_dim}": partial(
            _with_block_mask, direction, head_dim
        )
        for head_dim, direction in itertools.product((64, 128), block_mask.DIRECTIONS)
    },
    **{
        f"backward with {name}, D {head_dim}": partial(_backward, option, head_dim)
        for head_dim in (64, 128)
        for option, name in (("plain", "no option"), ("bias", "a bias of all sequences"))
    },
}


@cache
def call_rate(name: str) -> float:
    """What the file should hold of a call."""
    rate = Model(T4).rate(CALLS[name])
    assert rate is not None
    return round(rate, 2)


def modelled_of(row: Specialisation) -> str:
    """A digest of what the model's figures of a row follow from: the row, and the model itself."""
    return f"{made_of([row])}-{_model_digest()}"


@cache
def _model_digest() -> str:
    """Of the model's code, of what makes rows of its figures, and of the disassembler."""
    files = [*sorted(Path(turing.__file__).parent.glob("*.py")), Path(cli_turing.__file__)]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    with contextlib.suppress(turing.DisassemblerError):
        digest.update(disassembler_version().encode())
    return digest.hexdigest()[:16]


_Row = TypeVar("_Row")


def worth_trying(
    digests: Mapping[_Row, Callable[[], str]],
    records: Mapping[_Row, Mapping[str, Any]],
    always: Collection[_Row],
) -> list[_Row]:
    """The rows that are not made of what they were when recorded, and those of `always`.

    Of the rest the record stands: a compiler makes the same of the same. To compile and model them
    again took a fifth of a run with --deep (2 cores, 2026-11-27). Another compiler tries every row;
    and a plain run drops all but a few itself.
    """
    if not Search.deep or compiler_version() != NVRTC:
        return [*digests]
    return [
        row
        for row, digest in digests.items()
        if row in always or records.get(row, {}).get("made_of") != digest()
    ]


def compiler_version() -> str | None:
    """Of NVRTC; None where there is none."""
    try:
        return ".".join(map(str, nvrtc_version()))
    except RuntimeError:
        return None


def gate(members: Sequence[Specialisation]) -> dict[str, Any]:
    """What the file should hold of a row."""
    return {**worst(members, TURING)._asdict(), "made_of": made_of(members)}


def measured() -> dict[str, Any]:
    """What the file should hold."""
    tuned = rows_of(TUNED, None)
    model = describe(tuned, simulate=True, all_loops=False)
    modelled = [
        {**found, "made_of": modelled_of(row)}
        for row, found in zip(tuned, model["rows"], strict=True)
    ]
    gates = {row: gate(members) for row, members in rows().items()}
    versions = {name: model[name] for name in ("nvrtc", "nvdisasm")}
    calls = {name: call_rate(name) for name in CALLS}
    return {**versions, "rows": modelled, "gates": gates, "calls": calls}


def sm_of(machine: Machine) -> Machine:
    """A card's multiprocessor: cards that differ in size, clock and memory alone have the same."""
    return replace(machine, name="", multiprocessors=0, clock_mhz=0, memory_gb_s=0)


def of_machines() -> dict[tuple[str, str, str], Specialisation]:
    """Every row of the kernels with products, by card, kernel and row, on a card of each kind.

    But for a T4's rows of TUNED, which the file of rows has.
    """
    found = {}
    for name in {sm_of(machine): name for name, machine in MACHINES.items()}.values():
        on_tensor_cores, in_float32 = (*TUNED, *LIKE_TUNED), (*IN_FLOAT32, *LIKE_FLOAT32)
        kernels = on_tensor_cores if MACHINES[name].tensor_cores else in_float32
        for row in rows_of(LIKE_TUNED if name == T4.name else kernels, None):
            found[name, row.spec.entry, row_name(row)] = row
    return found


def on_machines() -> dict[str, Any]:
    """What the file of cards should hold."""
    rows = [
        {
            "machine": name,
            **short(kernel_row(row, machine=MACHINES[name])),
            "made_of": modelled_of(row),
        }
        for (name, _, _), row in of_machines().items()
    ]
    return {"nvrtc": RECORD["nvrtc"], "nvdisasm": RECORD["nvdisasm"], "rows": rows}


def short(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row the gates hold, and what binds."""
    loop = row["main"]
    names = ("spill_bytes", "lsu_ratio", "bound", "binding_pipe")
    main = {**{name: loop[name] for name in names}, "utilisation": loop["utilisation"]}
    return {**{name: row[name] for name in ("kernel", "row", "ctas_per_sm")}, "main": main}


def written(content: dict[str, Any]) -> str:
    """JSON with each row on a line."""
    head = json.dumps({**content, "rows": None}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    return head.replace('"rows": null', f'"rows": [\n{rows}\n ]') + "\n"


def moved() -> dict[str, Any]:
    """What the file of memory-bound calls should hold."""
    found = describe_memory(modelled_calls())
    return {name: found[name] for name in ("nvrtc", "rows")}


if __name__ == "__main__":
    for file, content in ((FILE, measured()), (MEMORY_FILE, moved())):
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    MACHINES_FILE.write_text(written(on_machines()), encoding="utf-8")
