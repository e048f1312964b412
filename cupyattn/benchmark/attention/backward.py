"""``python -m cupyattn.benchmark attention_backward``: times and TFLOP/s of the gradients on a GPU.

The work counted is that of the backward's five products, over the same scores as the forward's two:
10 * B * H * S * S * D where D = Dv. The deterministic kernels compute two of them again, which is
not counted: TFLOP/s compare times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import numpy as np

from cupyattn.benchmark.attention import modelled, peers
from cupyattn.benchmark.attention.arguments import add_case_options, calls_of
from cupyattn.benchmark.attention.cases import inputs_of
from cupyattn.benchmark.attention.contenders import backward_contenders
from cupyattn.benchmark.attention.forward import BENCHMARK as FORWARD
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.rows import Row, products_of
from cupyattn.benchmark.frame.subjects import Gauge, Subject, measured

IMPLEMENTATIONS = ("flash", "naive")
DETERMINISTIC = {"both": (False, True), "only": (True,), "never": (False,)}
TOLERANCE = 0.05


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    add_case_options(parser, IMPLEMENTATIONS, IMPLEMENTATIONS)
    parser.add_argument(
        "--deterministic",
        nargs="?",
        choices=tuple(DETERMINISTIC),
        const="only",
        default="both",
        help="of flash, which has both, time the deterministic kernels beside the one-pass kernel, "
        "only them, or never (default: %(default)s; the option alone: %(const)s)",
    )


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield every case with every option."""
    modes = DETERMINISTIC[arguments.deterministic]
    for case, option in calls_of(arguments):
        inputs = inputs_of(case, option, gauge.xp)
        yield Subject(
            {**case.labels, "option": option},
            backward_contenders(arguments.implementation, modes, inputs, gauge),
            flops=case.backward_flops(option),
            bytes=2 * case.bytes,  # q, k, v, out, their gradients
            ceiling=products_of(case.dtype),
            tolerance=np.inf if option == "dropout" else TOLERANCE,
        )


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    return measured(subjects(arguments, gauge), gauge, len(list(calls_of(arguments))))


BENCHMARK = Benchmark(
    name="attention_backward",
    title="Attention backward",
    help="times and TFLOP/s of attention's gradients on a GPU, one-pass and deterministic",
    description="Time attention_backward(..., grads=grads): by dtype, head dim, length and batch, "
    "plain and with each option, whose time is set beside the plain call's; the kernel that adds "
    "atomically and the deterministic ones beside each other.",
    note="TFLOP/s count the whole backward as 2.5 forwards, 10 * B * H * S * S * D (6 * D + 4 * Dv "
    "where they differ): half of that for causal calls, and the kept scores for a window.",
    rows=rows,
    options=options,
    peers=peers.BACKWARD,
    beside="option",
    quick=FORWARD.quick,
    modelled=modelled.backward,
)
