"""One command of the benchmarks: its options, its run on a GPU or by the model, what it writes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cupyattn.benchmark.frame.ceilings import measured_ceilings
from cupyattn.benchmark.frame.clock import Clock
from cupyattn.benchmark.frame.compare import RULE, show_changes
from cupyattn.benchmark.frame.emulated import ceilings_of
from cupyattn.benchmark.frame.gpu_command import FAILURES, NO_GPU
from cupyattn.benchmark.frame.machine import measured_on, modelled_with, this_host, watched
from cupyattn.benchmark.frame.memory import peak_bytes
from cupyattn.benchmark.frame.peers import (
    ARRAY_CODE,
    COMPILE_MODES,
    MEANING,
    PEERS,
    free_memory,
    load_torch,
    peer_names,
)
from cupyattn.benchmark.frame.results import require_writable, results_of, write_json
from cupyattn.benchmark.frame.rows import Row
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.benchmark.frame.table import show_result
from cupyattn.cli.arguments import integer, positive
from cupyattn.cli.terminal import Result, emit, fail
from cupyattn.cupy_library import load_cupy
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.turing import MACHINES

CALLS, WARM_UP, BUDGET_S, LIMIT_S = 1000, 100, 2.0, 1800.0
QUICK = {
    **{"calls": 100, "warm_up": 10, "budget": 0.25, "limit": 25.0},
    "compile_mode": COMPILE_MODES[0],
}
"""What --quick makes of the options that every benchmark has."""


@dataclass(frozen=True)
class Benchmark:
    """What one benchmark adds to the frame."""

    name: str
    title: str
    help: str
    description: str
    note: str
    """What its figures count; printed below them, and below its help."""
    rows: Callable[[argparse.Namespace, Gauge], Iterable[Row]]
    """Measures on the GPU that is current."""
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Adds its own."""
    peers: tuple[str, ...] = ()
    """Those of `PEERS` that compute the same."""
    beside: str | None = None
    """A label: the table sets each value's time beside that of the first."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Values of options with --quick, unless they are given."""
    facts: Callable[[argparse.Namespace], Mapping[str, Any]] = lambda arguments: {}
    """What else its result says: keys beside ``rows``."""
    modelled: Callable[[argparse.Namespace], Iterator[Row]] | None = None
    """Its rows without a GPU, by the emulator's counts and the model of Turing."""
    machine: str = "T4"
    """What is modelled."""
    gpus: int = 1
    """How many it takes: 0 of what runs on the CPU."""

    def add_parser(self, benchmarks: Any) -> None:
        """Add the benchmark to the command line."""
        without = "its rows are modelled" if self.modelled else "exit code 1"
        if self.gpus:
            without = (
                f"Without a GPU {without}. CUPYATTN_ARCH=75 times Turing's code on newer ones."
            )
        else:
            without = "It needs no GPU."
        parser = benchmarks.add_parser(
            self.name, help=self.help, description=self.description, epilog=f"{self.note} {without}"
        )
        self.options(parser)
        add_frame_options(parser, self.peers)
        defaults = {name: _usual(parser.get_default(name)) for name in {**QUICK, **self.quick}}
        parser.set_defaults(run=partial(self.run, defaults), **defaults)

    def run(self, defaults: Mapping[str, Any], arguments: argparse.Namespace) -> int:
        """Measure or model, print and write the result; return the exit code."""
        if arguments.quick:
            for name, value in {**QUICK, **self.quick}.items():
                if getattr(arguments, name) is defaults[name]:
                    setattr(arguments, name, value)
        try:
            old = before(arguments)
            result = self.result(arguments)
            if arguments.json is not None:
                write_json(result, arguments.json)
        except FAILURES as failure:
            fail(self.name, failure, as_json=False)
            return 1
        emit(result, partial(show_result, self.title, self.note, self.beside), as_json=False)
        if "failed" in result:
            print(f"{self.name}: {result['failed']}", file=sys.stderr)
            return 1
        if old is not None:
            show_changes([result], old, arguments.compare)
        return 0

    def result(self, arguments: argparse.Namespace) -> Result:
        """Return what the JSON holds."""
        head = {"command": self.name, "invocation": invocation(sys.argv)}
        began = time.monotonic()
        if arguments.modelled or (self.gpus and self.modelled and not device_count()):
            if self.modelled is None:
                raise RuntimeError("--modelled: there is no model of this; leave it out")
            rows = ({**row, "modelled": True} for row in self.modelled(arguments))
            card = MACHINES.get(self.machine)
            about = {
                **{"modelled": True, "machine": self.machine, **this_host(), **modelled_with()},
                "ceilings": None if card is None else ceilings_of(card),
            }
            found = rows_until_failure(rows)
            return {**head, **about, **found, "took_s": time.monotonic() - began}
        if device_count() < self.gpus:
            few = f"there are {device_count()} CUDA devices, and this takes {self.gpus} or more"
            raise RuntimeError(NO_GPU if self.gpus == 1 else few)
        if not self.gpus:
            found = rows_until_failure(self.rows(arguments, Gauge.idle(None)))
            about = this_host()
        else:
            about, found = self._measured(arguments)
        counts = {"calls": arguments.calls, "warm_up": arguments.warm_up}
        more = {**self.facts(arguments), **found, "took_s": time.monotonic() - began}
        return {**head, **about, **counts, **more}

    def _measured(self, arguments: argparse.Namespace) -> tuple[Result, Result]:
        cupy = load_cupy()
        device = cuda_device(0)
        peers = tuple(name for name in self.peers if name in arguments.peers)
        torch = _torch_for(peers)
        present = None if isinstance(torch, Exception) else torch
        with cupy.cuda.Device(device.ordinal), watched(device.ordinal) as clocks:
            ceilings = measured_ceilings(device)
            clock = Clock(arguments.calls, arguments.warm_up, arguments.budget)
            gauge = Gauge(
                cupy, clock.times, peak_bytes, torch, peers, ceilings, arguments.compile_mode,
                arguments.limit, free=partial(free_memory, present),
            )  # fmt: skip
            found = rows_until_failure(self.rows(arguments, gauge))
        about = measured_on(device, present)
        modes = {"torch_compile": arguments.compile_mode} if "compile" in peers else {}
        return {**about, **modes, "clocks": clocks or None, "ceilings": ceilings}, found


