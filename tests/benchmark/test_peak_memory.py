"""How much memory a call takes beyond its inputs and outputs."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import pytest

from cupyattn.benchmark.timer import peak_bytes


class FakePool:
    """Never gives a block back, as CuPy's while it is used."""

    def __init__(self):
        self.held = 0

    def malloc(self, size):
        self.held += size

    def total_bytes(self):
        return self.held


def test_memory_is_that_of_a_pool_of_its_own(monkeypatch):
    allocators = []

    @contextmanager
    def using_allocator(malloc):
        allocators.append(malloc)
        yield
        allocators.pop()

    class Array:
        def __init__(self, address):
            self.nbytes, self.data = 100, types.SimpleNamespace(ptr=address)

    stream = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(
        MemoryPool=FakePool, using_allocator=using_allocator, get_current_stream=lambda: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    there, addresses = Array(0), iter(range(1, 99))

    def scratch(*results):
        if allocators:
            for size in (300, 200):
                allocators[-1](size)
        return results

    assert peak_bytes(scratch) == 500
    assert peak_bytes(lambda: None) == 0
    assert peak_bytes(lambda: scratch(there)) == 500, "a result that was given"
    assert peak_bytes(lambda: scratch(there, Array(next(addresses)))) == 400, "one of its own"


def test_memory_of_pytorch_is_what_its_allocator_counts():
    class Tensor:
        nbytes = 64

        def __init__(self, address):
            self.data_ptr = lambda: address

    addresses, log = iter(range(9)), []
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            synchronize=lambda: None,
            reset_peak_memory_stats=lambda: log.append("reset"),
            memory_allocated=lambda: 1000,
            max_memory_allocated=lambda: 1500,
        )
    )
    assert peak_bytes(lambda: Tensor(next(addresses)), torch) == 500 - 64
    assert log == ["reset"]


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """The most at a time: the second array takes the place of the first."""
    import cupy

    def call():
        for _ in range(2):
            cupy.empty(1 << 20, cupy.uint8)

    kept = cupy.empty(1 << 24, cupy.uint8)
    assert peak_bytes(call) == 1 << 20
    assert kept.nbytes == 1 << 24
