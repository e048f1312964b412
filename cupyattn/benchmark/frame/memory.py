"""How much memory a call takes beyond its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyattn.benchmark.frame.clock import Call
from cupyattn.cupy_library import load_cupy


def peak_bytes(call: Call, torch: Any = None) -> int:
    """Return the most device memory that a call takes beyond what it is given and returns.

    Of CuPy that is what a memory pool of its own takes from the device: it holds no block from
    before, and gives none back before the call ends. Of PyTorch it is what its allocator counts.
    Results that have another address the second time are the call's own, and are taken off.
    """
    first = call()
    taken, second = _taken_by_torch(torch, call) if torch is not None else _taken(call)
    returned = sum(
        one.nbytes
        for one, other in zip(_arrays(second), _arrays(first), strict=True)
        if _address(one) != _address(other)
    )
    return max(0, taken - returned)


def _taken(call: Call) -> tuple[int, Any]:
    cupy = load_cupy()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        result = call()
        cupy.cuda.get_current_stream().synchronize()
    return int(pool.total_bytes()), result


def _taken_by_torch(torch: Any, call: Call) -> tuple[int, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before), result


def _arrays(result: Any) -> Iterator[Any]:
    """Yield the arrays and tensors of a result."""
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if hasattr(each, "nbytes"):
            yield each


def _address(array: Any) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)
