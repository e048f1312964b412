"""Launch configurations of the tensor-core forward of attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from cupyattn.ops.attention.kernels import parameters
from cupyattn.ops.attention.kernels.decode import INTEGER_BITS
from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import (
    EACH_OPTION,
    EACH_PAGED_OPTION,
    PLAIN,
    FlashOptions,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import Gates, KernelSpec, Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import (
    FLOAT_BYTES,
    cpp_bool,
    limit_of,
    option_macros,
    round_up,
    row_of,
    rows_for,
    with_gates,
    with_l2_ahead,
    with_mma_k,
)


@dataclass(frozen=True)
class FlashConfig:
    """One CTA per warps / sharing * m_tiles * 16 query rows; tile_k keys at a time.

    The kernels of dq and of a reduced dbias have such configurations too.
    """

    m_tiles: int
    warps: int
    tile_k: int
    ctas_per_sm: int
    reason: str
    mma_k: int = 8
    """Columns of one tensor-core instruction of Q K^T."""
    l2_ahead: int = 0
    """How many tiles ahead of its use a tile is prefetched into L2; 0 for no prefetch."""
    gates: Gates = Gates()
    accumulator: str = "float32"
    """Type of the sums of P V within a tile of keys."""
    sharing: int = 1
    """Warps that share rows, each with its own columns: 4 in forward_wide.cuh, elsewhere 1."""

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps // self.sharing * self.warp_rows

    @property
    def warp_rows(self) -> int:
        """Query rows per warp."""
        return self.m_tiles * 16


class SharingConfig(Protocol):
    """A configuration of warps that share rows, of this kernel or of that of sm_80 and later."""

    @property
    def sharing(self) -> int:
        """Warps that share rows."""

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""

    @property
    def tile_k(self) -> int:
        """Keys of a tile."""


# The first row whose head dim is not below max(D, Dv). "Models" is the tensor utilisation of the
# main loop on a T4 by a static model of the machine code (NVRTC 12.9.86, 2026-11-28, +-0.05): no
# Turing device has been measured. Two CTAs of 4 warps keep an SM's tensor cores busier than one of
# 8, whose warps go through their phases together; 32 rows a warp halve the shared-memory traffic,
# which binds otherwise.
_TURING = {
    40: FlashConfig(2, 4, 48, 2, "models 0.69, and 0.71 with 32 keys, 0.65 with 64"),
    64: FlashConfig(2, 4, 64, 2, "models 0.87, as with 32 keys, and 0.78 with 48"),
    80: FlashConfig(2, 4, 48, 2, "models 0.85, as with 32 keys; 64 keep one CTA, and 0.51"),
    96: FlashConfig(2, 4, 32, 2, "models 0.84, and 0.61 with 16 keys; 48 keep one CTA, and 0.50"),
    128: FlashConfig(2, 4, 16, 2, "models 0.84, and 0.75 with 32 keys, where 196 bytes spill"),
    160: FlashConfig(
        1, 8, 48, 1, "models 0.68, and 0.64 with 32 keys, 0.67 as 12 warps; 16 rows from here on"
    ),
    192: FlashConfig(1, 8, 32, 1, "models 0.73, and 0.60 with 16 keys"),
    256: FlashConfig(1, 8, 16, 1, "models 0.67, and 0.69 with 32 keys, where 36 bytes spill"),
    512: FlashConfig(
        2, 8, 16, 1, "models 0.51, and 0.47 at 384; four warps share 32 rows", sharing=4
    ),
}
# From head dim 160 on shared memory binds, at 0.79, 0.80 and 0.80 of the tensor cores: these rows
# have 0.87, 0.92 and 0.84 of that. The warps of the one CTA that fits wait for shared memory and do
# their exponentials at the same time. At 512 it binds at 0.75 (2026-11-28; forward_wide.cuh
# names other ways to share the columns).
# Tiles of 192 rows for long sequences: a fragment of K and V feeds three products.
_TURING_TALL = {
    40: FlashConfig(3, 4, 32, 2, "models 0.82, where 128 rows have 0.69", gates=Gates(0.82))
}
_TALL_HEAD_DIMS = range(33, 41)  # 0.61 and 0.68 at 32, 0.44 and 0.58 at 24
TALL = "tall"
"""Among the admissible rows the name of that."""
# What options take of registers and of instructions wants other tiles. The first kind that a call
# is of decides (`_kind`). None spills in the loop over full tiles, few do in that over masked ones.
_TURING_WITH = {
    # One call of Philox serves 32 keys of a row: rows whose tiles are no multiple of that may have
    # others.
    "dropout": {
        40: FlashConfig(2, 4, 64, 2, "models 0.55 and 0.58 at 32; 0.60 and 0.47 with 32 keys"),
        80: FlashConfig(2, 4, 32, 2, "models 0.75, and 0.62 with 48 keys, where 20 bytes spill"),
    },
    # The lists take registers: longer tiles spill in the loop over partial ones. The loop over full
    # tiles models 0.72, 0.86 and 0.80 at head dims 40, 96 and 128, where a call without a mask has
    # 0.69, 0.84 and 0.84. A partial tile takes 1.5 and 1.7 times a full one's at 64 and 128. Of 16
    # documents in 16,384 tokens a quarter of the tiles are partial, and both loops take 1.19 and
    # 1.14 of the time that a plain call takes for as many tiles (1.18 with 32 keys at 64; an H200
    # that runs the same code takes 1.39 with 48, 1.52 with 32 and 1.40 with 64, 2026-11-24,
    # `benchmark attention --block-mask --head-dim 64`). In all 28 bytes spill with 48 keys.
    "block mask": {
        64: FlashConfig(2, 4, 48, 2, "models 0.83, and 0.69 with 32 keys, 0.62 with 64"),
        80: FlashConfig(2, 4, 32, 2, "models 0.88, and 0.79 with 48 keys, where 40 bytes spill"),
    },
    # A float32 bias waits in four registers for each 4 keys, where others take two or one.
    "float32 bias by 4": {
        64: FlashConfig(2, 4, 48, 2, "models 0.59, as with 32 keys, and 0.50 with 64"),
        80: FlashConfig(2, 4, 32, 2, "models 0.68, and 0.52 with 48 keys, where 72 bytes spill"),
    },
    # (By 4, 16 keys model 0.73 and 0.71, and the usual 64 have 0.67 and 0.70, where 4 bytes spill.
    # An H200 that runs the same code takes 1.5 times as long with 16: 119 and 135 TFLOP/s, for 183
    # and 197 with 64, 2026-11-24.)
    "bias or mask one by one": {
        64: FlashConfig(2, 4, 48, 2, "models 0.54 and 0.57, and 0.45 and 0.44 with 64 keys")
    },
    "score_mod": {64: FlashConfig(2, 4, 48, 2, "models 0.75 for ALiBi, and 0.64 with 32 keys")},
    "mask_mod": {64: FlashConfig(2, 4, 32, 2, "models 0.80 of documents, and 0.71 with 48 keys")},
    "softcap": {
        64: FlashConfig(2, 4, 48, 2, "models 0.65, and 0.58 to 0.79 with 64 keys, 0.49 with 32")
    },
    "slopes": {64: FlashConfig(2, 4, 48, 2, "models 0.74, and 0.79 with 64 keys, 0.72 with 32")},
}
# Over a cache of integers, in 8 and 4 bits (the same model): making floats of them takes
# 0.05 to 0.16 of the utilisation, and registers. No loop over full tiles spills; that over masked
# ones does by 8 bytes at head dim 96, by up to 44 at 128, as over floats, and by 16 at 256.
_TURING_INTEGERS = {
    40: FlashConfig(2, 4, 48, 2, "models 0.60 and 0.58, and 0.52 and 0.59 with 64 keys"),
    64: FlashConfig(2, 4, 32, 2, "models 0.69 and 0.65, and 0.76 and 0.70 with 48 keys"),
    80: FlashConfig(2, 4, 32, 2, "models 0.69 and 0.67, and 0.74 with 48 keys, which spill"),
    96: FlashConfig(2, 4, 32, 2, "models 0.77 and 0.75"),
    128: FlashConfig(2, 4, 16, 2, "models 0.63 and 0.61"),
    192: FlashConfig(1, 8, 32, 1, "models 0.64 and 0.63"),
    256: FlashConfig(1, 8, 16, 1, "models 0.66 and 0.65, and 0.49 and 0.55 with 32 keys"),
    512: FlashConfig(2, 8, 16, 1, "models 0.36 and 0.40", sharing=4),
}


def _gains(on_rtx: float, others: str = "") -> str:
    """Return the reason of a row with float16 sums: its rate to that with float32 ones."""
    return (
        f"models {on_rtx:.2f} of the rate with float32 sums on an RTX 2080 Ti (2026-11-29)"
        f"{others and '; '}{others}"
    )


# Float16 accumulators for P V: on GeForce devices mma with them runs at twice the rate. Rates are
# those of the static model, to the row of the plain table; with Q K^T in float32 at most 1.33. On
# a T4 these rows have 0.82 to 0.95 (2026-11-29). Tiles of 16 keys, the only ones that fit at head
# dim 128, are added to float32 sums after two steps: one step for each two. 48 keys at 64 have
# 1.13, 32 at 80 1.19, 64 at 40 1.06.
_TURING_HALF_SUMS = {
    40: FlashConfig(2, 4, 48, 2, _gains(1.08, "the softmax limits it")),
    64: FlashConfig(2, 4, 64, 2, _gains(1.22, "tensor cores are busy for 0.95 of the time")),
    80: FlashConfig(2, 4, 48, 2, _gains(1.23)),
    96: FlashConfig(2, 4, 32, 2, _gains(1.13, "48 keys spill 76 bytes and keep one CTA")),
    128: FlashConfig(2, 4, 16, 2, _gains(1.12, "with 32 keys 440 bytes spill")),
    160: FlashConfig(1, 8, 48, 1, _gains(1.10)),
    192: FlashConfig(1, 8, 32, 1, _gains(1.03, "shared memory limits it")),
    256: FlashConfig(1, 8, 16, 1, _gains(1.12, "1.17 with 32 keys, where 40 bytes spill")),
}
_HALF_SUMS_GATES = {
    40: Gates(0.71),
    64: Gates(0.78, 144),
    80: Gates(0.85, 64),
    96: Gates(0.87, 32),
    128: Gates(0.69, 64),
    160: Gates(0.68, 32),
    192: Gates(0.70, 64),
    256: Gates(0.60, 16),
}
_GATES = {
    40: Gates(0.69, scalar=0.37, kernels=0.68),
    64: Gates(0.87, 128, scalar=0.64, items=0.49, options=0.66, kernels=0.81, most_spills=176),
    80: Gates(0.85, 64, scalar=0.41, items=0.61, kernels=0.73, most_spills=112),
    96: Gates(0.86, 16, scalar=0.65, kernels=0.85),
    128: Gates(0.83, 64, scalar=0.54, items=0.64, options=0.79, kernels=0.75, most_spills=80),
    160: Gates(0.69, scalar=0.38, kernels=0.64, most_spills=64),
    192: Gates(0.73, scalar=0.54, kernels=0.68),
    256: Gates(0.67, 32, scalar=0.49, kernels=0.65, most_spills=64),
    512: Gates(0.51, 80, scalar=0.41, items=0.41, options=0.46, kernels=0.44, most_spills=160),
}
_WITH_GATES = {
    "dropout": {40: Gates(0.62, options=0.55), 80: Gates(0.75)},
    "block mask": {64: Gates(0.83, 32), 80: Gates(0.88, 48)},
    "float32 bias by 4": {64: Gates(0.71, 48, items=0.59), 80: Gates(0.78, items=0.68)},
    "bias or mask one by one": {64: Gates(0.61, 96, items=0.54)},
    "score_mod": {64: Gates(0.75, 32)},
    "mask_mod": {64: Gates(0.80, 16)},
    "softcap": {64: Gates(0.65, 32, kernels=0.59)},
    "slopes": {64: Gates(0.78, 32, kernels=0.76, options=0.74)},
}
_INTEGERS_GATES = {
    40: Gates(0.58),
    64: Gates(0.74, scalar=0.48, options=0.56, kernels=0.66),
    80: Gates(0.69),
    96: Gates(0.75, 16),
    128: Gates(0.68, 64, kernels=0.61),
    192: Gates(0.63),
    256: Gates(0.65, 32),
    512: Gates(0.35, 192),
}
# From sm_80 on Q K^T takes two steps of columns in one instruction; P V still takes one.
# A tile of 16 keys takes an H200 a microsecond, and so does its memory: causal attention of 131,072
# tokens, 16 heads of 128, took 203.7 ms with tiles brought to L2 two ahead, 209.4 four ahead and
# 231.2 without; where all keys are seen 52.3, 53.7 and 66.8 (32,768 queries, 65,536 keys; sm_90
# code, 2026-11-24, by edits of the source before there was a macro). At head dim 64, with tiles of
# 64 keys, it made no difference. A Turing device's tiles take longer; none has been measured.
FLASH = with_l2_ahead(with_gates(_TURING, _GATES), {128: 2})
FLASH_TALL = with_mma_k(_TURING_TALL)
FLASH_WITH = {
    kind: with_mma_k(with_gates(rows, _WITH_GATES[kind])) for kind, rows in _TURING_WITH.items()
}
FLASH_INTEGERS = with_mma_k(with_gates(_TURING_INTEGERS, _INTEGERS_GATES))
FLASH_HALF_SUMS = {
    75: {
        limit: replace(row, accumulator="float16")
        for limit, row in with_gates(_TURING_HALF_SUMS, _HALF_SUMS_GATES).items()
    }
}


def flash_row(
    arch: int, head_dim: int, head_dim_v: int, options: FlashOptions = PLAIN
) -> FlashConfig:
    """Return the table row for these head dims and options."""
    rows = rows_for(FLASH, arch)
    limit = limit_of(rows, head_dim, head_dim_v)
    kind = _kind(options)
    return rows[limit] if kind is None else rows_for(FLASH_WITH[kind], arch).get(limit, rows[limit])


def half_sums_row(
    arch: int, head_dim: int, head_dim_v: int, options: FlashOptions = PLAIN
) -> FlashConfig:
    """Return the configuration with float16 accumulators for these head dims and options.

    Options that have a table of their own keep its tiles.
    """
    rows = rows_for(FLASH_HALF_SUMS, arch)
    limit, kind = limit_of(rows, head_dim, head_dim_v), _kind(options)
    if kind is not None and (row := rows_for(FLASH_WITH[kind], arch).get(limit)):
        return replace(row, accumulator="float16", gates=Gates())
    return rows[limit]


def _kind(options: FlashOptions) -> str | None:
    """Return which of the tables of options has the row, None for that of plain calls."""
    modified = options.modified
    together = {options.bias_vec} if options.bias != "void" else set()
    together |= {options.mask_vec} if options.mask else set()
    kinds = {
        "dropout": options.dropout,
        "block mask": modified is not None and modified.blocks,
        "float32 bias by 4": (options.bias, options.bias_vec) == ("float32", 4),
        "bias or mask one by one": 1 in together,
        "score_mod": modified is not None and modified.score is not None,
        "mask_mod": modified is not None and modified.mask is not None,
        "softcap": options.softcap,
        "slopes": options.slopes != "void",
    }
    return next((kind for kind, holds in kinds.items() if holds), None)


def admissible_rows(arch: int, head_dim: int, head_dim_v: int) -> dict[str, FlashConfig]:
    """Return the rows that have room for these head dims, by the head dim that each is made for.

    The first is the usual one. None has longer tiles than rows for these head dims have.
    """
    rows, longest = rows_for(FLASH, arch), flash_longest_tile(arch, head_dim, head_dim_v)
    least = limit_of(rows, head_dim, head_dim_v)
    found = {
        str(limit): row
        for limit, row in rows.items()
        if limit >= least and row.tile_k <= longest and row.sharing == rows[least].sharing
    }
    if max(head_dim, head_dim_v) in _TALL_HEAD_DIMS:
        found[TALL] = rows_for(FLASH_TALL, arch)[least]
    return found


def paged_row(arch: int, head_dim: int, cache: str = "float16") -> FlashConfig:
    """Return the table row for a paged cache of that dtype."""
    if cache in INTEGER_BITS:
        return row_of(FLASH_INTEGERS, arch, head_dim, head_dim)
    return flash_row(arch, head_dim, head_dim)


def flash_longest_tile(arch: int, head_dim: int, head_dim_v: int) -> int:
    """Return the most keys of a tile that these head dims have with any options."""
    tables = [rows_for(table, arch) for table in (FLASH, *FLASH_WITH.values())]
    limit = limit_of(tables[0], head_dim, head_dim_v)
    return max(rows[limit].tile_k for rows in tables if limit in rows)


KERNEL = KernelSpec("attention_forward", "attention/tensor_core/forward.cu", parameters.FLASH)
PAGED = KernelSpec(
    "attention_forward_paged", "attention/tensor_core/forward_paged.cu", parameters.PAGED
)
VARLEN = KernelSpec(
    "attention_forward_varlen", "attention/tensor_core/forward.cu", parameters.VARLEN
)
# Rotates queries as it loads them, which leaves the main loop as it is. Keys are rotated before
# (../rotary.py): in the loop, by each CTA anew, that models 0.57, 0.56 and 0.65 at head dims 64, 80
# and 128 instead of 0.87, 0.84 and 0.89 (`python -m cupyattn turing`, T4, 2026-11-22).
ROTARY = KernelSpec(
    "attention_forward_rotary", "attention/tensor_core/forward_rotary.cu", parameters.ROTARY
)
ROTARY_VARLEN = KernelSpec(
    "attention_forward_rotary_varlen",
    "attention/tensor_core/forward_rotary.cu",
    parameters.ROTARY_VARLEN,
)
SPLIT = KernelSpec(
    "attention_forward_split", "attention/tensor_core/forward_split.cu", parameters.SPLIT
)
KERNELS = (KERNEL, PAGED, VARLEN, ROTARY, ROTARY_VARLEN, SPLIT)


_SMEM_UNIT = 128  # bytes: alignment of each buffer in Smem


@cache
def flash(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    row: FlashConfig | None = None,
    spec: KernelSpec = KERNEL,
    dtype: str = "float16",
    **macros: Any,
) -> Specialisation:
    """Specialise one of `KERNELS`; `vec` is 8 where rows are aligned to 16 bytes, or 1.

    The row is that of the table, unless another admissible one is given. `macros` are those that
    kernels of rotary or of a paged cache have besides. Only that of a paged cache takes another
    dtype than float16.
    """
    row = row or flash_row(arch, head_dim, head_dim_v, options)
    return modified(spec, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_flash_shared_bytes(row, head_dim, head_dim_v),
        gates=row.gates,
        reason=row.reason,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        M_TILES=row.m_tiles,
        WARPS=row.warps,
        TILE_K=row.tile_k,
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=row.mma_k,
        L2_AHEAD=row.l2_ahead,
        ACCUMULATOR=row.accumulator,
        **macros,
        **option_macros(options),
    )


def rotary(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    table: str = "float32",
    interleaved: bool = False,
    packed: bool = False,
    row: FlashConfig | None = None,
) -> Specialisation:
    """Specialise the kernel that rotates queries by tables of that dtype."""
    macros = {"TABLE": table, "INTERLEAVED": cpp_bool(interleaved)}
    spec = ROTARY_VARLEN if packed else ROTARY
    return flash(arch, head_dim, head_dim_v, vec, options, row, spec, **macros)


def paged(
    arch: int,
    head_dim: int,
    vec: int,
    options: FlashOptions = PLAIN,
    cache: str = "float16",
    dtype: str = "float16",
    row: FlashConfig | None = None,
) -> Specialisation:
    """Specialise the kernel over a paged cache of that dtype.

    From sm_80 on it has caches of integers alone, and queries of bfloat16 too: native.py has the
    kernel over floats.
    """
    row = row or paged_row(arch, head_dim, cache)
    return flash(arch, head_dim, head_dim, vec, options, row, PAGED, dtype, CACHE=cache)


def _flash_shared_bytes(config: FlashConfig, head_dim: int, head_dim_v: int) -> int:
    """K and V twice, or Q, or the output tile (Smem in forward.cuh, which asserts it)."""
    if config.sharing > 1:
        return wide_shared_bytes(config, head_dim, head_dim_v)
    k_row, v_row = round_up(head_dim, 8) * 2, round_up(head_dim_v, 8) * 2  # bytes
    tiles = (
        round_up(2 * config.tile_k * k_row, _SMEM_UNIT)
        + round_up(2 * config.tile_k * v_row, _SMEM_UNIT),
        config.tile_q * k_row,
        config.tile_q * v_row,
    )
    return round_up(max(tiles), _SMEM_UNIT)


def wide_shared_bytes(
    config: SharingConfig, head_dim: int, head_dim_v: int, *, key_places: int = 1
) -> int:
    """Return the bytes of Smem in forward_wide.cuh, which asserts it.

    Those are K, once or twice, V twice and what warps exchange; or Q; or the output tile. Warps
    exchange three parts of the scores, P, and a factor of each row.
    """
    columns = 32 * config.sharing  # of which each warp has whole groups
    k_row, v_row = round_up(head_dim, columns) * 2, round_up(head_dim_v, columns) * 2  # bytes
    scores = config.tile_q * config.tile_k
    exchanged = scores * (3 * FLOAT_BYTES + 2) + config.tile_q * FLOAT_BYTES
    tiles = (
        config.tile_k * (key_places * k_row + 2 * v_row) + exchanged,
        config.tile_q * k_row,
        config.tile_q * v_row,
    )
    return round_up(max(tiles), _SMEM_UNIT)


_QUADS = (
    FlashOptions(bias="float16", bias_vec=4),
    FlashOptions(bias="float32", bias_vec=4),
    FlashOptions(mask=True, mask_vec=4),
)
"""Options that only the tensor-core kernel reads four keys at a time."""


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row at its largest head dim, with vector and scalar loads; options by one."""
    vec = vector_items("float16")
    for head_dim in rows_for(FLASH, arch):
        yield flash(arch, head_dim, head_dim, vec)
        yield flash(arch, head_dim, head_dim, 1)
    for head_dim, row in rows_for(FLASH_TALL, arch).items():
        yield flash(arch, head_dim, head_dim, vec, row=row)
    if arch < NATIVE_ARCH:
        for head_dim, row in rows_for(FLASH_HALF_SUMS, arch).items():
            yield flash(arch, head_dim, head_dim, vec, row=row)
        half_sums = rows_for(FLASH_HALF_SUMS, arch)[64]
        yield flash(arch, 64, 64, vec, row=half_sums, spec=VARLEN)
        yield paged(arch, 64, vec, row=half_sums)
    for head_dim in rows_for(FLASH_WITH["dropout"], arch):
        yield flash(arch, head_dim, head_dim, vec, FlashOptions(dropout=True))
    for options in _QUADS:
        for head_dim in (64, 80, 128):
            yield flash(arch, head_dim, head_dim, vec, options)
    for options in EACH_OPTION:
        yield flash(arch, 64, 64, vec, options)
    for head_dim in rows_for(FLASH, arch):
        yield paged(arch, head_dim, vec)
        yield flash(arch, head_dim, head_dim, vec, spec=VARLEN)
        yield rotary(arch, head_dim, head_dim, vec)
        yield flash(arch, head_dim, head_dim, vec, spec=SPLIT)
    yield flash(arch, 64, 64, vec, FlashOptions(dropout=True), spec=SPLIT)
    yield paged(arch, 64, 1)
    yield rotary(arch, 64, 64, 1, table="float16")
    yield rotary(arch, 64, 64, vec, interleaved=True)
    for head_dim in (64, 128):
        yield rotary(arch, head_dim, head_dim, vec, packed=True)
    yield flash(arch, 64, 64, 1, spec=VARLEN)
    for options in EACH_OPTION:
        yield flash(arch, 64, 64, vec, options, spec=VARLEN)
    for options in EACH_PAGED_OPTION:
        yield paged(arch, 64, vec, options)
    for integers in INTEGER_BITS:
        for head_dim in rows_for(FLASH_INTEGERS, arch):
            yield paged(arch, head_dim, vec, cache=integers)
        yield paged(arch, 64, 1, cache=integers)
        for options in EACH_PAGED_OPTION:
            yield paged(arch, 64, vec, options, integers)
    if arch >= NATIVE_ARCH:
        yield from _bfloat16_catalogue(arch, vec)


def _bfloat16_catalogue(arch: int, vec: int) -> Iterator[Specialisation]:
    """Yield the kernels of bfloat16 queries: over caches of integers alone."""
    for stored in INTEGER_BITS:
        for head_dim in rows_for(FLASH_INTEGERS, arch):
            yield paged(arch, head_dim, vec, cache=stored, dtype="bfloat16")
        for options in EACH_PAGED_OPTION:
            yield paged(arch, 64, vec, options, stored, "bfloat16")
        yield paged(arch, 64, 1, cache=stored, dtype="bfloat16")
