"""``python -m cupyattn.benchmark prefill``: a chunk of a prompt over a paged cache, on a GPU.

Its measure is the dense forward on the same tokens: its time over that of the paged one.
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
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.progress import progress

PACKED = "packed"
"""Of the ways that a case is timed: with cu_seqlens_q."""


class Case(NamedTuple):
    """A chunk of `queries` tokens at the end of `context` in each sequence."""

    batch: int
    context: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def flops(self) -> int:
        """Of both products, under causal order."""
        seen = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * seen

    def dense(self, xp: Any) -> tuple[Any, Any, Any]:
        """Return q, k and v."""
        rng, dtype = np.random.default_rng(2), dtype_of(self.dtype)

        def drawn(*shape: int) -> Any:
            return xp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

        keys = (self.batch, self.context, self.kv_heads, self.head_dim)
        q = drawn(self.batch, self.queries, self.heads, self.head_dim)
        return q, drawn(*keys), drawn(*keys)

    def paged(self, xp: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
        """Return the caches that hold k and v in blocks anywhere, the table and the lengths."""
        columns = -(-self.context // self.block_size)
        num_blocks = self.batch * columns
        table = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        ids = xp.asarray(table)
        tokens = columns * self.block_size
        caches = []
        for dense in (k, v):
            padded = xp.zeros((self.batch, tokens, *dense.shape[2:]), dense.dtype)
            padded[:, : self.context] = dense
            cache = xp.empty((num_blocks, self.block_size, *dense.shape[2:]), dense.dtype)
            cache[ids] = padded.reshape(cache.shape)
            caches.append(cache)
        lengths = xp.full(self.batch, self.context, xp.int32)
        return caches[0], caches[1], ids.reshape(self.batch, columns), lengths


def time_cases(cases: list[Case], xp: Any, timer: RoundTimer) -> list[dict[str, Any]]:
    """Return a row for each case: median seconds of the paged, packed and dense call, tflop_per_s.

    The calls take turns.
    """
    rows = []
    with progress("timing", len(cases)) as step:
        for case in cases:
            q, k, v = case.dense(xp)
            cache = case.paged(xp, k, v)
            bounds = xp.arange(case.batch + 1, dtype=xp.int32) * case.queries
            flat = q.reshape(-1, case.heads, case.head_dim)
            out, flat_out = xp.empty_like(q), xp.empty_like(flat)

            def paged(q: Any = q, cache: Any = cache, out: Any = out) -> Any:
                return cupyattn.paged_attention(q, *cache, causal=True, out=out)

            def packed(
                q: Any = flat,
                cache: Any = cache,
                out: Any = flat_out,
                bounds: Any = bounds,
                most: int = case.queries,
            ) -> Any:
                return cupyattn.paged_attention(
                    q, *cache, cu_seqlens_q=bounds, max_seqlen_q=most, causal=True, out=out
                )

            def dense(q: Any = q, k: Any = k, v: Any = v, out: Any = out) -> Any:
                return cupyattn.attention(q, k, v, causal=True, out=out)

            ways: dict[str, Callable[[], Any]] = {"paged": paged, PACKED: packed, "dense": dense}
            taken = {name: statistics.median(timer([call], None)) for name, call in ways.items()}
            rates = {name: case.flops / seconds / 1e12 for name, seconds in taken.items()}
            rows.append({**case._asdict(), "seconds": taken, "tflop_per_s": rates})
            step()
    return rows


def add_parser(benchmarks: Any) -> None:
    """Add the benchmark to the command line."""
    parser = benchmarks.add_parser(
        "prefill",
        help="a chunk of a prompt over a paged cache beside the dense forward, on a GPU",
        description="Time paged_attention with many query tokens by CUDA events around CUDA graphs "
        "of one call each, packed queries too, and attention on the same tokens. Needs a GPU; "
        "CUPYATTN_ARCH=75 times the Turing code on a newer one.",
        epilog="Causal, with the chunk at the end of each sequence. Exit code 1 without a GPU.",
    )
    lists = (
        ("batch", [1, 4], integer(1), "sequences"),
        ("context", [4096, 16384], integer(1), "tokens of each, the chunk's included"),
        ("block-size", [16, 256], integer(TILE_KEYS), "tokens of a block"),
    )
    for name, default, kind, what in lists:
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: {' '.join(map(str, default))})",
        )
    numbers = (
        ("queries", 2048, integer(1), "query tokens of each sequence"),
        ("heads", 32, integer(1), "query heads"),
        ("kv-heads", 8, integer(1), "key-value heads"),
        ("head-dim", 128, integer(1, MAX_HEAD_DIM), "head dim"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )
    add_timing_options(parser, calls=30, warm_up=5)
    parser.set_defaults(run=run)


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every combination that was asked for; a chunk is at most the context."""
    return [
        Case(
            batch=batch,
            context=context,
            queries=min(arguments.queries, context),
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            block_size=block_size,
            dtype=arguments.dtype,
        )
        for context in arguments.context
        for batch in arguments.batch
        for block_size in arguments.block_size
    ]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark."""
    return run_on_gpu("prefill", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Measure every case on the first GPU."""
    return measured_rows("prefill", arguments, partial(time_cases, cases_of(arguments)))


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Prefill", result, terminal)
    first = result["rows"][0]
    terminal.title(
        f"{first['heads']}/{first['kv_heads']} heads, D {first['head_dim']}, {first['dtype']}, "
        "causal"
    )
    terminal.table(
        ("batch", "context", "queries", "block", "paged", "TFLOP/s", "of dense", "packed"),
        [
            (
                str(row["batch"]),
                str(row["context"]),
                str(row["queries"]),
                str(row["block_size"]),
                f"{row['seconds']['paged'] * 1e6:.1f} us",
                f"{row['tflop_per_s']['paged']:.1f}",
                f"{row['seconds']['dense'] / row['seconds']['paged']:.2f}",
                f"{row['seconds']['dense'] / row['seconds'][PACKED]:.2f}",
            )
            for row in result["rows"]
        ],
    )
    terminal.text(
        f"  Medians of {result['calls']} calls after {result['warm_up']}; of dense: the dense "
        "forward's time over the paged one's, and over that with packed queries."
    )
