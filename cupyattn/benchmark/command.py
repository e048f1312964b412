"""A benchmark as data, and the driver that runs all of them: options, GPU or model, JSON, table.

An option's value is that of the command line, else that of ``--quick``, else the default. A variant
is a benchmark that another one runs with a flag, such as ``decode --prefill``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from cupyattn.benchmark.cases import Case, Harness, Row, measured
from cupyattn.benchmark.libraries import (
    ARRAY_CODE,
    BASELINES,
    COMPILE_MODES,
    MEANING,
    baseline_names,
    free_memory,
    load_torch,
)
from cupyattn.benchmark.results import measured_on, require_writable, this_host, write_json
from cupyattn.benchmark.table import show_result
from cupyattn.benchmark.timer import Timer, measured_ceilings, peak_bytes
from cupyattn.cli.arguments import Commands, integer, positive
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.errors import error

NO_GPU = (
    "there is no CUDA device, and this benchmark times kernels on one; run it on a computer with a "
    "GPU (without one, python -m cupyattn turing models the kernels of a Turing GPU)"
)
FAILURES = (RuntimeError, ValueError, MemoryError, OSError)
"""A GPU that is too old, a wrong CUPYATTN_ARCH, too little memory, files without permission."""
Kind = Callable[[str], object]
_COUNT: Kind = integer(1)


@dataclass(frozen=True)
class Option:
    """An option of a command: a number, or several, or words, or a flag."""

    name: str
    default: Any
    """A list takes several values; False is a flag."""
    help: str
    kind: Kind = _COUNT
    choices: Sequence[object] | None = None
    metavar: str | tuple[str, ...] | None = "N"
    repeated: int | None = None
    """Number of values, if the option can be given several times."""
    alias: str | None = None
    """Another name."""

    @property
    def dest(self) -> str:
        """The name of its value."""
        return self.name.replace("-", "_")

    def add(self, parser: argparse._ActionsContainer) -> None:
        """Add it to a command; its value is absent if it was not given."""
        given: Keywords = {"default": argparse.SUPPRESS, "help": self.help}
        if self.default is False:
            parser.add_argument(f"--{self.name}", action="store_true", **given)
            return
        several = isinstance(self.default, list)
        if "(default" not in self.help and self.default not in (None, []):
            shown = " ".join(map(str, self.default)) if several else self.default
            given["help"] += f" (default: {shown})"
        if self.choices is not None:
            given["choices"] = self.choices
            listed = ", ".join(map(str, self.choices))
            if len(listed) > 24:
                given["metavar"] = "NAME"
                given["help"] += "" if "all of" in self.help else f"; one of {listed}"
        else:
            given |= {"type": self.kind, "metavar": self.metavar}
        if self.repeated:
            given |= {"nargs": self.repeated, "action": "append"}
        elif several and "commas" not in self.help:
            given["nargs"] = "+"
        names = [self.name, self.alias] if self.alias else [self.name]
        parser.add_argument(*(f"--{name}" for name in names), **given)


def with_defaults(given: Iterable[Option], **defaults: object) -> tuple[Option, ...]:
    """Return options with other defaults, by dest."""
    return tuple(
        replace(option, default=defaults.get(option.dest, option.default)) for option in given
    )


QUICK = {
    **{"calls": 100, "warm_up": 10, "budget": 0.25, "limit": 25.0},
    "compile_mode": COMPILE_MODES[0],
}
"""Values of the shared options with --quick."""
JSON = Option("json", None, "write everything to FILE too, as JSON", Path, metavar="FILE")
TIMED = (
    Option("calls", 1000, "timed calls of a row"),
    Option("warm-up", 100, "calls before them"),
    Option("budget", 2.0, "seconds of a row: if calls take too long for it, fewer are made, three "
           "at least; the JSON records how many", positive),
    Option("limit", 1800.0, "seconds of the benchmark after which other libraries are left out; "
           "those that compile or load for long after half of it", positive),
    Option("compile-mode", COMPILE_MODES[-1], "how torch.compile chooses; the default takes long, "
           "and the benchmark makes the CUDA graphs itself", choices=COMPILE_MODES),
    Option("quick", False, "fewer cases and calls, in about a minute"),
)  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """One command: its options, and how to make its cases or its rows."""

    name: str
    title: str
    help: str
    description: str
    note: str
    """The units of its numbers, printed below the table and below the help."""
    options: tuple[Option, ...] = ()
    cases: Callable[[argparse.Namespace, Harness], Iterable[Case]] | None = None
    rows: Callable[[argparse.Namespace, Harness], Iterable[Row]] | None = None
    """Measure rows itself, instead of `cases`."""
    modelled: Callable[[argparse.Namespace], Iterator[Row]] | None = None
    """Yield the rows of a T4 that are shown without a GPU, and with its option ``--modelled``."""
    baselines: tuple[str, ...] = ()
    """The keys of `BASELINES` that compute the same results."""
    compare: str | None = None
    """A label; the table has each value's time relative to the time of the first value."""
    quick: Mapping[str, object] = field(default_factory=dict)
    """Values of options with --quick."""
    gpus: int = 1
    """The fewest GPUs that it needs."""
    variants: Mapping[str, Benchmark] = field(default_factory=dict)
    """Benchmarks that run instead of this one, by the name of the flag."""

    def add_parser(self, benchmarks: Commands) -> None:
        """Add the benchmark to the command line."""
        lacking = "its rows are modelled" if self.modelled else "exit code 1"
        parser = benchmarks.add_parser(
            self.name, help=self.help, description=self.description,
            epilog=f"{self.note} Without a GPU {lacking}. CUPYATTN_ARCH=75 times Turing's code on "
            "newer ones.",
        )  # fmt: skip
        every = [option for each in (self, *self.variants.values()) for option in each.options]
        for option in {option.name: option for option in reversed(every)}.values():
            option.add(parser)
        for flag, variant in self.variants.items():
            Option(flag, False, variant.help).add(parser)
        shared = parser.add_argument_group("options of every benchmark")
        for option in (*TIMED, JSON):
            option.add(shared)
        has = ", ".join({name: 0 for each in (self, *self.variants.values())
                         for name in each.baselines}) or "none"  # fmt: skip
        Option(
            "peers", (), "other libraries that compute the same in the same run, with commas "
            f"between them: all, torch, none, or some of {', '.join(BASELINES)}; this benchmark "
            f"has {has}. {MEANING} (default: none)", baseline_names, metavar="NAMES",
        ).add(shared)  # fmt: skip
        parser.set_defaults(run=self.run)

    def parse(self, *words: str) -> tuple[Benchmark, argparse.Namespace]:
        """Return what a command line runs, and the values of all its options."""
        parser = argparse.ArgumentParser()
        self.add_parser(parser.add_subparsers())
        return self.resolve(parser.parse_args([self.name, *words]))

    def resolve(self, given: argparse.Namespace) -> tuple[Benchmark, argparse.Namespace]:
        """Return the variant that runs, and its options; raise ValueError for any other option."""
        values = {name: value for name, value in vars(given).items() if name != "run"}
        chosen = self
        for flag, variant in self.variants.items():
            if values.pop(flag.replace("-", "_"), False):
                chosen = variant
                _require_taken(flag, variant, values)
        every = (*chosen.options, *TIMED, JSON)
        defaults = {option.dest: option.default for option in every} | {"peers": ()}
        quick = {**QUICK, **chosen.quick} if values.get("quick") else {}
        return chosen, argparse.Namespace(**{**defaults, **quick, **values})

    def run(self, given: argparse.Namespace) -> int:
        """Measure or model, print and write the result; return the exit code."""
        try:
            chosen, arguments = self.resolve(given)
        except ValueError as failure:
            fail(self.name, failure, as_json=False)
            return 1
        failed = False

        def show(result: Result, terminal: Terminal) -> None:
            nonlocal failed
            show_result(chosen.title, chosen.note, chosen.compare, result, terminal)
            if failed := "failed" in result:
                print(f"{self.name}: {result['failed']}", file=sys.stderr)

        measure = partial(chosen.result, arguments)
        return run_and_show(self.name, arguments.json, measure, show) or int(failed)

    def result(self, arguments: argparse.Namespace) -> Result:
        """Return the content of the JSON."""
        head = {"command": self.name, "invocation": invocation(sys.argv)}
        began = time.monotonic()
        if self.modelled is not None and (arguments.modelled or not device_count()):
            about = {"modelled": True, "machine": "T4", **this_host()}
            rows = ({**row, "modelled": True} for row in self.modelled(arguments))
            found = rows_until_failure(rows)
        else:
            if device_count() < self.gpus:
                few = f"there are {device_count()} CUDA devices, and this takes {self.gpus} or more"
                raise RuntimeError(NO_GPU if self.gpus == 1 else few)
            about, found = self._measured(arguments)
            about |= {"calls": arguments.calls, "warm_up": arguments.warm_up}
        return {**head, **about, **found, "took_s": time.monotonic() - began}

    def harness_rows(self, arguments: argparse.Namespace, harness: Harness) -> Iterable[Row]:
        """Return the rows that a harness measures."""
        if self.rows is not None:
            return self.rows(arguments, harness)
        assert self.cases is not None
        return measured(self.cases(arguments, harness), harness)

    def _measured(self, arguments: argparse.Namespace) -> tuple[Result, Result]:
        cupy = load_cupy()
        device = cuda_device(0)
        baselines = tuple(name for name in self.baselines if name in arguments.peers)
        torch: ModuleType | RuntimeError | None = None
        try:
            torch = load_torch() if set(baselines) - set(ARRAY_CODE) else None
        except RuntimeError as missing:
            torch = missing
        present = None if isinstance(torch, Exception) else torch
        with cupy.cuda.Device(device.ordinal):
            ceilings = measured_ceilings(device)
            free_memory(None)
            timer = Timer(arguments.calls, arguments.warm_up, arguments.budget)
            harness = Harness(
                cupy, timer.times, peak_bytes, torch, baselines, ceilings, arguments.compile_mode,
                arguments.limit, free=partial(free_memory, present),
            )  # fmt: skip
            found = rows_until_failure(self.harness_rows(arguments, harness))
        about = measured_on(device, present)
        modes = {"torch_compile": arguments.compile_mode} if "compile" in baselines else {}
        return {**about, **modes, "ceilings": ceilings}, found


