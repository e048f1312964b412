"""``python -m cupyattn.benchmark decode``: a step of decoding over a paged cache.

The measure is GB/s of the K and V in use. Variants time a chunk of a prompt (``--prefill``), and
the operations that write, copy and gather blocks (``--cache-operations``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark.cases import Case, Harness, TimedImplementation, products_of
from cupyattn.benchmark.command import Benchmark, Option, every, with_defaults
from cupyattn.benchmark.libraries import (
    BACKENDS,
    forward_calls,
    swapped,
    tensor_of,
    torch_attention,
)
from cupyattn.benchmark.timer import COPY, READ, Call, Round
from cupyattn.cli.arguments import integer
from cupyattn.ops.attention.choice import MAX_QUERIES
from cupyattn.ops.attention.kernels.decode import TILE_KEYS
from cupyattn.ops.attention.reference.cache_formats import quantise
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import MAX_HEAD_DIM

LAYOUTS = ("paged", "dense")
CACHES = {"float": None, "int8": 8, "int4": 4}
"""Formats of paged caches, and the bits of an integer."""
SHORTEST = 256
"""The fewest tokens of a ragged sequence."""
OPERATIONS = {"append": "append_kv", "copy": "copy_blocks", "gather": "gather"}
_TOLERANCE = 0.02
_SCALE_BYTES = 4
_LAYERS = 8  # whose blocks are copied at once
_TABLE = 4096  # positions of the rotary tables


class DecodingStep(NamedTuple):
    """One step; `ragged` draws lengths from 256 to the context instead of taking the context.

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

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sequence."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        shortest = min(SHORTEST, self.context)
        drawn = np.random.default_rng(0).integers(shortest, self.context + 1, self.batch)
        return drawn.astype(np.int32)

    @property
    def bytes(self) -> int:
        """The bytes of K and V of all tokens, and of their scales."""
        bits = CACHES[self.cache]
        row = self.head_dim * (STORAGE[self.dtype] if bits is None else bits / 8)
        row += 0 if bits is None else _SCALE_BYTES
        return int(self.lengths().sum() * 2 * self.kv_heads * row)

    @property
    def flops(self) -> int:
        """The operations of both products in causal order, for lengths that are the context."""
        seen = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * seen

    def arrays(self, xp: ModuleType) -> tuple[Array, ...]:
        """Return q, the caches, the table and lengths; blocks are anywhere in the pool.

        Dense keys and values are blocks as long as the longest sequence, without a table. Caches of
        integers are followed by their scales, which are contiguous along a head.
        """
        lengths = self.lengths()
        block_size = self.block_size or int(lengths.max())
        num_blocks = self.batch * -(-int(lengths.max()) // block_size)
        ids = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        dtype, rng = dtype_of(self.dtype), np.random.default_rng(2)

        def drawn(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

        some = drawn(1, block_size, self.kv_heads, self.head_dim)
        bits = CACHES[self.cache]
        stored, *scales = (some,) if bits is None else quantise(some, bits)
        q = drawn(self.batch, self.queries, self.heads, self.head_dim)
        # PagedKVCache stores the slots of a head next to each other.
        paged = self.block_size is not None
        caches = [_pool(xp, stored, num_blocks, heads_first=paged) for _ in range(2)]
        all_scales = [_pool(xp, each, num_blocks, heads_first=True) for each in (*scales, *scales)]
        table = [] if self.block_size is None else [xp.asarray(ids.reshape(self.batch, -1))]
        return xp.asarray(q), *caches, *table, xp.asarray(lengths), *all_scales

    def call(self, xp: ModuleType) -> Call:
        """Return the call of one layer, into its own array."""
        arrays = self.arrays(xp)
        out = xp.empty(arrays[0].shape, arrays[0].dtype)
        if self.block_size is not None:
            scales = dict(zip(("k_scales", "v_scales"), arrays[5:], strict=False))
            return partial(cupyattn.paged_attention, *arrays[:5], **scales, causal=True, out=out)
        q, k, v, lengths = arrays
        used = lengths if self.ragged else None
        return partial(cupyattn.attention, q, k, v, causal=True, seqused_k=used, out=out)

    def packed_call(self, xp: ModuleType) -> Call:
        """Return the call over a paged cache with packed queries."""
        q, *cache = self.arrays(xp)
        flat = q.reshape(-1, self.heads, self.head_dim)
        bounds = xp.arange(self.batch + 1, dtype=xp.int32) * self.queries
        return partial(
            cupyattn.paged_attention, flat, *cache, causal=True, cu_seqlens_q=bounds,
            max_seqlen_q=self.queries, out=xp.empty_like(flat),
        )  # fmt: skip

    def round(self, harness: Harness, layers: int, make: Callable[[], Call]) -> Round:
        """Return a call for each layer; layers alternate between caches that exceed any L2."""
        calls = [make() for _ in range(harness.sets(self.bytes, layers))]
        return [calls[layer % len(calls)] for layer in range(layers)]


def _pool(xp: ModuleType, block: np.ndarray, num_blocks: int, *, heads_first: bool) -> Array:
    """Return that many copies of a block (1, block_size, G, ...)."""
    shape = (num_blocks, *block.shape[1:])
    if heads_first:
        pool = xp.empty((shape[0], shape[2], shape[1], *shape[3:]), block.dtype).swapaxes(1, 2)
    else:
        pool = xp.empty(shape, block.dtype)
    pool[...] = xp.asarray(block)
    return pool


def steps(arguments: argparse.Namespace) -> list[DecodingStep]:
    """Return every combination of the options; raise ValueError for too many query tokens."""
    if arguments.queries > MAX_QUERIES:
        raise error(
            ValueError,
            f"--queries {arguments.queries}",
            f"a step of decoding has {MAX_QUERIES} at most",
            "ask for fewer, or time a chunk of a prompt with --prefill",
        )
    names = ("dtype", "head_dim", "context", "batch", "ragged", "heads", "kv_heads", "queries")
    paged = ("block_size", "cache")
    return [
        DecodingStep(**each, **of_layout)
        for each in every(arguments, *names)
        for layout in arguments.layout
        for of_layout in (every(arguments, *paged) if layout == "paged" else [{"block_size": None}])
    ]


def _cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield a case for each step."""
    for step in steps(arguments):
        call = partial(step.round, harness, arguments.layers, partial(step.call, harness.xp))
        other = harness.baselines if step.block_size is None and not step.ragged else ()
        yield Case(
            step._asdict(),
            [
                TimedImplementation("cupyattn", call),
                *(_baseline(name, step, arguments.layers, harness) for name in other),
            ],
            bytes=step.bytes,
            ceiling=READ,
            tolerance=_TOLERANCE,
        )


def _baseline(name: str, step: DecodingStep, layers: int, harness: Harness) -> TimedImplementation:
    prepare = partial(step.round, harness, layers, partial(_by_torch, name, step, harness))
    return TimedImplementation(name, prepare, swapped)


def _by_torch(name: str, step: DecodingStep, harness: Harness) -> Call:
    if step.queries > 1:  # PyTorch aligns the first query, not the last
        raise NotImplementedError("other libraries are timed with one query token")
    torch = harness.torch
    tensors = [swapped(tensor_of(torch, array)) for array in step.arrays(harness.xp)[:3]]
    attend, within = torch_attention(torch, name, enable_gqa=step.heads != step.kv_heads)
    return forward_calls(torch, attend, tensors, within)[0]


def prefill_cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield every combination of the options; a chunk is at most the context."""
    names = ("context", "batch", "block_size", "queries", "heads", "kv_heads", "head_dim", "dtype")
    for each in every(arguments, *names):
        labels = {**each, "queries": min(arguments.queries, each["context"])}
        chunk = DecodingStep(**labels, ragged=False)
        calls: dict[str, Callable[[ModuleType], Call]] = {
            "dense": chunk._replace(block_size=None).call,
            "paged": chunk.call,
            "packed": chunk.packed_call,
        }
        yield Case(
            labels,
            [
                TimedImplementation(f"cupyattn {name}", partial(_round, call, harness.xp))
                for name, call in calls.items()
            ],
            flops=chunk.flops,
            ceiling=products_of(chunk.dtype),
        )


def _round(call: Callable[[ModuleType], Call], xp: ModuleType) -> Round:
    return [call(xp)]


class CacheOperation(NamedTuple):
    """An operation on so many tokens of a cache; `cache` float stores the tokens' dtype."""

    operation: str
    cache: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def stored_bytes(self) -> int:
        """The bytes of a token's K and V in a cache, with scales."""
        bits = CACHES[self.cache] or 8 * STORAGE[self.dtype]
        scale = 0 if self.cache == "float" else _SCALE_BYTES
        return 2 * self.kv_heads * (self.head_dim * bits // 8 + scale)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all tokens."""
        return -(-self.tokens // self.block_size)

    @property
    def bytes(self) -> int:
        """The bytes that have to be read and written."""
        item = STORAGE[self.dtype]
        if self.operation == "copy":
            return 2 * _LAYERS * max(self.num_blocks // 2, 1) * self.block_size * self.stored_bytes
        heads = 2 * self.kv_heads + (2 * self.heads if self.operation == "append" else 0)
        return self.tokens * (heads * self.head_dim * item + self.stored_bytes)

    def round(self, xp: ModuleType) -> Round:
        """Make the arrays, and return the call on them."""
        return [getattr(self, f"_{self.operation}")(xp)]

    def _caches(self, xp: ModuleType, *shape: int) -> tuple[list[Array], Keywords]:
        stored = self.head_dim // 2 if self.cache == "int4" else self.head_dim
        names = {"int8": "int8", "int4": "uint8"}
        dtype = np.dtype(names[self.cache]) if self.cache in names else dtype_of(self.dtype)
        axes = (*shape, self.block_size, self.kv_heads)
        caches = [xp.zeros((*axes, stored), dtype) for _ in range(2)]
        if self.cache == "float":
            return caches, {}
        return caches, {name: xp.zeros(axes, np.float32) for name in ("k_scales", "v_scales")}

    def _ids(self, count: int) -> np.ndarray:
        return np.random.default_rng(0).permutation(count).astype(np.int32)

    def _append(self, xp: ModuleType) -> Call:
        """Rotate slices of packed q, k and v, into blocks anywhere in the pool."""
        heads = self.heads + 2 * self.kv_heads
        packed = xp.empty((self.tokens, heads, self.head_dim), dtype_of(self.dtype))
        some = np.random.default_rng(1).standard_normal(packed.shape[1:], dtype=np.float32)
        packed[...] = xp.asarray(some.astype(packed.dtype))
        k_from, v_from = self.heads, self.heads + self.kv_heads
        (k_cache, v_cache), scales = self._caches(xp, self.num_blocks)
        token = np.arange(self.tokens)
        blocks = self._ids(self.num_blocks)[token // self.block_size]
        slots = blocks * self.block_size + token % self.block_size
        tables = cupyattn.rope_tables(_TABLE, self.head_dim // 2 * 2)
        return partial(
            cupyattn.append_kv, k_cache, v_cache, packed[:, k_from:v_from], packed[:, v_from:],
            xp.asarray(slots.astype(np.int32)), q=packed[:, :k_from],
            rotary=tuple(map(xp.asarray, tables)),
            positions=xp.asarray((token % _TABLE).astype(np.int32)), **scales,
        )  # fmt: skip

    def _copy(self, xp: ModuleType) -> Call:
        """Copy half of the pool's blocks to the other half, in all layers."""
        count = max(self.num_blocks // 2, 1)
        (k_cache, v_cache), scales = self._caches(xp, _LAYERS, 2 * count)
        pairs = np.ascontiguousarray(self._ids(2 * count).reshape(2, count).T)
        return partial(cupyattn.copy_blocks, k_cache, v_cache, xp.asarray(pairs), **scales)

    def _gather(self, xp: ModuleType) -> Call:
        """Gather one long sequence, whose blocks are anywhere in the pool."""
        (k_cache, v_cache), scales = self._caches(xp, self.num_blocks)
        table = xp.asarray(self._ids(self.num_blocks)[None])
        shape, dtype = (1, self.tokens, self.kv_heads, self.head_dim), dtype_of(self.dtype)
        return partial(
            cupyattn.gather, k_cache, v_cache, table, xp.asarray(np.array([self.tokens])),
            max_seqlen_k=self.tokens, out=(xp.empty(shape, dtype), xp.empty(shape, dtype)),
            **scales,
        )  # fmt: skip


def cache_cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield every combination of the options."""
    names = ("cache", "tokens", "heads", "kv_heads", "head_dim", "block_size", "dtype")
    for operation in OPERATIONS:
        for each in every(arguments, *names):
            blocks = CacheOperation(operation, **each)
            own = TimedImplementation("cupyattn", partial(blocks.round, harness.xp))
            yield Case(blocks._asdict(), [own], bytes=blocks.bytes, ceiling=COPY)


_SHARED = (
    Option("heads", 32, "query heads"),
    Option("kv-heads", 8, "key-value heads"),
    Option("head-dim", [128], "head dims", integer(1, MAX_HEAD_DIM)),
    Option("block-size", [16, 256], "tokens of a block", integer(TILE_KEYS)),
    Option("dtype", ["float16"], "dtype of the arrays", choices=tuple(STORAGE)),
)
_TOKENS = (
    Option("batch", [1, 8, 64], "sequences"),
    Option("context", [4096, 16384], "tokens of each"),
    Option("queries", 1, f"query tokens of each sequence: {MAX_QUERIES} at most in a step, more "
           "in a chunk of a prompt"),
)  # fmt: skip
_CACHE = Option("cache", ["float"], "storage of paged caches: q's dtype, or integers with scales",
                choices=tuple(CACHES))  # fmt: skip
PREFILL = Benchmark(
    name="prefill",
    title="Prefill",
    help="time a chunk of a prompt over a paged cache, compared with the dense forward",
    description="",
    note="Causal, with the chunk at the end of each sequence.",
    options=with_defaults((*_SHARED, *_TOKENS), batch=[1, 4], queries=2048),
    cases=prefill_cases,
)
CACHE_OPERATIONS = Benchmark(
    name="kv_cache",
    title="Paged caches",
    help="time append_kv, copy_blocks and gather",
    description="",
    note="Bytes are those that a call has to read and to write, each once; few tokens stay in the "
    "GPU's cache, and their time is a launch's. append rotates q and k, copy copies half of the "
    f"tokens' blocks in {_LAYERS} layers.",
    options=with_defaults(
        (*_SHARED, _CACHE, Option("tokens", [64, 65536], "tokens of a cache operation")),
        cache=list(CACHES),
        block_size=[16],
    ),
    cases=cache_cases,
)
BENCHMARK = Benchmark(
    name="decode",
    title="Decoding",
    help="GB/s of K and V in a step of decoding, over a paged cache or dense, on a GPU",
    description="Time paged_attention, and attention over dense keys, by CUDA graphs of a step, "
    "with a call for each layer.",
    note="Times are of a layer; K and V of a case count once.",
    options=(
        *(*_SHARED, *_TOKENS, _CACHE, Option("layers", 16, "calls of a step")),
        Option("layout", list(LAYOUTS), "layouts of keys and values", choices=LAYOUTS),
        Option("ragged", False, f"lengths from {SHORTEST} to the context, drawn evenly"),
    ),
    cases=_cases,
    baselines=("eager", *BACKENDS),
    compare="cache",
    quick={"batch": [1, 64], "block_size": [16], "cache": list(CACHES)},
    variants={"prefill": PREFILL, "cache-operations": CACHE_OPERATIONS},
)  # fmt: skip
