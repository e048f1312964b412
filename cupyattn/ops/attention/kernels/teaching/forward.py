"""Launch configurations of the teaching kernels of attention, for sm_75."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.ops.attention.structs import TEACHING_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Parameter, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import FLOAT_BYTES, MAX_HEAD_DIM, round_up, row_of, rows_for

_PARAMETERS: tuple[Parameter, ...] = (
    *inputs("q", "k", "v"),
    *(Pointer("out"), Pointer("lse", optional=True)),
    TEACHING_STRUCT,
)
NAIVE_KERNEL = KernelSpec("attention_naive", "attention/teaching/naive.cu", _PARAMETERS)
TILED_KERNEL = KernelSpec("attention_tiled", "attention/teaching/tiled.cu", _PARAMETERS)
KERNELS = (NAIVE_KERNEL, TILED_KERNEL)


@dataclass(frozen=True)
class NaiveConfig:
    """One CTA per query row."""

    threads: int
    reason: str


@dataclass(frozen=True)
class TiledConfig:
    """One CTA per warps * rows query rows."""

    warps: int
    rows: int
    ctas_per_sm: int
    reason: str

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps * self.rows


TILED_TILE_K = WARP_SIZE  # one key per lane

NAIVE = NaiveConfig(
    threads=128, reason="segments of 128 keys; head dims to 128 are one column each"
)

# The first row whose head dim is not below max(D, Dv).
TILED = {
    75: {
        64: TiledConfig(8, 4, 2, "21 KB, 121 registers: 16 warps an SM hide each other's barriers"),
        128: TiledConfig(8, 8, 1, "a K or V word serves 8 rows; Q fills what is left of 64 KB"),
        256: TiledConfig(8, 3, 1, "the most rows whose Q fits with a 32-key tile of 256 columns"),
    }
}
MOST_TILED_DIM = max(TILED[75])
"""The largest head dim of the tiled kernel: a tile of 32 keys of 512 columns would fill 64 KB."""


@cache
def naive(dtype: str, head_dim: int, head_dim_v: int) -> Specialisation:
    """Specialise the naive kernel."""
    return NAIVE_KERNEL.specialise(
        threads=NAIVE.threads,
        static_shared_bytes=FLOAT_BYTES * (head_dim + NAIVE.threads),
        gates=Gates(registers=64 if max(head_dim, head_dim_v) <= 256 else 72),
        reason=NAIVE.reason,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
    )


def tiled_row(arch: int, head_dim: int, head_dim_v: int) -> TiledConfig:
    """Return the table row for these head dims."""
    return row_of(TILED, arch, head_dim, head_dim_v)


@cache
def tiled(arch: int, dtype: str, head_dim: int, head_dim_v: int) -> Specialisation:
    """Specialise the tiled kernel."""
    row = tiled_row(arch, head_dim, head_dim_v)
    return TILED_KERNEL.specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_tiled_shared_bytes(row, head_dim, head_dim_v),
        reason=row.reason,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WARPS=row.warps,
        ROWS=row.rows,
        MIN_CTAS=row.ctas_per_sm,
    )


def _tiled_shared_bytes(config: TiledConfig, head_dim: int, head_dim_v: int) -> int:
    """Q, one tile of K or V, and P, in float32 (Smem in tiled.cu, which asserts the sum)."""
    padded = round_up(head_dim, 4)
    words = padded // 4
    k_row = (words if words % 2 else words + 1) * 4
    v_row = round_up(head_dim_v, WARP_SIZE)
    q_items = config.tile_q * padded
    key_value_items = TILED_TILE_K * max(k_row, v_row)
    return FLOAT_BYTES * (q_items + key_value_items + config.tile_q * TILED_TILE_K)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim, in each dtype."""
    for dtype in STORAGE:
        yield naive(dtype, MAX_HEAD_DIM, MAX_HEAD_DIM)
    for dtype, head_dim in itertools.product(STORAGE, rows_for(TILED, arch)):
        yield tiled(arch, dtype, head_dim, head_dim)
