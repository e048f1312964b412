"""Launch configuration of merging two results of attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.attention.structs import MERGE_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import pairs

KERNEL = KernelSpec(
    "attention_merge",
    "attention/merge.cu",
    (
        *inputs("out_a", "lse_a", "out_b", "lse_b"),
        *(Pointer(name) for name in ("out", "lse")),
        MERGE_STRUCT,
    ),
)
KERNELS = (KERNEL,)
ROWS = 4
"""Rows of a CTA, one for each warp."""
VEC = 4
"""Items of a lane, where rows allow it: 128 columns are one for each lane."""


@cache
def merge(part_a: str, part_b: str, merged: str, vec: int) -> Specialisation:
    """Specialise the kernel by the dtypes of both parts and of the result."""
    return KERNEL.specialise(
        threads=ROWS * WARP_SIZE, DTYPE_A=part_a, DTYPE_B=part_b, DTYPE=merged, VEC=vec
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield kernels for each dtype, and for sums in float32 of parts in it."""
    kinds = {
        kinds
        for dtype in STORAGE
        for kinds in pairs(*[dict.fromkeys((dtype, "float32"))] * 3, (VEC, 1))
    }
    for each in sorted(kinds):
        yield merge(*each)
