"""Launch configurations of the passes over memory around the tensor-core backward's products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.kernels.arch import WARP_SIZE
from cupyattn.kernels.configs.attention_backward import ONE_PASS
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.tables import BACKWARD_BYTES
from cupyattn.kernels.registry import (
    ATTENTION_BACKWARD_CONVERT,
    ATTENTION_BACKWARD_DBIAS,
    ATTENTION_BACKWARD_DELTA,
    ATTENTION_BACKWARD_DSINKS,
)
from cupyattn.kernels.spec import Specialisation
from cupyattn.kernels.structs import ATTENTION_PARAMS, DBIAS_PARAMS

ROW_PAD = 64
"""Rows per head in scratch memory are a multiple of this (kRowPad in backward_params.cuh).

As many one CTA of `convert` takes.
"""

_THREADS = 256


def _row_lanes(head_dim_v: int) -> int:
    """Lanes that share a row of out: one for each 8 columns, a power of two from 8 on."""
    return next(lanes for lanes in (8, 16, 32) if head_dim_v <= 8 * lanes)


def delta_rows(head_dim_v: int) -> int:
    """Return the rows that one CTA of `delta` takes."""
    return _THREADS // _row_lanes(head_dim_v)


@cache
def delta(head_dim_v: int, vec: int) -> Specialisation:
    """Specialise the kernel of the row statistics."""
    return ATTENTION_BACKWARD_DELTA.specialise(
        threads=_THREADS,
        shared_bytes=0,
        HEAD_DIM_V=head_dim_v,
        THREADS=_THREADS,
        ROW_LANES=_row_lanes(head_dim_v),
        VEC=vec,
        **BACKWARD_BYTES,
    )


@cache
def convert(head_dim: int, vec: int) -> Specialisation:
    """Specialise the kernel that rounds the one-pass dQ."""
    return ATTENTION_BACKWARD_CONVERT.specialise(
        threads=_THREADS,
        shared_bytes=0,
        HEAD_DIM=head_dim,
        THREADS=_THREADS,
        VEC=vec,
        **BACKWARD_BYTES,
    )


def dbias_ctas(items: int, sums_keys: bool) -> int:
    """Return the CTAs of `dbias` for that many items, each of a thread, or a warp to sum keys."""
    return -(-items * (WARP_SIZE if sums_keys else 1) // _THREADS)


@cache
def dbias(dtype: str) -> Specialisation:
    """Specialise the kernel that sums the scratch of dS to a dbias of that dtype."""
    return ATTENTION_BACKWARD_DBIAS.specialise(
        threads=_THREADS,
        shared_bytes=0,
        DTYPE=dtype,
        THREADS=_THREADS,
        DBIAS_PARAMS_BYTES=DBIAS_PARAMS.itemsize,
        PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
    )


@cache
def dsinks(dtype: str) -> Specialisation:
    """Specialise the kernel of the sinks' gradient, for sinks of that dtype."""
    return ATTENTION_BACKWARD_DSINKS.specialise(
        threads=_THREADS, shared_bytes=0, DTYPE=dtype, THREADS=_THREADS, **BACKWARD_BYTES
    )


def catalogue() -> Iterator[Specialisation]:
    """Yield every kernel at the head dims of the products' tables, in each dtype that it takes."""
    for vec in (8, 1):
        for head_dim in ONE_PASS:
            yield delta(head_dim, vec)
            yield convert(head_dim, vec)
    for dtype in STORAGE:
        yield dbias(dtype)
        yield dsinks(dtype)
