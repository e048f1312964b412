"""Launch configurations of the deterministic dQ on tensor cores, a pass of its own, for sm_75."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import (
    BACKWARD_QUADS,
    DQ_MACROS,
    EACH_BACKWARD_OPTION,
    PLAIN_BACKWARD,
    BackwardOptions,
)
from cupyattn.ops.attention.kernels.parameters import POSITIONS, SCORE_INPUTS, of_packed
from cupyattn.ops.attention.kernels.tensor_core.backward_dkdv import SMEM_UNIT
from cupyattn.ops.attention.kernels.tensor_core.forward import FlashConfig
from cupyattn.ops.attention.structs import BACKWARD_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.tables import (
    FLOAT_BYTES,
    limit_of,
    option_macros,
    round_up,
    rows_for,
    with_gates,
    with_l2_ahead,
    with_mma_k,
)

DQ_KERNEL = KernelSpec(
    "attention_backward_dq",
    "attention/tensor_core/backward_dq.cu",
    (
        *(*inputs("q", "k", "v", "dout", "stats"), *inputs("scales", optional=True)),
        Pointer("cta_scales", optional=True),
        Pointer("dq"),
        *(*POSITIONS, *SCORE_INPUTS),
        BACKWARD_STRUCT,
    ),
)
DQ_WIDE_KERNEL = KernelSpec(
    "attention_backward_dq_wide", "attention/tensor_core/backward_dq_wide.cu", DQ_KERNEL.parameters
)
_DENSE = (DQ_KERNEL, DQ_WIDE_KERNEL)
VARLEN = {
    kernel: KernelSpec(f"{kernel.entry}_varlen", kernel.source, of_packed(kernel.parameters))
    for kernel in _DENSE
}
"""The kernels of packed sequences."""
KERNELS = (*_DENSE, *VARLEN.values())


@dataclass(frozen=True)
class DqConfig(FlashConfig):
    """With full_loop the tiles that need no mask have a loop of their own."""

    full_loop: bool = True


@dataclass(frozen=True)
class WideDqConfig:
    """One CTA per 32 query rows, whose columns all its warps share; tile_k keys a tile."""

    reason: str
    mma_k: int = 8
    gates: Gates = Gates()
    warps: int = 8
    ctas_per_sm: int = 1
    tile_q: int = 32
    """Query rows per CTA."""
    tile_k: int = 16
    warp_rows: int = 16
    """Rows whose scores one warp turns into gradients."""
    l2_ahead: int = 0
    """Tiles are not prefetched into L2."""

    @property
    def slices(self) -> int:
        """Warps that share the columns of Q, and as many those of dout."""
        return self.warps // 2


_TURING_DQ = {
    40: DqConfig(
        *(2, 4, 48, 2, "models 0.74, and 0.77 with two loops and 32 keys"), full_loop=False
    ),
    64: DqConfig(2, 4, 32, 2, "models 0.89, and 0.79 with 16 keys, slower on an H200 too"),
    80: DqConfig(2, 4, 16, 2, "models 0.80; 32 keys spill; 0.65 with one loop, 0.58 under ALiBi"),
    96: DqConfig(2, 4, 16, 2, "models 0.77, and 0.56 with 16 rows a warp"),
    128: DqConfig(1, 8, 32, 1, "models 0.73, and 0.67 as two CTAs of 4 warps"),
    160: DqConfig(1, 8, 16, 1, "models 0.65; 0.71 with 32 keys, where 44 bytes spill"),
    192: DqConfig(1, 8, 16, 1, "models 0.68; 0.66 with 32 keys, where 92 bytes spill"),
    256: DqConfig(
        *(1, 8, 16, 1, "models 0.47: Q, dout and dQ alone are 256 registers, some spill"),
        full_loop=False,
    ),
    512: WideDqConfig("models 0.81 for the warps of Q, 0.46 for both kinds together"),
}
# Items of a bias or a mask, read ahead, wait in registers for as long as the products take; the
# addresses of those that are read one by one take some.
_TURING_DQ_SCORE_ITEMS = {
    40: DqConfig(2, 4, 32, 2, "models 0.60 with a mask by 4, and 0.53 with 48 keys"),
    64: DqConfig(2, 4, 16, 2, "models 0.45 with a bias, 0.67 by 4, and 0.46 and 0.70 with 32 keys"),
}
# With a block mask one loop for both kinds of tiles spills (the model of 2026-11-28).
_TURING_DQ_BLOCKS = {40: DqConfig(2, 4, 32, 2, "models 0.77, and 0.57 with one loop")}

_GATES = {
    40: Gates(0.74, scalar=0.43, most_spills=128),
    64: Gates(0.89, 80, scalar=0.66, options=0.70, kernels=0.84, most_spills=112),
    80: Gates(0.8, 80, scalar=0.41, items=0.63, kernels=0.78, most_spills=96),
    96: Gates(0.78, 96, scalar=0.41, most_spills=112),
    128: Gates(0.73, 48, scalar=0.57, items=0.67, options=0.71, most_spills=80),
    160: Gates(0.65, scalar=0.36),
    192: Gates(0.7, 48, scalar=0.31),
    256: Gates(0.5, 304, scalar=0.38),
    512: Gates(0.81),
}
_SCORE_ITEMS_GATES = {40: Gates(0.58, 16, items=0.52), 64: Gates(0.55, items=0.46)}
_BLOCKS_GATES = {40: Gates(0.75)}

DQ = with_l2_ahead(with_gates(_TURING_DQ, _GATES), {128: 2})  # backward_dkdv.py says what it gains
DQ_SCORE_ITEMS = with_mma_k(with_gates(_TURING_DQ_SCORE_ITEMS, _SCORE_ITEMS_GATES))
DQ_BLOCKS = with_mma_k(with_gates(_TURING_DQ_BLOCKS, _BLOCKS_GATES))


def dq_row(
    arch: int, head_dim: int, head_dim_v: int, options: BackwardOptions = PLAIN_BACKWARD
) -> DqConfig | WideDqConfig:
    """Return the table row of dq for these head dims and options."""
    rows = rows_for(DQ, arch)
    limit = limit_of(rows, head_dim, head_dim_v)
    if options.bias != "void" or options.mask:
        return rows_for(DQ_SCORE_ITEMS, arch).get(limit, rows[limit])
    if options.modified is not None and options.modified.blocks:
        return rows_for(DQ_BLOCKS, arch).get(limit, rows[limit])
    return rows[limit]


@cache
def dq(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: BackwardOptions = PLAIN_BACKWARD,
    packed: bool = False,
    dtype: str = "float16",
) -> Specialisation:
    """Specialise the deterministic dQ kernel, which writes no dbias."""
    row = dq_row(arch, head_dim, head_dim_v, options)
    native = arch >= NATIVE_ARCH and vec > 1
    dense, of_rows = DQ_WIDE_KERNEL, {}
    if isinstance(row, DqConfig):
        dense = DQ_KERNEL
        of_rows = {
            "M_TILES": row.m_tiles,
            "FULL_LOOP": int(row.full_loop),
            "L2_AHEAD": row.l2_ahead,
        }
    return modified(VARLEN[dense] if packed else dense, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_dq_shared_bytes(row, head_dim, head_dim_v, native),
        gates=row.gates,
        reason=row.reason,
        DTYPE=dtype,
        NATIVE=int(native),
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WARPS=row.warps,
        TILE_K=row.tile_k,
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=row.mma_k,
        **of_rows,
        **option_macros(options, DQ_MACROS),
    )


def _dq_shared_bytes(
    config: DqConfig | WideDqConfig, head_dim: int, head_dim_v: int, native: bool
) -> int:
    """K and V twice, or Q, or dout (Smem in both sources, which assert it)."""
    wide = isinstance(config, WideDqConfig)
    unit = 32 * config.slices if isinstance(config, WideDqConfig) else 8  # columns
    row, row_v = round_up(head_dim, unit) * 2, round_up(head_dim_v, unit) * 2  # bytes
    halves = 1 if wide and not native else 2
    tiles = sum(round_up(halves * config.tile_k * bytes_, SMEM_UNIT) for bytes_ in (row, row_v))
    if isinstance(config, WideDqConfig):  # the parts of S and dP, and dS
        scores = config.tile_q * config.tile_k
        tiles += 2 * config.slices * scores * FLOAT_BYTES + round_up(scores * 2, SMEM_UNIT)
    return round_up(max(tiles, config.tile_q * max(row, row_v)), SMEM_UNIT)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim in every way; options by one."""
    for head_dim, vec in itertools.product(rows_for(DQ, arch), (8, 1)):
        yield dq(arch, head_dim, head_dim, vec)
    for head_dim in rows_for(DQ, arch):
        yield dq(arch, head_dim, head_dim, 8, packed=True)
        if arch >= NATIVE_ARCH:
            yield dq(arch, head_dim, head_dim, 8, dtype="bfloat16")
    for options in EACH_BACKWARD_OPTION:
        yield dq(arch, 64, 64, 8, options)
    for head_dim, options in itertools.product((40, 64, 80, 128), BACKWARD_QUADS):
        yield dq(arch, head_dim, head_dim, 8, options)
