"""Times of calls on a GPU by CUDA events: long ones one by one, short ones in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cupyattn.benchmark.frame.torch_arrays import torch_stream
from cupyattn.cupy_library import load_cupy

Call = Callable[[], Any]
Round = Sequence[Call]
"""Calls that are made one behind the other: of one case, with arrays of their own."""

COLD_BYTES = 400_000_000
"""What arrays that are taken in turn have together: several times an L2 cache."""
FEWEST = 3
"""Calls that are timed whatever they take."""
_WARM_UP_SHARE = 0.2
_SHORT_S = 100e-6
"""A call that is shorter is timed in a graph: to queue it takes the host some 20 us."""
_GRAPH_S = 1e-3
_MOST_IN_A_GRAPH = 50


class Samples(NamedTuple):
    """Seconds of a call, many times; each is the mean of so many calls.

    What calls of less than 0.1 ms differ by among each other is in no sample: one has a graph of
    them.
    """

    seconds: list[float]
    calls_each: int = 1


class Clock(NamedTuple):
    """How many calls are timed, behind how many, and within how many seconds.

    Attributes
    ----------
    calls, warm_up : int
        Timed calls, and those before them.
    budget_s : float
        A row takes about as long: of calls that are too long for that fewer are made.
    """

    calls: int
    warm_up: int
    budget_s: float

    def within(self, wanted: int, seconds: float, share: float = 1.0, least: int = FEWEST) -> int:
        """Return how many calls of so many seconds fit into a share of the budget.

        Examples
        --------
        >>> Clock(1000, 100, 2.0).within(1000, 0.01), Clock(1000, 100, 2.0).within(1000, 10.0)
        (200, 3)
        """
        return min(wanted, max(least, int(share * self.budget_s / max(seconds, 1e-9))))

    def times(self, calls: Round, torch: Any = None) -> Samples:
        """Return the seconds of a call, many times.

        Rounds of several calls, and calls that are short, are captured as one CUDA graph, whose
        time over the number of calls in it is one sample.

        Parameters
        ----------
        calls : sequence of callables
        torch : module, optional
            PyTorch, if the calls are its own.
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
        """Return the seconds of a call that is queued many times: what a graph cannot hold."""
        call()
        return self._of(call, _timed(call, 1)[0])

    def _of(self, call: Call, took: float) -> list[float]:
        for _ in range(self.within(self.warm_up, took, _WARM_UP_SHARE, 1)):
            call()
        return _timed(call, self.within(self.calls, took))

    def _of_graph(self, calls: Round, torch: Any) -> Samples:
        replay = _graph(calls) if torch is None else _torch_graph(torch, calls)
        replay()
        seconds = self._of(replay, _timed(replay, 1)[0])
        return Samples([each / len(calls) for each in seconds], len(calls))


def _timed(call: Call, count: int) -> list[float]:
    """Queue calls one behind the other with an event between them, and wait for all together."""
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
        for _ in range(2):  # compiles, and leaves the memory pool what the capture takes from it
            _each_result(calls)
        stream.synchronize()
        stream.begin_capture()
        try:
            _each_result(calls)
        finally:
            graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.get_current_stream())


def _torch_graph(torch: Any, calls: Round) -> Call:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)):
        for _ in range(2):
            _each_result(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch_stream(torch)):
        _each_result(calls)
    replay: Call = graph.replay
    return replay


def _each_result(calls: Round) -> None:
    """Make the calls, with memory of its own for the result of each, which no cache holds then."""
    _ = [call() for call in calls]
