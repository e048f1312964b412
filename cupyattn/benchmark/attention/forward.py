"""``python -m cupyattn.benchmark attention``: times and TFLOP/s of attention on a GPU.

The work counted is that of the two products, over all scores, over half of them for causal
attention, and over those that a window keeps: 4 * B * H * S * S * D where D = Dv. A few queries at
long keys, which bytes bind and not products, are ``--queries 16 64 256 --seqlen 65536 --tokens
65536 --width 1024 --head-dim 128``: 8 heads.
"""

from __future__ import annotations

import argparse
from typing import Any

from cupyattn.benchmark.attention.arguments import add_case_options
from cupyattn.benchmark.attention.table import show_rows
from cupyattn.benchmark.attention.times import measure_cases
from cupyattn.benchmark.contenders import Contender, forward_contenders
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.ops.attention.options import IMPLEMENTATIONS


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "attention",
        help="times and TFLOP/s of attention forward on a GPU, with and without options",
        description="Time attention(q, k, v, out=out) by CUDA events: by head dim and length, "
        "plain and with each option, whose time is set beside the plain call's. Needs a GPU; "
        "CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="TFLOP/s count 4 * B * H * S * S * D (2 * (D + Dv) where they differ) over the "
        "median of the calls: half of that for causal calls, and the kept scores for a window. "
        "Exit code 1 without a GPU.",
    )
    add_case_options(parser, IMPLEMENTATIONS, "scaled_dot_product_attention")
    parser.add_argument(
        "--queries",
        type=integer(1),
        nargs="+",
        metavar="Q",
        help="queries of a sequence, its last tokens: adds GB/s of q, k, v and the result "
        "(default: all tokens, and no GB/s)",
    )
    add_timing_options(parser, calls=50, warm_up=10)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("attention", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every row on the first GPU."""
    return measure_cases("attention", arguments, contenders_of)


def contenders_of(arguments: argparse.Namespace, torch: Any) -> list[Contender]:
    """Return what the command line names."""
    return forward_contenders(arguments.implementation, torch)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Attention forward", result, terminal)
    show_rows(result["rows"], terminal)
    terminal.text(
        f"  Median of {result['calls']} calls after {result['warm_up']}, with out=; TFLOP/s of the "
        "two products,\n  for causal calls of half the scores, for a window of those it keeps."
    )