class _Usual(int):
    """A default: unlike Python's small integers not the object that a given number is too."""


def _usual(default: Any) -> Any:
    return _Usual(default) if type(default) is int else default


def rows_until_failure(rows: Iterable[Row]) -> Result:
    """Return ``rows``, and ``failed`` if they ended with an error or an interrupt after the first.

    Raises
    ------
    Exception
        What the first row failed with.
    """
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
    except (Exception, KeyboardInterrupt) as failure:  # hours may lie behind it
        if not found:
            raise
        if not isinstance(failure, (*FAILURES, KeyboardInterrupt)):
            traceback.print_exc()
        return {"rows": found, "failed": f"{type(failure).__name__}: {failure}"}
    return {"rows": found}


def _torch_for(peers: Iterable[str]) -> Any:
    """Return PyTorch if one of the peers is its, or why it is not there; otherwise None."""
    if not set(peers) - set(ARRAY_CODE):
        return None
    try:
        return load_torch()
    except RuntimeError as missing:
        return missing


def add_frame_options(parser: argparse.ArgumentParser, peers: Iterable[str]) -> None:
    """Give a command the options that all benchmarks have."""
    frame = parser.add_argument_group("of every benchmark")
    for name, kind, default, what in (
        ("calls", integer(1), CALLS, "timed calls of a row"),
        ("warm-up", integer(1), WARM_UP, "calls before them"),
        ("budget", positive, BUDGET_S, "seconds of a row: of calls too long for that fewer are "
         "made, three at the least; the JSON has how many"),
        ("limit", positive, LIMIT_S, "seconds of the benchmark, behind which peers are left out; "
         "behind half of them, those that compile or load for long"),
    ):  # fmt: skip
        frame.add_argument(
            f"--{name}", type=kind, default=default, metavar="N",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    of_it = ", ".join(peers) or "none"
    frame.add_argument(
        "--peers", type=peer_names, default=(), metavar="NAMES",
        help=f"who else computes the same, with commas between them: all, torch, none, or "
        f"of {', '.join(PEERS)}; this benchmark has {of_it}. {MEANING} (default: none)",
    )  # fmt: skip
    frame.add_argument(
        "--compile-mode", choices=COMPILE_MODES, default=COMPILE_MODES[-1],
        help="how torch.compile chooses (default: %(default)s, which takes long; the CUDA graphs "
        "are the benchmark's)",
    )  # fmt: skip
    frame.add_argument(
        "--modelled",
        action="store_true",
        help="the emulator's counts and the model of Turing in place of times, as without a GPU",
    )
    frame.add_argument(
        "--quick", action="store_true", help="fewer cases and calls, in about a minute"
    )
    add_file_options(frame)


def add_file_options(parser: Any) -> None:
    """Give a command ``--json FILE`` and ``--compare OLD``."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to FILE too, as JSON"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD",
        help="print what changed since OLD, which --json wrote: " + RULE.replace("%", "%%"),
    )  # fmt: skip


def invocation(argv: list[str]) -> str:
    """Return the command to type again, but for where it writes to.

    Examples
    --------
    >>> words = ["__main__.py", "linear", "--json", "a.json", "--quick", "--compare=b.json"]
    >>> invocation(words).endswith("python -m cupyattn.benchmark linear --quick")
    True
    """
    kept, skip = [], False
    for word in argv[1:]:
        option, given, _ = word.partition("=")
        if option in ("--json", "--compare"):
            skip = not given
        elif skip:
            skip = False
        else:
            kept.append(shlex.quote(word))
    override = os.environ.get("CUPYATTN_ARCH")
    before = [f"CUPYATTN_ARCH={shlex.quote(override)}"] if override else []
    return " ".join([*before, "python -m cupyattn.benchmark", *kept])


def before(arguments: argparse.Namespace) -> list[Result] | None:
    """Return the results to compare with, None without; see to it that what comes can be written.

    Raises
    ------
    OSError, ValueError
        If one of the files is not as it has to be.
    """
    if arguments.json is not None:
        require_writable(arguments.json)
    return None if arguments.compare is None else results_of(arguments.compare)
