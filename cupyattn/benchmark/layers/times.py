"""The rows of the benchmark of layers: every operation at every width, by each contender, timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupyattn.benchmark.cuda_events import COLD_BYTES, Round, RoundTimer
from cupyattn.benchmark.layers.calls import (
    our_backward,
    our_forward,
    require_agreement,
    torch_backward,
    torch_forward,
)
from cupyattn.benchmark.layers.operation import Operation, Size, Source
from cupyattn.progress import progress

_MOST_SETS = 16


def sets_of(traffic: int) -> int:
    """Return how many sets of arrays of so many bytes are larger than any cache together.

    Examples
    --------
    >>> sets_of(3 * Size(8192, 4096, "float16").array_bytes)
    2
    """
    return max(1, min(_MOST_SETS, -(-COLD_BYTES // traffic)))


def time_operations(
    operations: Sequence[Operation],
    sizes: Sequence[Size],
    xp: Any,
    timer: RoundTimer,
    torch: Any = None,
) -> list[dict[str, Any]]:
    """Time every operation at every size, forward and backward.

    Returns
    -------
    list of dict
        A row for each operation, size, direction ("forward", "backward") and contender
        ("cupyattn", and with torch "torch", "torch.compile"): ``seconds`` (the median of a call),
        ``bytes`` (the least traffic) and ``gb_per_s``; and ``tflops`` where products take the time.
    """
    rows = []
    with progress("timing", len(operations)) as step:
        for operation in operations:
            for size in dict.fromkeys(map(operation.size, sizes)):
                for direction, contender, calls, peer in _calls(operation, size, xp, torch):
                    seconds = statistics.median(timer(calls, peer)) / len(calls)
                    traffic = operation.traffic(size, direction)
                    rows.append(
                        {
                            "operation": operation.name,
                            **size._asdict(),
                            "direction": direction,
                            "contender": contender,
                            "seconds": seconds,
                            "bytes": traffic,
                            "gb_per_s": traffic / seconds / 1e9,
                            **_products(operation, size, direction, seconds),
                        }
                    )
            step()
    return rows


def _products(operation: Operation, size: Size, direction: str, seconds: float) -> dict[str, float]:
    if operation.flops is None:
        return {}
    return {"tflops": operation.flops(size)[direction == "backward"] / seconds / 1e12}


def _calls(
    operation: Operation, size: Size, xp: Any, torch: Any
) -> Iterator[tuple[str, str, Round, Any]]:
    """Yield direction, contender, calls, and PyTorch for its own."""
    count = sets_of(operation.traffic(size, "forward"))
    sets = [operation.arrays(size, Source(xp, seed)) for seed in range(count)]
    peers = {} if torch is None else _peers(operation, torch)
    ours = our_forward(operation, sets)
    yield "forward", "cupyattn", ours, None
    for name, function in peers.items():
        theirs = torch_forward(torch, function, sets)
        require_agreement(operation, sets[0], ours, theirs)
        yield "forward", name, theirs, torch
    if operation.backward_arrays is None:
        return
    yield "backward", "cupyattn", our_backward(operation, sets, xp), None
    for name, function in peers.items():
        theirs = torch_backward(torch, function, sets, xp)
        yield "backward", name, theirs, torch


def _peers(operation: Operation, torch: Any) -> dict[str, Callable[..., Any]]:
    def eager(*tensors: Any) -> Any:
        return operation.torch(torch, *tensors)

    return {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
