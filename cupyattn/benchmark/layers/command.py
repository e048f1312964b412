"""``python -m cupyattn.benchmark layers``: the memory-bound layers, forward and backward, on a GPU.

Their measure is the memory's speed: GB/s of the least traffic that an operation can have, beside
those of a copy on the same device.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

import numpy as np

from cupyattn.benchmark.cuda_events import copy_rate, graph_timer, measured_on
from cupyattn.benchmark.gpu_command import add_timing_options, run_on_gpu, show_machine
from cupyattn.benchmark.layers.operation import Size
from cupyattn.benchmark.layers.operations import OPERATIONS
from cupyattn.benchmark.layers.times import time_operations
from cupyattn.benchmark.torch_peer import TORCH, load_torch
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.device.cuda import cuda_device


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    names = [operation.name for operation in OPERATIONS]
    parser = benchmarks.add_parser(
        "layers",
        help="GB/s of norms, softmax, losses, embedding, rope, activations, dropout, AdamW, "
        "sampling",
        description="Time the memory-bound layers, forward and backward, by CUDA events around "
        "CUDA graphs of calls with arrays that no cache holds, beside a copy on the same device. "
        "Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="GB/s count each array once that has to be read or written; where products take the "
        "time, TFLOP/s stand instead. Exit code 1 without a GPU.",
    )
    parser.add_argument(
        "--operation",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"which (default: all of {', '.join(names)})",
    )
    for name, default, what in (("rows", [8192], "rows"), ("width", [768, 2048, 4096], "items")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=integer(1),
            default=default,
            metavar="N",
            help=f"{what}{' of a row' if name == 'width' else ''} "
            f"(default: {' '.join(map(str, default))})",
        )
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )
    parser.add_argument(
        "--peer", choices=(TORCH,), help="time PyTorch beside it, as it is and by torch.compile"
    )
    add_timing_options(parser, calls=30, warm_up=5)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("layers", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every row on the first GPU."""
    cupy = load_cupy()

    device = cuda_device(0)
    torch = load_torch() if arguments.peer == TORCH else None
    sizes = [
        Size(rows, width, arguments.dtype) for rows in arguments.rows for width in arguments.width
    ]
    chosen = [operation for operation in OPERATIONS if operation.name in arguments.operation]
    with cupy.cuda.Device(device.ordinal):
        timer = graph_timer(arguments.calls, arguments.warm_up)
        copied = copy_rate(arguments.calls, arguments.warm_up)
        rows = time_operations(chosen, sizes, cupy, timer, torch)
    return {
        "command": "layers",
        **measured_on(device),
        "torch": None if torch is None else torch.__version__,
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "copy_gb_per_s": copied,
        "rows": rows,
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Layers", result, terminal)
    copied = result["copy_gb_per_s"]
    terminal.facts({"a copy on the device": f"{copied:.0f} GB/s"})

    def size(row: dict[str, Any]) -> tuple[int, int, str]:
        return row["rows"], row["width"], row["dtype"]

    for (rows, width, dtype), of_size in groupby(sorted(result["rows"], key=size), key=size):
        terminal.title(f"{rows} rows of {width}, {dtype}")
        terminal.table(
            ("operation", "direction", "ran", "median", "GB/s", "of a copy", "beside it"),
            [
                cells
                for _, group in groupby(of_size, key=lambda r: (r["operation"], r["direction"]))
                for cells in _cells(list(group), copied)
            ],
        )
    terminal.text(
        f"  Median of {result['calls']} rounds of calls after {result['warm_up']}; GB/s of the "
        "least traffic; beside it:\n  how many times faster cupyattn is."
    )


def _cells(rows: list[dict[str, Any]], copied: float) -> list[tuple[str, ...]]:
    ours = next(row["seconds"] for row in rows if row["contender"] == "cupyattn")
    return [
        (
            row["operation"],
            row["direction"],
            row["contender"],
            f"{row['seconds'] * 1e6:.1f} us",
            *(
                (f"{row['tflops']:.3g} TFLOP/s", "")
                if "tflops" in row
                else (f"{row['gb_per_s']:.0f}", f"{row['gb_per_s'] / copied:.2f}")
            ),
            "" if row["contender"] == "cupyattn" else f"{np.divide(row['seconds'], ours):.2f}",
        )
        for row in rows
    ]
