"""Time calls on a GPU with CUDA events, and measure its memory and its ceilings.

As in `cupyx.profiler.benchmark`, events surround each call after a warm-up. Unlike there, calls are
queued without waiting between them, and calls of less than 0.1 ms are captured in CUDA graphs:
otherwise times of short calls contain the launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.benchmark import ceiling_kernels
from cupyattn.runtime.arch import SUB_PARTITIONS
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device import tensor_cores
from cupyattn.runtime.device.cuda import CudaDevice
from cupyattn.runtime.plan import launch
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import VECTOR_BYTES

Tensor = Any
"""A tensor of PyTorch, which is not a dependency."""
Call = Callable[[], object]
Round = Sequence[Call]
"""Calls of one case that run one after the other, each with its own arrays."""

PRODUCTS, FLOAT32 = "mma_tflops", "fma_tflops"
BFLOAT16 = "bfloat16_mma_tflops"
COPY, READ = "copy_gb_per_s", "read_gb_per_s"
"""The ceilings that can bind a case: three of products, and two of bytes."""
ARITHMETIC = (PRODUCTS, BFLOAT16, FLOAT32)
FEWEST = 3
"""Timed calls, however long they take."""
_WARM_UP_SHARE = 0.2
_SHORT_S = 100e-6  # the host takes some 20 us to queue a call
_GRAPH_S = 1e-3
_MOST_IN_A_GRAPH = 50


class Samples(NamedTuple):
    """Seconds of a call, many times; each is the mean of `calls_each` calls."""

    seconds: list[float]
    calls_each: int = 1


class Timer(NamedTuple):
    """How many calls are timed, after how many others, and within how many seconds of a row.

    If calls take too long for the budget, fewer are made.
    """

    calls: int
    warm_up: int
    budget_s: float

    def within(self, wanted: int, seconds: float, share: float = 1.0, least: int = FEWEST) -> int:
        """Return how many calls of so many seconds fit into a share of the budget."""
        return min(wanted, max(least, int(share * self.budget_s / max(seconds, 1e-9))))

    def times(self, calls: Round, torch: ModuleType | None = None) -> Samples:
        """Return the seconds of a call, many times; `torch` is PyTorch, if the calls are its own.

        Several calls, and short calls, are captured as one CUDA graph. A sample is then the time
        of the graph divided by the number of its calls.
        """
        calls[0]()  # compiles
        if len(calls) > 1:
            return self._of_graph(calls, torch)
        (took,) = _timed(calls[0], 1)
        if took >= _SHORT_S:
            return Samples(self._of(calls[0], took))
        count = max(1, min(_MOST_IN_A_GRAPH, int(_GRAPH_S / max(took, 1e-9))))
        return self._of_graph(list(calls) * count, torch)

    def queued(self, call: Call) -> list[float]:
        """Return the seconds of a call that a graph cannot hold."""
        call()
        return self._of(call, _timed(call, 1)[0])

    def waited(self, call: Callable[[], float], took: float) -> list[float]:
        """Return what a call that times itself by the host's clock returns, after a warm-up."""
        for _ in range(self.within(self.warm_up, took, _WARM_UP_SHARE, 1)):
            call()
        return [call() for _ in range(self.within(self.calls, took))]

    def _of(self, call: Call, took: float) -> list[float]:
        for _ in range(self.within(self.warm_up, took, _WARM_UP_SHARE, 1)):
            call()
        return _timed(call, self.within(self.calls, took))

    def _of_graph(self, calls: Round, torch: ModuleType | None) -> Samples:
        replay = _graph(calls) if torch is None else _torch_graph(torch, calls)
        replay()
        seconds = self._of(replay, _timed(replay, 1)[0])
        return Samples([each / len(calls) for each in seconds], len(calls))


def _timed(call: Call, count: int) -> list[float]:
    """Queue calls with an event between any two, then wait for all of them."""
    cupy = load_cupy()
    events = [cupy.cuda.Event() for _ in range(count + 1)]
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    stream.synchronize()
    return [cupy.cuda.get_elapsed_time(start, stop) / 1e3 for start, stop in pairwise(events)]


def _graph(calls: Round) -> Call:
    cupy = load_cupy()
    cupy.cuda.get_current_stream().synchronize()  # the stream below does not wait for this one
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):  # compiles, and fills the memory pool with what the capture allocates
            _results(calls)
        stream.synchronize()
        stream.begin_capture()
        try:
            _results(calls)
        finally:
            graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.get_current_stream())


@cache
def torch_stream(torch: ModuleType) -> object:
    """Return the stream that PyTorch's calls are captured on.

    PyTorch computes gradients on the stream of their forward, which has to be this one.
    """
    return torch.cuda.Stream()


