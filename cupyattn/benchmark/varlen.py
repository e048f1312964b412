"""``python -m cupyattn.benchmark varlen``: packed sequences beside the dense call, on a GPU.

Its measure is the dense call with as many tokens in sequences of equal lengths: packed, the same
lengths should take its time, and log-normal ones should reach its TFLOP/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.cuda_events import RoundTimer, measured_rows
from cupyattn.benchmark.gpu_command import (
    add_numbers,
    add_timing_options,
    run_on_gpu,
    show_machine,
)
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.progress import progress

WAYS = ("dense", "equal", "ragged")
DIRECTIONS = ("forward", "backward")
_BACKWARD_FLOPS = 2.5  # forwards


class Case(NamedTuple):
    """`tokens` in sequences of `length`, or of lengths with that mean."""

    tokens: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str

    def lengths(self, way: str) -> np.ndarray:
        """Return those of each sequence: equal, or drawn from a log-normal distribution."""
        count = max(1, self.tokens // self.length)
        if way != "ragged":
            return np.full(count, self.length)
        drawn = np.random.default_rng(1).lognormal(sigma=1.0, size=count)
        ends = np.round(np.cumsum(drawn) / drawn.sum() * count * self.length).astype(int)
        return np.diff(ends, prepend=0)

    def flops(self, way: str) -> float:
        """Of both products of the forward; of causal calls half."""
        scores = int((self.lengths(way) ** 2).sum())
        return 4 * self.heads * self.head_dim * scores * (0.5 if self.causal else 1.0)

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        """Return q, k, v and dout, packed."""
        rng, dtype = np.random.default_rng(2), dtype_of(self.dtype)
        total = int(self.lengths("equal").sum())

        def drawn(heads: int) -> Any:
            shape = (total, heads, self.head_dim)
            return xp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

        return *map(drawn, (self.heads, self.kv_heads, self.kv_heads)), drawn(self.heads)


def calls_of(case: Case, xp: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return a call of each direction and way, whose results and scratch are there already."""
    *inputs, dout = case.arrays(xp)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for way in WAYS:
        lengths = case.lengths(way)
        shape = (len(lengths), case.length) if way == "dense" else (len(dout),)
        q, k, v, gradient = (x.reshape(*shape, *x.shape[1:]) for x in (*inputs, dout))
        bounds = xp.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        most = int(lengths.max())
        of_lengths = () if way == "dense" else (bounds, bounds, most, most)
        forward, backward = (
            (cupyattn.attention, cupyattn.attention_backward)
            if way == "dense"
            else (cupyattn.attention_varlen, cupyattn.attention_varlen_backward)
        )
        results = forward(q, k, v, *of_lengths, causal=case.causal, return_lse=True)
        grads = backward(gradient, q, k, v, *results, *of_lengths, causal=case.causal)

        def run_forward(
            forward: Any = forward, arrays: Any = (q, k, v, *of_lengths), out: Any = results
        ) -> Any:
            return forward(*arrays, causal=case.causal, return_lse=True, out=out)

        def run_backward(
            backward: Any = backward,
            arrays: Any = (gradient, q, k, v, *results, *of_lengths),
            grads: Any = grads,
        ) -> Any:
            return backward(*arrays, causal=case.causal, grads=grads)

        calls |= {("forward", way): run_forward, ("backward", way): run_backward}
    return calls


def time_cases(cases: list[Case], xp: Any, timer: RoundTimer) -> list[dict[str, Any]]:
    """Return a row for each case and direction: median seconds and tflop_per_s of each way."""
    rows = []
    with progress("timing", len(cases)) as step:
        for case in cases:
            calls = calls_of(case, xp)
            for direction in DIRECTIONS:
                factor = 1.0 if direction == "forward" else _BACKWARD_FLOPS
                taken = {
                    way: statistics.median(timer([calls[direction, way]], None)) for way in WAYS
                }
                rates = {
                    way: factor * case.flops(way) / seconds / 1e12 for way, seconds in taken.items()
                }
                rows.append(
                    {
                        **case._asdict(),
                        "direction": direction,
                        "seconds": taken,
                        "tflop_per_s": rates,
                    }
                )
            step()
    return rows


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "varlen",
        help="packed sequences beside the dense call, forward and backward, on a GPU",
        description="Time attention_varlen and its backward by CUDA events around CUDA graphs of "
        "one call each: sequences of equal lengths, beside attention on the same tokens, and of "
        "log-normal lengths (sigma 1). Needs a GPU; CUPYATTN_ARCH=75 times the Turing code on a "
        "newer one.",
        epilog="A backward counts as 2.5 forwards, a causal call as half a plain one. Exit code 1 "
        "without a GPU.",
    )
    parser.add_argument(
        "--length",
        nargs="+",
        type=integer(1),
        default=[512, 2048],
        metavar="N",
        help="mean tokens of a sequence (default: 512 2048)",
    )
    numbers = (
        ("tokens", 16384, integer(1), "of all sequences"),
        ("heads", 32, integer(1), "query heads"),
        ("kv-heads", 32, integer(1), "key-value heads"),
        ("head-dim", 64, integer(1, MAX_HEAD_DIM), "head dim"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )
    add_timing_options(parser, calls=30, warm_up=5)
    parser.set_defaults(run=run)


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every length that was asked for, plain and causal."""
    return [
        Case(
            tokens=arguments.tokens,
            length=min(length, arguments.tokens),
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            causal=causal,
            dtype=arguments.dtype,
        )
        for length in arguments.length
        for causal in (False, True)
    ]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("varlen", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every case on the first GPU."""
    return measured_rows("varlen", arguments, partial(time_cases, cases_of(arguments)))


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Packed sequences", result, terminal)
    first = result["rows"][0]
    terminal.title(
        f"{first['heads']}/{first['kv_heads']} heads, D {first['head_dim']}, {first['dtype']}, "
        f"{first['tokens']} tokens"
    )
    terminal.table(
        ("length", "causal", "direction", "dense", "equal", "of dense", "ragged", "of dense"),
        [
            (
                str(row["length"]),
                "yes" if row["causal"] else "no",
                row["direction"],
                f"{rates['dense']:.1f}",
                f"{rates['equal']:.1f}",
                f"{rates['equal'] / rates['dense']:.2f}",
                f"{rates['ragged']:.1f}",
                f"{rates['ragged'] / rates['dense']:.2f}",
            )
            for row in result["rows"]
            for rates in [row["tflop_per_s"]]
        ],
    )
    terminal.text(
        f"  TFLOP/s, medians of {result['calls']} calls after {result['warm_up']}: dense, packed "
        "with equal lengths, and packed with log-normal ones."
    )
