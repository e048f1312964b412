"""``python -m cupyattn.benchmark linear``: products with a weight, many rows and few.

Of many rows the figure is TFLOP/s, of few the GB/s at which the weight is read, beside a kernel
that reads it and does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from cupyattn.benchmark.cuda_events import Round, event_timer, graph_timer, measured_on
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.benchmark.linear.calls import own_calls, reading_calls, torch_calls
from cupyattn.benchmark.linear.cases import (
    LARGE,
    LAYOUTS,
    QUANTISED,
    THIN,
    THIN_ROWS,
    Arrays,
    Case,
    arrays_of,
)
from cupyattn.benchmark.torch_peer import TORCH, load_torch
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.ops.linear.problem import ACTIVATIONS
from cupyattn.weight_formats import FORMATS

KINDS = ("large", "thin", "backward")
OWN, READING, EAGER, COMPILED = "cupyattn", "read w", "torch", "torch.compile"


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "linear",
        help="times of linear on a GPU: TFLOP/s of many rows, GB/s of few, and of the backward",
        description="Time linear(x, w, b, out=out) and linear_backward by CUDA events: many rows "
        "and the backward in TFLOP/s; few rows in GB/s of the weight, which is never in L2, beside "
        "a kernel that only reads it. Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on a "
        "newer one.",
        epilog="TFLOP/s count 2 * M * N * K for each product, over the median of the calls. Few "
        "rows are timed in a CUDA graph of calls with one weight after the other. Exit code 1 "
        "without a GPU.",
    )
    parser.add_argument(
        "--kind", nargs="+", choices=KINDS, default=list(KINDS), help="default: all"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=tuple(STORAGE), default=["float16"], help="default: float16"
    )
    parser.add_argument(
        "--size",
        nargs=3,
        type=integer(1),
        action="append",
        metavar=("M", "N", "K"),
        help="instead of the usual ones, of every kind; may be given several times",
    )
    parser.add_argument(
        "--layout",
        nargs="+",
        choices=LAYOUTS,
        default=["nk"],
        help="how w lies: nk is w.T of an array (N, K) (default: nk)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=tuple(FORMATS),
        default=[],
        help="quantised weights (N, K) of these formats beside those of the dtype: many rows, also "
        "of dx = dout w^T, and few; no backward, which has no dw then",
    )
    parser.add_argument(
        "--activation",
        choices=("none", *ACTIVATIONS),
        help="default: gelu_tanh of many rows, none of few",
    )
    parser.add_argument(
        "--peer", choices=(TORCH,), help="time PyTorch beside it, and torch.compile"
    )
    add_timing_options(parser, calls=30, warm_up=5)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("linear", arguments, measure, show)


def cases_of(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield what the command line asks for."""
    kinds = [kind for kind in arguments.kind if kind != "backward" or not arguments.weights]
    for kind in kinds:
        usual: Sequence[tuple[int, int, int]] = QUANTISED if arguments.weights else LARGE
        if kind == "thin":
            usual = [(m, n, k) for n, k in THIN for m in THIN_ROWS]
        plain = kind == "thin" or arguments.weights
        activation = arguments.activation or ("none" if plain else "gelu_tanh")
        after = None if activation == "none" else activation
        for dtype in arguments.dtype:
            for layout in arguments.layout:
                for weights in (None, *(arguments.weights if layout == "nk" else ())):
                    for m, n, k in arguments.size or usual:
                        yield Case(kind, m, n, k, dtype, layout, after, weights)
                    if kind == "large" and arguments.weights:
                        for m, n, k in arguments.size or usual:
                            yield Case("dx", m, n, k, dtype, layout, None, weights)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every case on the first GPU."""
    cupy = load_cupy()
    torch = load_torch() if arguments.peer else None
    device = cuda_device(0)
    multiprocessors = cupy.cuda.Device(0).attributes["MultiProcessorCount"]

    def contenders(case: Case, arrays: Arrays) -> Iterator[tuple[str, Round]]:
        yield OWN, own_calls(case, arrays)
        if case.kind == "thin":
            yield READING, reading_calls(device, multiprocessors, arrays, cupy)
        if torch is not None and case.weights is None and case.kind != "dx":
            yield EAGER, torch_calls(torch, case, arrays, compiled=False)
            yield COMPILED, torch_calls(torch, case, arrays, compiled=True)

    rows = []
    for case in cases_of(arguments):
        arrays = arrays_of(case, cupy)
        for name, calls in contenders(case, arrays):
            rows.append(row_of(case, name, seconds_of(case, name, calls, arguments, torch)))
    more = {"torch": torch and torch.__version__, "calls": arguments.calls}
    return {"command": "linear", **measured_on(device), **more, "rows": rows}


def seconds_of(
    case: Case, name: str, calls: Round, arguments: argparse.Namespace, torch: Any
) -> list[float]:
    """Time a contender: long calls one by one, short ones in a graph."""
    if case.kind != "thin":
        return event_timer(arguments.calls, arguments.warm_up)(calls[0])
    peer = None if name in (OWN, READING) else torch
    rounds = graph_timer(arguments.calls, arguments.warm_up)(calls, peer)
    return [seconds / len(calls) for seconds in rounds]


def row_of(case: Case, contender: str, times: list[float]) -> dict[str, Any]:
    """Describe what was measured of one contender."""
    seconds = statistics.median(times)
    return {
        "kind": case.kind,
        "M": case.M,
        "N": case.N,
        "K": case.K,
        "dtype": case.dtype,
        "layout": case.layout,
        "weights": case.weights,
        "activation": case.activation,
        "contender": contender,
        "seconds": seconds,
        "fastest": min(times),
        "tflops": None if contender == READING else case.flops / seconds / 1e12,
        "gb_per_s": case.weight_bytes / seconds / 1e9 if case.kind == "thin" else None,
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("linear", result, terminal)
    titles = {
        "large": "Many rows",
        "dx": "Many rows of dout, and w^T",
        "thin": "Few rows, w not in L2",
        "backward": "Backward",
    }
    for (kind, dtype, layout, weights), rows in groupby(
        result["rows"],
        key=lambda row: (row["kind"], row["dtype"], row["layout"], row.get("weights")),
    ):
        turned = f"w.T of {weights or ''} (N, K)" if layout == "nk" else "w as (K, N)"
        terminal.title(f"{titles[kind]}, {dtype}, {' '.join(turned.split())}")
        figure = "GB/s of w" if kind == "thin" else "TFLOP/s"
        terminal.table(
            ("M x N x K", "after", "ran", "median", figure, f"beside {OWN}"), list(_lines(rows))
        )
    terminal.text(f"  Median of {result['calls']} calls (few rows: of graphs of calls).")


def _lines(rows: Any) -> Iterator[tuple[str, ...]]:
    own = None
    for row in rows:
        if row["contender"] == OWN:
            own = row["seconds"]
        figure = row["tflops"] if row["gb_per_s"] is None else row["gb_per_s"]
        beside = "" if row["contender"] == OWN else f"{row['seconds'] / own:.2f} x the time"
        yield (
            f"{row['M']} x {row['N']} x {row['K']}",
            row["activation"] or "-",
            row["contender"],
            f"{row['seconds'] * 1e6:.1f} us",
            f"{figure:.1f}",
            beside,
        )
