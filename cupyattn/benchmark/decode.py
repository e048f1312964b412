"""``python -m cupyattn.benchmark decode``: a step of decoding over a paged cache, and around it.

The measure is the memory's speed: GB/s of the K and V in use. For caches of integers it is tokens
a second compared with caches of floats. Variants time the steps of serving one by one
(``--sweep``), a chunk of a prompt (``--prefill``), and what writes, copies and gathers the blocks
of a cache (``--cache-operations``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.cases import Case, Harness, Implementation, products_of
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
from cupyattn.errors import error
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.ops.attention.decode_problem import MAX_QUERIES
from cupyattn.reference.kv_cache.quantisation import quantise

LAYOUTS = ("paged", "dense")
CACHES = {"float": None, "int8": 8, "int4": 4}
"""What paged caches store, and the bits of an integer."""
SHORTEST = 256
"""The fewest tokens of a ragged sequence."""
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
"""Steps of serving, a line of options each; the caches have the layout of `PagedKVCache`."""
OPERATIONS = {"append": "append_kv", "copy": "copy_blocks", "gather": "gather"}
_TOLERANCE = 0.02
_SCALE_BYTES = 4
_LAYERS = 8  # whose blocks are copied at once
_TABLE = 4096  # positions of the rotary tables


class Step(NamedTuple):
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
    heads_first: bool = False
    """A block stores all slots of one head next to each other, instead of all heads of a slot."""

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

    def arrays(self, xp: Any) -> tuple[Any, ...]:
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
        caches = [_pool(xp, stored, num_blocks, self.heads_first) for _ in range(2)]
        all_scales = [_pool(xp, each, num_blocks, True) for each in (*scales, *scales)]
        table = [] if self.block_size is None else [xp.asarray(ids.reshape(self.batch, -1))]
        return xp.asarray(q), *caches, *table, xp.asarray(lengths), *all_scales

    def call(self, xp: Any) -> Call:
        """Return the call of one layer, into its own array."""
        arrays = self.arrays(xp)
        out = xp.empty(arrays[0].shape, arrays[0].dtype)
        if self.block_size is not None:
            scales = dict(zip(("k_scales", "v_scales"), arrays[5:], strict=False))
            return partial(cupyattn.paged_attention, *arrays[:5], **scales, causal=True, out=out)
        q, k, v, lengths = arrays
        used = lengths if self.ragged else None
        return partial(cupyattn.attention, q, k, v, causal=True, seqused_k=used, out=out)

    def round(self, harness: Harness, layers: int, make: Callable[[], Call]) -> Round:
        """Return a call for each layer; layers alternate between caches that exceed any L2."""
        calls = [make() for _ in range(harness.sets(self.bytes, layers))]
        return [calls[layer % len(calls)] for layer in range(layers)]


def _pool(xp: Any, block: np.ndarray, num_blocks: int, heads_first: bool) -> Any:
    """Return that many copies of a block (1, block_size, G, ...)."""
    shape = (num_blocks, *block.shape[1:])
    if heads_first:
        pool = xp.empty((shape[0], shape[2], shape[1], *shape[3:]), block.dtype).swapaxes(1, 2)
    else:
        pool = xp.empty(shape, block.dtype)
    pool[...] = xp.asarray(block)
    return pool


def steps(arguments: argparse.Namespace) -> list[Step]:
    """Return every combination of the options.

    Raises
    ------
    ValueError
        For more query tokens than a step of decoding has.
    """
    if arguments.queries > MAX_QUERIES:
        raise error(
            ValueError,
            f"--queries {arguments.queries}",
            f"a step of decoding has {MAX_QUERIES} at most",
            "ask for fewer, or time a chunk of a prompt with --prefill",
        )
    names = ("dtype", "head_dim", "context", "batch", "ragged", "heads", "kv_heads", "queries")
    paged = ("block_size", "cache", "heads_first")
    return [
        Step(**each, **of_layout)
        for each in every(arguments, *names)
        for layout in arguments.layout
        for of_layout in (every(arguments, *paged) if layout == "paged" else [{"block_size": None}])
    ]


def sweep() -> list[Step]:
    """Return the steps of serving, which vary one thing at a time."""
    lines = (BENCHMARK.parse(*line.split(), "--heads-first")[1] for line in SWEEP)
    return list(dict.fromkeys(step for line in lines for step in steps(line)))


def _cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield a case for each step."""
    chosen = steps(arguments) if hasattr(arguments, "context") else sweep()
    if getattr(arguments, "small", False):  # what a step reaches hardly depends on its length
        chosen = list(dict.fromkeys(step._replace(batch=2, context=512) for step in chosen))
    for step in chosen:
        call = partial(step.round, harness, arguments.layers, partial(step.call, harness.xp))
        other = harness.baselines if step.block_size is None and not step.ragged else ()
        yield Case(
            step._asdict(),
            [
                Implementation("cupyattn", call),
                *(_baseline(name, step, arguments.layers, harness) for name in other),
            ],
            bytes=step.bytes,
            ceiling=READ,
            tolerance=_TOLERANCE,
        )


