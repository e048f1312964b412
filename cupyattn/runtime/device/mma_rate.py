"""The kernel that times mma: what tells GPUs without tensor cores from others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.runtime.arch import SUB_PARTITIONS, TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation

KERNEL = KernelSpec("mma_rate", "common/mma_rate.cu", (Pointer("cycles"),))
KERNELS = (KERNEL,)

FLOAT32_CYCLES = 16 * 8 * 8 // 16
"""What the 16 float32 units of a sub-partition take for the multiply-adds of one mma.m16n8k8.

Tensor cores of Turing take 8 cycles, or 16 on GeForce cards. Without them it is about 280 on a GTX
1650, by the speeds of a network's float16 and float32 products (LeelaChessZero/lc0#849), and 640 on
a GTX 1660 Super, by a matrix product's 0.5 TFLOP/s (pytorch/pytorch#121957).
"""
IN_FLIGHT = 8
_ROUNDS = 32
LONG_ROUNDS = 2048
"""For the rate of a whole card: a launch costs nothing beside them."""
PRODUCTS = IN_FLIGHT * _ROUNDS
"""Of each warp: by these cycles at 1.6 GHz 1 to 3 us on tensor cores, 45 to 100 without."""


@cache
def mma_rate(rounds: int = _ROUNDS) -> Specialisation:
    """Specialise the kernel."""
    threads = SUB_PARTITIONS * WARP_SIZE
    return KERNEL.specialise(threads=threads, IN_FLIGHT=IN_FLIGHT, ROUNDS=rounds)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel."""
    del arch  # one row serves all
    yield mma_rate()
