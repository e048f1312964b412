"""``python -m cupyattn.benchmark emulator``: what running the kernels without a GPU costs.

CPU time of the process, after the kernels have been compiled to PTX and translated to Python: what
a test pays for each call beyond its first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import FEWEST
from cupyattn.benchmark.frame.rows import Row, row_of
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.cli.arguments import integer
from cupyattn.emulator import Checks

RANDOM_PROBLEMS = 100
RANDOM_BUDGET_S = 4.0

_HEAD_DIM = 64
_CALLS_SHARE = 100
"""Calls that --calls counts for each: 10 by default, and three at the least."""


class Size(NamedTuple):
    """A forward of the tensor-core kernel, and the CPU time that it may take."""

    batch: int
    heads: int
    seqlen: int
    budget_s: float


SIZES = (Size(1, 2, 64, 0.005), Size(1, 2, 128, 0.012), Size(2, 4, 256, 0.060))


CHECKS = {"bounds": Checks.fast, "all": Checks.all}
"""The checks that cost little, and all: races and uninitialised reads among them."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument(
        "--problems",
        type=integer(1),
        default=RANDOM_PROBLEMS,
        metavar="N",
        help="random small problems (default: %(default)s)",
    )


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Row]:
    """Measure every row: problems of one size, and many random ones together, which take long."""
    del gauge
    rng = np.random.default_rng(0)
    for size in SIZES:
        shape = (size.batch, size.seqlen, size.heads, _HEAD_DIM)
        arrays = [rng.standard_normal(shape).astype(np.float16) for _ in range(3)]
        name = f"(B, H, N) = ({size.batch}, {size.heads}, {size.seqlen})"
        calls = max(FEWEST, arguments.calls // _CALLS_SHARE)
        yield from _rows_of(name, [(arrays, {})], calls, size.budget_s)
    problems = [random_problem(rng) for _ in range(arguments.problems)]
    budget = RANDOM_BUDGET_S * len(problems) / RANDOM_PROBLEMS
    yield from _rows_of(f"{len(problems)} random problems", problems, FEWEST, budget)


def _rows_of(
    name: str, problems: Sequence[tuple[Any, Any]], calls: int, budget_s: float
) -> Iterator[Row]:
    def call() -> None:
        for arrays, given in problems:
            cupyattn.attention(*arrays, **given)

    for checks, make in CHECKS.items():
        seconds = cpu_seconds(call, make(), calls)
        also = {"budget_s": budget_s} if checks == "bounds" else None
        yield row_of({"problem": name, "checks": checks}, "cupyattn", seconds, also=also)


def random_problem(rng: np.random.Generator) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return the arrays and the options of a small problem."""
    batch, kv_heads, group = rng.integers(1, 3, 3)
    sq, sk = rng.integers(1, 97, 2)
    head_dim = rng.choice((16, 32, 64, 128))  # few, because each is a compilation
    q_shape = (batch, sq, kv_heads * group, head_dim)
    kv_shape = (batch, sk, kv_heads, head_dim)
    arrays = [rng.standard_normal(s).astype(np.float16) for s in (q_shape, kv_shape, kv_shape)]
    window = (int(rng.integers(0, 64)), None) if rng.random() < 0.25 else None
    return arrays, {"causal": bool(rng.random() < 0.5), "window_size": window}


def cpu_seconds(call: Callable[[], Any], checks: Checks, calls: int) -> list[float]:
    """Return the CPU times of a call on the emulator; the first call is not counted."""
    seconds = []
    with cupyattn.backend("emulator", checks=checks):
        call()
        for _ in range(calls):
            began = time.process_time()
            call()
            seconds.append(time.process_time() - began)
    return seconds


BENCHMARK = Benchmark(
    name="emulator",
    title="CPU time of attention on the emulator",
    help="CPU time of the attention kernel on the emulator, with and without race checks",
    description="Measure the CPU time of attention forward on the emulator: the tensor-core "
    f"kernel at head dim {_HEAD_DIM} in three sizes, and random small problems. Compilation is not "
    "counted. Needs NVRTC.",
    note="Budgets hold for the checks that cost little, bounds among them; races and uninitialised "
    "reads may cost 5 times that.",
    rows=rows,
    options=options,
    beside="checks",
    quick={"problems": 10},
    gpus=0,
)
