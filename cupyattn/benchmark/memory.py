"""``python -m cupyattn memory``: what memory-bound calls reach on Turing GPUs, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import cupyattn
from cupyattn.benchmark import decode, layers, linear
from cupyattn.benchmark.command import Benchmark
from cupyattn.benchmark.model import EMULATED, ModelledCall, row_of
from cupyattn.benchmark.timer import Call, Round
from cupyattn.cli.arguments import add_json_option
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.progress import progress
from cupyattn.turing import MACHINES


def _of_layer(labels: dict[str, Any]) -> str:
    return labels["operation"] + (", backward" if labels["direction"] == "backward" else "")


_CACHES = "--heads 16 --kv-heads 4 --cache float int8 int4 --block-size 16"
CALLS: tuple[tuple[Benchmark, str, Callable[[dict[str, Any]], str]], ...] = (
    (layers.BENCHMARK, "", _of_layer),
    (decode.BENCHMARK, f"--cache-operations {_CACHES}",
     lambda of: f"{decode.OPERATIONS[of['operation']]}, {of['cache']}"),
    (decode.BENCHMARK, _CACHES,
     lambda of: f"decode, {'paged' if of['block_size'] else 'dense'}, {of['cache']}"),
    (linear.BENCHMARK, "--kind thin --few 1 --weights nf4 int4 int8 q4_k",
     lambda of: ", ".join(filter(None, ("linear", f"M={of['M']}", of["weights"])))),
    (linear.BENCHMARK, "--kind thin --few 16", lambda of: f"linear, M={of['M']}"),
)  # fmt: skip
"""The benchmarks that are modelled, their options, and how a call is named by its labels."""


def _first(prepare: Callable[[], Round]) -> Call:
    return prepare()[0]


def modelled_calls() -> Iterator[ModelledCall]:
    """Yield the calls, small for the emulator."""
    for benchmark, words, named in CALLS:
        chosen, arguments = benchmark.parse(*words.split())
        for case in chosen.modelled_cases(arguments)(EMULATED):
            prepare, least = case.implementations[0].prepare, int(case.bytes or 0)
            yield ModelledCall(named(dict(case.labels)), least, partial(_first, prepare))


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "memory",
        help="model the memory-bound kernels on Turing GPUs, by bytes and sectors; needs no GPU",
        description="Run layers, caches, decoding and thin products on the emulator, and show what "
        "each asks of a Turing GPU: the sectors of memory that it touches for each byte that has "
        "to move, what is busy for the longest, and the share of each GPU's bandwidth that no "
        "schedule exceeds. Needs NVRTC, but no GPU.",
        epilog="Counts are exact, of PTX, whose instructions the assembler fuses in part; shares "
        "are upper limits, which no Turing GPU has confirmed. Exit code 1 without a compiler.",
    )
    parser.add_argument(
        "--call", nargs="+", metavar="TEXT", help="calls whose name contains a text (default: all)"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        chosen = [
            call
            for call in modelled_calls()
            if arguments.call is None or any(text in call.name for text in arguments.call)
        ]
        if not chosen:
            raise ValueError(f"no call has {' or '.join(arguments.call)} in its name")
        result = describe(chosen)
    except (RuntimeError, ValueError) as failure:  # no compiler; no such call
        fail("memory", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def describe(calls: Iterable[ModelledCall]) -> Result:
    """Model calls, one after the other."""
    calls, rows = list(calls), []
    with progress("modelling", len(calls)) as step:
        for call in calls:
            rows.append(row_of(call))
            step()
    return {
        "command": "memory",
        "version": cupyattn.__version__,
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "machines": list(MACHINES),
        "rows": rows,
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title("Memory-bound calls on Turing, modelled")
    terminal.table(
        ("call", "sectors", "bound", *(name.split(" ", 1)[-1] for name in result["machines"])),
        [
            (
                row["call"],
                f"{row['sector_ratio']:.2f}",
                row["bound"],
                *(f"{row['bandwidth_share'][name]:.2f}" for name in result["machines"]),
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        "  Bytes of touched sectors for each that has to move; what is busy for the longest on a "
        "T4; the share of each GPU's bandwidth that no schedule exceeds, of the kernels that run "
        f"there. NVRTC {result['nvrtc']}."
    )
