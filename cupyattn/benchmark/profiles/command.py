"""``python -m cupyattn.benchmark profiles``: what Nsight Compute measured of every kernel."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cupyattn.benchmark.frame.gpu_command import run_on_gpu
from cupyattn.benchmark.frame.results import require_writable
from cupyattn.benchmark.frame.table import show_machine
from cupyattn.benchmark.profiles.binding import BUSY, binding
from cupyattn.benchmark.profiles.calls import CHANGED
from cupyattn.benchmark.profiles.taking import take, written
from cupyattn.cli.table_rows import kernel_name
from cupyattn.cli.terminal import Cell, Result, Terminal, emit, fail
from cupyattn.errors import error, shown
from cupyattn.kernels.arch import TURING

RECORD = Path(__file__).with_name("h200.json")
"""Profiles of the Turing code on an H200."""

_COMMAND = "profiles"
_TURING = f"{TURING.number / 10:.1f}"


def add_parser(benchmarks: Any) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        _COMMAND,
        help="what Nsight Compute measured of every kernel, and what binds each",
        description="Show a profile of every kernel: time, registers, shared memory, occupancy, "
        "how busy memory, caches, issue slots and tensor cores are, bank conflicts, and what binds "
        "it. Those of the library are of an H200 that ran the Turing code. --take profiles the GPU "
        "at hand by ncu, the command line of Nsight Compute.",
        epilog="Exit code 1 if ncu is not there or may not read the GPU's counters.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=RECORD,
        metavar="FILE",
        help="profiles that --take wrote (default: those of the library)",
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        type=kernel_name,
        default=[],
        metavar="NAME",
        help="only these kernels, by the names that `info` lists",
    )
    parser.add_argument("--take", action="store_true", help="profile the GPU at hand, by ncu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was taken there")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave what ncu printed in a folder"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.take:
        arguments.json = None  # --out has a form of its own
        return run_on_gpu(_COMMAND, arguments, _taken, show)
    try:
        result = _profiles_in(arguments.file)
    except (OSError, ValueError) as failure:
        fail(_COMMAND, failure, as_json=False)
        return 1
    if arguments.kernel:
        result["rows"] = [row for row in result["rows"] if row["kernel"] in arguments.kernel]
    emit(result, show, as_json=False)
    return 0


def _profiles_in(file: Path) -> Result:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:
        result = failure
    if not (isinstance(result, dict) and result.get("command") == _COMMAND):
        raise error(
            ValueError,
            f"{file} holds {shown(result)}",
            "profiles are what --take --out FILE writes",
            "take some, or leave the file out: the library has its own",
        )
    return result


def _taken(arguments: argparse.Namespace) -> Result:
    if arguments.out is not None:
        require_writable(arguments.out)
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        result = take(arguments.kernel, arguments.keep)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = take(arguments.kernel, Path(folder))
    if arguments.out is not None:
        arguments.out.write_text(written(result), encoding="utf-8")
    return result


_SHARES = ("occupancy", "dram", "l2", "l1", "compute", "issue")
_COLUMNS = (
    *("kernel", "us", "regs", "smem", "warps", "DRAM", "L2", "L1", "compute", "issue"),
    *("tensor", "conflicts", "bound by"),
)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Every kernel", result, terminal)
    rows, multiprocessors = result["rows"], result["multiprocessors"]
    terminal.table(_COLUMNS, [_cells(row, multiprocessors) for row in rows])
    changed = [row["kernel"] for row in rows if row["kernel"] in CHANGED]
    if changed:
        terminal.verdict(False, f"  launched otherwise today: {', '.join(changed)}")
    terminal.text(
        "  Microseconds of a launch with empty caches; a thread's registers, a CTA's shared memory "
        "in bytes; then percent: of the warps that a multiprocessor holds at most; of the peaks of "
        "memory, of the L2 cache, of L1 with shared memory, of a multiprocessor's busiest unit, of "
        "its issue slots and of its tensor cores; of shared memory's cycles, those that bank "
        f"conflicts take. What is busier than {100 * BUSY:.0f} % binds; otherwise what warps "
        "wait for longest, and how much of their time."
    )
    if result["compute_capability"] != _TURING:
        terminal.text(
            "  Turing cards have fewer GB/s for each multiprocessor: more of these kernels wait "
            "for memory there."
        )
    for line in summary(rows, multiprocessors):
        terminal.text(f"  {line}")
    terminal.text(f"  {result['invocation']}, ncu {result['ncu']}")


def summary(rows: list[dict[str, Any]], multiprocessors: int) -> list[str]:
    """Say what binds how many of the kernels, most first."""
    counts = Counter(binding(row, multiprocessors)[0] for row in rows)
    return [f"{count} of {len(rows)}: {what}" for what, count in counts.most_common()]


def _cells(row: dict[str, Any], multiprocessors: int) -> tuple[Cell, ...]:
    what, share = binding(row, multiprocessors)
    time = row["microseconds"]
    return (
        row["kernel"],
        "-" if time is None else f"{time:.1f}",
        *("-" if row[name] is None else row[name] for name in ("registers", "shared_bytes")),
        *map(_percent, (row[name] for name in _SHARES)),
        _percent(row["pipes"]["tensor"]),
        _percent(row["bank_conflicts"]),
        f"{what}, {share * 100:.0f} %",
    )


def _percent(share: float | None) -> Cell:
    return "-" if share is None else round(100 * share)
