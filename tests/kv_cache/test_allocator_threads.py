"""Calls of an allocator from many threads at once."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest

from cupyattn import BlockAllocator, OutOfBlocksError


class Yielding(list):
    """Counts of references that let another thread run between being read and being written."""

    def __getitem__(self, number):
        value = super().__getitem__(number)
        time.sleep(0)
        return value


@pytest.mark.parametrize("locked", [True, False])
def test_calls_of_many_threads_are_atomic(locked):
    """The counts are right in the end, which they are not without the lock."""
    allocator = BlockAllocator(40, 2, prefix_caching=True, num_host_blocks=10)
    allocator._refs = allocator._pool.refs = Yielding(allocator._refs)
    shared = allocator.add(range(5))
    if not locked:
        allocator._lock = allocator._pools.lock = nullcontext()
    failures = []

    def work(seed: int) -> None:
        mine = []
        try:
            for number in range(400):
                choice = (number * 7 + seed) % 6
                try:
                    if choice == 0 or not mine:
                        mine.append(allocator.add([number % 3, 1, 2, seed]))
                    elif choice == 1:
                        mine.append(shared.fork())
                    elif choice == 2:
                        mine[-1].append([number % 2])
                    elif choice == 3:
                        mine[-1].swap_out()
                        mine[-1].swap_in()
                    elif choice == 4:
                        allocator.free(allocator.allocate())
                    else:
                        mine.pop(0).free()
                except OutOfBlocksError:
                    if mine and mine[-1].is_swapped:
                        mine.pop().free()
            while mine:
                mine.pop().free()
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert failures == []
        allocator.check()
        shared.free()
        assert (allocator.num_used, allocator.num_free_host) == (0, 10)
    except Exception:
        if locked:
            raise
    else:
        assert locked
