"""``python -m cupyattn demo``: attention on what is here, beside the reference and its bound."""

from __future__ import annotations

import argparse
from typing import Any

from cupyattn.cli.accuracy import Problem
from cupyattn.cli.arguments import add_json_option, integer
from cupyattn.cli.attention_runs import TIMED_CALLS, on_gpu, without_gpu
from cupyattn.cli.compiled_kernel import spill_bytes
from cupyattn.cli.table_rows import configuration
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM

GPU_SEQLEN = 2048
EMULATED_SEQLEN = 128  # about half a second for the tiled kernel

_ERROR_COLUMNS = ("max_error", "bound", "max_ratio")


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    default = Problem()
    parser = commands.add_parser(
        "demo",
        help="run the attention kernels on this machine's GPU, or emulated on its CPU",
        description="Run causal attention by the library's kernels: on the GPU, or on a machine "
        "without one by the emulator, which executes the PTX for a Turing GPU on the CPU, under "
        "checks; without a compiler, by NumPy. Show each kernel and its launch configuration, the "
        "time, and the error against the float64 reference beside its bound.",
        epilog="Exit code 1 if an error is outside its bound, or a check finds a fault.",
    )
    parser.add_argument(
        "--seqlen",
        type=integer(1),
        metavar="S",
        help=f"queries and keys per sequence, of which there are {default.batch} (default: "
        f"{GPU_SEQLEN} on a GPU, {EMULATED_SEQLEN} without); reference and emulator take S * S "
        "time",
    )
    parser.add_argument(
        "--head-dim",
        type=integer(1, MAX_HEAD_DIM),
        default=default.head_dim,
        metavar="D",
        help=f"head dim of q, k and v, 1 to {MAX_HEAD_DIM} (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(STORAGE),
        default=default.dtype,
        help="dtype of q, k and v (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=integer(0),
        default=default.seed,
        metavar="N",
        help="seed of the random q, k and v (default: %(default)s)",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        has_gpu = device_count() > 0
        problem = Problem(
            seqlen=arguments.seqlen or (GPU_SEQLEN if has_gpu else EMULATED_SEQLEN),
            head_dim=arguments.head_dim,
            dtype=arguments.dtype,
            seed=arguments.seed,
        )
        result = on_gpu(problem) if has_gpu else without_gpu(problem)
    # No compiler, a GPU that is too old, a CUPYATTN_ARCH that is wrong, a fault in a kernel.
    except (RuntimeError, ValueError) as failure:
        fail("demo", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0 if result["within_bound"] else 1


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    p = result["problem"]
    terminal.title(
        f"Causal attention of {p['batch']} x {p['seqlen']} tokens, {p['heads']} query heads on "
        f"{p['kv_heads']} key-value heads, head dim {p['head_dim']}, {p['dtype']}"
    )
    {"gpu": _show_gpu, "emulator": _show_emulator, "numpy": _show_numpy}[result["ran_on"]](
        result, terminal
    )
    rows = [
        (run["implementation"], name, *(_text(error[key]) for key in _ERROR_COLUMNS))
        for run in result["runs"]
        for name, error in run["errors"].items()
    ]
    terminal.title("Error against the float64 reference")
    terminal.table(("ran", "result", "largest error", "its bound", "largest error / bound"), rows)
    if result["within_bound"]:
        terminal.verdict(True, "  every element is within its bound")
    else:
        terminal.verdict(False, "  OUTSIDE THE BOUND: this result is wrong")


def _show_gpu(result: Result, terminal: Terminal) -> None:
    runs = result["runs"]
    terminal.text(f"  ran on {result['device']}, compute capability {result['capability'] / 10}")
    if runs[0]["launch"]["arch"] != f"sm_{result['capability']}":
        arch = runs[0]["launch"]["arch"]
        terminal.text(
            f"  CUPYATTN_ARCH: the kernels are PTX for {arch}, translated by the driver; the "
            f"resources below are those of machine code for {arch} itself"
        )
    _show_launches([run["launch"] for run in runs], terminal)
    terminal.title("Time of a call")
    terminal.table(
        ("ran", f"median of {TIMED_CALLS}", "the first, which compiles or loads the kernel"),
        [
            (
                run["implementation"],
                f"{run['seconds'] * 1e3:.3f} ms",
                f"{run['first_call_s'] * 1e3:.1f} ms",
            )
            for run in runs
        ],
    )


def _show_emulator(result: Result, terminal: Terminal) -> None:
    runs = result["runs"]
    arch = runs[0]["launch"]["arch"]
    terminal.text(
        f"  no GPU here: EMULATED ON THE CPU, the kernels' PTX for {arch}, run by cupyattn.emulator"
    )
    terminal.text(f"  The resources below are those of machine code for {arch}, not run here.")
    _show_launches([run["launch"] for run in runs], terminal)
    terminal.title("On the emulator")
    terminal.table(
        ("ran", "time", "first call", "warp instructions", "bank conflicts", "sectors needed"),
        [
            (
                run["implementation"],
                f"{run['seconds'] * 1e3:.0f} ms",
                f"{run['first_call_s'] * 1e3:.0f} ms",
                run["warp_instructions"],
                f"{run['bank_conflict_ways']:.2f} ways",
                f"{run['sector_efficiency']:.0%}",
            )
            for run in runs
        ],
    )
    terminal.text("  The time is the CPU's, with all checks: it says nothing about a GPU's.")
    terminal.verdict(True, f"  no check found a fault: {', '.join(result['checks'])}")
    terminal.text("  python -m cupyattn profile attention shows it per line of the source.")


def _show_numpy(result: Result, terminal: Terminal) -> None:
    run = result["runs"][0]
    terminal.text(f"  no GPU here: ran in NumPy, {run['seconds'] * 1e3:.0f} ms")
    terminal.text(
        f"  That path is the float64 reference, rounded once to {result['problem']['dtype']}: "
        "its error is that rounding alone, and the bound is the one that a kernel has to keep."
    )
    terminal.text(
        f"  No kernel was compiled, so none ran emulated: {result['not_compiled_because']}"
    )


def _show_launches(launches: list[dict[str, Any]], terminal: Terminal) -> None:
    for launch in launches:
        terminal.title(f"{launch['kernel']} for {launch['arch']}")
        terminal.facts(
            {
                "specialisation": configuration(launch["macros"]),
                "launch": f"{launch['grid'][0]} CTAs of {launch['threads']} threads",
                "registers": f"{launch['registers']} a thread",
                "spills": f"{spill_bytes(launch)} bytes a thread",
                "shared memory": f"{launch['shared_bytes']} bytes a CTA",
                "resident": f"{launch['ctas_per_sm']} CTAs on an SM",
            }
        )


def _text(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.2e}"
