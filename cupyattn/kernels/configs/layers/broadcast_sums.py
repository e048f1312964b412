"""Sums over the axes along which an array had been broadcast: the gradient of a bias."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.configs.tables import FLOAT_BYTES
from cupyattn.kernels.spec import KernelSpec, Pointer, Scalar, Specialisation
from cupyattn.kernels.structs import Struct, rows_params

WARP = 32
THREADS = 256
"""Eight warps on one block of columns: loads enough in flight where there are few columns."""
ROWS_OF_A_WARP = 8
"""The fewest that a split is worth: a partial sum costs as much as it saves below that."""
SUMMING_CTAS = 4
"""For each multiprocessor, where there are rows enough to split."""

SUMS = KernelSpec(
    "broadcast_sums",
    "layers/broadcast_sums.cu",
    (
        Pointer("x", const=True),
        Pointer("partials"),
        Scalar("splits", np.dtype(np.int64)),
        *(Struct(name, rows_params(1), "RowsParams") for name in ("kept", "summed")),
    ),
)
KERNELS = (SUMS,)


def columns(vec: int) -> int:
    """Return how many columns a CTA has."""
    return WARP * vec


@cache
def broadcast_sums(dtype: str, vec: int) -> Specialisation:
    """Specialise the kernel for an array of a dtype; `vec` is the items of one load."""
    pitch = WARP + WARP // vec
    return SUMS.specialise(
        threads=THREADS,
        static_shared_bytes=THREADS // WARP * vec * pitch * FLOAT_BYTES,
        DTYPE=dtype,
        VEC=vec,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel for each dtype and load."""
    del arch  # one row serves all
    for dtype, whole in itertools.product(STORAGE, (True, False)):
        yield broadcast_sums(dtype, vector_items(dtype) if whole else 1)
