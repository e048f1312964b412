"""Launch configurations of the float32 backward of attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.kernels.arch import WARP_SIZE
from cupyattn.kernels.configs.attention import PLAIN, FlashOptions
from cupyattn.kernels.configs.tables import (
    BACKWARD_BYTES,
    FLOAT_BYTES,
    cpp_bool,
    option_macros,
)
from cupyattn.kernels.registry import (
    ATTENTION_BACKWARD_F32_DELTA,
    ATTENTION_BACKWARD_F32_DKDV,
    ATTENTION_BACKWARD_F32_DQ,
)
from cupyattn.kernels.spec import Specialisation

DTYPES = ("float32", "bfloat16")
VECTOR_ITEMS = 4
"""Items of one load where rows are aligned to as many."""

_THREADS = 128  # kProductThreads in register_products.cuh
_STAGE = 8192  # kStageBytes in operand_stages.cuh
_PART = 4096  # kPartFloats in float_gradient.cuh
_SCORES = 64  # of a thread at the most


@dataclass(frozen=True)
class FloatConfig:
    """One CTA per tile_k keys (dk, dv) or tile_q queries (dq).

    Its 128 threads are thread_rows by 128 / thread_rows in every product.
    """

    tile_q: int
    tile_k: int
    thread_rows: int
    ctas_per_sm: int
    reason: str


# The first row whose head dim is not below max(D, Dv), but for options that take registers.
DKDV = {
    64: FloatConfig(
        128, 64, 16, 2, "8 x 8 scores a thread: 16 words of shared memory feed 64 FFMAs"
    ),
    128: FloatConfig(64, 64, 8, 2, "dK and dV, 8 x 8 a thread each, leave room for 8 x 4 scores"),
    256: FloatConfig(64, 32, 8, 2, "half the keys: dK and dV take 128 registers again"),
}
DQ = {
    64: FloatConfig(128, 64, 16, 2, "8 x 8 scores and 8 x 8 of dQ a thread"),
    128: FloatConfig(64, 64, 8, 2, "as dK and dV"),
    256: FloatConfig(32, 64, 8, 2, "half the queries: dQ takes 64 registers"),
}


def dkdv_config(head_dim: int, head_dim_v: int, options: FlashOptions) -> FloatConfig:
    """Return the table row of dk and dv for these head dims and options."""
    return _row(DKDV, head_dim, head_dim_v, options)


def dq_config(head_dim: int, head_dim_v: int, options: FlashOptions) -> FloatConfig:
    """Return the table row of dq for these head dims and options."""
    return _row(DQ, head_dim, head_dim_v, options)


def _row(
    table: dict[int, FloatConfig], head_dim: int, head_dim_v: int, options: FlashOptions
) -> FloatConfig:
    largest = max(head_dim, head_dim_v)
    # The softcap's slopes and dropout's random words take the registers of four scores in eight.
    most = _SCORES // 2 if options.softcap or options.dropout else _SCORES
    return next(
        row
        for limit, row in table.items()
        if largest <= limit and row.tile_q * row.tile_k <= most * _THREADS
    )


DELTA_ROWS = 8
"""Rows that one CTA of `delta` takes, a warp each."""


@cache
def delta(dtype: str, head_dim_v: int) -> Specialisation:
    """Specialise the kernel of delta."""
    threads = DELTA_ROWS * WARP_SIZE
    return ATTENTION_BACKWARD_F32_DELTA.specialise(
        threads=threads,
        shared_bytes=0,
        DTYPE=dtype,
        HEAD_DIM_V=head_dim_v,
        THREADS=threads,
        **BACKWARD_BYTES,
    )


@cache
def dkdv(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    one_pass: bool,
    options: FlashOptions,
    dbias: str,
) -> Specialisation:
    """Specialise the kernel of dk and dv.

    With `one_pass` it adds to dq as well, which has to be float32; `dbias` is the dtype that it
    writes, or "void".
    """
    config = dkdv_config(head_dim, head_dim_v, options)
    return ATTENTION_BACKWARD_F32_DKDV.specialise(
        threads=_THREADS,
        shared_bytes=0,
        SHARED_BYTES=_shared_bytes(config),
        ONE_PASS=cpp_bool(one_pass),
        DBIAS=dbias,
        **_macros(dtype, head_dim, head_dim_v, vec, options, config),
        **BACKWARD_BYTES,
    )


@cache
def dq(
    dtype: str, head_dim: int, head_dim_v: int, vec: int, options: FlashOptions
) -> Specialisation:
    """Specialise the kernel of dq."""
    config = dq_config(head_dim, head_dim_v, options)
    return ATTENTION_BACKWARD_F32_DQ.specialise(
        threads=_THREADS,
        shared_bytes=0,
        SHARED_BYTES=_shared_bytes(config),
        **_macros(dtype, head_dim, head_dim_v, vec, options, config),
        **BACKWARD_BYTES,
    )


def _macros(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions,
    config: FloatConfig,
) -> dict[str, int | str]:
    return {
        "DTYPE": dtype,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "TILE_Q": config.tile_q,
        "TILE_K": config.tile_k,
        "THREAD_ROWS": config.thread_rows,
        "VEC": vec,
        "MIN_CTAS": config.ctas_per_sm,
        **option_macros(ATTENTION_BACKWARD_F32_DQ, options),
    }


def _shared_bytes(config: FloatConfig) -> int:
    """Sum two stages and the part of the weights that is held (the sources assert it)."""
    return 2 * _STAGE + FLOAT_BYTES * min(config.tile_q * config.tile_k, _PART)


_EVERYTHING = FlashOptions(bias="float32", mask=True, slopes="float32", softcap=True, dropout=True)


def catalogue() -> Iterator[Specialisation]:
    """Yield every row at its largest head dim, with vector and scalar loads; options at 64."""
    for dtype in DTYPES:
        for head_dim in DKDV:
            yield delta(dtype, head_dim)
            for vec in (VECTOR_ITEMS, 1):
                for one_pass in (True, False) if dtype == "float32" else (False,):
                    yield dkdv(dtype, head_dim, head_dim, vec, one_pass, PLAIN, "void")
                yield dq(dtype, head_dim, head_dim, vec, PLAIN)
    for options in (_EVERYTHING, FlashOptions(bias="float32")):
        for one_pass in (True, False):
            yield dkdv("float32", 64, 64, VECTOR_ITEMS, one_pass, options, "float32")
        yield dq("float32", 64, 64, VECTOR_ITEMS, options)
