"""Launch configurations of decoding: few query tokens over a paged cache or dense keys, for sm_75.

Tensor cores take float16 queries, and from sm_80 on bfloat16 ones, with the same configurations.

What is wanted is bytes in flight: warps that load a tile's K and V ahead, and as many of them as
registers allow. Caches of integers have fewer bytes a tile, so that more tiles are ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np

from cupyattn.ops.attention.kernels.options import DECODE_MACROS, EACH_PAGED_OPTION, FlashOptions
from cupyattn.ops.attention.structs import DECODE_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES
from cupyattn.runtime.tables import FLOAT_BYTES, option_macros, pairs, round_up, rows_for

_ARRAYS = (
    *inputs("q", "k_cache", "v_cache"),
    *inputs("block_table", "seqlens_k", "q_offset", optional=True),
    *inputs("k_scales", "v_scales", "alibi_slopes", "sinks", optional=True),
    Pointer("out"),
    Pointer("lse", optional=True),
    *(Pointer(name, optional=True) for name in ("partial_out", "partial_sums")),
)
FORWARD = KernelSpec("attention_decode", "attention/decode/forward.cu", (*_ARRAYS, DECODE_STRUCT))
CENTRED = KernelSpec(
    "attention_decode_centred",
    "attention/decode/forward.cu",
    (
        *_ARRAYS,
        *inputs("k_centre"),
        DECODE_STRUCT,
        Scalar("centre_stride", np.dtype(np.int64)),
    ),
)
COMBINE = KernelSpec(
    "attention_decode_combine",
    "attention/decode/combine.cu",
    (
        *inputs("seqlens_k", "q_offset", "sinks", optional=True),
        *inputs("partial_out", "partial_sums"),
        Pointer("out"),
        Pointer("lse", optional=True),
        DECODE_STRUCT,
    ),
)
KERNELS = (FORWARD, CENTRED, COMBINE)
_Row = TypeVar("_Row")

TILE_KEYS = 16
"""Keys that a warp takes at a time (kTileKeys in params.cuh); block sizes are multiples of it."""
WARPS = 4
COMBINE_WARPS = (1, 8)
"""Warps for each row: one where few parts are merged and rows are many."""
COMBINE_PARTS = 8
"""The items of a row that one warp loads at once."""
LOADERS = ("BlockFeed", "DenseFeed")
"""The tile loaders: of blocks that a table names, and of consecutive keys."""

INTEGER_BITS = {"int8": 8, "uint8": 4}
"""Bits of an item of caches of integers, by the dtype of their arrays."""
INTEGER_ITEMS = 8
"""Items of such a cache that a lane loads at once without tensor cores, where rows allow it."""


@dataclass(frozen=True)
class DecodeConfig:
    """The configuration for a head dim and a number of query rows of one key-value head.

    Attributes
    ----------
    rows : int
        Query rows of a key-value head that share a pass over the keys: 8 make a tile on the tensor
        cores, 4 otherwise.
    ctas_per_sm : int
        What the compiler keeps registers for, and what the grid is chosen by.
    tiles_ahead : int
        Tiles of 16 keys that a warp loads ahead on tensor cores; 0 loads them as they are used.
        Above head dim 256 parts of tiles, of 128 bytes a row (StreamedRows). Without tensor cores
        it is one, where the registers do (FloatRows).
    """

    rows: int
    ctas_per_sm: int
    reason: str
    tiles_ahead: int = 1
    gates: Gates = Gates()


# Above head dim 448 the accumulator takes half of the registers, and what lives outside of the loop
# over tiles is spilled. Even so a step of 64 sequences of 4,096 tokens (16 query heads on 4 of 512,
# blocks of 16) reads 4,122 GB/s of an H200, where heads of 256 (32 on 8) read 4,201; over 8 and 4
# bits it reads 3,820 and 2,979, where heads of 256 read 3,946 and 2,719. This is compute_75 code;
# native code reads 4,175 and 4,258 in float16, 4,173 and 4,259 in bfloat16 (a script that is not
# kept, 2026-11-28).
_FEW_SPILLS, _SPILLS = Gates(spills=32, most_spills=64), Gates(spills=176, most_spills=208)
_MORE_SPILLS = Gates(spills=256, most_spills=288)

# By the head dim and the most rows; others of 16 bits run as float32 does. Chosen by what
# registers hold; of D 128 and 8 rows others were timed on an H200 as compute_75 code (2026-11-22):
# two CTAs an SM, or two tiles ahead, gain nothing on long work, and little on one sequence alone.
# With bfloat16, of which sm_90 code was timed, a step of 64 sequences of 4,096 tokens (32 heads on
# 8 of 128, blocks of 16) reads 4,294 GB/s of an H200, where float16 has 4,290; over 8 and 4 bits it
# reads 3,799 and 2,525 where float16 queries have 3,976 and 2,699, whose integers take fewer
# instructions (`benchmark decode --batch 64 --context 4096 --block-size 16`, 2026-11-28).
TENSOR_CORES: Mapping[int, Mapping[int, Mapping[int | None, DecodeConfig]]] = {
    75: {
        64: {
            8: DecodeConfig(8, 4, "16 warps an SM with a tile of K and V each on the way"),
            None: DecodeConfig(16, 3, "two tiles of rows share what is read of K and V"),
        },
        128: {
            8: DecodeConfig(8, 3, "12 warps an SM, each with one tile ahead"),
            None: DecodeConfig(16, 2, "4 tokens of a group of 4 in one pass"),
        },
        256: {None: DecodeConfig(8, 2, "64 registers of K or V on the way, 96 of q and out", 0)},
        320: {None: DecodeConfig(8, 2, "5 parts in 80 registers, 80 of out", 5)},
        384: {None: DecodeConfig(8, 2, "4 parts in 64 registers, 96 of out", 4)},
        448: {None: DecodeConfig(8, 2, "2 parts in 32 registers, 112 of out", 2, _FEW_SPILLS)},
        512: {None: DecodeConfig(8, 2, "4 parts on the way: 2 take 7 % longer", 4, _SPILLS)},
    }
}

# The same of caches of integers, by their dtype first. With 8 rows of float16 queries of D 128 the
# loop has 395 instructions for a tile of int8 and 344 for one of 4 bits, 277 of float16. By the
# model of `python -m cupyattn turing` an SM of a T4 could so take 20 and 11 bytes a cycle (NVRTC
# 12.9, 2026-11-23); the device's memory brings 5.
INTEGER_TENSOR_CORES: Mapping[
    int, Mapping[str, Mapping[int, Mapping[int | None, DecodeConfig]]]
] = {
    75: {
        "int8": {
            64: {
                8: DecodeConfig(8, 4, "16 warps an SM; two tiles ahead would spill"),
                None: DecodeConfig(16, 3, "as of 8 rows"),
            },
            128: {
                8: DecodeConfig(8, 3, "12 warps an SM; two tiles ahead would spill"),
                None: DecodeConfig(16, 2, "as of 8 rows"),
            },
            256: {None: DecodeConfig(8, 2, "64 registers of K and V on the way")},
            384: {None: DecodeConfig(8, 2, "3 parts in 48 registers, 96 of out", 3)},
            512: {
                None: DecodeConfig(8, 2, "4 parts on the way: 2 take 12 % longer", 4, _MORE_SPILLS)
            },
        },
        "uint8": {
            64: {
                8: DecodeConfig(8, 4, "a quarter of float16's bytes a tile: two of them", 2),
                None: DecodeConfig(16, 3, "two tiles ahead would spill"),
            },
            128: {
                8: DecodeConfig(8, 3, "two tiles ahead were slower on an H200"),
                None: DecodeConfig(16, 2, "a quarter of float16's bytes: two tiles", 2),
            },
            256: {None: DecodeConfig(8, 2, "two tiles ahead would spill with options")},
            512: {None: DecodeConfig(8, 2, "2 parts on the way: 4 take 15 % longer", 2, _SPILLS)},
        },
    }
}

# For every other call, by the items of a row that a lane holds and the most rows.
LANES: Mapping[int, Mapping[int | None, Mapping[int | None, DecodeConfig]]] = {
    75: {
        4: {
            4: DecodeConfig(4, 3, "one token of a group of 4"),
            None: DecodeConfig(
                8, 2, "twice the rows for what is read of K and V", gates=Gates(spills=16)
            ),
        },
        8: {None: DecodeConfig(4, 2, "8 items of 8 rows, of q and out, would spill")},
        None: {None: DecodeConfig(4, 2, "16 items of 4 rows, of q and out", gates=_SPILLS)},
    }
}


@dataclass(frozen=True)
class DecodeLaunch:
    """A call's kernels, but for its options."""

    dtype: str
    cache: str
    head_dim: int
    tensor_cores: bool
    vec: int
    config: DecodeConfig
    centred: bool = False
    """Whether keys are int8 codes of differences from a centre; the cache is that of values."""

    @property
    def keys(self) -> str:
        """The dtype of the keys' items."""
        return "int8" if self.centred else self.cache

    @property
    def lanes(self) -> int:
        """Lanes that share a row; 0 on tensor cores."""
        return 0 if self.tensor_cores else _lanes(self.head_dim, self.vec)


