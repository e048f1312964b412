"""Launch configurations of the gradient of a bias that broadcasts, on tensor cores, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import (
    EACH_BACKWARD_OPTION,
    SUMMED_DBIAS_MACROS,
    BackwardOptions,
)
from cupyattn.ops.attention.kernels.parameters import POSITIONS, SCORE_INPUTS, of_packed
from cupyattn.ops.attention.kernels.tensor_core.forward import FlashConfig
from cupyattn.ops.attention.structs import BACKWARD_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Parameter,
    Pointer,
    Scalar,
    Specialisation,
    inputs,
)
from cupyattn.runtime.tables import (
    option_macros,
    round_up,
    row_of,
    rows_for,
    with_gates,
    with_mma_k,
)

_DENSE_PARAMETERS: tuple[Parameter, ...] = (
    *(*inputs("q", "k", "v", "dout", "stats"), *inputs("scales", optional=True)),
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
    "attention/tensor_core/backward_summed_dbias.cu",
    (*of_packed(_DENSE_PARAMETERS), *_SHARES),
)
"""The kernel of packed sequences."""
KERNELS = (SUMMED_DBIAS_KERNEL, SUMMED_DBIAS_VARLEN_KERNEL)

_COLUMNS = 32
"""Head dims are padded to a multiple of this (quad_rows.cuh)."""


# "Models" is the tensor utilisation of the main loop on a T4 by a static model of the machine code,
# with a bias of float16 (NVRTC 12.9.86, 2026-11-28, +-0.05): no Turing GPU has been measured. Two
# products have as many scores to make as the five of dk, dv and dq: that binds, and the load/store
# unit, as all four operands of a product are new each time. Large tiles read the least: on an H100
# that of head dim 64 took 697 us where 48 keys by warps of 32 rows took 856, that of 96 took 949
# where 64 keys took 1,083, and that of 32 took 534 where 48 keys took 632 (4 x 2,048 tokens, 16
# heads, one bias for all batch elements, CUPYATTN_ARCH=75; a script that is not kept, 2026-11-26).
_TURING_SUMMED_DBIAS = {
    32: FlashConfig(2, 4, 64, 2, "models 0.27, as with 96 keys, where 144 bytes spill"),
    64: FlashConfig(1, 8, 128, 1, "models 0.39, and 0.36 with 112 keys; fills the 64 KB"),
    96: FlashConfig(1, 8, 80, 1, "models 0.39, as at head dim 80, and 0.35 with 64 keys"),
    128: FlashConfig(1, 8, 64, 1, "models 0.38; 0.24 with 32 rows a warp, which spill"),
    256: FlashConfig(1, 8, 32, 1, "models 0.28, and 0.27 at 192; fills the 64 KB"),
}
LARGEST_HEAD_DIM = max(_TURING_SUMMED_DBIAS)
"""Beyond it the rows that a warp keeps do not fit in its registers."""
_GATES = {
    32: Gates(0.3, 32, items=0.22),
    64: Gates(0.4, 48, most_spills=80, items=0.32),
    96: Gates(0.41, items=0.35),
    128: Gates(0.43, 16, items=0.34),
    256: Gates(0.4, 48, items=0.26),
}
SUMMED_DBIAS = with_mma_k(with_gates(_TURING_SUMMED_DBIAS, _GATES))
# Items of the bias that are loaded one by one: more products for each of them hide the way.
_TURING_ONE_BY_ONE = {
    64: FlashConfig(2, 4, 48, 2, "models 0.24; 0.12 with rows of 16 and 128 keys"),
    **{head_dim: _TURING_SUMMED_DBIAS[head_dim] for head_dim in (128, 256)},
}
_ONE_BY_ONE_GATES = {**_GATES, 64: Gates(0.34, 144, options=0.19, most_spills=176, items=0.24)}
SUMMED_DBIAS_ONE_BY_ONE = with_mma_k(with_gates(_TURING_ONE_BY_ONE, _ONE_BY_ONE_GATES))


def summed_dbias_row(arch: int, head_dim: int, head_dim_v: int, score_vec: int) -> FlashConfig:
    """Return the table row for these head dims, and so many scores at a time: 4 or 1."""
    table = SUMMED_DBIAS_ONE_BY_ONE if score_vec == 1 else SUMMED_DBIAS
    return row_of(table, arch, head_dim, head_dim_v)


@cache
def summed_dbias(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: BackwardOptions,
    packed: bool = False,
    dtype: str = "float16",
) -> Specialisation:
    """Specialise the kernel, which writes items of the dtype that the options name for dbias."""
    row = summed_dbias_row(arch, head_dim, head_dim_v, options.score_vec)
    kernel = SUMMED_DBIAS_VARLEN_KERNEL if packed else SUMMED_DBIAS_KERNEL
    return modified(kernel, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_shared_bytes(row, head_dim, head_dim_v),
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
        **option_macros(options, SUMMED_DBIAS_MACROS),
    )


def _shared_bytes(config: FlashConfig, head_dim: int, head_dim_v: int) -> int:
    """K and V twice (Smem in backward_summed_dbias.cu, which asserts it)."""
    columns = round_up(head_dim, _COLUMNS) + round_up(head_dim_v, _COLUMNS)
    return 2 * config.tile_k * columns * 2


_HALF = BackwardOptions(bias="float16", dbias="float16", score_vec=4)
_FLOAT = BackwardOptions(bias="float32", dbias="float32", score_vec=4)
_OTHERS = (
    _FLOAT._replace(score_vec=1),
    *(
        each._replace(bias="float16", dbias="float16", score_vec=1 if each.dropout else 4)
        for each in EACH_BACKWARD_OPTION
        if each.bias == "void"
    ),
)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim; by one of them what else there is."""
    for head_dim in rows_for(SUMMED_DBIAS, arch):
        yield summed_dbias(arch, head_dim, head_dim, 8, _HALF)
        yield summed_dbias(arch, head_dim, head_dim, 8, _FLOAT)
        if arch >= NATIVE_ARCH:
            yield summed_dbias(arch, head_dim, head_dim, 8, _FLOAT, dtype="bfloat16")
    for options in _OTHERS:
        yield summed_dbias(arch, 64, 64, 8, options)
    yield summed_dbias(arch, 64, 64, 1, _HALF)
    yield summed_dbias(arch, 64, 64, 8, _HALF, packed=True)
