"""Launch configurations of flash attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cupyattn.kernels.arch import WARP_SIZE
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.tables import (
    FLOAT_BYTES,
    limit_of,
    option_macros,
    round_up,
    row_of,
)
from cupyattn.kernels.registry import ATTENTION_FORWARD, ATTENTION_FORWARD_F32
from cupyattn.kernels.spec import Specialisation
from cupyattn.kernels.structs import ATTENTION_PARAMS


@dataclass(frozen=True)
class FlashConfig:
    """One CTA per warps * m_tiles * 16 query rows; tile_k keys at a time."""

    m_tiles: int
    warps: int
    tile_k: int
    ctas_per_sm: int
    reason: str

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps * self.m_tiles * 16


class FlashOptions(NamedTuple):
    """Which options a call has; dtype names of arrays, "void" for those it has not."""

    bias: str = "void"
    bias_vec: int = 1
    """Neighbouring keys of the bias that are read at once: 4, 2 or 1."""
    mask: bool = False
    mask_vec: int = 1
    """The same for the mask."""
    slopes: str = "void"
    softcap: bool = False
    sinks: str = "void"
    dropout: bool = False


PLAIN = FlashOptions()

# The first row whose head dim is not below max(D, Dv). "Models" is the tensor utilisation of the
# main loop on a T4 by a static model of the machine code (NVRTC 12.9.86, 2026-11-21, +-0.05): no
# Turing card has been measured. Two CTAs of 4 warps keep an SM's tensor cores busier than one of
# 8, whose warps go through their phases together; 32 rows a warp halve the shared-memory traffic,
# which binds otherwise.
FLASH = {
    40: FlashConfig(2, 4, 48, 2, "models 0.73, and 0.67 with 32 keys, 0.66 with 64"),
    64: FlashConfig(2, 4, 64, 2, "models 0.87, and 0.85 with 32 keys, 0.79 with 48"),
    80: FlashConfig(2, 4, 48, 2, "models 0.85, and 0.84 with 32 keys; 64 keep one CTA, and 0.53"),
    96: FlashConfig(2, 4, 32, 2, "models 0.86, and 0.74 with 16 keys; 48 keep one CTA, and 0.52"),
    128: FlashConfig(2, 4, 16, 2, "models 0.89, and 0.78 with 32 keys, where 196 bytes spill"),
    160: FlashConfig(
        1, 8, 48, 1, "models 0.68, and 0.64 with 32 keys, 0.67 as 12 warps; 16 rows from here on"
    ),
    192: FlashConfig(1, 8, 32, 1, "models 0.73, and 0.61 with 16 keys"),
    256: FlashConfig(1, 8, 16, 1, "models 0.67, and 0.70 with 32 keys, where 36 bytes spill"),
}
# One call of Philox serves 32 keys of a row: rows whose tiles are no multiple of that may have
# others under dropout.
FLASH_DROPOUT = {
    40: FlashConfig(2, 4, 64, 2, "models 0.61, and 0.60 with 32 keys, 0.57 with 48"),
    80: FlashConfig(2, 4, 32, 2, "models 0.76, and 0.68 with 48 keys, where 20 bytes spill"),
}
# A float32 bias waits in four registers for each 4 keys, where others take two or one.
FLASH_FLOAT32_BIAS = {
    64: FlashConfig(2, 4, 48, 2, "models 0.69, and 0.66 with 32 keys, 0.65 with 64"),
    80: FlashConfig(2, 4, 32, 2, "models 0.76, and 0.66 with 48 keys, where 72 bytes spill"),
}
_SMEM_UNIT = 128  # bytes: alignment of each buffer in Smem


def flash_config(head_dim: int, head_dim_v: int, options: FlashOptions = PLAIN) -> FlashConfig:
    """Return the table row for these head dims and options."""
    row = limit_of(FLASH, head_dim, head_dim_v)
    if options.dropout:
        return FLASH_DROPOUT.get(row, FLASH[row])
    if (options.bias, options.bias_vec) == ("float32", 4):
        return FLASH_FLOAT32_BIAS.get(row, FLASH[row])
    return FLASH[row]


def flash_longest_tile(head_dim: int, head_dim_v: int) -> int:
    """Return the most keys of a tile that these head dims have with any options."""
    row = limit_of(FLASH, head_dim, head_dim_v)
    return max(
        rows[row].tile_k for rows in (FLASH, FLASH_DROPOUT, FLASH_FLOAT32_BIAS) if row in rows
    )


@cache
def flash(
    head_dim: int, head_dim_v: int, vec: int, options: FlashOptions = PLAIN
) -> Specialisation:
    """Specialise the tensor-core kernel; `vec` is 8 where rows are aligned to 16 bytes, else 1."""
    config = flash_config(head_dim, head_dim_v, options)
    shared_bytes = _flash_shared_bytes(config, head_dim, head_dim_v)
    return ATTENTION_FORWARD.specialise(
        threads=config.warps * WARP_SIZE,
        shared_bytes=shared_bytes,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        M_TILES=config.m_tiles,
        WARPS=config.warps,
        TILE_K=config.tile_k,
        VEC=vec,
        MIN_CTAS=config.ctas_per_sm,
        SHARED_BYTES=shared_bytes,
        PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
        **option_macros(ATTENTION_FORWARD, options),
    )


def _flash_shared_bytes(config: FlashConfig, head_dim: int, head_dim_v: int) -> int:
    """K and V twice, or Q, or the output tile (Smem in forward.cu, which asserts it)."""
    k_row, v_row = round_up(head_dim, 8) * 2, round_up(head_dim_v, 8) * 2  # bytes
    tiles = (
        round_up(2 * config.tile_k * k_row, _SMEM_UNIT)
        + round_up(2 * config.tile_k * v_row, _SMEM_UNIT),
        config.tile_q * k_row,
        config.tile_q * v_row,
    )
    return round_up(max(tiles), _SMEM_UNIT)


@dataclass(frozen=True)
class FlashF32Config:
    """A warp's lanes are 32 / column_lanes by column_lanes; each owns 8 rows and 2 * pairs keys."""

    column_lanes: int
    pairs: int
    warps: int
    ctas_per_sm: int
    reason: str

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps * self.warp_rows

    @property
    def warp_rows(self) -> int:
        """Query rows per warp."""
        return 8 * WARP_SIZE // self.column_lanes

    @property
    def tile_k(self) -> int:
        """Keys per tile."""
        return self.column_lanes * 2 * self.pairs