def _baseline(name: str, step: Step, layers: int, harness: Harness) -> Implementation:
    make = _composed if name == "cupy" else partial(_by_torch, name)

    def prepare() -> Round:
        if step.queries > 1:  # PyTorch aligns the first query, not the last
            raise NotImplementedError("other libraries are timed with one query token")
        return step.round(harness, layers, partial(make, step, harness))

    return Implementation.of(name, prepare, _same if name == "cupy" else swapped)


def _same(out: Any) -> Any:
    return out


def _by_torch(name: str, step: Step, harness: Harness) -> Call:
    torch = harness.torch
    tensors = [swapped(tensor_of(torch, array)) for array in step.arrays(harness.xp)[:3]]
    attend, within = torch_attention(torch, name, enable_gqa=step.heads != step.kv_heads)
    return forward_calls(torch, attend, tensors, within)[0]


def _composed(step: Step, harness: Harness) -> Call:
    """Return two products of cuBLAS, and a softmax between them."""
    xp = harness.xp
    q, k, v, _ = step.arrays(xp)
    grouped = q.reshape(step.batch, step.kv_heads, -1, step.head_dim)
    scale = np.float32(step.head_dim**-0.5)

    def call() -> Any:
        scores = xp.matmul(grouped, k.transpose(0, 2, 3, 1)).astype(np.float32) * scale
        scores = xp.exp(scores - scores.max(-1, keepdims=True))
        weights = (scores / scores.sum(-1, keepdims=True)).astype(v.dtype)
        return xp.matmul(weights, v.swapaxes(1, 2)).reshape(q.shape)

    return call