def _torch_graph(torch: ModuleType, calls: Round) -> Call:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)):
        for _ in range(2):
            _results(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch_stream(torch)):
        _results(calls)
    replay: Call = graph.replay
    return replay


def _results(calls: Round) -> None:
    """Make the calls; each result has its own memory, so that no cache holds it."""
    _ = [call() for call in calls]


def peak_bytes(call: Call, torch: ModuleType | None = None) -> int:
    """Return the most device memory that a call takes beyond its inputs and results.

    With CuPy this is what a new memory pool takes from the device, with PyTorch what its allocator
    reports. A result with another address in a second call is new memory, and is subtracted.
    """
    first = call()
    if torch is None:
        cupy = load_cupy()
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            second = call()
            cupy.cuda.get_current_stream().synchronize()
        taken = int(pool.total_bytes())
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        second = call()
        torch.cuda.synchronize()
        taken = int(torch.cuda.max_memory_allocated() - before)
    pairs = zip(_arrays(second), _arrays(first), strict=True)
    new = sum(one.nbytes for one, other in pairs if _address(one) != _address(other))
    return max(0, taken - new)


def _arrays(result: object) -> list[Array | Tensor]:
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [each for each in results if hasattr(each, "nbytes")]


def _address(array: Array | Tensor) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)


_MOST_BYTES = 2**30
_FLOPS_PER_K = 2 * 16 * 8  # of mma.m16n8k8 and m16n8k16
_ADDEND = 0.5  # s <- s / 2 + 1 / 2 stays below 1
_CTAS_PER_SM = 8
_TIMER = Timer(calls=20, warm_up=3, budget_s=0.5)


def measured_ceilings(device: CudaDevice) -> dict[str, float | None]:
    """Measure the rates of a copy, of reading, of mma and of float32 multiply-adds.

    mma is m16n8k8 in Turing's code, m16n8k16 in code of sm_80 and later. Its rate is None on a GPU
    without tensor cores, and with bfloat16 in Turing's code.
    """
    empty, size = load_cupy().empty, _copied_bytes()
    found: dict[str, float | None] = {COPY: copy_rate()}

    def seconds(kernel: Specialisation, grid: int, *arguments: object) -> float:
        return statistics.median(_TIMER.queued(partial(launch, device, kernel, grid, arguments)))

    source, sink = (load_cupy().zeros(*each) for each in ((size, np.uint8), (1, np.uint32)))
    grid = device.multiprocessors * ceiling_kernels.CTAS_PER_SM
    read = ceiling_kernels.read_weight()
    found[READ] = size / seconds(read, grid, source, sink, size // VECTOR_BYTES) / 1e9
    found[PRODUCTS] = found[BFLOAT16] = None
    if device.tensor_cores:
        mma_k = 16 if device.traits.native else 8
        grid, rounds = device.multiprocessors * _CTAS_PER_SM, tensor_cores.LONG_ROUNDS
        took = seconds(tensor_cores.mma_rate(rounds, mma_k), grid, empty(SUB_PARTITIONS, np.int64))
        products = grid * SUB_PARTITIONS * tensor_cores.IN_FLIGHT * rounds
        found[PRODUCTS] = products * _FLOPS_PER_K * mma_k / took / 1e12
        found[BFLOAT16] = found[PRODUCTS] if device.traits.native else None
    grid = device.multiprocessors * ceiling_kernels.CTAS_PER_SM
    threads = grid * ceiling_kernels.THREADS
    took = seconds(ceiling_kernels.fma_rate(), grid, empty(threads, np.float32), _ADDEND)
    found[FLOAT32] = 2 * threads * ceiling_kernels.IN_FLIGHT * ceiling_kernels.ROUNDS / took / 1e12
    return found


def copy_rate() -> float:
    """Return the GB/s, read and written, of copies of a gibibyte, or less (`_copied_bytes`).

    They are not in a graph, where a copy runs on an engine slower than the multiprocessors.
    """
    cupy, size = load_cupy(), _copied_bytes()
    source, target = cupy.zeros(size, np.uint8), cupy.empty(size, np.uint8)
    copy = partial(target.data.copy_from_device_async, source.data, size)
    return 2 * size / statistics.median(_TIMER.queued(copy)) / 1e9


def _copied_bytes() -> int:
    """Return a gibibyte, but an eighth of the free memory at most: others may use the GPU too."""
    free, _ = load_cupy().cuda.runtime.memGetInfo()
    return min(_MOST_BYTES, max(1, free // 8 >> 20) << 20)
