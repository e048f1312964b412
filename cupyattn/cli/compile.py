"""``python -m cupyattn compile``: every kernel ahead of its first call, with its resources."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import groupby
from operator import itemgetter
from typing import Any

import cupyattn
from cupyattn.cli.arguments import add_json_option, integer
from cupyattn.cli.compiled_kernel import compiled_kernel, macros_text, spill_bytes
from cupyattn.cli.terminal import Result, Terminal, emit, fail, progress
from cupyattn.kernels.arch import ARCHS, TURING, Arch
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.configs import catalogue


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "compile",
        help="compile every kernel into the cache and show its resources; needs no GPU",
        description="Compile every row of the launch-configuration tables to machine code for one "
        "architecture, into the cache, and show what each kernel takes: registers, spills, shared "
        "memory, and how many CTAs fit on an SM. Needs NVRTC, but no GPU. Head dims between the "
        "rows of the tables are compiled at their first call.",
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
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        nvrtc_version()
    except RuntimeError as failure:
        fail("compile", failure, as_json=arguments.json)
        return 1
    result = compile_catalogue(ARCHS[arguments.arch], arguments.jobs)
    emit(result, show, as_json=arguments.json)
    return 0 if result["ok"] else 1


def compile_catalogue(arch: Arch, jobs: int) -> Result:
    """Compile all that `catalogue` lists, `jobs` at a time."""
    began = time.perf_counter()
    specialisations = list(catalogue())
    kernels, failures = [], []
    with (
        ThreadPoolExecutor(jobs) as pool,
        progress(f"compiling for {arch.real}", len(specialisations)) as step,
    ):
        # NVRTC releases the interpreter lock, so threads compile side by side.
        futures = [pool.submit(compiled_kernel, each, arch) for each in specialisations]
        _wait(pool, futures, step)
    for specialisation, future in zip(specialisations, futures, strict=True):
        failure = future.exception()
        if failure is None:
            kernels.append(future.result())
        else:
            reason = f"{type(failure).__name__}: {failure}"
            failures.append({"kernel": specialisation.label, "error": reason})
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


def _wait(pool: ThreadPoolExecutor, futures: list[Future[Any]], step: Any) -> None:
    try:
        for _ in as_completed(futures):
            step()
    except BaseException:  # Ctrl-C: what has not begun never will
        pool.shutdown(wait=False, cancel_futures=True)
        raise


_COLUMNS = ("specialisation", "threads", "registers", "spills B", "shared B", "CTAs/SM", "time")


def _cells(kernel: dict[str, Any]) -> tuple[str | int, ...]:
    return (
        macros_text(kernel["macros"]),
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
        f"  {len(kernels)} kernels in {result['seconds']:.1f} s, {result['jobs']} at a time; "
        f"{cached} of them were in the cache"
    )
    spilling = sum(spill_bytes(kernel) > 0 for kernel in kernels)
    if spilling:
        terminal.verdict(False, f"  {spilling} of them spill registers to memory")
    for kernel in kernels:
        if not kernel["ctas_per_sm"]:
            name = f"{kernel['kernel']} {macros_text(kernel['macros'])}"
            terminal.verdict(False, f"  does not fit on an SM: {name}")
    for failure in result["failures"]:
        terminal.verdict(False, f"  did not compile: {failure['kernel']}\n{failure['error']}")
    if result["ok"]:
        terminal.verdict(True, "  every kernel compiles and fits")
