"""``python -m cupyattn.benchmark kv_cache``: append_kv, copy_blocks and gather, on a GPU.

Their measure is the memory's speed: GB/s of what has to be read and written, beside a copy's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.frame.arguments import add_numbers
from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.emulated import ModelledCall, memory_bound
from cupyattn.benchmark.frame.rows import COPY, Row
from cupyattn.benchmark.frame.subjects import Contender, Gauge, Subject, measured
from cupyattn.cli.arguments import integer
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM

OPERATIONS = ("append", "copy", "gather")
FORMATS = ("float", "int8", "int4")
_EMULATED = 64  # tokens
_LAYERS = 8  # whose blocks are copied at once
_TABLE = 4096  # positions of the rotary tables


class Call(NamedTuple):
    """One call, made ready, and the bytes that it cannot do without."""

    run: Callable[[], Any]
    bytes: int


class Case(NamedTuple):
    """An operation on so many tokens; `cache` is a storage format, float the tokens' dtype."""

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
        """A token's K and V in a cache, with scales."""
        bits = {"int8": 8, "int4": 4}.get(self.cache, 8 * STORAGE[self.dtype])
        scale = 0 if self.cache == "float" else 4
        return 2 * self.kv_heads * (self.head_dim * bits // 8 + scale)

    @property
    def num_blocks(self) -> int:
        """The blocks of all tokens."""
        return -(-self.tokens // self.block_size)

    def call(self, xp: Any) -> Call:
        """Make the arrays, and the call on them."""
        make = {"append": self._append, "copy": self._copy, "gather": self._gather}
        return make[self.operation](xp)

    def _caches(self, xp: Any, *shape: int) -> tuple[list[Any], dict[str, Any]]:
        """K and V of zeros, and their scales."""
        stored = self.head_dim // 2 if self.cache == "int4" else self.head_dim
        names = {"int8": "int8", "int4": "uint8"}
        dtype = np.dtype(names[self.cache]) if self.cache in names else dtype_of(self.dtype)
        axes = (*shape, self.block_size, self.kv_heads)
        caches = [xp.zeros((*axes, stored), dtype) for _ in range(2)]
        if self.cache == "float":
            return caches, {}
        return caches, {name: xp.zeros(axes, np.float32) for name in ("k_scales", "v_scales")}

    def _ids(self) -> np.ndarray:
        """Blocks in any order."""
        return np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)

    def _append(self, xp: Any) -> Call:
        """Slices of packed q, k and v, rotated, to blocks anywhere in the pool."""
        heads = self.heads + 2 * self.kv_heads
        dtype = dtype_of(self.dtype)
        packed = xp.empty((self.tokens, heads, self.head_dim), dtype)
        some = np.random.default_rng(1).standard_normal(packed.shape[1:], dtype=np.float32)
        packed[...] = xp.asarray(some.astype(dtype))
        k_from, v_from = self.heads, self.heads + self.kv_heads
        q, k, v = packed[:, :k_from], packed[:, k_from:v_from], packed[:, v_from:]
        (k_cache, v_cache), scales = self._caches(xp, self.num_blocks)
        token = np.arange(self.tokens)
        slots = self._ids()[token // self.block_size] * self.block_size + token % self.block_size
        rotary_dim = self.head_dim // 2 * 2
        cos, sin = cupyattn.rope_tables(_TABLE, rotary_dim)
        options: dict[str, Any] = {
            "q": q,
            "rotary": (xp.asarray(cos), xp.asarray(sin)),
            "positions": xp.asarray((token % _TABLE).astype(np.int32)),
            **scales,
        }
        slot_mapping = xp.asarray(slots.astype(np.int32))

        def run() -> None:
            cupyattn.append_kv(k_cache, v_cache, k, v, slot_mapping, **options)

        item = STORAGE[self.dtype]
        moved = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * item + self.stored_bytes
        return Call(run, self.tokens * moved)

    def _copy(self, xp: Any) -> Call:
        """Half of the pool's blocks to the other half, in all layers."""
        count = max(self.num_blocks // 2, 1)
        (k_cache, v_cache), scales = self._caches(xp, _LAYERS, 2 * count)
        ids = np.random.default_rng(0).permutation(2 * count).astype(np.int32)
        copies = xp.asarray(np.ascontiguousarray(ids.reshape(2, count).T))

        def run() -> None:
            cupyattn.copy_blocks(k_cache, v_cache, copies, **scales)

        return Call(run, 2 * _LAYERS * count * self.block_size * self.stored_bytes)

    def _gather(self, xp: Any) -> Call:
        """One long sequence, of blocks anywhere in the pool."""
        (k_cache, v_cache), scales = self._caches(xp, self.num_blocks)
        table, lengths = xp.asarray(self._ids()[None]), xp.asarray(np.array([self.tokens]))
        dtype = dtype_of(self.dtype)
        shape = 1, self.tokens, self.kv_heads, self.head_dim
        out = xp.empty(shape, dtype), xp.empty(shape, dtype)

        def run() -> None:
            cupyattn.gather(
                k_cache, v_cache, table, lengths, max_seqlen_k=self.tokens, out=out, **scales
            )

        written = 2 * self.kv_heads * self.head_dim * STORAGE[self.dtype]
        return Call(run, self.tokens * (self.stored_bytes + written))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=integer(1),
        default=[64, 65536],
        metavar="N",
        help="tokens of a call (default: 64 65536)",
    )
    parser.add_argument(
        "--cache",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        help="storage formats; float is the tokens' dtype (default: all)",
    )
    numbers = (
        ("heads", 32, integer(1), "query heads, which append_kv rotates"),
        ("kv-heads", 8, integer(1), "key-value heads"),
        ("head-dim", 128, integer(2, MAX_HEAD_DIM), "head dim, even"),
        ("block-size", 16, integer(1), "tokens of a block"),
    )
    add_numbers(parser, numbers)
    parser.add_argument(
        "--dtype", choices=STORAGE, default="float16", help="of the tokens (default: %(default)s)"
    )


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return every combination that was asked for."""
    return [
        Case(
            operation,
            cache,
            tokens,
            arguments.heads,
            arguments.kv_heads,
            arguments.head_dim,
            arguments.block_size,
            arguments.dtype,
        )
        for operation in OPERATIONS
        for cache in arguments.cache
        for tokens in arguments.tokens
    ]


def subjects(arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Subject]:
    """Yield every case."""
    for case in cases_of(arguments):
        call = case.call(gauge.xp)
        ours = Contender("cupyattn", partial(list, [call.run]))
        yield Subject(case._asdict(), [ours], bytes=call.bytes, ceiling=COPY)


def rows(arguments: argparse.Namespace, gauge: Gauge) -> Iterable[Row]:
    """Measure every row."""
    return measured(subjects(arguments, gauge), gauge, len(cases_of(arguments)))


def modelled(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of few tokens by the emulator: rates hardly depend on their number."""
    for case in dict.fromkeys(case._replace(tokens=_EMULATED) for case in cases_of(arguments)):
        call = ModelledCall("", case.call(np).bytes, partial(_prepared, case))
        yield memory_bound(case._asdict(), call)


def _prepared(case: Case) -> Callable[[], Any]:
    return case.call(np).run


BENCHMARK = Benchmark(
    name="kv_cache",
    title="Paged caches",
    help="GB/s of append_kv, copy_blocks and gather on a GPU",
    description="Time what writes, copies and gathers the blocks of a paged cache.",
    note="Bytes are those that a call has to read and to write, each once; few tokens stay in the "
    "GPU's cache, and their time is a launch's. append rotates q and k, copy is of half of the "
    f"tokens' blocks in {_LAYERS} layers.",
    rows=rows,
    options=options,
    modelled=modelled,
)
