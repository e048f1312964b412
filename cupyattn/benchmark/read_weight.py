"""The kernel that only reads: what kernels for few rows are measured beside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs

KERNEL = KernelSpec(
    "read_weight",
    "benchmark/read_weight.cu",
    (*inputs("words"), Pointer("sink"), Scalar("count", np.dtype(np.int64))),
)
KERNELS = (KERNEL,)
THREADS = 256
CTAS_PER_SM = 4
_IN_FLIGHT = 8


@cache
def read_weight() -> Specialisation:
    """Specialise the kernel."""
    return KERNEL.specialise(threads=THREADS, IN_FLIGHT=_IN_FLIGHT)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel."""
    del arch  # one row serves all
    yield read_weight()
