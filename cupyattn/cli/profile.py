"""``python -m cupyattn profile``: what a kernel does, line by line; a profiler without the card.

The kernel runs on the emulator, which counts. What it counts is exact: instructions, bank
conflicts, sectors, bytes, divergence. What it cannot know is time: latencies, caches and what
overlaps. The cycles that order the lines are therefore no prediction; `busy_cycles` defines them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import cupyattn
from cupyattn.cli.arguments import add_json_option
from cupyattn.cli.profiled_call import add_attention_parser, add_softmax_parser
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.emulator import Checks, Report
from cupyattn.emulator.report import Access, LineReport
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.source import source_root

SHOWN_LINES = 12

# Cycles for which one warp instruction keeps a pipe of a Turing SM busy: 32 lanes over the results
# per cycle and SM of the CUDA C++ Programming Guide, "Throughput of Native Arithmetic
# Instructions", column 7.5 (half: two results a lane). tensor: m16n8k8 has 1,024 multiply-adds, an
# SM's tensor cores do 512 a cycle (Turing whitepaper). xu: conversions are counted as if all took
# this pipe. control: a slot of one of the four schedulers. Shared and global memory are counted in
# passes and sectors; most moves vanish in the assembler.
_CYCLES = {
    "fma": 0.5,
    "alu": 0.5,
    "half": 0.5,
    "xu": 2.0,
    "double": 16.0,
    "shuffle": 1.0,
    "tensor": 2.0,
    "control": 0.25,
    "local": 1.0,
    "atomic": 1.0,
}
_CYCLES_PER_SECTOR = 0.5  # L1 to registers: 64 bytes a cycle (Jia et al., arXiv:1903.07486)


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "profile",
        help="what a kernel does per source line: bank conflicts, sectors, instructions; no GPU",
        description="Run a kernel on the emulator and show, for each line of its source, bank "
        "conflicts, sectors of global memory, the mix of instructions, bytes and divergence. "
        "Needs NVRTC, but no GPU.",
        epilog="Counts are exact; time is not known. Lines are ordered by the cycles for which "
        "they keep a Turing SM's pipes busy, at full throughput and without overlap.",
    )
    kernels = parser.add_subparsers(title="kernels", metavar="KERNEL", required=True)
    for add in (add_attention_parser, add_softmax_parser):
        kernel = add(kernels)
        kernel.add_argument(
            "--all-lines",
            action="store_true",
            help=f"show every line in the order of the source, not the {SHOWN_LINES} costliest",
        )
        add_json_option(kernel)
        kernel.set_defaults(run=run)


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
    lines = [_line(line) for line in report.lines]
    return {
        "command": "profile",
        "version": cupyattn.__version__,
        "arch": TURING.real,
        "call": call.description,
        "totals": {
            "busy_cycles": sum(line["busy_cycles"] for line in lines),
            "instructions": report.instruction_mix,
            "bytes": report.bytes_moved,
            "bank_conflict_ways": report.bank_conflict_ways,
            "sector_efficiency": report.sector_efficiency,
            "diverged_steps": report.diverged_steps,
            "atomic_updates": report.atomic_updates,
        },
        "all_lines": arguments.all_lines,
        "lines": lines,
    }


def busy_cycles(line: LineReport) -> float:
    """Return for how many cycles a line keeps the pipes of one Turing SM busy.

    Each pipe at its full throughput, all of them added up, shared memory by its passes (bank
    conflicts included) and global memory by its sectors: a ranking, not a duration.
    """
    arithmetic = sum(_CYCLES.get(pipe, 0.0) * n for pipe, n in line.instructions.items())
    passes = sum(access.wavefronts for access in line.accesses)
    sectors = sum(access.sectors for access in line.accesses)
    return arithmetic + passes + _CYCLES_PER_SECTOR * sectors


def _line(line: LineReport) -> dict[str, Any]:
    file, text = _source(line.file, line.line)
    return {
        "file": file,
        "line": line.line,
        "source": text,
        "busy_cycles": busy_cycles(line),
        "instructions": dict(line.instructions.most_common()),
        "diverged_steps": line.diverged_steps,
        "accesses": [_access(access) for access in line.access_totals()],
    }


def _access(access: Access) -> dict[str, Any]:
    described = {
        "instruction": access.instruction.opcode,
        "space": access.space,
        "write": access.write,
        "requests": access.requests,
        "bytes": access.bytes,
    }
    if access.space == "shared":
        return {**described, "ways": access.ways, "worst_ways": access.worst}
    return {
        **described,
        "sectors_per_request": access.sectors_per_request,
        "efficiency": access.efficiency,
    }


def _source(file: str, line: int) -> tuple[str, str]:
    """Return a file's name below the CUDA sources, and the text of the line if it is there.

    The PTX may come from the cache of a checkout that lay elsewhere: the last folder decides.
    """
    name = "/".join(Path(file).parts[-2:])
    path = source_root() / name
    if not path.is_file():
        return name, ""
    lines = path.read_text(encoding="utf-8").splitlines()
    return name, lines[line - 1].strip() if 0 < line <= len(lines) else ""


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    totals = result["totals"]
    terminal.title(f"{result['call']}: emulated on the CPU, PTX for {result['arch']}")
    mix = Counter(totals["instructions"])
    terminal.facts(
        {
            "warp instructions": f"{mix.total():,}: {_mix(mix)}",
            "bytes": ", ".join(f"{name} {n:,}" for name, n in totals["bytes"].items()),
            "bank conflicts": f"{totals['bank_conflict_ways']:.2f} ways (1 is none)",
            "global sectors": f"{totals['sector_efficiency']:.0%} of those touched were needed",
            "diverged steps": f"{totals['diverged_steps']:,} (code run by part of a warp)",
            "atomic updates": f"{totals['atomic_updates']:,}",
        }
    )
    lines = result["lines"]
    if result["all_lines"]:
        terminal.title(f"All {len(lines)} lines")
    else:
        lines = sorted(lines, key=lambda line: -line["busy_cycles"])[:SHOWN_LINES]
        terminal.title(f"The {len(lines)} costliest of {len(result['lines'])} lines")
    terminal.text("  share of the pipes' busy cycles, place, source; then what the line did")
    for line in lines:
        share = line["busy_cycles"] / (totals["busy_cycles"] or 1)
        where = f"{line['file']}:{line['line']}"
        terminal.text(f"\n  {share:6.1%}  {where:<28}  {line['source']}".rstrip())
        terminal.text(f"{'':10}{_mix(Counter(line['instructions']))}")
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
