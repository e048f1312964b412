"""Kernels that measure a GPU: float32 multiply-adds, reading memory, and its units one by one.

Products without tensor cores are compared with the first, kernels for few rows with the second. The
units are what the model of Turing takes from publications.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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
_UNIT_RATES = KernelSpec(
    "unit_rates", "benchmark/unit_rates.cu", (Pointer("cycles"), Pointer("words"))
)


class TimedUnit(NamedTuple):
    """A unit that `unit_rates` times.

    Attributes
    ----------
    name : str
    macro : str
    opcode : str
        Its instruction on Turing.
    threads, in_flight : int
        Of a CTA, one for each multiprocessor, and the chains of a thread.
    """

    name: str
    macro: str
    opcode: str
    threads: int = 256
    in_flight: int = 8


LOADS = "kLoads"
TENSOR_UNITS = ("kProducts", "kIntegerProducts")
"""Units that devices without tensor cores do not have."""
UNITS = (
    TimedUnit("conversions to float16 (F2F)", "kConversions", "F2F.F16.F32"),
    TimedUnit("exponentials (MUFU)", "kExponentials", "MUFU.EX2"),
    TimedUnit("shuffles (SHFL)", "kShuffles", "SHFL.BFLY"),
    TimedUnit("reductions in global memory (RED)", "kReductions", "RED.E.ADD.F32"),
    TimedUnit("products (HMMA)", "kProducts", "HMMA.1688.F32"),
    TimedUnit("products of int8 (IMMA)", "kIntegerProducts", "IMMA.8816.S8.S8"),
    TimedUnit("loads from L2 (LDG), one warp", LOADS, "LDG.E.128", threads=32, in_flight=1),
    TimedUnit("loads, 8 warps", LOADS, "LDG.E.128", in_flight=1),
    TimedUnit("loads, 32 warps", LOADS, "LDG.E.128", threads=1024, in_flight=1),
    TimedUnit("loads, 8 warps with 8 each", LOADS, "LDG.E.128"),
)
"""Units in the order of a report. Loads hit L2, which all multiprocessors share."""
UNIT_WORDS = 2**17
"""Words of 16 bytes: 2 MB, half of a T4's L2."""
UNIT_ROUNDS = 512


@cache
def unit_rates(unit: TimedUnit, rounds: int = UNIT_ROUNDS) -> Specialisation:
    """Specialise the kernel that times a unit."""
    return _UNIT_RATES.specialise(
        threads=unit.threads,
        IN_FLIGHT=unit.in_flight,
        ROUNDS=rounds,
        UNIT=unit.macro,
        COUNT=UNIT_WORDS,
    )


@cache
def fma_rate(rounds: int = ROUNDS) -> Specialisation:
    """Specialise the kernel that counts float32 multiply-adds."""
    return _FMA_RATE.specialise(threads=THREADS, IN_FLIGHT=IN_FLIGHT, ROUNDS=rounds)


@cache
def read_weight() -> Specialisation:
    """Specialise the kernel that only reads."""
    return _READ_WEIGHT.specialise(threads=THREADS, IN_FLIGHT=IN_FLIGHT)