def every(arguments: argparse.Namespace, *names: str) -> Iterator[Keywords]:
    """Yield every combination of the values of some options, the last one varying fastest."""
    values = (getattr(arguments, name) for name in names)
    lists = [value if isinstance(value, list) else [value] for value in values]
    for combination in product(*lists):
        yield dict(zip(names, combination, strict=True))


def _require_taken(flag: str, variant: Benchmark, values: Mapping[str, Any]) -> None:
    taken = {option.dest for option in (*variant.options, *TIMED, JSON)} | {"peers"}
    others = [f"--{name.replace('_', '-')}" for name in values if name not in taken]
    if others:
        own = ", ".join(f"--{option.name}" for option in variant.options)
        raise error(
            ValueError,
            f"--{flag} with {', '.join(others)}",
            f"of this benchmark's options it takes {own}",
            f"leave --{flag} or the others out",
        )


def rows_until_failure(rows: Iterable[Row]) -> Result:
    """Return ``rows``, and ``failed`` if an error or an interrupt ended them after the first."""
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
    except (Exception, KeyboardInterrupt) as failure:  # hours of work may be in `found`
        if not found:
            raise
        if not isinstance(failure, (*FAILURES, KeyboardInterrupt)):
            traceback.print_exc()
        return {"rows": found, "failed": f"{type(failure).__name__}: {failure}"}
    return {"rows": found}


