"""``python -m cupyattn.benchmark prefill``: a chunk of a prompt over a paged cache, on a GPU.

Its measure is the dense forward on the same tokens: its time over that of the paged one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.frame.arguments import add_lists, add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.rows import Row, products_of
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM

_TOLERANCE = 0.02


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


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    lists = (
        ("batch", [1, 4], integer(1), "sequences"),
        ("context", [4096, 16384], integer(1), "tokens of each, the chunk's included"),
        ("block-size", [16, 256], integer(TILE_KEYS), "tokens of a block"),
    )
    add_lists(parser, lists)
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


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield every case: the dense forward, and the paged one, packed too."""
    xp = gauge.xp
    for case in cases_of(arguments):
        q, k, v = case.dense(xp)
        cache = case.paged(xp, k, v)
        bounds = xp.arange(case.batch + 1, dtype=xp.int32) * case.queries
        flat, out = q.reshape(-1, case.heads, case.head_dim), xp.empty_like(q)
        packed = {"cu_seqlens_q": bounds, "max_seqlen_q": case.queries}
        paged = partial(cupyattn.paged_attention, causal=True)
        calls = {
            "dense": partial(cupyattn.attention, q, k, v, causal=True, out=out),
            "paged": partial(paged, q, *cache, out=out),
            "packed": partial(paged, flat, *cache, **packed, out=xp.empty_like(flat)),
        }
        yield Subject(
            case._asdict(),
            [
                Contender(
                    f"cupyattn {way}", partial(list, [call]),
                    comparable=partial(_shaped, q.shape),
                )
                for way, call in calls.items()
            ],
            flops=case.flops,
            ceiling=products_of(case.dtype),
            tolerance=_TOLERANCE,
        )  # fmt: skip


def _shaped(shape: tuple[int, ...], out: Any) -> Any:
    return out.reshape(shape)


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    return measured(subjects(arguments, gauge), gauge, len(cases_of(arguments)))


BENCHMARK = Benchmark(
    name="prefill",
    title="Prefill",
    help="a chunk of a prompt over a paged cache beside the dense forward, on a GPU",
    description="Time paged_attention with many query tokens, packed queries too, and attention on "
    "the same tokens.",
    note="Causal, with the chunk at the end of each sequence.",
    rows=rows,
    options=options,
)
