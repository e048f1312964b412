"""Launch configuration of adding up what a forward with split keys leaves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.attention.kernels.parameters import POSITIONS
from cupyattn.ops.attention.structs import SPLIT_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import pairs

KERNEL = KernelSpec(
    "attention_combine_parts",
    "attention/combine_parts.cu",
    (
        *POSITIONS,
        *inputs("sinks", optional=True),
        *inputs("partial_out", "partial_sums"),
        Pointer("out"),
        Pointer("lse", optional=True),
        SPLIT_STRUCT,
    ),
)
KERNELS = (KERNEL,)
ROWS = 4
"""Rows of a CTA, one for each warp."""


@cache
def combine(dtype: str, head_dim_v: int, tile_q: int, tile_k: int, sinks: str) -> Specialisation:
    """Specialise the kernel that runs after a forward of those tiles."""
    return KERNEL.specialise(
        threads=ROWS * WARP_SIZE,
        DTYPE=dtype,
        HEAD_DIM_V=head_dim_v,
        TILE_Q=tile_q,
        TILE_K=tile_k,
        SINKS=sinks,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield dtypes, head dims and sinks in pairs."""
    for dtype, head_dim, sinks in pairs(STORAGE, (64, 80, 256), ("void", "float32")):
        yield combine(dtype, head_dim, 128, 64, sinks)
