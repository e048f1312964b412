"""What the GPU at hand can do at the most, measured in the same run: bytes and products."""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np

from cupyattn.benchmark.frame.clock import Clock
from cupyattn.benchmark.frame.rows import COPY, FLOAT32, PRODUCTS, READ
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.arch import SUB_PARTITIONS
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES
from cupyattn.kernels.configs.linear import fma_rate, mma_rate, read_weight
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.kernels.launch import launch

_BYTES = 2**30
_PRODUCT_FLOPS = 2 * 16 * 8 * 8  # of mma.m16n8k8
_ADDEND = 0.5  # of s <- s / 2 + 1 / 2, whose numbers stay below 1
_CTAS_PER_SM = 8
_CLOCK = Clock(calls=20, warm_up=3, budget_s=0.5)


def measured_ceilings(device: CudaDevice) -> dict[str, float | None]:
    """Measure the rates of a copy, of reading, of mma.m16n8k8 and of float32 multiply-adds.

    Those of mma are None on a GPU without tensor cores.
    """
    cupy = load_cupy()
    source = cupy.zeros(_BYTES, np.uint8)
    found: dict[str, float | None] = {COPY: copy_rate(), READ: _read_rate(device, source)}
    found[PRODUCTS] = _product_rate(device) if device.tensor_cores else None
    found[FLOAT32] = _float32_rate(device)
    return found


def copy_rate() -> float:
    """Return the GB/s, read and written, of copies of a gibibyte.

    Not as a graph, in which a copy goes through an engine that is slower than the multiprocessors.
    """
    cupy = load_cupy()
    source, target = cupy.zeros(_BYTES, np.uint8), cupy.empty(_BYTES, np.uint8)
    copy = partial(target.data.copy_from_device_async, source.data, source.nbytes)
    return 2 * _BYTES / statistics.median(_CLOCK.queued(copy)) / 1e9


def _read_rate(device: CudaDevice, source: np.ndarray) -> float:
    sink = load_cupy().zeros(1, np.uint32)
    grid = device.multiprocessors * read_weight.CTAS_PER_SM
    arguments = (source, sink, _BYTES // VECTOR_BYTES)
    read = partial(launch, device, read_weight.read_weight(), grid, arguments)
    return _BYTES / statistics.median(_CLOCK.queued(read)) / 1e9


def _product_rate(device: CudaDevice) -> float:
    cycles = load_cupy().empty(SUB_PARTITIONS, np.int64)  # of which nothing is read
    kernel = mma_rate.mma_rate(mma_rate.LONG_ROUNDS)
    grid = device.multiprocessors * _CTAS_PER_SM
    seconds = statistics.median(_CLOCK.queued(partial(launch, device, kernel, grid, (cycles,))))
    products = grid * SUB_PARTITIONS * mma_rate.IN_FLIGHT * mma_rate.LONG_ROUNDS
    return products * _PRODUCT_FLOPS / seconds / 1e12


def _float32_rate(device: CudaDevice) -> float:
    grid = device.multiprocessors * fma_rate.CTAS_PER_SM
    threads = grid * fma_rate.THREADS
    arguments = (load_cupy().empty(threads, np.float32), _ADDEND)
    multiply = partial(launch, device, fma_rate.fma_rate(), grid, arguments)
    seconds = statistics.median(_CLOCK.queued(multiply))
    return 2 * threads * fma_rate.IN_FLIGHT * fma_rate.ROUNDS / seconds / 1e12
