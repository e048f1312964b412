"""Kernels that measure a GPU's ceilings: float32 multiply-adds, and reading memory.

Products without tensor cores are compared with the first, kernels for few rows with the second.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs

THREADS = 256
CTAS_PER_SM = 4
"""Eight warps of each sub-partition: more than hide the 4 cycles of a multiply-add."""
IN_FLIGHT = 8
ROUNDS = 4096
"""A third of a millisecond on a T4."""

_FMA_RATE = KernelSpec(
    "fma_rate", "benchmark/fma_rate.cu", (Pointer("sums"), Scalar("x", np.dtype(np.float32)))
)
_READ_WEIGHT = KernelSpec(
    "read_weight",
    "benchmark/read_weight.cu",
    (*inputs("words"), Pointer("sink"), Scalar("count", np.dtype(np.int64))),
)


@cache
def fma_rate(rounds: int = ROUNDS) -> Specialisation:
    """Specialise the kernel that counts float32 multiply-adds."""
    return _FMA_RATE.specialise(threads=THREADS, IN_FLIGHT=IN_FLIGHT, ROUNDS=rounds)


@cache
def read_weight() -> Specialisation:
    """Specialise the kernel that only reads."""
    return _READ_WEIGHT.specialise(threads=THREADS, IN_FLIGHT=IN_FLIGHT)
