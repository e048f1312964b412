"""Launch configurations of the gradient of a bias that broadcasts, on tensor cores, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.attention.modifiers import modified
from cupyattn.kernels.configs.attention.options import BackwardOptions
from cupyattn.kernels.configs.attention.parameters import POSITIONS, SCORE_INPUTS, of_packed
from cupyattn.kernels.configs.tables import option_macros, round_up, row_of, rows_for, with_mma_k
from cupyattn.kernels.spec import KernelSpec, Parameter, Pointer, Scalar, Specialisation, inputs
from cupyattn.kernels.structs.attention import BACKWARD_STRUCT

_DENSE_PARAMETERS: tuple[Parameter, ...] = (
    *inputs("q", "k", "v", "dout", "stats", "scales"),
    Pointer("dbias"),
    *(*POSITIONS, *SCORE_INPUTS),
    BACKWARD_STRUCT,
)
_SHARES: tuple[Parameter, ...] = tuple(
    Scalar(name, np.dtype(np.int32))
    for name in ("batches", "heads", "parts", "sums_rows", "sums_keys", "adds")
)
SUMMED_DBIAS_KERNEL = KernelSpec(
    "attention_backward_summed_dbias",
    "attention/tensor_core/backward_summed_dbias.cu",
    (*_DENSE_PARAMETERS, *_SHARES),
)
SUMMED_DBIAS_VARLEN_KERNEL = KernelSpec(
    "attention_backward_summed_dbias_varlen",
    "attention/tensor_core/backward_summed_dbias_varlen.cu",
    (*of_packed(_DENSE_PARAMETERS), *_SHARES),
)
"""The same of packed sequences."""
KERNELS = (SUMMED_DBIAS_KERNEL, SUMMED_DBIAS_VARLEN_KERNEL)

_COLUMNS = 32
"""Head dims are padded to a multiple of this (quad_rows.cuh)."""


@dataclass(frozen=True)
class SummedDbiasConfig:
    """One CTA per warps * m_tiles * 16 query rows and tile_k keys of a bias."""

    m_tiles: int
    warps: int
    tile_k: int
    ctas_per_sm: int
    reason: str
    mma_k: int = 8

    @property
    def tile_rows(self) -> int:
        """Query rows per CTA."""
        return self.warps * self.warp_rows

    @property
    def warp_rows(self) -> int:
        """Query rows per warp."""
        return self.m_tiles * 16


# "Models" is the tensor utilisation of the main loop on a T4 by a static model of the machine code,
# with a bias of float16 (NVRTC 12.9.86, 2026-11-24, +-0.05): no Turing card has been measured. Two
# products have as many scores to make as the five of dk, dv and dq: that binds, and the load/store
# unit, as all four operands of a product are new each time.
_TURING_SUMMED_DBIAS = {
    64: SummedDbiasConfig(2, 4, 48, 2, "models 0.42, and 0.43 with 64 keys, where 132 bytes spill"),
    128: SummedDbiasConfig(
        1, 8, 64, 1, "models 0.48, and at head dim 96 0.41; 0.44 with 32 rows a warp, which spill"
    ),
    256: SummedDbiasConfig(1, 8, 32, 1, "models 0.43, and 0.38 at 192; fills the 64 KB"),
}
SUMMED_DBIAS = with_mma_k(_TURING_SUMMED_DBIAS)


def summed_dbias_row(arch: int, head_dim: int, head_dim_v: int) -> SummedDbiasConfig:
    """Return the table row for these head dims."""
    return row_of(SUMMED_DBIAS, arch, head_dim, head_dim_v)


_OPTIONS = ("bias", "mask", "score_vec", "slopes", "softcap", "dropout", "modified", "dbias")


@cache
def summed_dbias(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: BackwardOptions,
    packed: bool = False,
) -> Specialisation:
    """Specialise the kernel, which writes items of the dtype that the options name for dbias."""
    row = summed_dbias_row(arch, head_dim, head_dim_v)
    kernel = SUMMED_DBIAS_VARLEN_KERNEL if packed else SUMMED_DBIAS_KERNEL
    return modified(kernel, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_shared_bytes(row, head_dim, head_dim_v),
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        M_TILES=row.m_tiles,
        WARPS=row.warps,
        TILE_K=row.tile_k,
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=row.mma_k,
        **option_macros(options, _OPTIONS),
    )


def _shared_bytes(config: SummedDbiasConfig, head_dim: int, head_dim_v: int) -> int:
    """K and V twice (Smem in backward_summed_dbias.cuh, which asserts it)."""
    columns = round_up(head_dim, _COLUMNS) + round_up(head_dim_v, _COLUMNS)
    return 2 * config.tile_k * columns * 2


_HALF = BackwardOptions(bias="float16", dbias="float16", score_vec=4)
_FLOAT = BackwardOptions(bias="float32", dbias="float32", score_vec=4)
_OTHERS = (
    _FLOAT._replace(score_vec=1),
    _HALF._replace(mask=True),
    _HALF._replace(slopes="float32"),
    _HALF._replace(softcap=True),
    _HALF._replace(dropout=True, score_vec=1),
)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim; by one of them what else there is."""
    for head_dim in rows_for(SUMMED_DBIAS, arch):
        yield summed_dbias(arch, head_dim, head_dim, 8, _HALF)
        yield summed_dbias(arch, head_dim, head_dim, 8, _FLOAT)
    for options in _OTHERS:
        yield summed_dbias(arch, 64, 64, 8, options)
    yield summed_dbias(arch, 64, 64, 1, _HALF)
    yield summed_dbias(arch, 64, 64, 8, _HALF, packed=True)