# The first row whose head dim is not below max(D, Dv).
FLASH_F32 = {
    64: FlashF32Config(8, 4, 4, 2, "8 x 8 scores and up to 8 x 8 outputs a thread"),
    128: FlashF32Config(16, 4, 4, 2, "16 lanes to a row: 8 x 8 outputs a thread again"),
    160: FlashF32Config(16, 4, 8, 1, "8 warps have less on the way: room for 10 output columns"),
    256: FlashF32Config(16, 2, 8, 1, "8 x 16 outputs a thread leave room for 8 x 4 scores"),
}
F32_DTYPES = ("float32", "bfloat16")
"""What Turing's tensor cores do not take, and this kernel does."""
F32_VECTOR_ITEMS = 4
"""Items that the float32 kernel loads at once where rows are aligned to so many."""
_PANEL_KEYS = 16  # of V at a time
_SLICE_ROW = 16 * FLOAT_BYTES  # bytes of a row of a slice of Q or K


def flash_f32_config(head_dim: int, head_dim_v: int) -> FlashF32Config:
    """Return the table row for these head dims."""
    return row_of(FLASH_F32, head_dim, head_dim_v)


@cache
def flash_f32(
    dtype: str, head_dim: int, head_dim_v: int, vec: int, options: FlashOptions = PLAIN
) -> Specialisation:
    """Specialise the float32 flash kernel; `vec` is 4 where rows are aligned to it, else 1."""
    config = flash_f32_config(head_dim, head_dim_v)
    shared_bytes = _flash_f32_shared_bytes(config, head_dim_v)
    return ATTENTION_FORWARD_F32.specialise(
        threads=config.warps * WARP_SIZE,
        shared_bytes=shared_bytes,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WARPS=config.warps,
        COLUMN_LANES=config.column_lanes,
        PAIRS=config.pairs,
        VEC=vec,
        MIN_CTAS=config.ctas_per_sm,
        SHARED_BYTES=shared_bytes,
        PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
        **option_macros(ATTENTION_FORWARD_F32, options),
    )


def _flash_f32_shared_bytes(config: FlashF32Config, head_dim_v: int) -> int:
    """Two stages, each a slice of Q and K or a panel of V, and P (Smem in forward_f32.cu)."""
    columns = -(-head_dim_v // config.column_lanes)
    columns += columns % 4 == 3
    stage = max(
        (config.tile_q + config.tile_k) * _SLICE_ROW,
        _PANEL_KEYS * config.column_lanes * columns * FLOAT_BYTES,
    )
    return 2 * stage + config.tile_q * 2 * config.column_lanes * FLOAT_BYTES


_EACH_OPTION = (
    FlashOptions(bias="float16"),
    FlashOptions(bias="float16", bias_vec=2),
    FlashOptions(bias="float32", bias_vec=2),
    FlashOptions(mask=True),
    FlashOptions(mask=True, mask_vec=2),
    FlashOptions(slopes="float32"),
    FlashOptions(softcap=True),
    FlashOptions(sinks="float32"),
    FlashOptions(dropout=True),
)


_QUADS = (
    FlashOptions(bias="float16", bias_vec=4),
    FlashOptions(bias="float32", bias_vec=4),
    FlashOptions(mask=True, mask_vec=4),
)
"""What only the tensor-core kernel reads four keys at a time."""


def catalogue() -> Iterator[Specialisation]:
    """Yield every row at its largest head dim, in each dtype, with vector and scalar loads."""
    for head_dim in FLASH:
        for vec in (vector_items("float16"), 1):
            yield flash(head_dim, head_dim, vec)
    for dtype in F32_DTYPES:
        for head_dim in FLASH_F32:
            for vec in (F32_VECTOR_ITEMS, 1):
                yield flash_f32(dtype, head_dim, head_dim, vec)
    for head_dim in FLASH_DROPOUT:
        yield flash(head_dim, head_dim, vector_items("float16"), FlashOptions(dropout=True))
    for options in _QUADS:
        for head_dim in (64, 80, 128):
            yield flash(head_dim, head_dim, vector_items("float16"), options)
    for options in _EACH_OPTION:
        yield flash(64, 64, vector_items("float16"), options)
        yield flash_f32("float32", 64, 64, F32_VECTOR_ITEMS, options)
