"""Times of calls on a GPU, by CUDA events, and what they were measured on."""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

import cupyattn
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.device.cuda import CudaDevice, cuda_device
from cupyattn.kernels.target import arch_override, target_of

Round = Sequence[Callable[[], Any]]
RoundTimer = Callable[[Round, Any], list[float]]
"""Makes the calls of a round one behind the other, many times; returns the seconds of each round.

Beside the calls it takes PyTorch if they are its own, or None.
"""

COLD_BYTES = 400_000_000
"""What arrays that are taken in turn have together: several times an L2 cache."""

Timer = Callable[[Callable[[], Any]], list[float]]
"""Calls something many times, and returns the seconds of each call that counts."""


def event_timer(calls: int, warm_up: int) -> Timer:
    """Make a timer of calls on CuPy's current stream.

    The calls are queued one behind the other, with an event between them, and waited for together:
    where a call is longer than the CPU takes to queue it, some 20 us, its host side costs nothing.
    """

    def time_calls(call: Callable[[], Any]) -> list[float]:
        cupy = load_cupy()

        for _ in range(warm_up):
            call()
        events = [cupy.cuda.Event() for _ in range(calls + 1)]
        stream = cupy.cuda.get_current_stream()
        stream.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(start, stop) / 1e3 for start, stop in pairwise(events)]

    return time_calls


def graph_timer(rounds: int, warm_up: int) -> RoundTimer:
    """Make a timer of rounds of calls, each round captured as one CUDA graph.

    So the host's side of a call, which is longer than a small kernel, costs nothing. It takes the
    calls of a round, and PyTorch if they are its own; it returns the seconds of each round.
    """

    def time_rounds(calls: Round, torch: Any = None) -> list[float]:
        cupy = load_cupy()
        replay = _torch_graph(torch, calls) if torch is not None else _graph(calls)
        stream = cupy.cuda.get_current_stream()
        for _ in range(warm_up):
            replay()
        events = [cupy.cuda.Event() for _ in range(rounds + 1)]
        stream.synchronize()
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(start, stop) / 1e3 for start, stop in pairwise(events)]

    return time_rounds


def _graph(calls: Round) -> Callable[[], None]:
    cupy = load_cupy()
    cupy.cuda.get_current_stream().synchronize()  # the stream below does not wait for this one
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):  # compiles, and leaves the memory pool what the capture takes from it
            _each_result(calls)
        stream.synchronize()
        stream.begin_capture()
        _each_result(calls)
        graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.get_current_stream())


def _torch_graph(torch: Any, calls: Round) -> Callable[[], None]:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)):
        for _ in range(2):
            _each_result(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch_stream(torch)):
        _each_result(calls)
    return graph.replay


def _each_result(calls: Round) -> None:
    """Make the calls, with memory of its own for the result of each, which no cache holds then."""
    _ = [call() for call in calls]


@cache
def torch_stream(torch: Any) -> Any:
    """Return the stream that PyTorch's calls are captured on.

    Gradients are computed on the stream of their forward: that has to be this one.
    """
    return torch.cuda.Stream()


def copy_rate(calls: int, warm_up: int) -> float:
    """Return the GB/s, read and written, of copies of a gibibyte on the current device.

    Not as a graph, in which a copy goes through an engine that is slower than the multiprocessors.
    """
    cupy = load_cupy()
    source, target = cupy.zeros(2**30, np.uint8), cupy.empty(2**30, np.uint8)
    copy = partial(target.data.copy_from_device_async, source.data, source.nbytes)
    return 2 * source.nbytes / statistics.median(event_timer(calls, warm_up)(copy)) / 1e9


def measured_rows(
    command: str,
    arguments: argparse.Namespace,
    time: Callable[[Any, RoundTimer], list[dict[str, Any]]],
    *,
    beside_a_copy: bool = False,
) -> dict[str, Any]:
    """Return a command's result: the rows that `time` makes on the first GPU, and what it is.

    `time` is called with the array module and a timer of graphs; ``copy_gb_per_s`` is there if
    wanted.
    """
    cupy = load_cupy()
    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        timer = graph_timer(arguments.calls, arguments.warm_up)
        copied = copy_rate(arguments.calls, arguments.warm_up) if beside_a_copy else None
        rows = time(cupy, timer)
    return {
        "command": command,
        **measured_on(device),
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        **({} if copied is None else {"copy_gb_per_s": copied}),
        "rows": rows,
    }


def measured_on(device: CudaDevice) -> dict[str, Any]:
    """Describe what the kernels that are loaded on a device ran on, and what they are compiled for.

    Returns
    -------
    dict
        ``device``, ``compute_capability``; ``code``: the targets that the loaded code itself names,
        such as "sm_90" for machine code or "compute_75" for PTX that the driver translated;
        ``arch_override``: CUPYATTN_ARCH; ``tensor_cores``: whether float16 ran on them;
        ``cuda_driver``, ``cupy``, ``nvrtc``, ``numpy`` and ``version`` (of the library); ``date``.
    """
    cupy = load_cupy()

    override = arch_override()
    loaded = [device.load(specialisation).code for specialisation in device.loaded]
    driver = cupy.cuda.runtime.driverGetVersion()
    return {
        "version": cupyattn.__version__,
        "date": datetime.date.today().isoformat(),
        "device": device.name,
        "compute_capability": f"{device.capability / 10:.1f}",
        "code": sorted({target_of(path.read_bytes()) for path in loaded}),
        "arch_override": override and str(override.number),
        "tensor_cores": device.tensor_cores,
        "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "numpy": np.__version__,
    }
