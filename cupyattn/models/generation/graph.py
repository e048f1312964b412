"""A step as a CUDA graph, and its results on the host: what is CuPy's alone.

On NumPy arrays a replay is the call itself, and a copy is made at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np

from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy

WARM_UPS = 2
"""The first loads kernels and constants, the second leaves the pool what the capture takes."""


def device_of(array: Array) -> AbstractContextManager[Any]:
    """Return the device of an array, for a with statement."""
    return nullcontext() if isinstance(array, np.ndarray) else array.device


def upload(array: Array, staged: np.ndarray) -> None:
    """Queue the copy of an array of the host; it may change as soon as this has returned."""
    if isinstance(array, np.ndarray):
        array[...] = staged
    else:  # from memory that is not pinned the driver takes what it reads before the call returns
        array.set(staged, stream=_current_stream())


def capture(xp: Any, prepare: Callable[[], None], work: Callable[[], None]) -> Callable[[], None]:
    """Capture work on arrays that stay where they are; return what runs it on the current stream.

    `prepare` fills these arrays, before each run of the work. What the work allocates comes from a
    pool of its own, which lives as long as the graph does: nobody else gets that memory.
    """
    if xp is np:
        return work
    xp.cuda.get_current_stream().synchronize()  # the stream below does not wait for this one
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    with stream, xp.cuda.using_allocator(pool.malloc):
        for _ in range(WARM_UPS):
            prepare()
            work()
        stream.synchronize()
        stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(Exception):  # the capture is broken already
                stream.end_capture()
            raise
        graph = stream.end_capture()
    return Replay(graph, pool, stream)


def _current_stream() -> Any:
    return load_cupy().cuda.get_current_stream()


class Replay:
    """A captured graph with the memory that it works in."""

    def __init__(self, graph: Any, pool: Any, stream: Any) -> None:
        self.graph = graph
        self._kept = pool, stream

    def __call__(self) -> None:
        """Queue it on the current stream."""
        self.graph.launch()


class Readback:
    """Copies of an array of results to the host; at most two of them are on their way."""

    def __init__(self, xp: Any, items: int) -> None:
        self._turn = 0
        self._places: list[tuple[np.ndarray, Any]] = []
        if xp is not np:
            for _ in range(2):
                memory = xp.cuda.alloc_pinned_memory(items * 4)
                host = np.frombuffer(memory, np.int32, items)
                self._places.append((host, xp.cuda.Event(disable_timing=True)))

    def queue(self, array: Array) -> Callable[[], list[int]]:
        """Queue a copy; return what waits for it and reads it, before the next but one is queued.

        Only for what was queued before it, so that later work goes on meanwhile.
        """
        if isinstance(array, np.ndarray):
            copied = array.tolist()
            return lambda: copied
        host, event = self._places[self._turn]
        self._turn = 1 - self._turn
        stream = _current_stream()
        array.get(out=host, stream=stream, blocking=False)
        event.record(stream)

        def read() -> list[int]:
            event.synchronize()
            return host.tolist()

        return read
