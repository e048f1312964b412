"""Launch configurations of the tensor-core forward of attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from cupyattn.ops.attention.kernels import parameters
from cupyattn.ops.attention.kernels.decode import INTEGER_BITS
from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import (
    EACH_OPTION,
    EACH_PAGED_OPTION,
    PLAIN,
    FlashOptions,
)
from cupyattn.ops.attention.kernels.tensor_core.forward_rows import (
    FLASH,
    FLASH_INTEGERS,
    FLASH_TALL,
    FLASH_WITH,
    FlashConfig,
    flash_row,
    paged_row,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import cpp_bool, option_macros, round_up, rows_for

KERNEL = KernelSpec("attention_forward", "attention/tensor_core/forward.cu", parameters.FLASH)
PAGED = KernelSpec(
    "attention_forward_paged", "attention/tensor_core/forward_paged.cu", parameters.PAGED
)
VARLEN = KernelSpec(
    "attention_forward_varlen", "attention/tensor_core/forward_varlen.cu", parameters.VARLEN
)
# Rotates queries as it loads them, which leaves the main loop as it is. Keys are rotated before
# (../rotary.py): in the loop, by each CTA anew, that models 0.57, 0.56 and 0.65 at head dims 64, 80
# and 128 instead of 0.87, 0.84 and 0.89 (`python -m cupyattn turing`, T4, 2026-11-22).
ROTARY = KernelSpec(
    "attention_forward_rotary", "attention/tensor_core/forward_rotary.cu", parameters.ROTARY
)
ROTARY_VARLEN = KernelSpec(
    "attention_forward_rotary_varlen",
    "attention/tensor_core/forward_rotary_varlen.cu",
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
) -> Specialisation:
    """Specialise the tensor-core kernel; `vec` is 8 where rows are aligned to 16 bytes, or 1.

    The row is that of the table, unless another admissible one is given.
    """
    row = row or flash_row(arch, head_dim, head_dim_v, options)
    return _specialise(KERNEL, row, head_dim, head_dim_v, vec, options)


@cache
def varlen(
    arch: int, head_dim: int, head_dim_v: int, vec: int, options: FlashOptions = PLAIN
) -> Specialisation:
    """Specialise the kernel of packed sequences."""
    row = flash_row(arch, head_dim, head_dim_v, options)
    return _specialise(VARLEN, row, head_dim, head_dim_v, vec, options)


@cache
def rotary(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    table: str = "float32",
    interleaved: bool = False,
    packed: bool = False,
) -> Specialisation:
    """Specialise the kernel that rotates queries by tables of that dtype."""
    row = flash_row(arch, head_dim, head_dim_v, options)
    of_tables = {"TABLE": table, "INTERLEAVED": cpp_bool(interleaved)}
    spec = ROTARY_VARLEN if packed else ROTARY
    return _specialise(spec, row, head_dim, head_dim_v, vec, options, **of_tables)


@cache
def split(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    row: FlashConfig | None = None,
) -> Specialisation:
    """Specialise the kernel of whose CTAs several share the keys of a tile of rows."""
    row = row or flash_row(arch, head_dim, head_dim_v, options)
    return _specialise(SPLIT, row, head_dim, head_dim_v, vec, options)


@cache
def paged(
    arch: int, head_dim: int, vec: int, options: FlashOptions = PLAIN, cache: str = "float16"
) -> Specialisation:
    """Specialise the kernel over a paged cache of that dtype."""
    row = paged_row(arch, head_dim, cache)
    return _specialise(PAGED, row, head_dim, head_dim, vec, options, CACHE=cache)


def _specialise(
    spec: KernelSpec,
    row: FlashConfig,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions,
    **macros: Any,
) -> Specialisation:
    return modified(spec, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_flash_shared_bytes(row, head_dim, head_dim_v),
        gates=row.gates,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        M_TILES=row.m_tiles,
        WARPS=row.warps,
        TILE_K=row.tile_k,
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=row.mma_k,
        L2_AHEAD=row.l2_ahead,
        **macros,
        **option_macros(options),
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


_QUADS = (
    FlashOptions(bias="float16", bias_vec=4),
    FlashOptions(bias="float32", bias_vec=4),
    FlashOptions(mask=True, mask_vec=4),
)
"""What only the tensor-core kernel reads four keys at a time."""


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row at its largest head dim, with vector and scalar loads; options by one."""
    vec = vector_items("float16")
    for head_dim in rows_for(FLASH, arch):
        yield flash(arch, head_dim, head_dim, vec)
        yield flash(arch, head_dim, head_dim, 1)
    for head_dim, row in rows_for(FLASH_TALL, arch).items():
        yield flash(arch, head_dim, head_dim, vec, row=row)
    for head_dim in rows_for(FLASH_WITH["dropout"], arch):
        yield flash(arch, head_dim, head_dim, vec, FlashOptions(dropout=True))
    for options in _QUADS:
        for head_dim in (64, 80, 128):
            yield flash(arch, head_dim, head_dim, vec, options)
    for options in EACH_OPTION:
        yield flash(arch, 64, 64, vec, options)
    for head_dim in rows_for(FLASH, arch):
        yield paged(arch, head_dim, vec)
        yield varlen(arch, head_dim, head_dim, vec)
        yield rotary(arch, head_dim, head_dim, vec)
        yield split(arch, head_dim, head_dim, vec)
    yield split(arch, 64, 64, vec, FlashOptions(dropout=True))
    yield paged(arch, 64, 1)
    yield rotary(arch, 64, 64, 1, table="float16")
    yield rotary(arch, 64, 64, vec, interleaved=True)
    for head_dim in (64, 128):
        yield rotary(arch, head_dim, head_dim, vec, packed=True)
    yield varlen(arch, 64, 64, 1)
    for options in EACH_OPTION:
        yield varlen(arch, 64, 64, vec, options)
    for options in EACH_PAGED_OPTION:
        yield paged(arch, 64, vec, options)
    for integers in INTEGER_BITS:
        for head_dim in rows_for(FLASH_INTEGERS, arch):
            yield paged(arch, head_dim, vec, cache=integers)
        yield paged(arch, 64, 1, cache=integers)
        for options in EACH_PAGED_OPTION:
            yield paged(arch, 64, vec, options, integers)
