"""Launch configuration of merging two results of attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.kernels.structs import MERGE_STRUCT

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
"""Of a CTA, one a warp."""


@cache
def merge(dtype: str) -> Specialisation:
    """Specialise the kernel."""
    return KERNEL.specialise(threads=ROWS * WARP_SIZE, DTYPE=dtype)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield a kernel for each dtype."""
    for dtype in STORAGE:
        yield merge(dtype)