def _lanes(head_dim: int, vec: int) -> int:
    """Return how many lanes share a row: a power of two, at least 4."""
    vectors = -(-head_dim // vec)
    return min(max(4, 1 << (vectors - 1).bit_length()), WARP_SIZE)


@cache
def decode_launch(
    arch: int,
    dtype: str,
    head_dim: int,
    rows: int,
    vec: int,
    cache: str | None = None,
    *,
    tensor_cores: bool = True,
    centred: bool = False,
) -> DecodeLaunch:
    """Choose for so many query rows a key-value head.

    `cache` is the dtype of the caches, q's by default; if keys are `centred`, that of values. `vec`
    is 16 bytes' worth of their items, where every row starts at a multiple of that and q's too; of
    integers INTEGER_ITEMS, where rows allow no more; otherwise what a byte or an item has.
    `tensor_cores`: whether the device has any.
    """
    cache = dtype if cache is None else cache
    by_rows = None
    if tensor_cores and vec * cache_bits(cache) == 8 * VECTOR_BYTES:
        by_rows = _tensor_cores(arch, dtype).get(cache, {}).get(head_dim)
    tensor_cores = by_rows is not None
    if by_rows is None:
        vec = min(vec, INTEGER_ITEMS)
        lanes = _lanes(head_dim, vec)
        items = -(-head_dim // (lanes * vec)) * vec
        by_rows = _first(rows_for(LANES, arch), items)
    config = _first(by_rows, rows)
    return DecodeLaunch(dtype, cache, head_dim, tensor_cores, vec, config, centred)


def _tensor_cores(
    arch: int, dtype: str
) -> Mapping[str, Mapping[int, Mapping[int | None, DecodeConfig]]]:
    """Return the rows of queries of a dtype by the dtype of the caches."""
    if dtype not in _tensor_core_dtypes(arch):
        return {}
    return {dtype: rows_for(TENSOR_CORES, arch), **rows_for(INTEGER_TENSOR_CORES, arch)}


def _tensor_core_dtypes(arch: int) -> tuple[str, ...]:
    return ("float16", "bfloat16") if arch >= NATIVE_ARCH else ("float16",)


def cache_bits(cache: str) -> int:
    """Return how many bits an item has in caches of a dtype."""
    return INTEGER_BITS[cache] if cache in INTEGER_BITS else 8 * STORAGE[cache]


def _first(rows: Mapping[int | None, _Row], size: int) -> _Row:
    """Return the first row whose limit is not below a size; None is no limit."""
    return next(row for most, row in rows.items() if most is None or size <= most)


@cache
def forward(
    launch: DecodeLaunch, options: FlashOptions, loader: str = "BlockFeed"
) -> Specialisation:
    """Specialise the kernel that loops over the keys; `loader` is one of `LOADERS`."""
    tensor_core_rows = 8 if launch.head_dim <= 128 else 4 if launch.head_dim <= 256 else 2
    float_rows = launch.config.rows if launch.head_dim <= 256 else launch.config.rows // 2
    pass_rows = tensor_core_rows if launch.tensor_cores else float_rows
    streams = launch.tensor_cores and launch.head_dim > 256
    query_bytes = launch.config.rows * launch.head_dim * STORAGE[launch.dtype] if streams else 0
    row_bytes = (round_up(launch.head_dim, 4) + 4) * FLOAT_BYTES
    return (CENTRED if launch.centred else FORWARD).specialise(
        threads=WARPS * WARP_SIZE,
        static_shared_bytes=query_bytes
        + round_up(WARPS * pass_rows * (row_bytes + 2 * FLOAT_BYTES), 16),
        gates=launch.config.gates,
        reason=launch.config.reason,
        DTYPE=launch.dtype,
        CACHE=launch.cache,
        HEAD_DIM=launch.head_dim,
        QUERY_ROWS=launch.config.rows,
        WARPS=WARPS,
        VEC=launch.vec,
        LANES=launch.lanes,
        FEED=loader,
        TILES_AHEAD=launch.config.tiles_ahead,
        MIN_CTAS=launch.config.ctas_per_sm,
        KEYS=launch.keys,
        CENTRED=int(launch.centred),
        **option_macros(options, DECODE_MACROS),
    )


@cache
def combine(launch: DecodeLaunch, sinks: str, parts: int) -> Specialisation:
    """Specialise the kernel that merges the parts of rows whose keys several CTAs shared.

    `parts` is how many a row has, about.
    """
    warps = COMBINE_WARPS[parts > COMBINE_PARTS]
    return COMBINE.specialise(
        threads=warps * WARP_SIZE,
        static_shared_bytes=round_up(warps * (launch.head_dim + 2) * FLOAT_BYTES, 8),
        gates=Gates(registers=72 if launch.head_dim <= 256 else 80),
        DTYPE=launch.dtype,
        HEAD_DIM=launch.head_dim,
        SINKS=sinks,
        WARPS=warps,
        FORWARD_WARPS=WARPS,
        QUERY_ROWS=launch.config.rows,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows with and without tensor cores, dtypes, head dims and loads in pairs; options.

    Each launch has both loaders: that of blocks holds their ids, and needs more registers. Caches
    of integers have blocks.
    """
    plain = FlashOptions()
    launches = [
        decode_launch(arch, dtype, head_dim, rows, 8 * VECTOR_BYTES // cache_bits(cache), cache)
        for dtype in _tensor_core_dtypes(arch)
        for cache, by_head_dim in _tensor_cores(arch, dtype).items()
        for head_dim in by_head_dim
        for rows in (8, 16)
    ]
    launches += [
        decode_launch(
            arch, dtype, head_dim, rows, INTEGER_ITEMS if whole else 8 // INTEGER_BITS[cache], cache
        )
        for dtype, cache, head_dim, rows, whole in pairs(
            STORAGE, INTEGER_BITS, (32, 80, 128, 256, 512), (4, 8), (True, False)
        )
    ]
    launches += [
        decode_launch(
            arch,
            dtype,
            head_dim,
            rows,
            VECTOR_BYTES // STORAGE[dtype] if whole else 1,
            tensor_cores=False,
        )
        for dtype, head_dim, rows, whole in pairs(
            STORAGE, (32, 80, 128, 256, 512), (4, 8), (True, False)
        )
    ]
    launches += [
        replace(launch, centred=True)
        for launch in launches
        if launch.cache in STORAGE and launch.head_dim <= 256
    ]
    for launch in dict.fromkeys(launches):
        for loader in LOADERS[:1] if launch.centred or launch.cache not in STORAGE else LOADERS:
            yield forward(launch, plain, loader)
    for launch in (launches[0], launches[-1]):
        for parts in (COMBINE_PARTS, COMBINE_PARTS + 1):
            yield combine(launch, "void", parts)
        for options in EACH_PAGED_OPTION:
            for loader in LOADERS:
                yield forward(launch, options, loader)
