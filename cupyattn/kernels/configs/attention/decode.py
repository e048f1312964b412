"""Launch configurations of decoding: a few query tokens over a paged cache, for sm_75.

What is wanted is bytes in flight: warps that load a tile's K and V ahead, and as many of them as
registers allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.attention.options import FlashOptions
from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.configs.tables import (
    FLOAT_BYTES,
    option_macros,
    pairs,
    round_up,
    rows_for,
)
from cupyattn.kernels.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.kernels.structs import DECODE_STRUCT

FORWARD = KernelSpec(
    "attention_decode",
    "attention/decode/forward.cu",
    (
        *inputs("q", "k_cache", "v_cache", "block_table", "seqlens_k"),
        *inputs("alibi_slopes", "sinks", optional=True),
        Pointer("out"),
        Pointer("lse", optional=True),
        *(Pointer(name) for name in ("partial_out", "partial_sums")),
        DECODE_STRUCT,
    ),
)
COMBINE = KernelSpec(
    "attention_decode_combine",
    "attention/decode/combine.cu",
    (
        *inputs("seqlens_k"),
        *inputs("sinks", optional=True),
        *inputs("partial_out", "partial_sums"),
        Pointer("out"),
        Pointer("lse", optional=True),
        DECODE_STRUCT,
    ),
)
KERNELS = (FORWARD, COMBINE)
_Row = TypeVar("_Row")

TILE_KEYS = 16
"""Keys that a warp takes at a time (kTileKeys in params.cuh); block sizes are multiples of it."""
WARPS = 4
COMBINE_WARPS = 4


@dataclass(frozen=True)
class DecodeConfig:
    """Of a head dim and a number of query rows of one key-value head.

    Attributes
    ----------
    rows : int
        Query rows of a key-value head that share a pass over the keys: 8 make a tile on the tensor
        cores, 4 otherwise.
    ctas_per_sm : int
        What the compiler keeps registers for, and what the grid is chosen by.
    """

    rows: int
    ctas_per_sm: int
    reason: str


# By the head dim and the most rows; others of float16 run as other dtypes do. Chosen by what
# registers hold; no row has been timed yet (python -m cupyattn.benchmark decode).
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
        256: {None: DecodeConfig(8, 2, "64 registers of K or V on the way, 96 of q and out")},
    }
}

# For every other call, by the items of a row that a lane holds and the most rows.
LANES: Mapping[int, Mapping[int | None, Mapping[int | None, DecodeConfig]]] = {
    75: {
        4: {
            4: DecodeConfig(4, 3, "one token of a group of 4"),
            None: DecodeConfig(8, 2, "twice the rows for what is read of K and V"),
        },
        None: {None: DecodeConfig(4, 2, "8 items of 8 rows, of q and out, would spill")},
    }
}


@dataclass(frozen=True)
class DecodeLaunch:
    """A call's kernels, but for its options."""

    dtype: str
    head_dim: int
    tensor_cores: bool
    vec: int
    config: DecodeConfig

    @property
    def lanes(self) -> int:
        """Lanes that share a row; 0 on tensor cores."""
        return 0 if self.tensor_cores else _lanes(self.head_dim, self.vec)


def _lanes(head_dim: int, vec: int) -> int:
    """Return how many lanes share a row: a power of two, at least 4."""
    vectors = -(-head_dim // vec)
    return min(max(4, 1 << (vectors - 1).bit_length()), WARP_SIZE)


@cache
def decode_launch(arch: int, dtype: str, head_dim: int, rows: int, vec: int) -> DecodeLaunch:
    """Choose for so many query rows a key-value head; `vec` is 16 bytes' worth of items, or 1."""
    matching = rows_for(TENSOR_CORES, arch).get(head_dim)
    tensor_cores = dtype == "float16" and vec > 1 and matching is not None
    if tensor_cores and matching is not None:
        by_rows = matching
    else:
        lanes = _lanes(head_dim, vec)
        items = -(-head_dim // (lanes * vec)) * vec
        by_rows = _first(rows_for(LANES, arch), items)
    return DecodeLaunch(dtype, head_dim, tensor_cores, vec, _first(by_rows, rows))


def _first(rows: Mapping[int | None, _Row], size: int) -> _Row:
    """Return the first row whose limit is not below a size; None is no limit."""
    return next(row for most, row in rows.items() if most is None or size <= most)


@cache
def forward(launch: DecodeLaunch, options: FlashOptions) -> Specialisation:
    """Specialise the kernel that walks over the keys."""
    tensor_core_rows = 8 if launch.head_dim <= 128 else 4
    pass_rows = tensor_core_rows if launch.tensor_cores else launch.config.rows
    row_bytes = (round_up(launch.head_dim, 4) + 4) * FLOAT_BYTES
    return FORWARD.specialise(
        threads=WARPS * WARP_SIZE,
        static_shared_bytes=round_up(WARPS * pass_rows * (row_bytes + 2 * FLOAT_BYTES), 16),
        DTYPE=launch.dtype,
        HEAD_DIM=launch.head_dim,
        QUERY_ROWS=launch.config.rows,
        WARPS=WARPS,
        VEC=launch.vec,
        LANES=launch.lanes,
        MIN_CTAS=launch.config.ctas_per_sm,
        **option_macros(options, ("slopes", "softcap", "sinks")),
    )


@cache
def combine(launch: DecodeLaunch, sinks: str) -> Specialisation:
    """Specialise the kernel that merges the parts of rows whose keys several CTAs shared."""
    return COMBINE.specialise(
        threads=COMBINE_WARPS * WARP_SIZE,
        DTYPE=launch.dtype,
        HEAD_DIM=launch.head_dim,
        SINKS=sinks,
        FORWARD_WARPS=WARPS,
        QUERY_ROWS=launch.config.rows,
    )


_EACH_OPTION = (
    FlashOptions(slopes="float32"),
    FlashOptions(softcap=True),
    FlashOptions(sinks="float32"),
)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows with and without tensor cores, dtypes, head dims and loads in pairs; options."""
    plain = FlashOptions()
    launches = [
        decode_launch(arch, "float16", head_dim, rows, vector_items("float16"))
        for head_dim in rows_for(TENSOR_CORES, arch)
        for rows in (8, 16)
    ]
    launches += [
        decode_launch(arch, dtype, head_dim, rows, vector_items(dtype) if whole else 1)
        for dtype, head_dim, rows, whole in pairs(
            STORAGE, (32, 80, 128, 256), (4, 8), (True, False)
        )
    ]
    for launch in dict.fromkeys(launches):
        yield forward(launch, plain)
    for launch in (launches[0], launches[-1]):
        yield combine(launch, "void")
        for options in _EACH_OPTION:
            yield forward(launch, options)
