"""``python -m cupyattn.benchmark block_mask``: documents in one sequence, by tiles, on a GPU.

Its measure is the share of tiles that a mask of documents leaves: with `block_mask` a call should
take that share of the plain call's time, and little more.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import Array, dtype_of
from cupyattn.benchmark.cuda_events import Timer, event_timer, measured_on
from cupyattn.benchmark.gpu_command import (
    add_numbers,
    add_timing_options,
    run_on_gpu,
    show_machine,
)
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.progress import progress

WAYS = ("plain", "mask_mod", "block_mask")
DIRECTIONS = ("forward", "backward", "deterministic backward")
TILE = (128, 64)
"""Queries and keys of the tiles that are counted: those of the forward at head dim 64."""


class Case(NamedTuple):
    """One sequence of `length` tokens, of so many documents."""

    length: int
    documents: int
    heads: int
    head_dim: int
    dtype: str

    def document(self) -> np.ndarray:
        """Return which one each token is of: log-normal lengths (sigma 0.5)."""
        drawn = np.random.default_rng(1).lognormal(sigma=0.5, size=self.documents)
        ends = np.round(np.cumsum(drawn) / drawn.sum() * self.length)
        return np.searchsorted(ends, np.arange(self.length), side="right").astype(np.int32)

    def kept(self) -> float:
        """Return the share of tiles in which something is seen.

        Examples
        --------
        >>> Case(512, 1, 1, 64, "float16").kept()
        1.0
        """
        document = self.document()
        starts = [document[::tile][:, None] for tile in TILE]
        ends = [
            document[np.minimum(np.arange(tile, self.length + tile, tile), self.length) - 1][
                :, None
            ]
            for tile in TILE
        ]
        # Documents are numbered in order: a tile is seen where the two ranges of them meet.
        return float(((starts[0] <= ends[1].T) & (ends[0] >= starts[1].T)).mean())

    def arrays(self, xp: Any) -> list[Array]:
        """Return q, k, v and dout."""
        rng = np.random.default_rng(2)
        shape = 1, self.length, self.heads, self.head_dim
        return [
            xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype_of(self.dtype)))
            for _ in range(4)
        ]


def calls_of(case: Case, xp: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return a call of each direction and way, whose results are there already."""
    same = cupyattn.MaskMod(
        "document[q_idx] == document[k_idx]",
        python=lambda b, h, i, j, document: document[i] == document[j],
        document=xp.asarray(case.document()),
    )
    blocks = cupyattn.block_mask(same, case.length, case.length)
    q, k, v, dout = case.arrays(xp)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for way, mask_mod in zip(WAYS, (None, same, blocks), strict=True):
        results = cupyattn.attention(q, k, v, mask_mod=mask_mod, return_lse=True)
        grads = cupyattn.attention_backward(dout, q, k, v, *results, mask_mod=mask_mod)

        def forward(mask_mod: Any = mask_mod, out: Any = results) -> Any:
            return cupyattn.attention(q, k, v, mask_mod=mask_mod, return_lse=True, out=out)

        def backward(
            deterministic: bool,
            mask_mod: Any = mask_mod,
            results: Any = results,
            grads: Any = grads,
        ) -> Any:
            return cupyattn.attention_backward(
                dout, q, k, v, *results, mask_mod=mask_mod, grads=grads, deterministic=deterministic
            )

        three = forward, lambda run=backward: run(False), lambda run=backward: run(True)
        calls |= {(direction, way): call for direction, call in zip(DIRECTIONS, three, strict=True)}
    return calls


def time_cases(cases: list[Case], xp: Any, timer: Timer) -> list[dict[str, Any]]:
    """Return a row for each case and direction: median seconds of each way, and `kept`."""
    rows = []
    with progress("timing", len(cases)) as step:
        for case in cases:
            calls = calls_of(case, xp)
            for direction in DIRECTIONS:
                seconds = {way: statistics.median(timer(calls[direction, way])) for way in WAYS}
                share = seconds["block_mask"] / seconds["plain"]
                rows.append(
                    {
                        **case._asdict(),
                        "direction": direction,
                        "seconds": seconds,
                        "kept": case.kept(),
                        "time_over_kept": share / case.kept(),
                    }
                )
            step()
    return rows


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "block_mask",
        help="a mask of documents whose empty tiles are skipped, beside the plain call, on a GPU",
        description="Time attention and its backward by CUDA events: plain, with a mask_mod of "
        "documents in one sequence, and with block_mask of it. Needs a GPU; CUPYATTN_ARCH=75 times "
        "the Turing code on a newer one.",
        epilog="Exit code 1 without a GPU.",
    )
    numbers = (
        ("length", 16384, integer(1), "tokens of the sequence"),
        ("documents", 16, integer(1), "documents in it"),
        ("heads", 16, integer(1), "heads"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=integer(1, MAX_HEAD_DIM),
        default=[64, 128],
        metavar="D",
        help="head dims (default: 64 128)",
    )
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )
    add_timing_options(parser, calls=20, warm_up=5)
    parser.set_defaults(run=run)


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every head dim that was asked for."""
    return [
        Case(arguments.length, arguments.documents, arguments.heads, head_dim, arguments.dtype)
        for head_dim in arguments.head_dim
    ]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("block_mask", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every case on the first GPU."""
    cupy = load_cupy()
    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        timer = event_timer(arguments.calls, arguments.warm_up)
        rows = time_cases(cases_of(arguments), cupy, timer)
    return {
        "command": "block_mask",
        **measured_on(device),
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "rows": rows,
    }


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Documents in one sequence", result, terminal)
    first = result["rows"][0]
    terminal.title(
        f"{first['documents']} documents in {first['length']} tokens, {first['heads']} heads, "
        f"{first['dtype']}; {first['kept']:.1%} of the tiles kept"
    )
    terminal.table(
        ("D", "direction", *WAYS, "of plain", "over kept"),
        [
            (
                str(row["head_dim"]),
                row["direction"],
                *(f"{row['seconds'][way] * 1e3:.3f} ms" for way in WAYS),
                f"{row['seconds']['block_mask'] / row['seconds']['plain']:.1%}",
                f"{row['time_over_kept']:.2f}",
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        f"  Medians of {result['calls']} calls after {result['warm_up']}. Over kept: the share of "
        f"the plain call's time over\n  that of the tiles of {TILE[0]} queries by {TILE[1]} keys "
        "in which something is seen; 1 would be perfect."
    )
