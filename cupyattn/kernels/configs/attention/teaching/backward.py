"""Launch configurations of the naive attention backward kernels, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.attention.modifiers import modified
from cupyattn.kernels.configs.attention.options import PLAIN, SCORE_MACROS, FlashOptions
from cupyattn.kernels.configs.attention.parameters import (
    FLOAT_GRADIENT,
    POSITIONS,
    SCORE_INPUTS,
)
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import FLOAT_BYTES, MAX_HEAD_DIM, option_macros, rows_for
from cupyattn.kernels.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.kernels.structs.attention import BACKWARD_STRUCT

DQ_KERNEL = KernelSpec(
    "attention_backward_naive_dq",
    "attention/teaching/naive_dq.cu",
    (
        *inputs("dout", "q", "k", "v", "out", "lse"),
        *(*inputs("dlse", optional=True), *POSITIONS, *SCORE_INPUTS),
        *(Pointer("delta"), Pointer("dq")),
        BACKWARD_STRUCT,
    ),
)
DKDV_KERNEL = KernelSpec(
    "attention_backward_naive_dkdv",
    "attention/teaching/naive_dkdv.cu",
    (
        *(*FLOAT_GRADIENT, *POSITIONS, *SCORE_INPUTS),
        *(Pointer("dk"), Pointer("dv")),
        BACKWARD_STRUCT,
    ),
)
DBIAS_KERNEL = KernelSpec(
    "attention_backward_naive_dbias",
    "attention/teaching/naive_dbias.cu",
    (*FLOAT_GRADIENT, *POSITIONS, *SCORE_INPUTS, Pointer("dbias"), BACKWARD_STRUCT),
)
DSINKS_KERNEL = KernelSpec(
    "attention_backward_naive_dsinks",
    "attention/teaching/naive_dsinks.cu",
    (*inputs("lse", "delta", "sinks"), Pointer("dsinks"), BACKWARD_STRUCT),
)
KERNELS = (DQ_KERNEL, DKDV_KERNEL, DBIAS_KERNEL, DSINKS_KERNEL)


@dataclass(frozen=True)
class NaiveConfig:
    """How many threads a CTA has, and how many of them share what it owns (0: all)."""

    threads: int
    lanes: int
    reason: str


DQ = NaiveConfig(128, 0, "one query a CTA: a strip of 128 keys, as the naive forward")
DKDV = NaiveConfig(128, 0, "one key a CTA: a strip of 128 queries")
DSINKS = NaiveConfig(256, 0, "one head a CTA, which reads its rows once")

# The first row whose number of scores is not below that of the scores that an item of dbias was
# added to; None takes the rest.
DBIAS: dict[int, dict[int | None, NaiveConfig]] = {
    75: {
        16: NaiveConfig(128, 1, "few scores an item: a thread each"),
        None: NaiveConfig(128, WARP_SIZE, "many scores an item: a warp shares them"),
    }
}


def dbias_row(arch: int, terms: int) -> NaiveConfig:
    """Return the table row for items of dbias that are sums of `terms` scores."""
    rows = rows_for(DBIAS, arch)
    return next(row for limit, row in rows.items() if limit is None or terms <= limit)


@cache
def dq(dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions) -> Specialisation:
    """Specialise the kernel of dq, which leaves delta for the others."""
    floats = head_dim + head_dim_v + DQ.threads + DQ.threads // WARP_SIZE
    return modified(DQ_KERNEL, options.modified).specialise(
        threads=DQ.threads,
        static_shared_bytes=FLOAT_BYTES * floats,
        **_macros(dtype, head_dim, head_dim_v, options),
    )


@cache
def dkdv(dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions) -> Specialisation:
    """Specialise the kernel of dk and dv."""
    return modified(DKDV_KERNEL, options.modified).specialise(
        threads=DKDV.threads,
        static_shared_bytes=FLOAT_BYTES * (head_dim + head_dim_v + 2 * DKDV.threads),
        **_macros(dtype, head_dim, head_dim_v, options),
    )


@cache
def dbias(
    dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions, row: NaiveConfig
) -> Specialisation:
    """Specialise the kernel of dbias."""
    macros = _macros(dtype, head_dim, head_dim_v, options)
    return modified(DBIAS_KERNEL, options.modified).specialise(
        threads=row.threads, LANES=row.lanes, **macros
    )


def _macros(dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions) -> dict[str, Any]:
    return {
        "DTYPE": dtype,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        **option_macros(options, SCORE_MACROS),
    }


@cache
def dsinks(sinks: str) -> Specialisation:
    """Specialise the kernel of dsinks for sinks of a dtype."""
    return DSINKS_KERNEL.specialise(threads=DSINKS.threads, SINKS=sinks)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every kernel at the largest head dims in each dtype, plain and with all options."""
    dims = MAX_HEAD_DIM, MAX_HEAD_DIM
    for dtype in STORAGE:
        everything = FlashOptions(
            bias=dtype, mask=True, slopes="float32", softcap=True, dropout=True
        )
        for options in (PLAIN, everything):
            yield dq(dtype, *dims, options)
            yield dkdv(dtype, *dims, options)
        for row in rows_for(DBIAS, arch).values():
            yield dbias(dtype, *dims, everything, row)
        yield dsinks(dtype)
