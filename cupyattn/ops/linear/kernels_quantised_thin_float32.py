"""Launch configurations of products with few rows and a quantised weight in float32 arithmetic.

For dtypes that Turing's tensor cores do not take, and float16 on cards without any. A GTX 1650 Ti
asks for 8 bytes of codes a cycle of a multiprocessor; decoding and products of one row take about
five instructions a weight, and with 16 warps that is about what there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.linear.kernels_float32 import STRUCTS
from cupyattn.ops.linear.kernels_quantised import FORMATS
from cupyattn.ops.linear.kernels_quantised_thin import PRODUCT as ON_TENSOR_CORES
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Specialisation
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs

PRODUCT = KernelSpec(
    "linear_quantised_thin_f32", "linear/quantised/thin_float32.cu", ON_TENSOR_CORES.parameters
)
KERNELS = (PRODUCT,)

ROWS = (1, 2, 4, 8)
"""Rows of x of a CTA."""
MAX_ROWS = 16
"""Beyond which kernels for many rows dequantise less often."""
X_VECTOR = 4
"""Items of x that a load may bring."""
_WARPS = 8
_COLUMNS = 4  # of a warp


def ctas(rows: int, outer: int, gated: bool) -> int:
    """Return the grid."""
    results = _WARPS * _COLUMNS // (1 + gated)
    return -(-rows // _tile_rows(rows)) * -(-outer // results)


def _tile_rows(rows: int) -> int:
    return next((most for most in ROWS if rows <= most), max(ROWS))


def thin(
    weights: str,
    block_size: int,
    dtype: str,
    vec: int,
    rows: int,
    activation: str | None,
    gated: bool,
) -> Specialisation:
    """Specialise the kernel; block_size is 0 of a whole row of "int8"."""
    return _thin(weights, block_size, dtype, vec, _tile_rows(rows), activation, gated)


@cache
def _thin(
    weights: str,
    block_size: int,
    dtype: str,
    vec: int,
    rows: int,
    activation: str | None,
    gated: bool,
) -> Specialisation:
    run_items = WARP_SIZE * VECTOR_BYTES * (1 if weights == "int8" else 2)
    return PRODUCT.specialise(
        threads=_WARPS * WARP_SIZE,
        static_shared_bytes=rows * run_items * FLOAT_BYTES,
        FORMAT=FORMATS[weights],
        BLOCK_SIZE=block_size,
        DTYPE=dtype,
        VEC=vec,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        ROWS=rows,
        COLUMNS=_COLUMNS,
        MIN_CTAS=2,
    )


_BLOCKS = (("nf4", 64), ("int4", 128), ("int8", 0), ("int8", 32), ("q4_1", 32), ("q4_k", 32))


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield formats in their usual blocks, dtypes, rows, activations and loads in pairs."""
    del arch  # one row serves all
    kinds = ((None, False), ("gelu", False), ("silu", True))
    for (weights, block_size), dtype, rows, (activation, gated), vec in pairs(
        _BLOCKS, tuple(STORAGE), ROWS, kinds, (1, X_VECTOR)
    ):
        yield _thin(weights, block_size, dtype, vec, rows, activation, gated)
