"""Launch configurations of the float32 backward of attention, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import EVERYTHING, PLAIN, SCORE_MACROS, FlashOptions
from cupyattn.ops.attention.kernels.parameters import (
    FLOAT_GRADIENT,
    POSITIONS,
    SCORE_INPUTS,
    of_packed,
)
from cupyattn.ops.attention.structs import BACKWARD_STRUCT, VARLEN_BACKWARD_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import (
    FLOAT_BYTES,
    MAX_HEAD_DIM,
    ByArch,
    cpp_bool,
    option_macros,
    pairs,
    rows_for,
    with_gates,
)

DELTA_KERNEL = KernelSpec(
    "attention_backward_f32_delta",
    "attention/float32/backward_delta.cu",
    (*(*inputs("dout", "out"), *inputs("dlse", optional=True)), Pointer("delta"), BACKWARD_STRUCT),
)
DKDV_KERNEL = KernelSpec(
    "attention_backward_f32_dkdv",
    "attention/float32/backward_dkdv.cu",
    (
        *(*FLOAT_GRADIENT, *POSITIONS, *SCORE_INPUTS),
        *(Pointer("dq"), Pointer("dk"), Pointer("dv"), Pointer("dbias", optional=True)),
        BACKWARD_STRUCT,
    ),
)
DQ_KERNEL = KernelSpec(
    "attention_backward_f32_dq",
    "attention/float32/backward_dq.cu",
    (*FLOAT_GRADIENT, *POSITIONS, *SCORE_INPUTS, Pointer("dq"), BACKWARD_STRUCT),
)
CONVERT_KERNEL = KernelSpec(
    "attention_backward_f32_convert",
    "attention/float32/backward_convert.cu",
    (*inputs("dq_acc"), Pointer("dq"), BACKWARD_STRUCT),
)
DBIAS_KERNEL = KernelSpec(
    "attention_backward_f32_dbias",
    "attention/float32/backward_dbias.cu",
    (*FLOAT_GRADIENT, *POSITIONS, *SCORE_INPUTS, Pointer("dbias"), BACKWARD_STRUCT),
)
DSINKS_KERNEL = KernelSpec(
    "attention_backward_f32_dsinks",
    "attention/float32/backward_dsinks.cu",
    (*inputs("lse", "delta", "sinks"), Pointer("dsinks"), BACKWARD_STRUCT),
)
DELTA_VARLEN_KERNEL = KernelSpec(
    "attention_backward_f32_delta_varlen",
    "attention/float32/backward_delta.cu",
    (*DELTA_KERNEL.parameters[:-1], Pointer("dq"), *inputs("cu_seqlens_q"), VARLEN_BACKWARD_STRUCT),
)
DKDV_VARLEN_KERNEL = KernelSpec(
    "attention_backward_f32_dkdv_varlen",
    "attention/float32/backward_dkdv.cu",
    of_packed(DKDV_KERNEL.parameters),
)
DQ_VARLEN_KERNEL = KernelSpec(
    "attention_backward_f32_dq_varlen",
    "attention/float32/backward_dq.cu",
    of_packed(DQ_KERNEL.parameters),
)
DSINKS_VARLEN_KERNEL = KernelSpec(
    "attention_backward_f32_dsinks_varlen",
    "attention/float32/backward_dsinks.cu",
    (*DSINKS_KERNEL.parameters[:-1], *inputs("cu_seqlens_q"), VARLEN_BACKWARD_STRUCT),
)
KERNELS = (
    *(DELTA_KERNEL, DKDV_KERNEL, DQ_KERNEL, CONVERT_KERNEL, DBIAS_KERNEL, DSINKS_KERNEL),
    *(DELTA_VARLEN_KERNEL, DKDV_VARLEN_KERNEL, DQ_VARLEN_KERNEL, DSINKS_VARLEN_KERNEL),
)

DTYPES = ("float32", "bfloat16", "float16")
VECTOR_ITEMS = 4
"""Items of one load where rows are aligned to as many."""

_THREADS = 128  # kProductThreads in backward_products.cuh
_STAGE = 8192  # kStageBytes in backward_loader.cuh
_PART = 4096  # kPartFloats in score_gradient.cuh
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
    column_parts: int = 1
    """Parts of the columns of dk and dv, for each of which the scores are computed again."""
    gates: Gates = Gates()


# The first row whose head dim is not below max(D, Dv), but for options that take registers.
_TURING_DKDV = {
    64: FloatConfig(
        128, 64, 16, 2, "8 x 8 scores a thread: 16 words of shared memory feed 64 FFMAs"
    ),
    128: FloatConfig(64, 64, 8, 2, "dK and dV, 8 x 8 a thread each: room for 8 x 4 scores"),
    256: FloatConfig(64, 32, 8, 2, "half the keys: dK and dV take 128 registers again"),
    512: FloatConfig(64, 32, 8, 2, "half the columns at a time: as many registers", column_parts=2),
}
_TURING_DQ = {
    64: FloatConfig(128, 64, 16, 2, "8 x 8 scores and 8 x 8 of dQ a thread"),
    128: FloatConfig(64, 64, 8, 2, "as dK and dV"),
    256: FloatConfig(32, 64, 8, 2, "half the queries: dQ takes 64 registers"),
    512: FloatConfig(32, 64, 8, 2, "as of half the columns: dQ takes 128 registers"),
}
_DKDV_GATES = {
    64: Gates(0.56, most_spills=208, kernels=0.55),
    128: Gates(0.93, 176, scalar=0.93, options=0.67, kernels=0.94, most_spills=224),
    256: Gates(0.39, 64, scalar=0.34, most_spills=96),
    512: Gates(0.39, 80, most_spills=256),
}
_DQ_GATES = {
    64: Gates(0.99, most_spills=48),
    128: Gates(0.99, options=0.67, most_spills=128),
    256: Gates(0.4, kernels=0.39),
    512: Gates(0.36, scalar=0.34, kernels=0.33),
}
DKDV = {75: with_gates(_TURING_DKDV, _DKDV_GATES)}
DQ = {75: with_gates(_TURING_DQ, _DQ_GATES)}


def dkdv_row(arch: int, head_dim: int, head_dim_v: int, options: FlashOptions) -> FloatConfig:
    """Return the table row of dk and dv for these head dims and options."""
    return _row(DKDV, arch, head_dim, head_dim_v, options)


def dq_row(arch: int, head_dim: int, head_dim_v: int, options: FlashOptions) -> FloatConfig:
    """Return the table row of dq for these head dims and options."""
    return _row(DQ, arch, head_dim, head_dim_v, options)


def _row(
    table: ByArch[FloatConfig], arch: int, head_dim: int, head_dim_v: int, options: FlashOptions
) -> FloatConfig:
    largest = max(head_dim, head_dim_v)
    # What is kept of each score takes the registers of four scores in eight.
    most = _SCORES // 2 if options.keeps_items else _SCORES
    return next(
        row
        for limit, row in rows_for(table, arch).items()
        if largest <= limit and row.tile_q * row.tile_k <= most * _THREADS
    )


CTA_ROWS = 8
"""Rows that one CTA of `delta` and `convert` takes, a warp each."""


@cache
def delta(dtype: str, head_dim_v: int, zeroed_dim: int | None = None) -> Specialisation:
    """Specialise the kernel of delta; with `zeroed_dim` that of packed sequences.

    The latter zeroes that many items of each row of dq.
    """
    shape: dict[str, Any] = {
        "threads": CTA_ROWS * WARP_SIZE,
        "DTYPE": dtype,
        "HEAD_DIM_V": head_dim_v,
    }
    if zeroed_dim is None:
        return DELTA_KERNEL.specialise(**shape, ZEROED_DIM=0)
    return DELTA_VARLEN_KERNEL.specialise(**shape, ZEROED_DIM=zeroed_dim)


@cache
def convert(dtype: str, head_dim: int) -> Specialisation:
    """Specialise the kernel that rounds the one-pass dq, which is float32, to another dtype."""
    return CONVERT_KERNEL.specialise(threads=CTA_ROWS * WARP_SIZE, DTYPE=dtype, HEAD_DIM=head_dim)


@cache
def dkdv(
    arch: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    one_pass: bool,
    options: FlashOptions,
    dbias: str,
    packed: bool = False,
) -> Specialisation:
    """Specialise the kernel of dk and dv.

    With `one_pass` it adds to a float32 dq as well; `dbias` is the dtype that it writes, or "void".
    """
    row = dkdv_row(arch, head_dim, head_dim_v, options)
    kernel = DKDV_VARLEN_KERNEL if packed else DKDV_KERNEL
    return modified(kernel, options.modified).specialise(
        threads=_THREADS,
        static_shared_bytes=_shared_bytes(row),
        gates=row.gates,
        reason=row.reason,
        ONE_PASS=cpp_bool(one_pass),
        DBIAS=dbias,
        COLUMN_PARTS=row.column_parts,
        **_macros(dtype, head_dim, head_dim_v, vec, options, row),
    )


@cache
def dq(
    arch: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions,
    packed: bool = False,
) -> Specialisation:
    """Specialise the kernel of dq."""
    row = dq_row(arch, head_dim, head_dim_v, options)
    kernel = DQ_VARLEN_KERNEL if packed else DQ_KERNEL
    return modified(kernel, options.modified).specialise(
        threads=_THREADS,
        static_shared_bytes=_shared_bytes(row),
        gates=row.gates,
        reason=row.reason,
        **_macros(dtype, head_dim, head_dim_v, vec, options, row),
    )


@dataclass(frozen=True)
class DbiasConfig:
    """One item of dbias per `lanes` threads of a CTA."""

    threads: int
    lanes: int
    reason: str


# The first row whose number of scores is not below that of the scores that an item of dbias was
# added to; None takes the rest.
DBIAS: dict[int, dict[int | None, DbiasConfig]] = {
    75: {
        16: DbiasConfig(128, 1, "few scores an item: a thread each"),
        None: DbiasConfig(128, WARP_SIZE, "many scores an item: a warp shares them"),
    }
}


def dbias_row(arch: int, terms: int) -> DbiasConfig:
    """Return the table row for items of dbias that are sums of `terms` scores."""
    rows = rows_for(DBIAS, arch)
    return next(row for limit, row in rows.items() if limit is None or terms <= limit)


@cache
def dbias(
    dtype: str, head_dim: int, head_dim_v: int, options: FlashOptions, row: DbiasConfig
) -> Specialisation:
    """Specialise the kernel of the gradient of a bias that broadcasts."""
    return modified(DBIAS_KERNEL, options.modified).specialise(
        threads=row.threads,
        gates=Gates(registers=80),
        LANES=row.lanes,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        **option_macros(options, SCORE_MACROS),
    )


_DSINKS_THREADS = 256  # of a CTA, which has one head and reads its rows once


@cache
def dsinks(dtype: str, packed: bool = False) -> Specialisation:
    """Specialise the kernel of the gradient of sinks of that dtype."""
    kernel = DSINKS_VARLEN_KERNEL if packed else DSINKS_KERNEL
    return kernel.specialise(threads=_DSINKS_THREADS, SINKS=dtype)


def _macros(
    dtype: str, head_dim: int, head_dim_v: int, vec: int, options: FlashOptions, row: FloatConfig
) -> dict[str, Any]:
    return {
        "DTYPE": dtype,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "TILE_Q": row.tile_q,
        "TILE_K": row.tile_k,
        "THREAD_ROWS": row.thread_rows,
        "VEC": vec,
        "MIN_CTAS": row.ctas_per_sm,
        **option_macros(options, SCORE_MACROS),
    }


def _shared_bytes(row: FloatConfig) -> int:
    """Sum two stages and the part of the weights that is held (the sources assert it)."""
    return 2 * _STAGE + FLOAT_BYTES * min(row.tile_q * row.tile_k, _PART)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim, dtypes, ways and loads in pairs; options at 64."""
    dims = rows_for(DKDV, arch)
    for dtype, head_dim in pairs(DTYPES, dims):
        yield delta(dtype, head_dim)
        if dtype != "float32":
            yield convert(dtype, head_dim)
        yield delta(dtype, head_dim, head_dim if dtype == "float32" else 0)
    ways = [(dtype, one_pass) for dtype in DTYPES for one_pass in (True, False)]
    for (dtype, one_pass), head_dim, vec in pairs(ways, dims, (VECTOR_ITEMS, 1)):
        for packed in (False, True):
            yield dkdv(arch, dtype, head_dim, head_dim, vec, one_pass, PLAIN, "void", packed)
    for dtype, head_dim, vec in pairs(DTYPES, rows_for(DQ, arch), (VECTOR_ITEMS, 1)):
        yield dq(arch, dtype, head_dim, head_dim, vec, PLAIN)
        yield dq(arch, dtype, head_dim, head_dim, vec, PLAIN, packed=True)
    for dtype in STORAGE:
        everything = EVERYTHING._replace(bias=dtype)
        for row in rows_for(DBIAS, arch).values():
            yield dbias(dtype, MAX_HEAD_DIM, MAX_HEAD_DIM, everything, row)
        yield dsinks(dtype)
        yield dsinks(dtype, packed=True)
    for options in (EVERYTHING, FlashOptions(bias="float32")):
        for one_pass in (True, False):
            for packed in (False, True):
                yield dkdv(
                    arch, "float32", 64, 64, VECTOR_ITEMS, one_pass, options, "float32", packed
                )
        yield dq(arch, "float32", 64, 64, VECTOR_ITEMS, options)
        yield dq(arch, "float32", 64, 64, VECTOR_ITEMS, options, packed=True)
