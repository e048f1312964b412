"""``python -m cupyattn.benchmark attention``: times and TFLOP/s of attention on a GPU.

The work counted is that of the two products, over all scores, over half of them for causal
attention, and over those that a window keeps: 4 * B * H * S * S * D where D = Dv. A few queries at
long keys, which bytes bind and not products, are ``--queries 16 64 256 --seqlen 65536 --tokens
65536 --width 1024 --head-dim 128``: 8 heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import numpy as np

from cupyattn.benchmark.attention import modelled, peers
from cupyattn.benchmark.attention.arguments import add_case_options, calls_of
from cupyattn.benchmark.attention.cases import inputs_of
from cupyattn.benchmark.attention.contenders import forward_contenders
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.rows import READ, Row, products_of
from cupyattn.benchmark.frame.subjects import Gauge, Subject, measured
from cupyattn.cli.arguments import integer
from cupyattn.ops.attention.options import IMPLEMENTATIONS

TOLERANCE = 0.02


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    add_case_options(parser, IMPLEMENTATIONS, ("flash", "tiled", "naive"))
    parser.add_argument(
        "--queries",
        type=integer(1),
        nargs="+",
        metavar="Q",
        help="queries of a sequence, its last tokens; memory bounds them (default: all tokens)",
    )


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield every case with every option."""
    for case, option in calls_of(arguments):
        inputs = inputs_of(case, option, gauge.xp)
        yield Subject(
            {**case.labels, "option": option},
            forward_contenders(arguments.implementation, inputs, gauge),
            flops=case.flops(option),
            bytes=case.bytes,
            ceiling=products_of(case.dtype) if case.queries is None else READ,
            tolerance=np.inf if option == "dropout" else TOLERANCE,
        )


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    return measured(subjects(arguments, gauge), gauge, len(list(calls_of(arguments))))


BENCHMARK = Benchmark(
    name="attention",
    title="Attention forward",
    help="times and TFLOP/s of attention forward on a GPU, with and without options",
    description="Time attention(q, k, v, out=out): by dtype, head dim, length and batch, plain and "
    "with each option, whose time is set beside the plain call's.",
    note="TFLOP/s count 4 * B * H * S * S * D (2 * (D + Dv) where they differ): half of that for "
    "causal calls, and the kept scores for a window.",
    rows=rows,
    options=options,
    peers=peers.FORWARD,
    beside="option",
    quick={
        "head_dim": [64, 128, 80, 40, 96, 160, 192, 256],
        "seqlen": [4096],
        "batch": [4],
        "dtype": ["float16"],
        "implementation": ["flash"],
        "options": ["causal"],
    },
    modelled=modelled.forward,
)
