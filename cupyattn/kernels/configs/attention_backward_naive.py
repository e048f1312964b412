"""Launch configurations of the naive attention backward kernels, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.kernels.arch import WARP_SIZE
from cupyattn.kernels.configs.attention import PLAIN, FlashOptions
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import (
    BACKWARD_BYTES,
    FLOAT_BYTES,
    MAX_HEAD_DIM,
    option_macros,
)
from cupyattn.kernels.registry import (
    ATTENTION_BACKWARD_NAIVE_DBIAS,
    ATTENTION_BACKWARD_NAIVE_DKDV,
    ATTENTION_BACKWARD_NAIVE_DQ,
    ATTENTION_BACKWARD_NAIVE_DSINKS,
)
from cupyattn.kernels.spec import Specialisation


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
DBIAS: dict[int | None, NaiveConfig] = {
    16: NaiveConfig(128, 1, "few scores an item: a thread each"),
    None: NaiveConfig(128, WARP_SIZE, "many scores an item: a warp shares them"),
}


def dbias_config(terms: int) -> NaiveConfig:
    """Return the table row for items of dbias that are sums of `terms` scores."""
    return next(config for limit, config in DBIAS.items() if limit is None or terms <= limit)


@cache
def dq(dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions) -> Specialisation:
    """Specialise the kernel of dq, which leaves delta for the others."""
    floats = head_dim + head_dim_v + DQ.threads + DQ.threads // WARP_SIZE
    return ATTENTION_BACKWARD_NAIVE_DQ.specialise(
        threads=DQ.threads,
        shared_bytes=0,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        THREADS=DQ.threads,
        SHARED_BYTES=FLOAT_BYTES * floats,
        **option_macros(ATTENTION_BACKWARD_NAIVE_DQ, options),
        **BACKWARD_BYTES,
    )


@cache
def dkdv(dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions) -> Specialisation:
    """Specialise the kernel of dk and dv."""
    return ATTENTION_BACKWARD_NAIVE_DKDV.specialise(
        threads=DKDV.threads,
        shared_bytes=0,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        THREADS=DKDV.threads,
        SHARED_BYTES=FLOAT_BYTES * (head_dim + head_dim_v + 2 * DKDV.threads),
        **option_macros(ATTENTION_BACKWARD_NAIVE_DKDV, options),
        **BACKWARD_BYTES,
    )


@cache
def dbias(
    dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions, config: NaiveConfig
) -> Specialisation:
    """Specialise the kernel of dbias."""
    return ATTENTION_BACKWARD_NAIVE_DBIAS.specialise(
        threads=config.threads,
        shared_bytes=0,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        THREADS=config.threads,
        LANES=config.lanes,
        **option_macros(ATTENTION_BACKWARD_NAIVE_DBIAS, options),
        **BACKWARD_BYTES,
    )


@cache
def dsinks(sinks: str) -> Specialisation:
    """Specialise the kernel of dsinks for sinks of a dtype."""
    return ATTENTION_BACKWARD_NAIVE_DSINKS.specialise(
        threads=DSINKS.threads,
        shared_bytes=0,
        SINKS=sinks,
        THREADS=DSINKS.threads,
        **BACKWARD_BYTES,
    )


def catalogue() -> Iterator[Specialisation]:
    """Yield every kernel at the largest head dims in each dtype, plain and with all options."""
    dims = MAX_HEAD_DIM, MAX_HEAD_DIM
    for dtype in STORAGE:
        everything = FlashOptions(
            bias=dtype, mask=True, slopes="float32", softcap=True, dropout=True
        )
        for options in (PLAIN, everything):
            yield dq(dtype, *dims, options)
            yield dkdv(dtype, *dims, options)
        for config in DBIAS.values():
            yield dbias(dtype, *dims, everything, config)
        yield dsinks(dtype)
