"""``python -m cupyattn profile``: what a kernel does, line by line; a profiler without the card.

The kernel runs on the emulator, which counts. What it counts is exact: instructions, bank
conflicts, sectors, bytes, divergence. What it cannot know is time: latencies, caches and what
overlaps. The cycles that order the lines are therefore no prediction: see `busy_cycles`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import cupyattn
from cupyattn.cli.arguments import add_json_option, print_help_of
from cupyattn.cli.profiled_call import (
    add_attention_backward_parser,
    add_attention_parser,
    add_softmax_parser,
)
from cupyattn.cli.profiled_lines import figures
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.emulator import Checks, Report
from cupyattn.runtime.arch import TURING

SHOWN_LINES = 12
"""The most source lines that are shown of each kernel."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "profile",
        help="what kernels do per source line: bank conflicts, sectors, instructions; needs no GPU",
        description="Run a call on the emulator and show, for each of its kernels and each line of "
        "their sources, bank conflicts, sectors of global memory, the mix of instructions, bytes "
        "and divergence. Needs NVRTC, but no GPU.",
        epilog="Counts are exact; time is not known. Lines are ordered by the cycles for which "
        "they keep a Turing SM's pipes busy, at full throughput and without overlap.",
    )
    parser.set_defaults(run=print_help_of(parser))
    calls = parser.add_subparsers(title="calls", metavar="CALL")
    for add in (add_attention_parser, add_attention_backward_parser, add_softmax_parser):
        call = add(calls)
        call.usage = "%(prog)s [OPTION ...]"  # they are many, and listed below it
        call.add_argument(
            "--all-lines",
            action="store_true",
            help=f"show every line in the order of the source, not the {SHOWN_LINES} costliest",
        )
        add_json_option(call)
        call.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        result = profile(arguments)
    # No compiler, a kernel that does not exist yet, a fault found while it ran.
    except (RuntimeError, ValueError) as failure:
        fail("profile", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def profile(arguments: argparse.Namespace) -> Result:
    """Run the call that the arguments describe, with a report."""
    call = arguments.call(arguments)
    report = Report()
    with cupyattn.backend("emulator", checks=Checks.fast(), report=report):
        call.run()
    totals = figures(report)
    del totals["lines"]  # each kernel has its own
    return {
        "command": "profile",
        "version": cupyattn.__version__,
        "arch": TURING.real,
        "call": call.description,
        "totals": totals,
        "all_lines": arguments.all_lines,
        "kernels": [
            {"kernel": name, **figures(of_kernel)} for name, of_kernel in report.kernels.items()
        ],
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(f"{result['call']}: emulated on the CPU, PTX for {result['arch']}")
    terminal.text(
        "  Of each kernel its totals, then the lines of its source: their share of the pipes' busy "
        "cycles, their text, or the instruction that inline assembly names; what they did."
    )
    for kernel in result["kernels"]:
        _show_kernel(kernel, result, terminal)


def _show_kernel(kernel: dict[str, Any], result: Result, terminal: Terminal) -> None:
    share = kernel["busy_cycles"] / (result["totals"]["busy_cycles"] or 1)
    terminal.title(f"{kernel['kernel']}, {share:.1%} of the busy cycles")
    mix = Counter(kernel["instructions"])
    terminal.facts(
        {
            "warp instructions": f"{mix.total():,}: {_mix(mix)}",
            "bytes": ", ".join(f"{name} {n:,}" for name, n in kernel["bytes"].items()),
            "bank conflicts": f"{kernel['bank_conflict_ways']:.2f} ways (1 is none)",
            "global sectors": f"{kernel['sector_efficiency']:.0%} of those touched were needed",
            "diverged steps": f"{kernel['diverged_steps']:,} (code run by part of a warp)",
            "atomic updates": f"{kernel['atomic_updates']:,}",
        }
    )
    lines = kernel["lines"]
    if result["all_lines"]:
        terminal.title(f"{kernel['kernel']}: all {len(lines)} lines")
    else:
        lines = sorted(lines, key=lambda line: -line["busy_cycles"])[:SHOWN_LINES]
        terminal.title(
            f"{kernel['kernel']}: the {len(lines)} costliest of {len(kernel['lines'])} lines"
        )
    for line in lines:
        _show_line(line, line["busy_cycles"] / (kernel["busy_cycles"] or 1), terminal)


def _show_line(line: dict[str, Any], share: float, terminal: Terminal) -> None:
    where = f"{line['file']}:{line['line']}"
    terminal.facts({f"{share:6.1%}": line["instruction"] or line["source"] or where})
    terminal.text(f"{'':10}{where}: {_mix(Counter(line['instructions']))}")
    for access in line["accesses"]:
        terminal.text(f"{'':10}{_cost(access)}")
    if line["diverged_steps"]:
        terminal.text(f"{'':10}diverged: {line['diverged_steps']:,} times by part of a warp")


def _mix(instructions: Counter[str]) -> str:
    return ", ".join(f"{pipe} {n:,}" for pipe, n in instructions.most_common())


def _cost(access: dict[str, Any]) -> str:
    text = f"{access['instruction']}: {access['requests']:,} requests, {access['bytes']:,} bytes, "
    if access["space"] == "shared":
        ways = f"{access['ways']:.2f} ways"
        worst = access["worst_ways"]
        return text + (f"{ways}, at worst {worst:.2f}" if worst > access["ways"] else ways)
    return text + (
        f"{access['sectors_per_request']:.1f} sectors a request, {access['efficiency']:.0%} needed"
    )
