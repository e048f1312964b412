"""The rows of the benchmark of layers: every operation at every width, by each contender, timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupyattn.benchmark.cuda_events import Round, RoundTimer
from cupyattn.benchmark.layers.calls import (
    our_backward,
    our_forward,
    require_agreement,
    torch_backward,
    torch_forward,
)
from cupyattn.benchmark.layers.operations import Operation, Size, Source
from cupyattn.cli.progress import progress

COLD_BYTES = 400_000_000
"""What the sets of arrays take together: several times an L2 cache."""
_MOST_SETS = 16


def sets_of(size: Size, arrays: int) -> int:
    """Return how many sets of `arrays` arrays of rows are larger than any cache together.

    Examples
    --------
    >>> sets_of(Size(8192, 4096, "float16"), 3)
    2
    """
    return max(1, min(_MOST_SETS, -(-COLD_BYTES // (arrays * size.array_bytes))))


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
        ``bytes`` (the least traffic) and ``gb_per_s``.
    """
    rows = []
    with progress("timing", len(operations)) as step:
        for operation in operations:
            for size in dict.fromkeys(map(operation.size, sizes)):
                for direction, contender, calls, arrays, peer in _calls(operation, size, xp, torch):
                    seconds = statistics.median(timer(calls, peer)) / len(calls)
                    traffic = arrays * size.array_bytes
                    rows.append(
                        {
                            "operation": operation.name,
                            **size._asdict(),
                            "direction": direction,
                            "contender": contender,
                            "seconds": seconds,
                            "bytes": traffic,
                            "gb_per_s": traffic / seconds / 1e9,
                        }
                    )
            step()
    return rows


def _calls(
    operation: Operation, size: Size, xp: Any, torch: Any
) -> Iterator[tuple[str, str, Round, int, Any]]:
    """Yield direction, contender, calls, arrays of rows in and out, and PyTorch for its own."""
    count = sets_of(size, operation.forward_arrays)
    sets = [operation.arrays(size, Source(xp, seed)) for seed in range(count)]
    peers = {} if torch is None else _peers(operation, torch)
    ours = our_forward(operation, sets)
    yield "forward", "cupyattn", ours, operation.forward_arrays, None
    for name, function in peers.items():
        theirs = torch_forward(torch, function, sets)
        require_agreement(operation, ours, theirs)
        yield "forward", name, theirs, operation.forward_arrays, torch
    if operation.backward_arrays is None:
        return
    yield "backward", "cupyattn", our_backward(operation, sets, xp), operation.backward_arrays, None
    for name, function in peers.items():
        theirs = torch_backward(torch, function, sets, xp)
        yield "backward", name, theirs, operation.backward_arrays, torch


def _peers(operation: Operation, torch: Any) -> dict[str, Callable[..., Any]]:
    def eager(*tensors: Any) -> Any:
        return operation.torch(torch, *tensors)

    return {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
