"""Launch configurations of the teaching kernels of attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.kernels.arch import WARP_SIZE
from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.configs.tables import FLOAT_BYTES, MAX_HEAD_DIM, round_up, row_of
from cupyattn.kernels.registry import ATTENTION_NAIVE, ATTENTION_TILED
from cupyattn.kernels.spec import Specialisation
from cupyattn.kernels.structs import ATTENTION_PARAMS


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

NAIVE = NaiveConfig(threads=128, reason="a strip of 128 keys; head dims to 128 are one column each")

# The first row whose head dim is not below max(D, Dv).
TILED = {
    64: TiledConfig(8, 4, 2, "21 KB and 127 registers: 16 warps an SM hide each other's barriers"),
    128: TiledConfig(8, 8, 1, "a K or V word serves 8 rows; Q fills what one CTA leaves of 64 KB"),
    256: TiledConfig(8, 3, 1, "the most rows whose Q fits beside a 32-key tile of 256 columns"),
}


@cache
def naive(dtype: str, head_dim: int, head_dim_v: int) -> Specialisation:
    """Specialise the naive kernel."""
    return ATTENTION_NAIVE.specialise(
        threads=NAIVE.threads,
        shared_bytes=0,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        THREADS=NAIVE.threads,
        SHARED_BYTES=FLOAT_BYTES * (head_dim + NAIVE.threads + NAIVE.threads // WARP_SIZE),
        PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
    )


def tiled_config(head_dim: int, head_dim_v: int) -> TiledConfig:
    """Return the table row for these head dims."""
    return row_of(TILED, head_dim, head_dim_v)


@cache
def tiled(dtype: str, head_dim: int, head_dim_v: int, vec: int) -> Specialisation:
    """Specialise the tiled kernel; `vec` is the items of one load, 1 or 16 bytes' worth."""
    config = tiled_config(head_dim, head_dim_v)
    shared_bytes = _tiled_shared_bytes(config, head_dim, head_dim_v, vec)
    return ATTENTION_TILED.specialise(
        threads=config.warps * WARP_SIZE,
        shared_bytes=shared_bytes,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WARPS=config.warps,
        ROWS=config.rows,
        VEC=vec,
        MIN_CTAS=config.ctas_per_sm,
        SHARED_BYTES=shared_bytes,
        PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
    )


def _tiled_shared_bytes(config: TiledConfig, head_dim: int, head_dim_v: int, vec: int) -> int:
    """Q, one tile of K or V, and P, in float32 (Smem in tiled.cu, which asserts the sum)."""
    padded = round_up(head_dim, max(vec, 4))
    words = padded // 4
    k_row = (words if words % 2 else words + 1) * 4
    v_row = round_up(head_dim_v, WARP_SIZE)
    q_items = config.tile_q * padded
    key_value_items = TILED_TILE_K * max(k_row, v_row)
    return FLOAT_BYTES * (q_items + key_value_items + config.tile_q * TILED_TILE_K)


def catalogue() -> Iterator[Specialisation]:
    """Yield every row at its largest head dim, in each dtype, with vector and scalar loads."""
    for dtype in STORAGE:
        yield naive(dtype, MAX_HEAD_DIM, MAX_HEAD_DIM)
        for head_dim in TILED:
            for vec in (vector_items(dtype), 1):
                yield tiled(dtype, head_dim, head_dim, vec)
