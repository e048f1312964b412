"""``python -m cupyattn.benchmark emulator``: what running the kernels without a GPU costs.

CPU time of the process, after the kernels have been compiled to PTX and translated to Python: what
a test pays for each call beyond its first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.cli.arguments import add_json_option, integer
from cupyattn.cli.terminal import Result, Terminal, emit, fail
from cupyattn.emulator import Checks

RANDOM_PROBLEMS = 100
RANDOM_BUDGET_S = 4.0

_HEAD_DIM = 64


class Size(NamedTuple):
    """A forward of the tensor-core kernel, and the CPU time that it may take."""

    batch: int
    heads: int
    seqlen: int
    budget_s: float


SIZES = (Size(1, 2, 64, 0.005), Size(1, 2, 128, 0.012), Size(2, 4, 256, 0.060))


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "emulator",
        help="CPU time of the attention kernel on the emulator, with and without race checks",
        description="Measure the CPU time of attention forward on the emulator: the tensor-core "
        f"kernel at head dim {_HEAD_DIM} in three sizes, and random small problems. Compilation is "
        "not counted. Needs NVRTC, but no GPU.",
        epilog="Budgets hold for the checks that cost little; races and uninitialised reads may "
        "cost 5 times that.",
    )
    parser.add_argument(
        "--calls",
        type=integer(1),
        default=10,
        metavar="N",
        help="calls of each size, of which the median is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--problems",
        type=integer(1),
        default=RANDOM_PROBLEMS,
        metavar="N",
        help="random small problems (default: %(default)s)",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    try:
        result = measure(arguments.calls, arguments.problems)
    except RuntimeError as failure:  # no compiler
        fail("emulator", failure, as_json=arguments.json)
        return 1
    emit(result, show, as_json=arguments.json)
    return 0


def measure(calls: int, problems: int) -> Result:
    """Measure every row."""
    return {
        "command": "emulator",
        "version": cupyattn.__version__,
        "numpy": np.__version__,
        "kernel": "attention_forward",
        "head_dim": _HEAD_DIM,
        "dtype": "float16",
        "calls": calls,
        "rows": [*(_size_row(size, calls) for size in SIZES), _random_row(problems)],
    }


def _size_row(size: Size, calls: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (size.batch, size.seqlen, size.heads, _HEAD_DIM)
    arrays = [rng.standard_normal(shape).astype(np.float16) for _ in range(3)]

    def call() -> None:
        cupyattn.attention(*arrays)

    return {
        "name": f"(B, H, N) = ({size.batch}, {size.heads}, {size.seqlen})",
        "fast_s": cpu_seconds(call, Checks.fast(), calls),
        "all_checks_s": cpu_seconds(call, Checks.all(), calls),
        "budget_s": size.budget_s,
    }


def _random_row(count: int) -> dict[str, Any]:
    """Time problems of many shapes and options together: the first walk over them compiles."""
    rng = np.random.default_rng(0)
    problems = [random_problem(rng) for _ in range(count)]

    def call() -> None:
        for arrays, options in problems:
            cupyattn.attention(*arrays, **options)

    return {
        "name": f"{count} random problems",
        "fast_s": cpu_seconds(call, Checks.fast(), 1),
        "all_checks_s": cpu_seconds(call, Checks.all(), 1),
        "budget_s": RANDOM_BUDGET_S * count / RANDOM_PROBLEMS,
    }


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


def cpu_seconds(call: Callable[[], Any], checks: Checks, calls: int) -> float:
    """Return the median CPU time of a call on the emulator; the first call is not counted."""
    seconds = []
    with cupyattn.backend("emulator", checks=checks):
        call()
        for _ in range(calls):
            began = time.process_time()
            call()
            seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    terminal.title(
        f"CPU time of {result['kernel']} on the emulator, head dim {result['head_dim']} (random "
        f"problems: 16 to 128), {result['dtype']}, NumPy {result['numpy']}"
    )
    terminal.table(
        ("problem", "bounds checks", "budget", "all checks", "all / bounds"),
        [
            (
                row["name"],
                f"{row['fast_s'] * 1e3:.1f} ms",
                f"{row['budget_s'] * 1e3:g} ms",
                f"{row['all_checks_s'] * 1e3:.1f} ms",
                f"{row['all_checks_s'] / row['fast_s']:.1f}",
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        f"  after compilation; median of {result['calls']} calls, the random problems once. Bounds "
        "checks:\n  all but races and uninitialised reads"
    )
