"""``python -m cupyattn.benchmark all``: every benchmark, one after another, each in a process.

A benchmark that fails, or leaves the GPU unusable, does not affect the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cupyattn.benchmark.command import FAILURES, JSON, Benchmark, Option
from cupyattn.benchmark.libraries import baseline_names
from cupyattn.benchmark.results import require_writable, results_of, write_json
from cupyattn.cli.arguments import Commands, positive
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.folders import temporary_directory

QUICK_MINUTES, MINUTES = 7.5, 24 * 60.0
_QUICK_PART_S = 130.0
_QUICK_LEAST_S = 20.0  # what the parts before one leave it: its first rows, with compilation
_TO_BEGIN_S = 1.0  # a part with less would be interrupted while it imports
_TO_FINISH_S = 15.0  # for a part that was interrupted, and writes its rows


class BenchmarkVariant(NamedTuple):
    """A benchmark or a variant of one, and the words that run it."""

    benchmark: Benchmark
    words: tuple[str, ...]

    def runs_with(self, gpus: int) -> bool:
        """Return whether it has rows on a host with so many GPUs."""
        return gpus >= self.benchmark.gpus or (gpus == 0 and self.benchmark.modelled is not None)


def parts_of(benchmarks: Sequence[Benchmark]) -> dict[str, BenchmarkVariant]:
    """Return every part by the name of its results."""
    found = {}
    for benchmark in benchmarks:
        found[benchmark.name] = BenchmarkVariant(benchmark, (benchmark.name,))
        for flag, variant in benchmark.variants.items():
            found[variant.name] = BenchmarkVariant(variant, (benchmark.name, f"--{flag}"))
    return found


@dataclass(frozen=True)
class Everything:
    """The command that runs all others."""

    benchmarks: Sequence[Benchmark]

    def add_parser(self, commands: Commands) -> None:
        """Add it to the command line."""
        names = list(parts_of(self.benchmarks))
        parser = commands.add_parser(
            "all",
            help="every benchmark, one after another, into one file",
            description=f"Run {', '.join(names)}, each in a separate process, with all other "
            "libraries that are installed, and write one list of their results. Without a GPU "
            "only those run that can be modelled; ring needs two GPUs.",
            epilog="Exit code 1 if one of them fails; the others still run. The file is written "
            "after each.",
        )
        options = (
            Option("only", names, "some of them (default: all)", choices=names),
            Option("peers", "all", "other libraries, as for each benchmark", str, metavar="NAMES"),
            Option("quick", False, "fewer cases and calls, in less than 8 minutes"),
            Option("minutes", None, "limit for all of them; the table reports what is cut "
                   f"(default: {MINUTES:g}, with --quick {QUICK_MINUTES:g})", positive),
            JSON,
        )  # fmt: skip
        for option in options:
            option.add(parser)
        parser.set_defaults(run=self.run, **{each.dest: each.default for each in options})

    def run(self, arguments: argparse.Namespace) -> int:
        """Run them, and return the exit code."""
        try:
            baseline_names(arguments.peers)
            if arguments.json is not None:
                require_writable(arguments.json)
        except (argparse.ArgumentTypeError, *FAILURES) as failure:
            fail("all", failure, as_json=False)
            return 1
        gpus = device_count()
        minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
        ends = time.monotonic() + 60 * minutes
        results: list[Result] = []
        reports: list[tuple[str, str, str]] = []
        every = parts_of(self.benchmarks)
        wanted = {name: part for name, part in every.items() if name in arguments.only}
        shared = [*["--quick"] * arguments.quick, "--peers", arguments.peers]
        to_run = sum(part.runs_with(gpus) for part in wanted.values())
        for name, part in wanted.items():
            if not part.runs_with(gpus):
                reports.append((name, "", f"left out: it takes {part.benchmark.gpus} or more GPUs"))
                continue
            began = time.monotonic()
            to_run -= 1
            seconds = ends - began
            if arguments.quick:
                seconds = min(seconds - to_run * _QUICK_LEAST_S, _QUICK_PART_S)
            result, verdict = run_part([*part.words, *shared], seconds)
            reports.append((name, f"{time.monotonic() - began:.1f} s", verdict))
            if result is not None:
                results.append(result)
                if arguments.json is not None:
                    write_json(results, arguments.json)

        def show(_: Result, terminal: Terminal) -> None:
            terminal.title("All benchmarks")
            terminal.table(("benchmark", "time", "outcome"), reports)

        emit({}, show, as_json=False)
        return int(any(verdict.startswith("FAILED") for _, _, verdict in reports))


def run_part(words: Sequence[str], seconds: float) -> tuple[Result | None, str]:
    """Run a benchmark for so many seconds at most; return its result, and how it went.

    A benchmark that takes longer is interrupted, and writes the rows that it has.
    """
    if seconds < _TO_BEGIN_S:
        return None, "FAILED: no time was left"
    with TemporaryDirectory(dir=temporary_directory()) as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "cupyattn.benchmark", *words, "--json", str(file)]
        print(f"\n--- {' '.join(words)}", flush=True)
        cut = False
        with subprocess.Popen(command) as process:
            try:
                code = process.wait(seconds)
                verdict = "all rows" if code == 0 else f"FAILED with exit code {code}"
            except subprocess.TimeoutExpired:
                verdict, cut = f"cut after {seconds:.0f} s", True
                _interrupt(process)
        result = results_of(file)[0] if file.exists() else None
    if cut and not (result and result["rows"]):
        return result, f"FAILED: {verdict}, before its first row"
    if result is None:
        return None, verdict if verdict.startswith("FAILED") else "FAILED: no result"
    rows = result["rows"]
    missing = sum("unavailable" in row for row in rows)
    return result, f"{verdict}: {len(rows) - missing} rows, {missing} unavailable"


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        process.send_signal(signal.SIGINT)
    else:
        process.terminate()
    try:
        process.wait(_TO_FINISH_S)
    except subprocess.TimeoutExpired:
        process.kill()
