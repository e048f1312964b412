"""Launch configurations of the float32 forward of attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Specialisation
from cupyattn.runtime.tables import FLOAT_BYTES, option_macros, pairs, row_of, rows_for, with_gates

KERNEL = KernelSpec("attention_forward_f32", "attention/float32/forward.cu", parameters.FLASH)
PAGED = KernelSpec(
    "attention_forward_paged_f32", "attention/float32/forward_paged.cu", parameters.PAGED
)
VARLEN = KernelSpec(
    "attention_forward_varlen_f32", "attention/float32/forward.cu", parameters.VARLEN
)
SPLIT = KernelSpec(
    "attention_forward_split_f32", "attention/float32/forward_split.cu", parameters.SPLIT
)
KERNELS = (KERNEL, PAGED, VARLEN, SPLIT)


@dataclass(frozen=True)
class FloatFlashConfig:
    """A warp's lanes are 32 / column_lanes by column_lanes; each owns rows, and 2 * pairs keys."""

    column_lanes: int
    pairs: int
    warps: int
    ctas_per_sm: int
    reason: str
    thread_rows: int = 8
    panel_keys: int = 16
    """Keys of V that pass through shared memory at a time."""
    gates: Gates = Gates()

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps * self.warp_rows

    @property
    def warp_rows(self) -> int:
        """Query rows per warp."""
        return self.thread_rows * WARP_SIZE // self.column_lanes

    @property
    def tile_k(self) -> int:
        """Keys per tile."""
        return self.column_lanes * 2 * self.pairs


# The first row whose head dim is not below max(D, Dv).
_TURING = {
    64: FloatFlashConfig(8, 4, 4, 2, "8 x 8 scores and up to 8 x 8 outputs a thread"),
    128: FloatFlashConfig(16, 4, 4, 2, "16 lanes to a row: 8 x 8 outputs a thread again"),
    160: FloatFlashConfig(16, 4, 8, 1, "8 warps have less on the way: room for 10 output columns"),
    256: FloatFlashConfig(16, 2, 8, 1, "8 x 16 outputs a thread leave room for 8 x 4 scores"),
    512: FloatFlashConfig(16, 2, 8, 1, "4 x 32 outputs a thread", thread_rows=4, panel_keys=8),
}
_GATES = {
    64: Gates(0.99, items=0.9, options=0.89, most_spills=176, kernels=0.94),
    128: Gates(0.99, scalar=0.94),
    160: Gates(0.98, most_spills=32, scalar=0.95, kernels=0.9),
    256: Gates(0.98, kernels=0.93),
    512: Gates(0.87),
}
FLASH = {75: with_gates(_TURING, _GATES)}
DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that Turing's tensor cores do not take; float16 too, for GPUs that have none."""
VECTOR_ITEMS = 4
"""Items that the float32 kernel loads at once where rows are aligned to so many."""
_SLICE_ROW = 16 * FLOAT_BYTES  # bytes of a row of a slice of Q or K


def flash_row(arch: int, head_dim: int, head_dim_v: int) -> FloatFlashConfig:
    """Return the table row for these head dims."""
    return row_of(FLASH, arch, head_dim, head_dim_v)


@cache
def flash(
    arch: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    spec: KernelSpec = KERNEL,
    cache: str | None = None,
) -> Specialisation:
    """Specialise one of `KERNELS`; `vec` is 4 where rows are aligned to it, otherwise 1.

    `cache` is the dtype of the caches of PAGED, if they are integers.
    """
    row = flash_row(arch, head_dim, head_dim_v)
    of_cache: dict[str, Any] = {"CACHE": cache or dtype} if spec is PAGED else {}
    return modified(spec, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_flash_shared_bytes(row, head_dim_v),
        gates=row.gates,
        reason=row.reason,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WARPS=row.warps,
        COLUMN_LANES=row.column_lanes,
        THREAD_ROWS=row.thread_rows,
        PAIRS=row.pairs,
        PANEL_KEYS=row.panel_keys,
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        **of_cache,
        **option_macros(options),
    )


def _flash_shared_bytes(config: FloatFlashConfig, head_dim_v: int) -> int:
    """Two stages, each a slice of Q and K or a panel of V, and P (Smem in forward.cu)."""
    columns = -(-head_dim_v // config.column_lanes)
    columns += columns % 4 == 3
    stage = max(
        (config.tile_q + config.tile_k) * _SLICE_ROW,
        config.panel_keys * config.column_lanes * columns * FLOAT_BYTES,
    )
    return 2 * stage + config.tile_q * 2 * config.column_lanes * FLOAT_BYTES


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim, dtypes and loads in pairs; options by one."""
    for dtype, head_dim, vec in pairs(DTYPES, rows_for(FLASH, arch), (VECTOR_ITEMS, 1)):
        yield flash(arch, dtype, head_dim, head_dim, vec)
    for options in EACH_OPTION:
        yield flash(arch, "float32", 64, 64, VECTOR_ITEMS, options)
    for number, head_dim in enumerate(rows_for(FLASH, arch)):
        dtype, vec = DTYPES[number % 2], VECTOR_ITEMS if number % 3 else 1
        for spec in (PAGED, VARLEN, SPLIT):
            yield flash(arch, dtype, head_dim, head_dim, vec, spec=spec)
    for options in EACH_PAGED_OPTION:
        yield flash(arch, "float32", 64, 64, VECTOR_ITEMS, options, PAGED)
    for dtype, head_dim, vec, integers in pairs(
        DTYPES, rows_for(FLASH, arch), (VECTOR_ITEMS, 1), INTEGER_BITS
    ):
        yield flash(arch, dtype, head_dim, head_dim, vec, spec=PAGED, cache=integers)
    for options in EACH_OPTION:
        yield flash(arch, "float32", 64, 64, VECTOR_ITEMS, options, VARLEN)
