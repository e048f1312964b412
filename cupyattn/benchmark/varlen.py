"""``python -m cupyattn.benchmark varlen``: packed sequences, compared with the dense call.

Equal lengths should take the time of the dense call with the same number of tokens, and log-normal
lengths should reach its TFLOP/s.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark.cases import Case, Harness, TimedImplementation, products_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.timer import Call, Round
from cupyattn.cli.arguments import integer
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM

LAYOUTS = ("dense", "equal", "ragged")
FACTORS = {"forward": 1.0, "backward": 2.5}
"""The work of a direction, in forwards."""
_TOLERANCE = 0.05


class PackedAttentionProblem(NamedTuple):
    """`tokens` in sequences of `length`, or of lengths with that mean."""

    tokens: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str

    def lengths(self, layout: str) -> np.ndarray:
        """Return the length of each sequence: equal, or drawn from a log-normal distribution."""
        count = max(1, self.tokens // self.length)
        if layout != "ragged":
            return np.full(count, self.length)
        drawn = np.random.default_rng(1).lognormal(sigma=1.0, size=count)
        ends = np.round(np.cumsum(drawn) / drawn.sum() * count * self.length).astype(int)
        return np.diff(ends, prepend=0)

    def flops(self, layout: str) -> float:
        """Return the operations of both products of the forward; causal calls have half."""
        scores = int((self.lengths(layout) ** 2).sum())
        return 4 * self.heads * self.head_dim * scores * (0.5 if self.causal else 1.0)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """The packed shapes of q, k, v and dout."""
        total = int(self.lengths("equal").sum())
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [(total, count, self.head_dim) for count in heads]

    def bytes(self, direction: str) -> int:
        """Return the bytes of q, k, v and out, and for the backward of their gradients too."""
        items = sum(map(math.prod, self.shapes))
        return (1 if direction == "forward" else 2) * items * STORAGE[self.dtype]


def call_of(
    problem: PackedAttentionProblem, layout: str, direction: str, arrays: Any, xp: ModuleType
) -> Call:
    """Return the call of a direction, whose results and scratch are allocated."""
    lengths, total = problem.lengths(layout), len(arrays[0])
    shape = (len(lengths), problem.length) if layout == "dense" else (total,)
    q, k, v, dout = (x.reshape(*shape, *x.shape[1:]) for x in arrays)
    bounds = xp.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    most = int(lengths.max())
    packed: tuple[object, ...] = () if layout == "dense" else (bounds, bounds, most, most)
    attend: Callable[..., Any] = cupyattn.attention_varlen if packed else cupyattn.attention
    forward = partial(attend, q, k, v, *packed, causal=problem.causal, return_lse=True)
    results = forward()
    if direction == "forward":
        return partial(forward, out=results)
    gradients: Callable[..., object] = (
        cupyattn.attention_varlen_backward if packed else cupyattn.attention_backward
    )
    backward = partial(gradients, dout, q, k, v, *results, *packed, causal=problem.causal)
    return partial(backward, grads=backward())


def problems(arguments: argparse.Namespace) -> list[PackedAttentionProblem]:
    """Return every length, plain and causal."""
    names = ("tokens", "heads", "kv_heads", "head_dim", "dtype")
    given = {name: getattr(arguments, name) for name in names}
    return [
        PackedAttentionProblem(length=min(length, arguments.tokens), causal=causal, **given)
        for causal in (False, True)
        for length in arguments.length
    ]


def cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield each direction of each problem, in every layout; ragged lengths are not compared."""
    for problem in problems(arguments):
        for direction, factor in FACTORS.items():
            packed = partial(_packed, problem, direction)
            yield Case(
                {**problem._asdict(), "direction": direction},
                [
                    TimedImplementation(
                        f"cupyattn {layout}",
                        partial(_calls, problem, layout, direction, harness),
                        comparable=(lambda result: None) if layout == "ragged" else packed,
                    )
                    for layout in LAYOUTS
                ],
                flops=factor * problem.flops("dense"),
                bytes=problem.bytes(direction),
                ceiling=products_of(problem.dtype),
                tolerance=_TOLERANCE,
                own={"cupyattn ragged": {"flops": factor * problem.flops("ragged")}},
            )


def _calls(problem: PackedAttentionProblem, layout: str, direction: str, harness: Harness) -> Round:
    source = harness.arrays(2)
    arrays = [source.normal(*shape, dtype=problem.dtype) for shape in problem.shapes]
    return [call_of(problem, layout, direction, arrays, harness.xp)]


def _packed(problem: PackedAttentionProblem, direction: str, result: Any) -> object:
    """Return out, or the gradients, in the packed shapes."""
    q, k, v, out = problem.shapes
    shapes = (out,) if direction == "forward" else (q, k, v)
    return tuple(x.reshape(shape) for x, shape in zip(result, shapes, strict=False))


BENCHMARK = Benchmark(
    name="varlen",
    title="Packed sequences",
    help="packed sequences compared with the dense call, forward and backward, on a GPU",
    description="Time attention_varlen and its backward: sequences of equal lengths, compared with "
    "attention on the same tokens, and of log-normal lengths (sigma 1).",
    note="A backward counts as 2.5 forwards, a causal call as half a plain one; equal and ragged "
    "are packed.",
    options=(
        Option("length", [512, 2048], "mean tokens of a sequence"),
        Option("tokens", 16384, "tokens of all sequences"),
        Option("heads", 32, "query heads"),
        Option("kv-heads", 32, "key-value heads"),
        Option("head-dim", 64, "head dim", integer(1, MAX_HEAD_DIM)),
        Option("dtype", "float16", "dtype of the arrays", choices=tuple(STORAGE)),
    ),
    cases=cases,
)
