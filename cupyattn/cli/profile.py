"""``python -m cupyattn profile``: the work of a kernel line by line; a profiler without a GPU.

The kernel runs on the emulator, which counts. What it counts is exact: instructions, bank
conflicts, sectors, bytes, divergence. What it cannot know is time: latencies, caches and what
overlaps. The cycles that order the lines are therefore no prediction: see `busy_cycles`.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

import cupyattn
from cupyattn.cli.arguments import Commands, add_json_option, integer, print_help_of
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.emulator import Checks, Report
from cupyattn.emulator.report import Access, LineReport
from cupyattn.ops.attention.options import IMPLEMENTATIONS
from cupyattn.runtime.annotations import Json, Keywords
from cupyattn.runtime.arch import emulated_arch
from cupyattn.runtime.source import source_root
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM

# Cycles for which one warp instruction keeps a pipe of a Turing SM busy: 32 lanes over the results
# per cycle and SM of the CUDA C++ Programming Guide, "Throughput of Native Arithmetic
# Instructions", column 7.5 (half: two results a lane). tensor: m16n8k8 has 1,024 multiply-adds, an
# SM's tensor cores do 512 a cycle (Turing whitepaper). integer_tensor: m8n8k16 of 8 bits has as
# many at twice that rate, m8n8k32 of 4 bits twice as many at four times the rate. xu: conversions
# are counted as if all took this pipe, but for those of float16 into float32, which an HADD2 does.
# control: a slot of one of the four schedulers. Shared and global memory are counted in passes and
# sectors; most moves vanish in the assembler.
_CYCLES = {
    "fma": 0.5,
    "alu": 0.5,
    "half": 0.5,
    "xu": 2.0,
    "double": 16.0,
    "shuffle": 1.0,
    "tensor": 2.0,
    "integer_tensor": 1.0,
    "control": 0.25,
    "local": 1.0,
    "atomic": 1.0,
}
_CYCLES_PER_SECTOR = 0.5  # L1 to registers: 64 bytes a cycle (Jia et al., arXiv:1903.07486)

_ASM = re.compile(r'\basm\b[^"]*"\s*([a-z][\w.:]*)')


def figures(report: Report) -> Json:
    """Return the totals of a report, and its lines."""
    lines = [_line(line) for line in report.lines]
    return {
        "busy_cycles": sum(line["busy_cycles"] for line in lines),
        "instructions": report.instruction_mix,
        "bytes": report.bytes_moved,
        "bank_conflict_ways": report.bank_conflict_ways,
        "sector_efficiency": report.sector_efficiency,
        "diverged_steps": report.diverged_steps,
        "atomic_updates": report.atomic_updates,
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


def _line(line: LineReport) -> Json:
    file, source = source_of(line.file)
    return {
        "file": file,
        "line": line.line,
        "source": source[line.line - 1].strip() if 0 < line.line <= len(source) else "",
        "instruction": instruction_at(source, line.line),
        "busy_cycles": busy_cycles(line),
        "instructions": dict(line.instructions.most_common()),
        "diverged_steps": line.diverged_steps,
        "accesses": [_access(access) for access in line.access_totals()],
    }


def _access(access: Access) -> Json:
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


@cache
def source_of(file: str) -> tuple[str, tuple[str, ...]]:
    """Return a file's name below the CUDA sources, and its lines if it is there.

    The end of the path counts: compiled code names the files below a folder that is not there.
    """
    parts = PurePosixPath(posixpath.normpath(Path(file).as_posix())).parts
    for length in range(1, len(parts)):
        name = "/".join(parts[-length:])
        path = source_root() / name
        if path.is_file():
            return name, tuple(path.read_text(encoding="utf-8").splitlines())
    return "/".join(parts[-2:]), ()


def instruction_at(source: tuple[str, ...], line: int) -> str | None:
    """Return the PTX instruction of the asm statement that a line belongs to, if there is one.

    Compilers place inline assembly at any line of its statement, operands included.

    Examples
    --------
    >>> source = ('asm("rcp.approx.ftz.f32 %0, %1;"', '    : "=f"(y) : "f"(x));', "return y;")
    >>> instruction_at(source, 2), instruction_at(source, 3)
    ('rcp.approx.ftz.f32', None)
    """
    if not 0 < line <= len(source):
        return None
    first, last = line - 1, line - 1
    while first > 0 and not _ends(source[first - 1]):
        first -= 1
    while last < len(source) - 1 and not _ends(source[last]):
        last += 1
    found = _ASM.search("\n".join(source[first : last + 1]))
    return found[1] if found else None


def _ends(line: str) -> bool:
    return line.rstrip().endswith((";", "{", "}"))


class ProfiledCall(NamedTuple):
    """A call of the library, ready to be made."""

    description: str
    run: Callable[[], object]


def add_attention_parser(calls: Commands) -> argparse.ArgumentParser:
    """Add ``profile attention``."""
    parser: argparse.ArgumentParser = calls.add_parser(
        "attention",
        help="attention forward",
        description="Profile self-attention of random q, k and v.",
    )
    _add_problem(parser)
    parser.set_defaults(call=_attention)
    return parser


def add_attention_backward_parser(calls: Commands) -> argparse.ArgumentParser:
    """Add ``profile attention_backward``."""
    parser: argparse.ArgumentParser = calls.add_parser(
        "attention_backward",
        help="attention backward, all its kernels",
        description="Profile the gradients of self-attention of random q, k and v; out and lse are "
        "the reference's.",
    )
    _add_problem(parser)
    parser.add_argument(
        "--deterministic", action="store_true", help="bitwise the same from run to run"
    )
    parser.set_defaults(call=_attention_backward)
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of q, k and v, the options, and which implementation."""
    _add_size(parser, "--batch", 1, "B", "sequences")
    _add_size(parser, "--seqlen", 128, "S", "queries and keys per sequence")
    _add_size(parser, "--heads", 2, "H", "query heads")
    parser.add_argument(
        "--kv-heads",
        type=integer(1),
        metavar="G",
        help="key-value heads, a divisor of the query heads (default: the same number)",
    )
    _add_size(parser, "--head-dim", 64, "D", "head dim of q, k and v", MAX_HEAD_DIM)
    _add_dtype(parser)
    _add_attention_options(parser)
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default=IMPLEMENTATIONS[0],
        metavar="NAME",
        help="which kernels: %(choices)s (default: %(default)s)",
    )


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cupyattn.attention`, by their names there; arrays are made at random."""
    parser.add_argument("--causal", action="store_true", help="hide later keys from a query")
    parser.add_argument(
        "--window-size",
        nargs=2,
        type=_window_side,
        metavar=("LEFT", "RIGHT"),
        help="keys that a query sees before and after its own; none for all of them",
    )
    parser.add_argument("--mask", action="store_true", help="hide a tenth of the scores, at random")
    parser.add_argument("--bias", action="store_true", help="add a bias per head to the scores")
    parser.add_argument(
        "--alibi-slopes", action="store_true", help="ALiBi with slopes 2^(-8/H), 2^(-16/H), ..."
    )
    parser.add_argument("--softcap", type=float, metavar="C", help="cap scores at C, by tanh")
    parser.add_argument("--sinks", action="store_true", help="one more logit per head")
    parser.add_argument(
        "--dropout-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop weights with this probability (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="of dropout (default: %(default)s)"
    )


def _window_side(text: str) -> int | None:
    return None if text == "none" else integer(0)(text)


def add_softmax_parser(calls: Commands) -> argparse.ArgumentParser:
    """Add ``profile softmax``."""
    parser: argparse.ArgumentParser = calls.add_parser(
        "softmax",
        help="softmax over rows, forward or backward",
        description="Profile the softmax of random rows.",
    )
    _add_size(parser, "--rows", 64, "R", "rows")
    _add_size(parser, "--length", 1024, "N", "items of a row")
    _add_dtype(parser)
    parser.add_argument("--backward", action="store_true", help="its gradient instead")
    parser.set_defaults(call=_softmax)
    return parser


def _add_size(
    parser: argparse.ArgumentParser,
    name: str,
    default: int,
    letter: str,
    what: str,
    highest: int | None = None,
) -> None:
    parser.add_argument(
        name,
        type=integer(1, highest),
        default=default,
        metavar=letter,
        help=f"{what} (default: %(default)s)",
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=tuple(STORAGE), default="float16", help="dtype (default: %(default)s)"
    )


def _normal(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)

    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _attention(arguments: argparse.Namespace) -> ProfiledCall:
    (q, k, v), options = _problem(arguments)
    return ProfiledCall(
        _description("attention", arguments, options),
        lambda: cupyattn.attention(
            q, k, v, implementation=arguments.implementation, return_lse=True, **options
        ),
    )


def _attention_backward(arguments: argparse.Namespace) -> ProfiledCall:
    (q, k, v), options = _problem(arguments)
    with cupyattn.backend("reference"):
        out, lse = cupyattn.attention(q, k, v, return_lse=True, **options)
    dout = _normal(out.shape, arguments.dtype, np.random.default_rng(1))
    if arguments.deterministic:
        options["deterministic"] = True
    return ProfiledCall(
        _description("attention backward", arguments, options),
        lambda: cupyattn.attention_backward(
            dout, q, k, v, out, lse, implementation=arguments.implementation, **options
        ),
    )


def _problem(arguments: argparse.Namespace) -> tuple[tuple[np.ndarray, ...], Keywords]:
    """Return q, k and v, and the options."""
    a = arguments
    rng = np.random.default_rng(0)
    arrays = tuple(
        _normal((a.batch, a.seqlen, heads, a.head_dim), a.dtype, rng)
        for heads in (a.heads, a.kv_heads or a.heads, a.kv_heads or a.heads)
    )
    return arrays, _attention_options(a, rng)


def _description(what: str, arguments: argparse.Namespace, options: Keywords) -> str:
    a = arguments
    extra = [name for name in options if name != "causal"]
    return (
        f"{(f'causal {what}' if a.causal else what).capitalize()} ({a.implementation}) of "
        f"{a.batch} x {a.seqlen} tokens, {a.heads} query heads on {a.kv_heads or a.heads} "
        f"key-value heads, head dim {a.head_dim}, {a.dtype}{', with ' if extra else ''}"
        f"{', '.join(extra)}"
    )


def _attention_options(arguments: argparse.Namespace, rng: np.random.Generator) -> Keywords:
    """Return the options of the command line, as `cupyattn.attention` takes them."""
    a = arguments
    scores = (a.heads, a.seqlen, a.seqlen)
    options: Json = {"causal": True} if a.causal else {}
    if a.window_size is not None:
        options["window_size"] = tuple(a.window_size)
    if a.mask:
        options["mask"] = rng.random((1, 1, *scores[1:])) < 0.9
    if a.bias:
        options["bias"] = _normal((1, *scores), a.dtype, rng)
    if a.alibi_slopes:
        options["alibi_slopes"] = 2.0 ** (
            -8.0 * np.arange(1, a.heads + 1, dtype=np.float32) / a.heads
        )
    if a.softcap is not None:
        options["softcap"] = a.softcap
    if a.sinks:
        options["sinks"] = _normal((a.heads,), "float32", rng)
    if a.dropout_p:
        options |= {"dropout_p": a.dropout_p, "seed": a.seed}
    return options


def _softmax(arguments: argparse.Namespace) -> ProfiledCall:
    shape, dtype = (arguments.rows, arguments.length), arguments.dtype
    rng = np.random.default_rng(0)
    x = _normal(shape, dtype, rng)
    what = f"of {shape[0]} rows of {shape[1]} {dtype} items"
    if not arguments.backward:
        return ProfiledCall(f"Softmax {what}", lambda: cupyattn.softmax(x))
    with cupyattn.backend("reference"):
        out = cupyattn.softmax(x)
    return ProfiledCall(f"Softmax backward {what}", lambda: cupyattn.softmax_backward(x, out))


SHOWN_LINES = 12
"""The most source lines that are shown of each kernel."""


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "profile",
        help="bank conflicts, sectors and instructions of kernels per source line; needs no GPU",
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
        "arch": emulated_arch().real,
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


def _show_kernel(kernel: Json, result: Result, terminal: Terminal) -> None:
    share = kernel["busy_cycles"] / (result["totals"]["busy_cycles"] or 1)
    terminal.title(f"{kernel['kernel']}, {share:.1%} of the busy cycles")
    mix: Counter[str] = Counter(kernel["instructions"])
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


def _show_line(line: Json, share: float, terminal: Terminal) -> None:
    where = f"{line['file']}:{line['line']}"
    terminal.facts({f"{share:6.1%}": line["instruction"] or line["source"] or where})
    terminal.text(f"{'':10}{where}: {_mix(Counter(line['instructions']))}")
    for access in line["accesses"]:
        terminal.text(f"{'':10}{_cost(access)}")
    if line["diverged_steps"]:
        terminal.text(f"{'':10}diverged: {line['diverged_steps']:,} times by part of a warp")


def _mix(instructions: Counter[str]) -> str:
    return ", ".join(f"{pipe} {n:,}" for pipe, n in instructions.most_common())


def _cost(access: Json) -> str:
    text = f"{access['instruction']}: {access['requests']:,} requests, {access['bytes']:,} bytes, "
    if access["space"] == "shared":
        ways = f"{access['ways']:.2f} ways"
        worst = access["worst_ways"]
        return text + (f"{ways}, at worst {worst:.2f}" if worst > access["ways"] else ways)
    return text + (
        f"{access['sectors_per_request']:.1f} sectors a request, {access['efficiency']:.0%} needed"
    )
