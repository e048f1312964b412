"""The norm of many arrays."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, Struct, inputs
from cupyattn.runtime.storage import STORAGE, vector_items

NORM_ARRAYS = 8
"""Arrays that one launch of norm_partials takes."""


# NormParams in cuda_src/optimizer/norm_partials.cu
NORM_PARAMS = np.dtype(
    [
        *((field, np.int64, (NORM_ARRAYS,)) for field in ("length", "stride", "units", "rows")),
        ("first_cta", np.uint32, (NORM_ARRAYS + 1,)),
        ("first_partial", np.uint32),
    ],
    align=True,
)


NORM_STRUCT = Struct("params", NORM_PARAMS, "NormParams")


PARTIALS = KernelSpec(
    "norm_partials",
    "optimizer/norm_partials.cu",
    (
        *inputs("x0"),
        *inputs(*(f"x{i}" for i in range(1, NORM_ARRAYS)), optional=True),
        Pointer("partials"),
        NORM_STRUCT,
    ),
)
ROOT = KernelSpec(
    "global_norm",
    "optimizer/global_norm.cu",
    (*inputs("partials"), Pointer("out"), Scalar("count", np.dtype(np.int64))),
)
KERNELS = (PARTIALS, ROOT)

# Of 256 or 512 threads, 2, 4 or 8 loads each and 512 to 2,048 CTAs the fastest, a tenth to a fifth
# faster than 256, 2 and 1,024 (8192 rows of 768 to 4096 of float16, an H200 as compute_75 code,
# 2026-11-22, `python -m cupyattn.benchmark layers --operation global_norm`). Since loads have no
# branch and leave L1 to others, widths of 768, 2048 and 4096 take 6.67, 11.39 and 18.98 us for
# 7.20, 11.88 and 19.49 (the same device, 2026-11-24, by a script that is not kept).
THREADS = 512
MOST_CTAS = 512
"""Of one array: more would leave a thread little to add, and the second step much."""


def loads(vec: int) -> int:
    """Return how many loads of `vec` items a thread has in flight: 64 bytes, or 8 single items."""
    return 4 if vec > 1 else 8


@cache
def specialise_partials(dtype: str, vec: int) -> Specialisation:
    """Specialise the sums of squares; `vec` is the items of one load, 1 or 16 bytes' worth."""
    return PARTIALS.specialise(
        threads=THREADS, DTYPE=dtype, VEC=vec, VECTORS=loads(vec), ARRAYS=NORM_ARRAYS
    )


@cache
def specialise_root() -> Specialisation:
    """Specialise the root of their sum."""
    return ROOT.specialise(threads=THREADS, DTYPE="float32")


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield each dtype with loads of both kinds, and the root."""
    del arch  # one row serves all
    for dtype in STORAGE:
        for vec in (vector_items(dtype), 1):
            yield specialise_partials(dtype, vec)
    yield specialise_root()
