"""``python -m cupyattn compile``: every kernel ahead of its first call, with its resources."""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from queue import Empty, SimpleQueue
from threading import Thread

import cupyattn
from cupyattn.cli.arguments import Commands, add_json_option, integer
from cupyattn.cli.configurations import (
    add_row_options,
    compiled_kernel,
    rows_of,
    spill_bytes,
    without_rows,
)
from cupyattn.cli.terminal import Cell, Result, Terminal, emit, fail
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import ARCHS, TURING, Arch, arch_override
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.progress import progress
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.tuning import tuned_override


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "compile",
        help="compile kernels into the cache and show their resources; needs no GPU",
        description="Compile the kernels' configurations to machine code for one "
        "architecture, into the cache, and show what each kernel takes: registers, spills, shared "
        "memory, and how many CTAs (thread blocks) fit on an SM. Needs NVRTC, but no GPU. Head "
        "dims that have no configuration are compiled at their first call.",
        epilog="Exit code 1 if a kernel does not compile or does not fit on an SM; spills are "
        "shown, but are no failure.",
    )
    parser.add_argument(
        "--arch",
        type=int,
        choices=tuple(ARCHS),
        default=TURING.number,
        metavar="N",
        help="compute capability without its dot: %(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=integer(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="compilations at a time (default: the number of processors)",
    )
    add_row_options(parser, default="all")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    arch = ARCHS[arguments.arch]
    try:
        # --arch decides, but a wrong variable is still an error.
        arch_override()
        tuned_override()
        nvrtc_version()
        rows = rows_of(arguments.kernel, arguments.head_dim, arch)
    except (RuntimeError, ValueError) as failure:  # no compiler; no such row, no such architecture
        fail("compile", failure, as_json=arguments.json)
        return 1
    result = compile_rows(rows, arch, arguments.jobs)
    result["without_rows"] = without_rows(rows, arguments.kernel, arguments.head_dim)
    emit(result, show, as_json=arguments.json)
    return 0 if result["ok"] else 1


def compile_rows(rows: Sequence[Specialisation], arch: Arch, jobs: int) -> Result:
    """Compile the rows, `jobs` at a time."""
    began = time.perf_counter()
    with progress(f"compiling for {arch.real}", len(rows)) as step:
        outcomes = _compile_side_by_side(rows, arch, jobs, step)
    failures = [
        {"kernel": row.label, "error": f"{type(outcome).__name__}: {outcome}"}
        for row, outcome in zip(rows, outcomes, strict=True)
        if isinstance(outcome, Exception)
    ]
    kernels = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    return {
        "command": "compile",
        "version": cupyattn.__version__,
        "arch": arch.real,
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "jobs": jobs,
        "seconds": time.perf_counter() - began,
        "kernels": kernels,
        "failures": failures,
        "ok": not failures and all(kernel["ctas_per_sm"] for kernel in kernels),
    }


def _compile_side_by_side(
    rows: Sequence[Specialisation], arch: Arch, jobs: int, step: Callable[[], None]
) -> list[Json | Exception]:
    """Return the result of `compiled_kernel` for each row, or raise.

    NVRTC releases the interpreter lock, so threads compile side by side. It cannot be stopped, and
    a process waits for the threads of an executor: these are left behind at Ctrl-C, and begin
    nothing more.
    """
    waiting = deque(enumerate(rows))
    done: SimpleQueue[tuple[int, Json | Exception]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                at, row = waiting.popleft()
            except IndexError:
                return
            try:
                done.put((at, compiled_kernel(row, arch)))
            except Exception as failure:
                done.put((at, failure))

    outcomes: dict[int, Json | Exception] = {}
    try:
        for _ in range(min(jobs, len(rows))):
            Thread(target=work, daemon=True).start()
        while len(outcomes) < len(rows):
            try:
                at, outcome = done.get(timeout=0.5)  # without it Windows would not hear of Ctrl-C
            except Empty:
                continue
            outcomes[at] = outcome
            step()
    finally:
        waiting.clear()
    return [outcomes[at] for at in range(len(rows))]


_COLUMNS = ("row", "threads", "regs", "spills", "shared B", "CTAs", "time")


def _cells(kernel: Json) -> tuple[Cell, ...]:
    return (
        kernel["row"],
        kernel["threads"],
        kernel["registers"],
        spill_bytes(kernel),
        kernel["shared_bytes"],
        kernel["ctas_per_sm"],
        "cached" if kernel["cached"] else f"{kernel['seconds']:.2f} s",
    )


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    kernels = sorted(result["kernels"], key=itemgetter("kernel"))
    for entry, rows in groupby(kernels, key=itemgetter("kernel")):
        terminal.title(f"{entry} for {result['arch']}")
        terminal.table(_COLUMNS, [_cells(kernel) for kernel in rows])
    terminal.title(f"Compiled by NVRTC {result['nvrtc']}")
    cached = sum(kernel["cached"] for kernel in kernels)
    terminal.text(
        f"  Kernels: {len(kernels)} in {result['seconds']:.1f} s, {result['jobs']} at a time; in "
        f"the cache before: {cached}. A thread's registers, and the bytes that it spills for want "
        "of more; a CTA's shared memory; how many CTAs an SM holds."
    )
    spilling = sum(spill_bytes(kernel) > 0 for kernel in kernels)
    if spilling:
        terminal.verdict(False, f"  spilling registers to memory: {spilling}")
    for kernel in kernels:
        if not kernel["ctas_per_sm"]:
            terminal.verdict(False, f"  does not fit on an SM: {kernel['kernel']}, {kernel['row']}")
    for failure in result["failures"]:
        terminal.verdict(False, f"  did not compile: {failure['kernel']}")
        terminal.verbatim(failure["error"])
    for nothing in result["without_rows"]:
        terminal.verdict(False, f"  {nothing}")
    if result["ok"]:
        terminal.verdict(True, "  every kernel compiles and fits")
