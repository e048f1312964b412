"""Launch configurations of what writes, copies and gathers the blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cupyattn.ops.cache.structs import APPEND_STRUCT, COPY_BLOCKS_STRUCT, GATHER_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for

APPEND = KernelSpec(
    "append_kv",
    "cache/append.cu",
    (
        *(Pointer(name) for name in ("k_cache", "v_cache")),
        *(Pointer(name, optional=True) for name in ("k_scales", "v_scales", "q")),
        *inputs("k", "v", "slot_mapping"),
        *inputs("cos", "sin", "positions", optional=True),
        APPEND_STRUCT,
    ),
)
COPY_BLOCKS = KernelSpec(
    "copy_blocks",
    "cache/copy_blocks.cu",
    (
        *(Pointer(name) for name in ("k_cache", "v_cache")),
        *(Pointer(name, optional=True) for name in ("k_scales", "v_scales")),
        *inputs("copies", optional=True),
        COPY_BLOCKS_STRUCT,
    ),
)
GATHER = KernelSpec(
    "kv_gather",
    "cache/gather.cu",
    (
        *inputs("k_cache", "v_cache"),
        *inputs("k_scales", "v_scales", optional=True),
        *inputs("block_table", "seqlens_k"),
        *(Pointer(name) for name in ("k", "v")),
        GATHER_STRUCT,
    ),
)
KERNELS = (APPEND, COPY_BLOCKS, GATHER)

_QUANTISED = {"int8": "Int8", "int4": "Int4"}
"""Quantised formats, with their names in C++."""
_BITS = {"int8": 8, "int4": 4}
_INTEGERS = {"int32": "int", "int64": "int64"}
WORDS = (16, 8, 4, 2, 1)
"""Bytes that one thread copies of a block."""
THREADS = 256
COPY_THREADS = 128
"""A block has few words, and each CTA more of them brings another multiprocessor's loads."""


@dataclass(frozen=True)
class AppendConfig:
    """A CTA, and how many heads share a lane's cosines and sines."""

    threads: int
    heads: int
    reason: str


# The first row that has not fewer heads than any array, or one chunk of each; None takes the rest.
APPEND_TABLE: Mapping[int, Mapping[int | None, AppendConfig]] = {
    75: {
        1: AppendConfig(128, 1, "one head, or enough loads of one to be in flight"),
        None: AppendConfig(128, 4, "cosines once for four heads; small CTAs, for a step has few"),
    }
}


class AppendLaunch(NamedTuple):
    """What a specialisation of append_kv depends on, but for its row of the table."""

    dtype: str
    cache: str
    """The storage format."""
    head_dim: int
    vec: int
    """Items of one load, 1 or 16 bytes' worth."""
    slot: str
    table: str
    """Of the cosines and sines; void without a rotation."""
    position: str
    interleaved: bool

    @property
    def lanes(self) -> int:
        """Lanes that share a head: a power of two, at most a warp."""
        chunks = -(-self.head_dim // self._chunk)
        return min(1 << (chunks - 1).bit_length(), WARP_SIZE)

    @property
    def chunks(self) -> int:
        """Chunks of a head that a lane has."""
        return -(-self.head_dim // (self.lanes * self._chunk))

    @property
    def _chunk(self) -> int:
        """What a lane stores at once fills a byte."""
        return max(self.vec, 8 // _BITS.get(self.cache, 8))


def stored_bytes(dtype: str, cache: str, vec: int) -> int:
    """Return the bytes of a cache that `vec` items fill.

    Examples
    --------
    >>> stored_bytes("float16", "float16", 8), stored_bytes("float16", "int4", 8)
    (16, 4)
    """
    return vec * _BITS.get(cache, 8 * STORAGE[dtype]) // 8


def append_config(arch: int, heads: int, chunks: int) -> AppendConfig:
    """Return the table's row for arrays of at most that many heads, of so many chunks a lane."""
    rows = rows_for(APPEND_TABLE, arch).items()
    together = heads if chunks == 1 else 1
    return next(row for limit, row in rows if limit is None or together <= limit)


@cache
def specialise_append(config: AppendConfig, launch: AppendLaunch) -> Specialisation:
    """Specialise the kernel that writes tokens."""
    return APPEND.specialise(
        threads=config.threads,
        gates=Gates(registers=96),
        DTYPE=launch.dtype,
        CACHE=_QUANTISED.get(launch.cache, launch.cache),
        LANES=launch.lanes,
        CHUNKS=launch.chunks,
        HEADS=config.heads,
        VEC=launch.vec,
        SLOT=_INTEGERS[launch.slot],
        TABLE=launch.table,
        POSITION=_INTEGERS[launch.position],
        INTERLEAVED=cpp_bool(launch.interleaved),
    )


@cache
def specialise_copies(word: int, copy: str) -> Specialisation:
    """Specialise the kernel that copies blocks, for words of that many bytes."""
    return COPY_BLOCKS.specialise(
        threads=COPY_THREADS, gates=Gates(registers=88), WORD=word, COPY=_INTEGERS[copy]
    )


@cache
def specialise_gather(dtype: str, cache: str, vec: int, length: str) -> Specialisation:
    """Specialise the kernel that gathers tokens; `vec` is 1 or 16 bytes' worth of results."""
    return GATHER.specialise(
        threads=THREADS,
        DTYPE=dtype,
        CACHE=_QUANTISED.get(cache, cache),
        VEC=vec,
        LENGTH=_INTEGERS[length],
    )


def _formats(dtype: str) -> tuple[str, ...]:
    return dtype, *_QUANTISED


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows, dtypes, formats, loads, head dims, tables and integers in pairs."""
    flags = (True, False)
    axes = STORAGE, range(3), flags, (64, 128, 256), ("void", *STORAGE), _INTEGERS, flags
    for dtype, kind, whole, head_dim, table, integer, interleaved in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        # Without a rotation there are no positions, and nothing is paired.
        position, paired = ("int32", False) if table == "void" else (integer, interleaved)
        launch = AppendLaunch(
            dtype, _formats(dtype)[kind], head_dim, vec, integer, table, position, paired
        )
        for config in dict.fromkeys(append_config(arch, heads, launch.chunks) for heads in (1, 4)):
            yield specialise_append(config, launch)
    for word, copy in pairs(WORDS, _INTEGERS):
        yield specialise_copies(word, copy)
    for dtype, kind, whole, length in pairs(STORAGE, range(3), flags, _INTEGERS):
        vec = vector_items(dtype) if whole else 1
        yield specialise_gather(dtype, _formats(dtype)[kind], vec, length)
