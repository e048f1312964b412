"""``python -m cupyattn.benchmark decode``: a step of decoding, paged and dense, on a GPU.

Its measure is the memory's speed: GB/s of the K and V in use, beside those of a copy. Of caches of
integers it is what they are for: tokens a second beside those of floats.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from cupyattn.benchmark.decode import peers
from cupyattn.benchmark.decode.cases import CACHES, SHORTEST, Case
from cupyattn.benchmark.frame.arguments import add_lists, add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.emulated import ModelledCall, memory_bound
from cupyattn.benchmark.frame.rows import READ, Row
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.cli.arguments import integer
from cupyattn.errors import error
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.ops.attention.decode_problem import MAX_QUERIES

LAYOUTS = ("paged", "dense")
SWEEP = (
    "--batch 64 --context 4096 16384 32768",
    "--batch 64 --context 4096 16384 32768 --cache int8 int4 --layout paged --block-size 16",
    "--batch 64 --context 4096 --kv-heads 32 --head-dim 64 --block-size 16",
    "--batch 1 --context 32768 --block-size 16",
    "--batch 8 --context 32768 --ragged --block-size 16",
    "--batch 64 --context 4096 --head-dim 1 16 32 64 96 128 192 256 --block-size 16",
    "--batch 64 --context 4096 --head-dim 1 64 128 256 --dtype float32 bfloat16 --layout paged "
    "--block-size 16",
)
"""Steps of serving, a line of options each; caches lie in memory as those of `PagedKVCache` do."""
_TOLERANCE = 0.02
_EMULATED: dict[str, Any] = {"batch": 2, "context": 512}
_QUICK: dict[str, Any] = {
    **{"batch": [1, 64], "block_size": [16], "cache": ["float", "int8", "int4"]},
    "heads_first": True,
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    lists = (
        ("batch", [1, 8, 64], integer(1), "sequences"),
        ("context", [4096, 16384], integer(1), "tokens of each"),
        ("block-size", [16, 256], integer(TILE_KEYS), "tokens of a block"),
        ("head-dim", [128], integer(1, MAX_HEAD_DIM), "head dims"),
    )
    add_lists(parser, lists)
    parser.add_argument(
        "--layout",
        nargs="+",
        choices=LAYOUTS,
        default=LAYOUTS,
        help=f"of keys and values (default: {' '.join(LAYOUTS)})",
    )
    numbers = (
        ("heads", 32, integer(1), "query heads"),
        ("kv-heads", 8, integer(1), "key-value heads"),
        ("queries", 1, integer(1, MAX_QUERIES), "query tokens of each sequence"),
        ("layers", 16, integer(1), "calls of a step"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--ragged",
        action="store_true",
        help=f"lengths from {SHORTEST} to the context, drawn evenly",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=STORAGE, default=["float16"],
        help="of the arrays (default: float16)",
    )  # fmt: skip
    parser.add_argument(
        "--cache",
        nargs="+",
        choices=CACHES,
        default=["float"],
        help="of paged caches: q's dtype, or integers with scales (default: float)",
    )
    parser.add_argument(
        "--heads-first",
        action="store_true",
        help="lay out a block of paged caches in memory as (heads, slots), not as (slots, heads)",
    )

    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead of combinations of these options the steps of serving, one thing varied at "
        "a time: contexts, block sizes, integers, heads, one sequence, ragged ones, head dims and "
        "dtypes",
    )


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every combination that was asked for, or those of the sweep.

    Raises
    ------
    ValueError
        If a sweep was asked for, and options that it does not take.
    """
    if not arguments.sweep:
        return _combinations(arguments)
    parser = argparse.ArgumentParser()
    options(parser)
    usual = vars(parser.parse_args([])) | (_QUICK if arguments.quick else {})
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in usual.items()
        if name not in ("sweep", "layers") and getattr(arguments, name) != value
    ]
    if given:
        raise error(
            ValueError,
            f"--sweep with {', '.join(given)}",
            "a sweep has sizes of its own; of this benchmark's options it takes --layers alone",
            "leave --sweep or the others out",
        )
    lines = (parser.parse_args([*line.split(), "--heads-first"]) for line in SWEEP)
    return list(dict.fromkeys(case for line in lines for case in _combinations(line)))


def _combinations(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(
            batch,
            context,
            arguments.ragged,
            arguments.heads,
            arguments.kv_heads,
            head_dim,
            arguments.queries,
            block_size,
            dtype,
            cache,
            arguments.heads_first and layout == "paged",
        )
        for dtype in arguments.dtype
        for head_dim in arguments.head_dim
        for context in arguments.context
        for batch in arguments.batch
        for layout in arguments.layout
        for block_size in (arguments.block_size if layout == "paged" else [None])
        for cache in (arguments.cache if layout == "paged" else ["float"])
    ]


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield a step of each case."""
    for case in cases_of(arguments):
        calls = [Contender("cupyattn", partial(case.step, gauge.xp, arguments.layers))]
        calls += peers.contenders(case, arguments.layers, gauge)
        yield Subject(
            case._asdict(), calls, bytes=case.bytes_of(case.lengths()), ceiling=READ,
            tolerance=_TOLERANCE,
        )  # fmt: skip


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every case."""
    return measured(subjects(arguments, gauge), gauge, len(cases_of(arguments)))


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of short contexts by the emulator: rates hardly depend on the length."""
    for case in dict.fromkeys(case._replace(**_EMULATED) for case in cases_of(arguments)):
        least = case.bytes_of(case.lengths())
        yield memory_bound(case._asdict(), ModelledCall("", least, partial(case.call, np)))


BENCHMARK = Benchmark(
    name="decode",
    title="Decoding",
    help="GB/s of K and V in a step of decoding, over a paged cache or dense, on a GPU",
    description="Time paged_attention, and attention over dense keys, by CUDA graphs of a step, "
    "with a call for each layer.",
    note="Times are of a layer; K and V of a case count once.",
    rows=rows,
    options=options,
    peers=peers.NAMES,
    beside="cache",
    quick=_QUICK,
    facts=lambda arguments: {"layers": arguments.layers},
    modelled=modelled,
)
