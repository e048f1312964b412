"""Records, kernels, their C structs and launch configurations: append, copy blocks, gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from cupyattn.ops.rope.kernels import RopeConfig
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for


@dataclass(slots=True)
class CacheArrays(Record[T]):
    """The caches, and the scales of quantised ones: the first arrays of each kernel."""

    k_cache: T
    v_cache: T
    k_scales: T | None
    v_scales: T | None


@dataclass(slots=True)
class AppendArrays(CacheArrays[T]):
    """Arrays of `append_kv`; cos and sin are those of rotary, weights those of norms."""

    SHOWN_AS: ClassVar = MappingProxyType(
        {"q_weight": "q_norm's weight", "k_weight": "k_norm's weight"}
    )

    q: T | None
    k: T
    v: T
    slot_mapping: T
    cos: T | None = None
    sin: T | None = None
    positions: T | None = None
    q_weight: T | None = None
    k_weight: T | None = None
    k_centre: T | None = None


@dataclass(slots=True)
class CopyArrays(CacheArrays[T]):
    """Arrays of `copy_blocks`; copies only where they are an array."""

    copies: T | None = None


@dataclass(slots=True)
class GatherArrays(CacheArrays[T]):
    """Arrays of `gather`; its results are k and v."""

    SHOWN_AS: ClassVar = MappingProxyType({"k": "out's k", "v": "out's v"})

    block_table: T
    seqlens_k: T
    k: T | None = None
    v: T | None = None


_SLOT_STRIDES = np.dtype([(axis, np.int64) for axis in ("outer", "inner", "head")], align=True)

# AppendParams in cuda_src/cache/append.cu
APPEND_PARAMS = np.dtype(
    [
        *(
            (array, _SLOT_STRIDES)
            for array in ("q", "k", "v", "k_cache", "v_cache", "k_scales", "v_scales")
        ),
        *(
            (f"{array}_{axis}", np.int64)
            for array in ("slots", "positions")
            for axis in ("batch", "seq")
        ),
        *((field, np.int64) for field in ("cos_stride", "sin_stride", "table_length", "slots")),
        *((field, np.uint32) for field in ("tokens", "seq", "heads", "groups", "kv_heads")),
        *((field, np.uint32) for field in ("kv_groups", "half", "dim", "block_size")),
        *((field, np.float32) for field in ("q_eps", "k_eps", "q_offset", "k_offset")),
    ],
    align=True,
)
APPEND_STRUCT = StructParameter("params", APPEND_PARAMS, "AppendParams")

COPY_ARRAYS = 4
"""Arrays that one launch of copy_blocks takes."""

COPY_AXES = 4
"""Axes of a block's words (kCopyAxes in copy_blocks.cu)."""

COPIES_PASSED = 32
"""Copies that a launch takes by value (kPassed in copy_blocks.cu)."""

# CopyBlocksParams in cuda_src/cache/copy_blocks.cu
COPY_BLOCKS_PARAMS = np.dtype(
    [
        ("block_stride", np.int64, (COPY_ARRAYS,)),
        ("strides", np.int64, (COPY_ARRAYS, COPY_AXES)),
        *((field, np.int64) for field in ("copy_stride", "end_stride", "copies")),
        ("shape", np.uint32, (COPY_ARRAYS, COPY_AXES)),
        ("first_thread", np.uint32, (COPY_ARRAYS + 1,)),
        ("num_blocks", np.int32),
        ("passed", np.int32),
        *((end, np.int32, (COPIES_PASSED,)) for end in ("src", "dst")),
    ],
    align=True,
)
COPY_BLOCKS_STRUCT = StructParameter("params", COPY_BLOCKS_PARAMS, "CopyBlocksParams")

# GatherParams in cuda_src/cache/gather.cu
GATHER_PARAMS = np.dtype(
    [
        *(
            (array, _SLOT_STRIDES)
            for array in ("k_cache", "v_cache", "k_scales", "v_scales", "k", "v")
        ),
        *((field, np.int64) for field in ("table_batch", "table_block", "seqlens_stride")),
        *((field, np.uint32) for field in ("tokens", "length", "heads", "units", "block_size")),
        *((field, np.int32) for field in ("num_blocks", "max_blocks")),
    ],
    align=True,
)
GATHER_STRUCT = StructParameter("params", GATHER_PARAMS, "GatherParams")