def invocation(argv: list[str]) -> str:
    """Return the command line without --json.

    Examples
    --------
    >>> invocation(["__main__.py", "linear", "--json", "a.json", "--quick"])[-14:]
    'linear --quick'
    """
    words = [f" {shlex.quote(word)}" for word in argv[1:] if not word.startswith("--json=")]
    if " --json" in words:
        del words[(at := words.index(" --json")) : at + 2]
    override = os.environ.get("CUPYATTN_ARCH")
    arch = f"CUPYATTN_ARCH={shlex.quote(override)} " if override else ""
    return f"{arch}python -m cupyattn.benchmark{''.join(words)}"


def run_on_gpu(
    command: str,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Result],
    show: Callable[[Result, Terminal], None],
) -> int:
    """Measure something on a GPU, write and print it; return the exit code, 1 without a GPU."""

    def measured() -> Result:
        if not device_count():
            raise RuntimeError(NO_GPU)
        return measure(arguments)

    return run_and_show(command, arguments.json, measured, show)


def run_and_show(
    command: str,
    file: Path | None,
    measure: Callable[[], Result],
    show: Callable[[Result, Terminal], None],
) -> int:
    """Measure something, write it to a file and print it; return the exit code."""
    try:
        if file is not None:
            require_writable(file)
        result = measure()
        if file is not None:
            write_json(result, file)
    except FAILURES as failure:
        fail(command, failure, as_json=False)
        return 1
    emit(result, show, as_json=False)
    return 0
