"""Launch configurations of the passes over memory around the tensor-core backward's products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.attention.kernels.parameters import PACKED
from cupyattn.ops.attention.kernels.tensor_core.backward_dkdv import ONE_PASS
from cupyattn.ops.attention.structs import BACKWARD_STRUCT, DBIAS_STRUCT, VARLEN_BACKWARD_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import pairs, rows_for

DELTA_KERNEL = KernelSpec(
    "attention_backward_delta",
    "attention/tensor_core/backward_delta.cu",
    (
        *(*inputs("out", "dout", "lse"), *inputs("dlse", optional=True), *inputs("v")),
        *(Pointer("stats"), Pointer("sizes", optional=True), Pointer("zeroed", optional=True)),
        *inputs("seqused_k", optional=True),
        BACKWARD_STRUCT,
    ),
)
SCALES_KERNEL = KernelSpec(
    "attention_backward_scales",
    "attention/tensor_core/backward_scales.cu",
    (*inputs("sizes"), Pointer("stats"), Pointer("scales"), BACKWARD_STRUCT),
)
CONVERT_KERNEL = KernelSpec(
    "attention_backward_convert",
    "attention/tensor_core/backward_convert.cu",
    (*inputs("dq_acc"), *inputs("scales", optional=True), Pointer("dq"), BACKWARD_STRUCT),
)
DELTA_VARLEN_KERNEL = KernelSpec(
    "attention_backward_delta_varlen",
    "attention/tensor_core/backward_delta.cu",
    (
        *DELTA_KERNEL.parameters[:-2],
        *PACKED,
        *DELTA_KERNEL.parameters[-2:-1],
        VARLEN_BACKWARD_STRUCT,
    ),
)
SCALES_VARLEN_KERNEL = KernelSpec(
    "attention_backward_scales_varlen",
    "attention/tensor_core/backward_scales.cu",
    (*SCALES_KERNEL.parameters[:-1], *PACKED, VARLEN_BACKWARD_STRUCT),
)
CONVERT_VARLEN_KERNEL = KernelSpec(
    "attention_backward_convert_varlen",
    "attention/tensor_core/backward_convert.cu",
    (*CONVERT_KERNEL.parameters[:-1], *inputs("cu_seqlens_q"), VARLEN_BACKWARD_STRUCT),
)
DBIAS_KERNEL = KernelSpec(
    "attention_backward_dbias",
    "attention/tensor_core/backward_dbias.cu",
    (*inputs("scratch"), Pointer("dbias"), DBIAS_STRUCT),
)
DSINKS_KERNEL = KernelSpec(
    "attention_backward_dsinks",
    "attention/tensor_core/backward_dsinks.cu",
    (*inputs("sinks", "stats"), Pointer("dsinks"), BACKWARD_STRUCT),
)
KERNELS = (
    DELTA_KERNEL,
    SCALES_KERNEL,
    CONVERT_KERNEL,
    DELTA_VARLEN_KERNEL,
    SCALES_VARLEN_KERNEL,
    CONVERT_VARLEN_KERNEL,
    DBIAS_KERNEL,
    DSINKS_KERNEL,
)

ROW_PAD = 64
"""Rows per head in scratch memory are a multiple of this (kRowPad in backward_params.cuh).

As many one CTA of `convert` takes. So are keys, where `delta` reads the rows of V.
"""

_THREADS = 256


def _row_lanes(head_dim_v: int) -> int:
    """Lanes that share a row of out: one for each 8 columns, a power of two from 8 to 32."""
    return next(lanes for lanes in (8, 16, 32) if head_dim_v <= 8 * lanes or lanes == WARP_SIZE)


def scales_gradients(dtype: str) -> bool:
    """Tell whether dS is scaled into the range of a dtype (gradient_scale.cuh)."""
    return dtype == "float16"


def delta_rows(head_dim_v: int) -> int:
    """Return the rows that one CTA of `delta` takes, of queries or of V."""
    return _THREADS // _row_lanes(head_dim_v)


@cache
def delta(
    head_dim_v: int, vec: int, packed: bool = False, dtype: str = "float16"
) -> Specialisation:
    """Specialise the kernel of the row statistics."""
    return (DELTA_VARLEN_KERNEL if packed else DELTA_KERNEL).specialise(
        threads=_THREADS,
        DTYPE=dtype,
        HEAD_DIM_V=head_dim_v,
        ROW_LANES=_row_lanes(head_dim_v),
        VEC=vec,
    )


@cache
def scales(head_dim_v: int, packed: bool = False) -> Specialisation:
    """Specialise the kernel that keeps dS within float16's range."""
    return (SCALES_VARLEN_KERNEL if packed else SCALES_KERNEL).specialise(
        threads=_THREADS, DTYPE="float16", CTA_ROWS=delta_rows(head_dim_v)
    )


@cache
def convert(
    head_dim: int, vec: int, packed: bool = False, dtype: str = "float16"
) -> Specialisation:
    """Specialise the kernel that rounds the one-pass dQ."""
    return (CONVERT_VARLEN_KERNEL if packed else CONVERT_KERNEL).specialise(
        threads=_THREADS, DTYPE=dtype, HEAD_DIM=head_dim, VEC=vec
    )


def dbias_ctas(items: int, sums_keys: bool) -> int:
    """Return the CTAs of `dbias` for that many items, each of a thread, or a warp to sum keys."""
    return -(-items * (WARP_SIZE if sums_keys else 1) // _THREADS)


@cache
def dbias(dtype: str) -> Specialisation:
    """Specialise the kernel that sums the scratch of dS to a dbias of that dtype."""
    return DBIAS_KERNEL.specialise(threads=_THREADS, DTYPE=dtype)


@cache
def dsinks(sinks: str, dtype: str = "float16") -> Specialisation:
    """Specialise the kernel of the sinks' gradient, by the dtypes of the sinks and of the call."""
    return DSINKS_KERNEL.specialise(threads=_THREADS, DTYPE=dtype, SINKS=sinks)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every kernel at head dims of the products' tables, with vector and scalar loads."""
    for head_dim, vec in pairs(rows_for(ONE_PASS, arch), (8, 1)):
        yield delta(head_dim, vec)
        yield convert(head_dim, vec)
        if arch >= NATIVE_ARCH:
            yield delta(head_dim, vec, dtype="bfloat16")
            yield convert(head_dim, vec, dtype="bfloat16")
    for head_dim in (64, 128, 256):  # as many lanes to a row as there can be
        yield scales(head_dim)
        yield scales(head_dim, packed=True)
        yield delta(head_dim, 8, packed=True)
        yield convert(head_dim, 8, packed=True)
    for dtype in STORAGE:
        yield dbias(dtype)
        yield dsinks(dtype)
        if arch >= NATIVE_ARCH:
            yield dsinks(dtype, "bfloat16")
