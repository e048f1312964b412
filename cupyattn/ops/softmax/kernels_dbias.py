"""The gradient of a bias of softmax: sums over the axes along which it had been broadcast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Scalar, Specialisation, Struct, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import rows_params
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool

WARP = 32
THREADS = 256
"""Eight warps on one block of columns: loads enough in flight where there are few columns."""
ROWS_OF_A_WARP = 8
"""The fewest that a split is worth: a partial sum costs as much as it saves below that."""
SUMMING_CTAS = 4
"""For each multiprocessor, where there are rows enough to split."""


@dataclass(slots=True)
class BiasSumArrays(Record[T]):
    """Arrays of the sum of a bias's gradient."""

    dout: T
    out: T
    bias: T
    row_sum: T
    dbias: T | None = None
    workspace: T | None = None


DBIAS = KernelSpec(
    "softmax_dbias",
    "softmax/dbias.cu",
    (
        *inputs("dout", "out", "row_sum"),
        Pointer("partials"),
        Scalar("splits", np.dtype(np.int64)),
        *(Struct(name, rows_params(3), "RowsParams") for name in ("kept", "summed")),
    ),
)
KERNELS = (DBIAS,)


def columns(vec: int) -> int:
    """Return how many columns a CTA has."""
    return WARP * vec


@cache
def softmax_dbias(dtype: str, vec: int, logarithm: bool) -> Specialisation:
    """Specialise the kernel for arrays of a dtype; `vec` is the items of one load."""
    pitch = WARP + WARP // vec
    return DBIAS.specialise(
        threads=THREADS,
        static_shared_bytes=THREADS // WARP * vec * pitch * FLOAT_BYTES,
        gates=Gates(registers=80),
        DTYPE=dtype,
        VEC=vec,
        LOGARITHM=cpp_bool(logarithm),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel for each dtype and load, of softmax and of its logarithm."""
    del arch  # one row serves all
    for dtype, whole, logarithm in itertools.product(STORAGE, (True, False), (False, True)):
        yield softmax_dbias(dtype, vector_items(dtype) if whole else 1, logarithm)