_APPEND_ARRAYS = (
    *(Pointer(name) for name in ("k_cache", "v_cache")),
    *(Pointer(name, optional=True) for name in ("k_scales", "v_scales", "q")),
    *inputs("k", "v", "slot_mapping"),
    *inputs("cos", "sin", "positions", "q_weight", "k_weight", optional=True),
)
APPEND = KernelSpec("append_kv", "cache/append.cu", (*_APPEND_ARRAYS, APPEND_STRUCT))
APPEND_CENTRED = KernelSpec(
    "append_kv_centred",
    "cache/append.cu",
    (
        *_APPEND_ARRAYS,
        *inputs("k_centre"),
        APPEND_STRUCT,
        Scalar("centre_stride", np.dtype(np.int64)),
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
KERNELS = (APPEND, APPEND_CENTRED, COPY_BLOCKS, GATHER)

_QUANTISED = {"int8": "Int8", "int4": "Int4"}
"""Quantised formats, with their names in C++."""
_BITS = {"int8": 8, "int4": 4}
_INTEGERS = {"int32": "int", "int64": "int64"}
WORDS = (16, 8, 4, 2, 1)
"""Bytes that one thread copies of a block."""
THREADS = 256
"""Threads of a CTA of gather."""
COPY_THREADS = 128
"""Threads of a CTA of copy_blocks: a block has few words, and more CTAs keep more SMs loading."""


# A call takes the first configuration with at least as many heads as each of its arrays, or with at
# least 1 where a lane has several chunks of a head. None takes the rest.
APPEND_TABLE: Mapping[int, Mapping[int | None, RopeConfig]] = {
    75: {
        1: RopeConfig(128, 1, "one head, or enough loads of one to be in flight"),
        None: RopeConfig(128, 4, "cosines once for four heads; small CTAs, for a step has few"),
    }
}


class AppendLaunch(NamedTuple):
    """Options of a specialisation of append_kv, without those of its configuration."""

    dtype: str
    cache: str
    """The storage format of keys and values, or of values alone if keys are centred."""
    head_dim: int
    vec: int
    """Items of one load, 1 or 16 bytes' worth."""
    slot: str
    table: str
    """Dtype of the cosines and sines; void without a rotation."""
    position: str
    interleaved: bool
    normed: bool
    """Whether any heads are normalised."""
    centred: bool = False
    """Whether keys are codes of their differences from a centre."""

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
        """Items that a lane stores at once: they fill whole bytes."""
        return max(self.vec, 8 // _BITS.get(self.cache, 8))


def stored_bytes(dtype: str, cache: str, vec: int) -> int:
    """Return the bytes of a cache that `vec` items fill.

    Examples
    --------
    >>> stored_bytes("float16", "float16", 8), stored_bytes("float16", "int4", 8)
    (16, 4)
    """
    return vec * _BITS.get(cache, 8 * STORAGE[dtype]) // 8


def append_config(arch: int, heads: int, chunks: int) -> RopeConfig:
    """Return the configuration for at most `heads` heads with `chunks` chunks in a lane."""
    rows = rows_for(APPEND_TABLE, arch).items()
    shared = heads if chunks == 1 else 1
    return next(row for limit, row in rows if limit is None or shared <= limit)


@cache
def specialise_append(config: RopeConfig, launch: AppendLaunch) -> Specialisation:
    """Specialise the kernel that writes tokens."""
    return (APPEND_CENTRED if launch.centred else APPEND).specialise(
        threads=config.threads,
        gates=Gates(registers=(128 if launch.head_dim <= 256 else 144) if launch.normed else 96),
        reason=config.reason,
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
        NORMED=cpp_bool(launch.normed),
        CENTRED=int(launch.centred),
    )


@cache
def specialise_copies(word: int, copy: str) -> Specialisation:
    """Specialise the kernel that copies blocks, for words of `word` bytes."""
    return COPY_BLOCKS.specialise(
        threads=COPY_THREADS,
        gates=Gates(registers=88),
        reason=f"a block has few words of {word} bytes: small CTAs keep more multiprocessors busy",
        WORD=word,
        COPY=_INTEGERS[copy],
    )


@cache
def specialise_gather(dtype: str, cache: str, vec: int, length: str) -> Specialisation:
    """Specialise the kernel that gathers tokens; `vec` is 1 or 16 bytes' worth of results."""
    return GATHER.specialise(
        threads=THREADS,
        reason="all loads and stores of results have 16 bytes"
        if vec > 1
        else "rows are not aligned to 16 bytes: a thread has one item",
        DTYPE=dtype,
        CACHE=_QUANTISED.get(cache, cache),
        VEC=vec,
        LENGTH=_INTEGERS[length],
    )


def _formats(dtype: str) -> tuple[str, ...]:
    return dtype, *_QUANTISED


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield specialisations in which every two configurations, dtypes and formats meet."""
    flags = (True, False)
    dims, tables = (64, 128, 256, 512), ("void", *STORAGE)
    axes = STORAGE, range(4), flags, dims, tables, _INTEGERS, flags, flags
    for dtype, kind, whole, head_dim, table, integer, interleaved, normed in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        # Without a rotation there are no positions, and nothing is paired.
        position, paired = ("int32", False) if table == "void" else (integer, interleaved)
        cache, centred = (*_formats(dtype), dtype)[kind], kind == 3
        launch = AppendLaunch(
            dtype, cache, head_dim, vec, integer, table, position, paired, normed, centred
        )
        for config in dict.fromkeys(append_config(arch, heads, launch.chunks) for heads in (1, 4)):
            yield specialise_append(config, launch)
    for word, copy in pairs(WORDS, _INTEGERS):
        yield specialise_copies(word, copy)
    for dtype, kind, whole, length in pairs(STORAGE, range(3), flags, _INTEGERS):
        vec = vector_items(dtype) if whole else 1
        yield specialise_gather(dtype, _formats(dtype)[kind], vec, length)
