"""``python -m cupyattn.benchmark decode``: a step of decoding, paged and dense, on a GPU.

Its measure is the memory's speed: GB/s of the K and V in use, beside those of a copy. Of caches of
integers it is what they are for: tokens a second beside those of floats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.frame.arguments import add_lists, add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.clock import COLD_BYTES, Round
from cupyattn.benchmark.frame.emulated import ModelledCall, memory_bound
from cupyattn.benchmark.frame.rows import READ, Row
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.ops.attention.decode_problem import MAX_QUERIES
from cupyattn.reference.kv_cache.quantisation import quantise

LAYOUTS = ("paged", "dense")
CACHES = {"float": None, "int8": 8, "int4": 4}
"""What paged caches hold, and bits of an integer."""
_SCALE_BYTES = 4
_SHORTEST = 256  # of ragged sequences
_TOLERANCE = 0.02
_EMULATED: dict[str, Any] = {"batch": 2, "context": 512}


class Case(NamedTuple):
    """One step; `ragged` draws lengths from 256 to the context instead of taking that.

    Without a block_size keys and values are dense, and the step is a call of `attention`.
    """

    batch: int
    context: int
    ragged: bool
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    block_size: int | None
    dtype: str
    cache: str = "float"
    heads_first: bool = False
    """In memory a block's slots of one head lie side by side, not a slot's heads."""

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        shortest = min(_SHORTEST, self.context)
        drawn = np.random.default_rng(0).integers(shortest, self.context + 1, self.batch)
        return drawn.astype(np.int32)

    def bytes_of(self, lengths: np.ndarray) -> int:
        """K and V of all tokens, and their scales."""
        bits = CACHES[self.cache]
        row = self.head_dim * (STORAGE[self.dtype] if bits is None else bits / 8)
        row += 0 if bits is None else _SCALE_BYTES
        return int(lengths.sum() * 2 * self.kv_heads * row)

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        """Return q, the caches, the table and lengths; blocks lie anywhere in the pool.

        Dense keys and values are blocks as long as the longest sequence, without a table. Caches of
        integers are followed by their scales, each head's side by side.
        """
        lengths = self.lengths()
        block_size = self.block_size or int(lengths.max())
        columns = -(-int(lengths.max()) // block_size)
        num_blocks = self.batch * columns
        ids = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        dtype = dtype_of(self.dtype)
        pool = (num_blocks, block_size, self.kv_heads, self.head_dim)
        rng = np.random.default_rng(2)
        some = rng.standard_normal((1, *pool[1:]), dtype=np.float32).astype(dtype)
        bits = CACHES[self.cache]
        stored, *scales = (some,) if bits is None else quantise(some, bits)
        q = rng.standard_normal(
            (self.batch, self.queries, self.heads, self.head_dim), dtype=np.float32
        ).astype(dtype)
        caches = [self._pool(xp, stored, num_blocks, self.heads_first) for _ in range(2)]
        all_scales = [self._pool(xp, each, num_blocks, True) for each in (*scales, *scales)]
        table = [] if self.block_size is None else [xp.asarray(ids.reshape(self.batch, -1))]
        return xp.asarray(q), *caches, *table, xp.asarray(lengths), *all_scales

    def _pool(self, xp: Any, block: np.ndarray, num_blocks: int, heads_first: bool) -> Any:
        """Return that many copies of a block (1, block_size, G, ...)."""
        shape = (num_blocks, *block.shape[1:])
        if heads_first:
            pool = xp.empty((shape[0], shape[2], shape[1], *shape[3:]), block.dtype).swapaxes(1, 2)
        else:
            pool = xp.empty(shape, block.dtype)
        pool[...] = xp.asarray(block)
        return pool

    def step(self, xp: Any, layers: int) -> Round:
        """Return the calls of a step, one for each layer of a model.

        Layers take caches in turn, of which all together are larger than any L2.
        """
        caches = -(-COLD_BYTES // max(self.bytes_of(self.lengths()), 1))
        calls = [self.call(xp) for _ in range(min(caches, layers))]
        return [calls[layer % len(calls)] for layer in range(layers)]

    def call(self, xp: Any) -> Callable[[], Any]:
        """Return the call of a layer, into an array of its own."""
        arrays = self.arrays(xp)
        out = xp.empty(arrays[0].shape, arrays[0].dtype)
        if self.block_size is not None:
            scales = dict(zip(("k_scales", "v_scales"), arrays[5:], strict=False))
            return partial(cupyattn.paged_attention, *arrays[:5], **scales, causal=True, out=out)
        q, k, v, lengths = arrays
        used = lengths if self.ragged else None
        return partial(cupyattn.attention, q, k, v, causal=True, seqused_k=used, out=out)

    def composed(self, xp: Any) -> Round:
        """Return a layer of array functions: two products of cuBLAS, and a softmax, of one token.

        Raises
        ------
        NotImplementedError
            For several tokens, which have a mask.
        """
        if self.queries > 1:
            raise NotImplementedError("array functions are timed with one query token")
        q, k, v, _ = self.arrays(xp)
        grouped = q.reshape(self.batch, self.kv_heads, -1, self.head_dim)
        scale = np.float32(self.head_dim**-0.5)

        def call() -> Any:
            scores = xp.matmul(grouped, k.transpose(0, 2, 3, 1)).astype(np.float32) * scale
            scores = xp.exp(scores - scores.max(-1, keepdims=True))
            weights = (scores / scores.sum(-1, keepdims=True)).astype(v.dtype)
            return xp.matmul(weights, v.swapaxes(1, 2)).reshape(q.shape)

        return [call]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    lists = (
        ("batch", [1, 8, 64], integer(1), "sequences"),
        ("context", [4096, 16384], integer(1), "tokens of each"),
        ("block-size", [16, 256], integer(TILE_KEYS), "tokens of a block"),
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
        ("head-dim", 128, integer(1, MAX_HEAD_DIM), "head dim"),
        ("queries", 1, integer(1, MAX_QUERIES), "query tokens of each sequence"),
        ("layers", 16, integer(1), "calls of a step"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--ragged",
        action="store_true",
        help=f"lengths from {_SHORTEST} to the context, drawn evenly",
    )
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the arrays (default: %(default)s)"
    )
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


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every combination that was asked for."""
    return [
        Case(
            batch,
            context,
            arguments.ragged,
            arguments.heads,
            arguments.kv_heads,
            arguments.head_dim,
            arguments.queries,
            block_size,
            arguments.dtype,
            cache,
            arguments.heads_first and layout == "paged",
        )
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
        if "cupy" in gauge.peers and case.block_size is None and not case.ragged:
            calls.append(Contender.of_peer("cupy", partial(case.composed, gauge.xp)))
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
    peers=("cupy",),
    beside="cache",
    quick={"batch": [1, 64], "block_size": [16], "cache": ["float", "int8", "int4"],
           "heads_first": True},
    facts=lambda arguments: {"layers": arguments.layers},
    modelled=modelled,
)  # fmt: skip
