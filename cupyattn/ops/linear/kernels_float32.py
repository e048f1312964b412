"""Launch configurations of products in float32 arithmetic, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from cupyattn.ops.linear.structs import FLOAT_PRODUCT_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for

FORWARD = KernelSpec(
    "linear_forward_f32",
    "linear/float32/forward.cu",
    (
        *(*inputs("x", "w"), *inputs("b", "residual", optional=True)),
        *(Pointer("out"), Pointer("preactivation", optional=True)),
        FLOAT_PRODUCT_STRUCT,
    ),
)
THIN = KernelSpec("linear_thin_f32", "linear/float32/thin.cu", FORWARD.parameters)
DX = KernelSpec(
    "linear_dx_f32",
    "linear/float32/dx.cu",
    (
        *(*inputs("dout", "w"), *inputs("preactivation", optional=True)),
        Pointer("dx"),
        FLOAT_PRODUCT_STRUCT,
    ),
)
DW = KernelSpec(
    "linear_dw_f32",
    "linear/float32/dw.cu",
    (
        *(*inputs("x", "dout"), *inputs("preactivation", optional=True)),
        Pointer("dw"),
        FLOAT_PRODUCT_STRUCT,
    ),
)
DB = KernelSpec(
    "linear_db_f32",
    "linear/float32/db.cu",
    (
        *(*inputs("dout"), *inputs("preactivation", optional=True)),
        Pointer("partials"),
        FLOAT_PRODUCT_STRUCT,
    ),
)
KERNELS = (FORWARD, THIN, DX, DW, DB)

DTYPES = ("float32", "bfloat16", "float16")
"""What Turing's tensor cores do not take; and float16, for cards that have none."""
STRUCTS = {
    None: "Identity",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "silu": "Silu",
    "relu": "Relu",
}
"""What the sources call an activation."""
OUT_VECTOR = 4
"""Items that the epilogue loads and stores at once where rows are aligned to so many."""
THIN_ROWS = (1, 2, 4, 8, 16)
"""Rows of x that the kernels for few of them are made for."""
THIN_COLUMNS = 32
"""Columns of w to a CTA."""
_THIN_WARPS = 8

DB_THREADS = 64
DB_CTAS = 512
"""About as many as there are to be, so that rows are summed by many at once."""

_SM_SHARED_BYTES = 64 * 1024
_WARP_ROWS, _WARP_COLUMNS = 32, 64  # kWarpRows and kWarpColumns in product.cuh


@dataclass(frozen=True)
class ProductConfig:
    """A CTA's tile: 8 x 8 sums a thread, a warp for 32 rows by 64 columns."""

    tile_m: int
    tile_n: int
    ctas_per_sm: int
    reason: str

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.tile_m // _WARP_ROWS * (self.tile_n // _WARP_COLUMNS) * WARP_SIZE


_GATES = Gates(models=0.96)  # of the float32 units, in every product and both configurations
_FEW = ProductConfig(64, 64, 4, "four times as many CTAs for results of few tiles")

# The first row of which there are as many tiles as its key, otherwise the last.
Rows = Mapping[int, ProductConfig]
PRODUCTS: Mapping[int, Rows] = {
    75: {
        80: ProductConfig(128, 64, 3, "168 registers hold the sums, and factors on their way"),
        0: _FEW,
    }
}
# Where the rows of the result are those of a factor that is computed as it is loaded: each of its
# items is used by 128 of the other factor's lines.
GRADIENT_ROWS: Mapping[int, Rows] = {
    75: {80: ProductConfig(64, 128, 3, "as the others, the other way round"), 0: _FEW}
}


