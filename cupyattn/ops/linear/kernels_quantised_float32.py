"""Launch configurations of products with a quantised weight in float32 arithmetic, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.linear import kernels_float32 as float32
from cupyattn.ops.linear.kernels_float32 import ProductConfig
from cupyattn.ops.linear.kernels_quantised import CODEBOOK_BYTES, FORMATS
from cupyattn.ops.linear.structs import QUANTISED_FLOAT_STRUCT
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import pairs, rows_for

_WEIGHT = (*inputs("codes", "scales"), *inputs("super_scales", optional=True))

FORWARD = KernelSpec(
    "linear_forward_quantised_f32",
    "linear/quantised/float_forward.cu",
    (
        *inputs("x"),
        *_WEIGHT,
        *inputs("b", "residual", optional=True),
        *(Pointer("out"), Pointer("preactivation", optional=True)),
        QUANTISED_FLOAT_STRUCT,
    ),
)
DX = KernelSpec(
    "linear_dx_quantised_f32",
    "linear/quantised/float_dx.cu",
    (
        *inputs("dout"),
        *_WEIGHT,
        *inputs("preactivation", optional=True),
        Pointer("dx"),
        QUANTISED_FLOAT_STRUCT,
    ),
)
KERNELS = (FORWARD, DX)


@cache
def product(
    spec: KernelSpec,
    name: str,
    dtype: str,
    row: ProductConfig,
    w_along: str,
    activation: str | None,
    gated: bool,
    vec: int,
    vec_out: int,
) -> Specialisation:
    """Specialise FORWARD or DX; w_along is "kDepth" where rows of codes lie along the sum."""
    return float32.specialise_tile(
        spec,
        dtype,
        row,
        activation,
        gated,
        vec,
        vec_out,
        CODEBOOK_BYTES.get(name, 0),
        FORMAT=FORMATS[name],
        W_ALONG=w_along,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield formats, rows, dtypes, ways round, activations and loads in pairs."""
    kinds = ((None, False), ("gelu", False), ("relu", False), ("silu", True))
    for name, dtype, size, along, (activation, gated), whole in pairs(
        FORMATS, float32.DTYPES, range(2), ("kDepth", "kLines"), kinds, (True, False)
    ):
        vec, vec_out = (vector_items(dtype), float32.OUT_VECTOR) if whole else (1, 1)
        options = (along, activation, gated, vec, vec_out)
        rows = rows_for(float32.PRODUCTS, arch), rows_for(float32.GRADIENT_ROWS, arch)
        yield product(FORWARD, name, dtype, tuple(rows[0].values())[size], *options)
        yield product(DX, name, dtype, tuple(rows[1].values())[size], *options)
