"""Detection of tensor cores.

All GPUs of compute capability 7.5 support the mma instructions. Those with the dies TU116 and TU117
have no tensor cores, and mma is about four times slower there than the same products in float32.
CUDA reports no property that differs; only the product name and the measured rate of mma do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from cupyattn.runtime.arch import (
    SUB_PARTITIONS,
    TENSOR_CORES_VARIABLE,
    TURING,
    WARP_SIZE,
    tensor_cores_override,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.plan import launch
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
def mma_rate(rounds: int = _ROUNDS, mma_k: int = 8) -> Specialisation:
    """Specialise the kernel for mma.m16n8k8, or from sm_80 on for mma.m16n8k16."""
    threads = SUB_PARTITIONS * WARP_SIZE
    return KERNEL.specialise(threads=threads, IN_FLIGHT=IN_FLIGHT, ROUNDS=rounds, MMA_K=mma_k)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel."""
    del arch  # one configuration for all
    yield mma_rate()


# Product names with the dies TU102, TU104 and TU106, then with TU116 and TU117.
_WITH = re.compile(r"\bRTX\b|\bT4G?$|\bT(10|40)$")
_WITHOUT = re.compile(r"\bGTX 16\d0\b|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


class TensorCores(NamedTuple):
    """Whether a GPU has tensor cores, and why."""

    present: bool
    because: str
    """A clause for messages."""


IN_CAPTURE = TensorCores(True, "not measured yet: in a CUDA graph capture it is taken to have them")
"""The answer in a capture if the GPU has to be measured: mma is correct everywhere, only slower."""


def without_measuring(capability: int, name: str) -> TensorCores | None:
    """Decide by environment variable, compute capability and product name; None if none decides.

    Examples
    --------
    >>> without_measuring(75, "NVIDIA GeForce GTX 1650 Ti")
    TensorCores(present=False, because='its name')
    >>> without_measuring(90, "NVIDIA H200")
    TensorCores(present=True, because='its compute capability, 9.0')

    Raises
    ------
    ValueError
        If CUPYATTN_TENSOR_CORES is neither 0 nor 1.
    """
    override = tensor_cores_override()
    if override is not None:
        return TensorCores(override, f"{TENSOR_CORES_VARIABLE}={override:d}")
    if capability > TURING.number:
        return TensorCores(True, f"its compute capability, {capability / 10:.1f}")
    if _WITHOUT.search(name):
        return TensorCores(False, "its name")
    return TensorCores(True, "its name") if _WITH.search(name) else None


def measured(device: Device) -> TensorCores:
    """Time products on one multiprocessor with its clock; waits for the current stream."""
    cycles = device.empty((SUB_PARTITIONS,), np.dtype(np.int64))
    launch(device, mma_rate(), 1, (cycles,))
    each = max(cycles.tolist()) / PRODUCTS
    return TensorCores(
        each < FLOAT32_CYCLES,
        f"measured: a product of 16 x 8 x 8 takes {each:.0f} cycles by mma, {FLOAT32_CYCLES} by "
        "float32 units",
    )
