"""The kernel that times mma, to find GPUs without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.runtime.arch import SUB_PARTITIONS, TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation

KERNEL = KernelSpec("mma_rate", "common/mma_rate.cu", (Pointer("cycles"),))
KERNELS = (KERNEL,)

FLOAT32_CYCLES = 16 * 8 * 8 // 16
"""Cycles that the 16 float32 units of a sub-partition need for the work of one mma.m16n8k8.

Turing's tensor cores need 8 cycles, or 16 on GeForce products. Without tensor cores mma needs about
280 cycles on a GTX 1650, computed from the speeds of a network's float16 and float32 products
(LeelaChessZero/lc0#849), and 640 on a GTX 1660 Super, computed from 0.5 TFLOP/s of a matrix product
(pytorch/pytorch#121957).
"""
IN_FLIGHT = 8
_ROUNDS = 32
LONG_ROUNDS = 2048
"""Rounds to measure the rate of a whole device: the launch time is negligible then."""
PRODUCTS = IN_FLIGHT * _ROUNDS
"""Products of each warp. At 1.6 GHz they take 1 to 3 us with tensor cores, 45 to 100 us without."""


@cache
def mma_rate(rounds: int = _ROUNDS) -> Specialisation:
    """Specialise the kernel."""
    threads = SUB_PARTITIONS * WARP_SIZE
    return KERNEL.specialise(threads=threads, IN_FLIGHT=IN_FLIGHT, ROUNDS=rounds)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel."""
    del arch  # one configuration for all
    yield mma_rate()