def product_row(
    arch: int, rows: int, columns: int, table: Mapping[int, Rows] = PRODUCTS
) -> ProductConfig:
    """Return the table row for a result of these sizes."""
    for least, row in rows_for(table, arch).items():
        if -(-rows // row.tile_m) * -(-columns // row.tile_n) >= least:
            return row
    raise AssertionError("the last row takes everything")


@cache
def forward(
    dtype: str,
    row: ProductConfig,
    w_along: str,
    activation: str | None,
    gated: bool,
    vec: int,
    vec_out: int,
) -> Specialisation:
    """Specialise the forward; w_along is "kLines" where rows of w are contiguous, or "kDepth"."""
    return specialise_tile(FORWARD, dtype, row, activation, gated, vec, vec_out, W_ALONG=w_along)


@cache
def thin(
    dtype: str, rows: int, w_along: str, activation: str | None, gated: bool, vec: int
) -> Specialisation:
    """Specialise the forward of few rows, one of `THIN_ROWS`; w_along as of `forward`."""
    parts = _THIN_WARPS if w_along == "kLines" else 1
    return THIN.specialise(
        threads=_THIN_WARPS * WARP_SIZE,
        static_shared_bytes=parts * rows * THIN_COLUMNS * FLOAT_BYTES,
        DTYPE=dtype,
        ROWS=rows,
        MIN_CTAS=2 if rows < THIN_ROWS[-1] else 1,
        W_ALONG=w_along,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        VEC=vec,
    )


@cache
def dx(
    dtype: str,
    row: ProductConfig,
    w_along: str,
    activation: str | None,
    gated: bool,
    vec: int,
    vec_out: int,
) -> Specialisation:
    """Specialise the kernel of dx; w_along is "kDepth" where rows of w are contiguous."""
    return specialise_tile(DX, dtype, row, activation, gated, vec, vec_out, W_ALONG=w_along)


@cache
def dw(
    dtype: str,
    row: ProductConfig,
    transposed: bool,
    activation: str | None,
    gated: bool,
    vec: int,
    vec_out: int,
) -> Specialisation:
    """Specialise the kernel of dw, or of its transpose."""
    return specialise_tile(
        DW, dtype, row, activation, gated, vec, vec_out, TRANSPOSED=cpp_bool(transposed)
    )


def specialise_tile(
    spec: KernelSpec,
    dtype: str,
    row: ProductConfig,
    activation: str | None,
    gated: bool,
    vec: int,
    vec_out: int,
    own_bytes: int = 0,
    **more: Any,
) -> Specialisation:
    """Specialise a kernel that includes product.cuh; `own_bytes` of shared memory are its own."""
    depth = 2 * vector_items(dtype)
    shared_bytes = 2 * depth * (row.tile_m + row.tile_n) * FLOAT_BYTES + own_bytes
    return spec.specialise(
        threads=row.threads,
        static_shared_bytes=shared_bytes,
        gates=_GATES,
        DTYPE=dtype,
        TILE_M=row.tile_m,
        TILE_N=row.tile_n,
        MIN_CTAS=min(row.ctas_per_sm, _SM_SHARED_BYTES // shared_bytes),
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        VEC=vec,
        VEC_OUT=vec_out,
        **more,
    )


@cache
def db(dtype: str, activation: str | None, gated: bool, vec: int) -> Specialisation:
    """Specialise the kernel of db's partial sums."""
    return DB.specialise(
        threads=DB_THREADS,
        gates=Gates(registers=240),
        DTYPE=dtype,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        VEC=vec,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows, dtypes, ways round, activations and loads in pairs."""
    kinds = ((None, False), ("gelu", False), ("gelu_tanh", False), ("relu", False), ("silu", True))
    ways, sizes, whole_or_not = (True, False), range(2), (True, False)
    for dtype, size, lines, (activation, gated), whole, whole_out in pairs(
        DTYPES, sizes, ways, kinds, whole_or_not, whole_or_not
    ):
        vec, vec_out = vector_items(dtype) if whole else 1, OUT_VECTOR if whole_out else 1
        options = (activation, gated, vec, vec_out)
        table = GRADIENT_ROWS if lines else PRODUCTS
        along = "kLines" if lines else "kDepth"
        yield forward(dtype, _nth(PRODUCTS, arch, size), along, *options)
        yield dx(dtype, _nth(GRADIENT_ROWS, arch, size), along, *options)
        yield dw(dtype, _nth(table, arch, size), lines, *options)
    of_rows = tuple(zip(THIN_ROWS, kinds, strict=True))
    for dtype, (rows, (activation, gated)), lines, whole in pairs(
        DTYPES, of_rows, ways, whole_or_not
    ):
        along, vec = "kLines" if lines else "kDepth", vector_items(dtype) if whole else 1
        yield thin(dtype, rows, along, activation, gated, vec)
    for dtype, (activation, gated), whole in pairs(DTYPES, kinds, whole_or_not):
        yield db(dtype, activation, gated, vector_items(dtype) if whole else 1)


def _nth(table: Mapping[int, Rows], arch: int, index: int) -> ProductConfig:
    return tuple(rows_for(table, arch).values())[index]
