"""The kernel that counts float32 multiply-adds: what products without tensor cores are held to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation

KERNEL = KernelSpec(
    "fma_rate", "benchmark/fma_rate.cu", (Pointer("sums"), Scalar("x", np.dtype(np.float32)))
)
KERNELS = (KERNEL,)
THREADS = 256
CTAS_PER_SM = 4
"""Eight warps of each sub-partition: more than hide the 4 cycles of a multiply-add."""
IN_FLIGHT = 8
ROUNDS = 4096
"""A third of a millisecond on a T4."""


@cache
def fma_rate(rounds: int = ROUNDS) -> Specialisation:
    """Specialise the kernel."""
    return KERNEL.specialise(threads=THREADS, IN_FLIGHT=IN_FLIGHT, ROUNDS=rounds)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel."""
    del arch  # one row serves all
    yield fma_rate()
