"""``python -m cupyattn.benchmark varlen``: packed sequences beside the dense call, on a GPU.

Its measure is the dense call with as many tokens in sequences of equal lengths: packed, the same
lengths should take its time, and log-normal ones should reach its TFLOP/s.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.frame.arguments import add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import Call
from cupyattn.benchmark.frame.emulated import ModelledCall, of_products
from cupyattn.benchmark.frame.rows import Row, products_of
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.benchmark.frame.turing_model import Model, rate_of_call
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.progress import progress
from cupyattn.turing import T4

WAYS = ("dense", "equal", "ragged")
FACTORS = {"forward": 1.0, "backward": 2.5}
"""Forwards that a direction's work is."""
DIRECTIONS = tuple(FACTORS)
_COUNTED: dict[str, Any] = {"tokens": 256, "length": 128, "heads": 1, "kv_heads": 1}
"""What the emulator runs."""
_TOLERANCE = 0.05


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

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Those of q, k, v and dout, packed."""
        total = int(self.lengths("equal").sum())
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [(total, count, self.head_dim) for count in heads]

    def bytes(self, direction: str) -> int:
        """Return those of q, k, v and out, and of the backward of their gradients too."""
        items = sum(map(math.prod, self.shapes))
        return (1 if direction == "forward" else 2) * items * STORAGE[self.dtype]

    def arrays(self, xp: Any) -> list[Any]:
        """Return q, k, v and dout."""
        rng, dtype = np.random.default_rng(2), dtype_of(self.dtype)
        return [
            xp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(dtype))
            for shape in self.shapes
        ]

    def unfilled(self) -> list[np.ndarray]:
        """Return them for calls whose kernels do not run."""
        return [np.empty(shape, dtype_of(self.dtype)) for shape in self.shapes]


def calls_of(case: Case, way: str, arrays: Any, xp: Any) -> dict[str, Callable[[], Any]]:
    """Return a call of each direction, whose results and scratch are there already."""
    *inputs, dout = arrays
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
    forward = partial(forward, q, k, v, *of_lengths, causal=case.causal, return_lse=True)
    results = forward()
    backward = partial(backward, gradient, q, k, v, *results, *of_lengths, causal=case.causal)
    return {
        "forward": partial(forward, out=results),
        "backward": partial(backward, grads=backward()),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
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


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield each direction of each case, by every way."""
    for case in cases_of(arguments):
        arrays = case.arrays(gauge.xp)
        for direction in DIRECTIONS:

            def prepare(
                way: str, case: Case = case, arrays: Any = arrays, to: str = direction
            ) -> Any:
                return [calls_of(case, way, arrays, gauge.xp)[to]]

            def comparable(result: Any, arrays: Any = arrays, to: str = direction) -> Any:
                """Return out, or the gradients, packed."""
                found = result[:1] if to == "forward" else result[:3]
                of = arrays[3:] if to == "forward" else arrays[:3]
                return tuple(x.reshape(like.shape) for x, like in zip(found, of, strict=True))

            factor = FACTORS[direction]
            yield Subject(
                {**case._asdict(), "direction": direction},
                [
                    Contender(
                        f"cupyattn {way}",
                        partial(prepare, way),
                        comparable=(lambda result: None) if way == "ragged" else comparable,
                    )
                    for way in WAYS
                ],
                flops=factor * case.flops("dense"),
                ceiling=products_of(case.dtype),
                tolerance=_TOLERANCE,
                own={"cupyattn ragged": {"flops": factor * case.flops("ragged")}},
            )


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    total = len(cases_of(arguments)) * len(DIRECTIONS)
    return measured(subjects(arguments, gauge), gauge, total)


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of equal lengths, by main loops; with others they are the same loops."""
    model = Model(T4)
    every = list(product(cases_of(arguments), DIRECTIONS, ("dense", "equal")))
    with progress("modelling", len(every)) as step:
        for case, direction, way in every:
            small = case._replace(**_COUNTED)
            rate = rate_of_call(model, partial(_call, case, way, direction, unfilled=True))
            counted = partial(_call, small, way, direction)
            call = ModelledCall(way, small.bytes(direction), counted)
            labels = {**case._asdict(), "direction": direction}
            flops = case.flops(way) * FACTORS[direction]
            yield of_products(labels, f"cupyattn {way}", flops, rate, call)
            step()


def _call(case: Case, way: str, direction: str, *, unfilled: bool = False) -> Call:
    arrays = case.unfilled() if unfilled else case.arrays(np)
    return calls_of(case, way, arrays, np)[direction]


BENCHMARK = Benchmark(
    name="varlen",
    title="Packed sequences",
    help="packed sequences beside the dense call, forward and backward, on a GPU",
    description="Time attention_varlen and its backward: sequences of equal lengths, beside "
    "attention on the same tokens, and of log-normal lengths (sigma 1).",
    note="A backward counts as 2.5 forwards, a causal call as half a plain one; equal and ragged "
    "are packed.",
    rows=rows,
    options=options,
    modelled=modelled,
)