class Chunk(NamedTuple):
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
        """The operations of both products in causal order."""
        seen = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * seen

    def dense(self, harness: Harness) -> tuple[Any, Any, Any]:
        """Return q, k and v."""
        normal = partial(harness.arrays(2).normal, dtype=self.dtype)
        keys = (self.batch, self.context, self.kv_heads, self.head_dim)
        q = normal(self.batch, self.queries, self.heads, self.head_dim)
        return q, normal(*keys), normal(*keys)

    def paged(self, xp: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
        """Return the caches that store k and v in blocks anywhere, the table and the lengths."""
        columns = -(-self.context // self.block_size)
        num_blocks = self.batch * columns
        table = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        ids = xp.asarray(table)
        caches = []
        for dense in (k, v):
            padded = xp.zeros((self.batch, columns * self.block_size, *dense.shape[2:]), k.dtype)
            padded[:, : self.context] = dense
            cache = xp.empty((num_blocks, self.block_size, *dense.shape[2:]), k.dtype)
            cache[ids] = padded.reshape(cache.shape)
            caches.append(cache)
        lengths = xp.full(self.batch, self.context, xp.int32)
        return caches[0], caches[1], ids.reshape(self.batch, columns), lengths


class _ChunkInputs:
    def __init__(self, chunk: Chunk, harness: Harness) -> None:
        self.chunk, self.harness = chunk, harness

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The dense forward, and the paged one, packed too."""
        chunk, xp = self.chunk, self.harness.xp
        q, k, v = chunk.dense(self.harness)
        flat, out = q.reshape(-1, chunk.heads, chunk.head_dim), xp.empty_like(q)
        paged = partial(cupyattn.paged_attention, causal=True)
        cache, packed = chunk.paged(xp, k, v), {"max_seqlen_q": chunk.queries}
        packed["cu_seqlens_q"] = xp.arange(chunk.batch + 1, dtype=xp.int32) * chunk.queries
        return {
            "dense": partial(cupyattn.attention, q, k, v, causal=True, out=out),
            "paged": partial(paged, q, *cache, out=out),
            "packed": partial(paged, flat, *cache, **packed, out=xp.empty_like(flat)),
        }

    def round(self, layout: str) -> Round:
        """Return one of the calls."""
        return [self.calls[layout]]


def prefill_cases(arguments: argparse.Namespace, harness: Harness) -> Iterator[Case]:
    """Yield every combination of the options; a chunk is at most the context."""
    names = ("context", "batch", "block_size", "queries", "heads", "kv_heads", "head_dim", "dtype")
    for each in every(arguments, *names):
        chunk = Chunk(**{**each, "queries": min(arguments.queries, each["context"])})
        inputs = _ChunkInputs(chunk, harness)
        shape = (chunk.batch, chunk.queries, chunk.heads, chunk.head_dim)
        yield Case(
            chunk._asdict(),
            [
                Implementation(
                    f"cupyattn {layout}",
                    partial(inputs.round, layout),
                    comparable=partial(_reshaped, shape),
                )
                for layout in ("dense", "paged", "packed")
            ],
            flops=chunk.flops,
            ceiling=products_of(chunk.dtype),
            tolerance=_TOLERANCE,
        )


def _reshaped(shape: tuple[int, ...], out: Any) -> Any:
    return out.reshape(shape)


class Blocks(NamedTuple):
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

    def round(self, xp: Any) -> Round:
        """Make the arrays, and return the call on them."""
        return [getattr(self, f"_{self.operation}")(xp)]

    def _caches(self, xp: Any, *shape: int) -> tuple[list[Any], dict[str, Any]]:
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

    def _append(self, xp: Any) -> Call:
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

    def _copy(self, xp: Any) -> Call:
        """Copy half of the pool's blocks to the other half, in all layers."""
        count = max(self.num_blocks // 2, 1)
        (k_cache, v_cache), scales = self._caches(xp, _LAYERS, 2 * count)
        pairs = np.ascontiguousarray(self._ids(2 * count).reshape(2, count).T)
        return partial(cupyattn.copy_blocks, k_cache, v_cache, xp.asarray(pairs), **scales)

    def _gather(self, xp: Any) -> Call:
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
            blocks = Blocks(operation, **each)
            own = Implementation("cupyattn", partial(blocks.round, harness.xp))
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
_LAYER_COUNT = Option("layers", 16, "calls of a step")
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
    modelled=lambda arguments: {"tokens": [64]},
)
BENCHMARK = Benchmark(
    name="decode",
    title="Decoding",
    help="GB/s of K and V in a step of decoding, over a paged cache or dense, on a GPU",
    description="Time paged_attention, and attention over dense keys, by CUDA graphs of a step, "
    "with a call for each layer.",
    note="Times are of a layer; K and V of a case count once.",
    options=(
        *(*_SHARED, *_TOKENS, _CACHE, _LAYER_COUNT),
        Option("layout", list(LAYOUTS), "layouts of keys and values", choices=LAYOUTS),
        Option("ragged", False, f"lengths from {SHORTEST} to the context, drawn evenly"),
        Option("heads-first", False, "lay out a block of paged caches in memory as (heads, slots), "
               "not as (slots, heads)"),
    ),
    cases=_cases,
    modelled=lambda arguments: {"small": True},
    baselines=("eager", *BACKENDS, "cupy"),
    beside="cache",
    quick={
        "batch": [1, 64],
        "block_size": [16],
        "cache": ["float", "int8", "int4"],
        "heads_first": True,
    },
    facts=("layers",),
)  # fmt: skip
_SWEEP = replace(
    BENCHMARK,
    help="time the steps of serving instead of combinations of these options, one thing varied at "
    "a time: contexts, block sizes, integers, heads, one sequence, ragged ones, head dims, dtypes",
    options=(_LAYER_COUNT,),
    quick={},
)
BENCHMARK = replace(
    BENCHMARK,
    variants={"sweep": _SWEEP, "prefill": PREFILL, "cache-operations": CACHE_OPERATIONS},
)
