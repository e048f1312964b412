"""``python -m cupyattn.benchmark attention_backward``: times and TFLOP/s of the gradients on a GPU.

The work counted is that of the backward's five products, over the same scores as the forward's two:
10 * B * H * S * S * D where D = Dv. The deterministic kernels compute two of them again, which is
not counted: TFLOP/s compare times.
"""

from __future__ import annotations

import argparse
from typing import Any

from cupyattn.benchmark.attention.arguments import add_case_options
from cupyattn.benchmark.attention.table import show_rows
from cupyattn.benchmark.attention.times import measure_cases
from cupyattn.benchmark.contenders import Contender, backward_contenders
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.cli.terminal import Result, Terminal

IMPLEMENTATIONS = ("flash", "naive")
DETERMINISTIC = {"both": (False, True), "only": (True,), "never": (False,)}


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "attention_backward",
        help="times and TFLOP/s of attention's gradients on a GPU, one-pass and deterministic",
        description="Time attention_backward(..., grads=grads, workspace=workspace) by CUDA "
        "events: by head dim and length, plain and with each option, whose time is set beside the "
        "plain call's; the kernel that adds atomically and the deterministic ones beside each "
        "other. Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="TFLOP/s count the whole backward as 2.5 forwards, 10 * B * H * S * S * D (6 * D + "
        "4 * Dv where they differ), over the median of the calls: half of that for causal calls, "
        "and the kept scores for a window. Exit code 1 without a GPU.",
    )
    add_case_options(parser, IMPLEMENTATIONS, "autograd.grad of scaled_dot_product_attention")
    parser.add_argument(
        "--deterministic",
        nargs="?",
        choices=tuple(DETERMINISTIC),
        const="only",
        default="both",
        help="of flash, which has both, time the deterministic kernels beside the one-pass kernel, "
        "only them, or never (default: %(default)s; the option alone: %(const)s)",
    )
    add_timing_options(parser, calls=50, warm_up=10)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("attention_backward", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every row on the first GPU."""
    return measure_cases("attention_backward", arguments, contenders_of)


def contenders_of(arguments: argparse.Namespace, torch: Any) -> list[Contender]:
    """Return what the command line names."""
    modes = DETERMINISTIC[arguments.deterministic]
    return backward_contenders(arguments.implementation, modes, torch)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Attention backward", result, terminal)
    show_rows(result["rows"], terminal)
    terminal.text(
        f"  Median of {result['calls']} calls after {result['warm_up']}, with grads= and "
        "workspace=; TFLOP/s of 2.5 forwards,\n  for causal calls of half the scores, for a window "
        "of those it keeps."
    )
