"""The allocator's rules one by one: what is shared, cached, evicted, copied."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from array import array
from contextlib import nullcontext

import numpy as np
import pytest

from cupyattn import BlockAllocator, Copy, OutOfBlocksError, PagedKVCache
from cupyattn.kv_cache import pool
from cupyattn.kv_cache.pool import BYTES_OF_A_BLOCK


def ids(sequence):
    return sequence.block_ids.tolist()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_one_token_is_always_computed(length):
    """num_cached_tokens is a multiple of the block size below the length."""
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    tokens = list(range(length))
    first, second = allocator.add(tokens), allocator.add(tokens)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == allocator.find(tokens) == (length - 1) // 4 * 4
    assert second.fork().num_cached_tokens == second.num_cached_tokens


def test_states_of_blocks_and_what_lives():
    allocator = BlockAllocator(5, 4, prefix_caching=True)
    first, second = allocator.add(range(9)), allocator.add(range(9))
    held = allocator.allocate()
    assert allocator.sequences == (first, second)
    assert first in allocator and "first" not in allocator
    assert BlockAllocator(5, 4).add([1]) not in allocator
    first.free()
    assert (first.is_freed, second.is_freed) == (True, False)
    assert first not in allocator and allocator.sequences == (second,)
    second.free()
    assert [allocator.state(block) for block in range(5)] == ["cached"] * 2 + ["free"] * 2 + [
        "used"
    ]
    assert held == 4
    for block in (-1, 5, None):
        with pytest.raises(ValueError, match="the pool's blocks are 0 to 4"):
            allocator.state(block)


def test_a_prompt_in_parts_is_counted_as_it_is_said():
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    allocator.add(range(9), counted=20)
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (20, 0)
    assert allocator.add(range(9), counted=0).num_cached_tokens == 8
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (20, 0)
    assert allocator.add(range(12), counted=30).num_cached_tokens == 8
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (50, 8)
    with pytest.raises(ValueError, match="counted = -1; allowed is 0 or more"):
        allocator.add([1], counted=-1)
    with pytest.raises(TypeError, match=r"counted = 1\.5; it is an integer"):
        allocator.add([1], counted=1.5)


def test_tokens_whose_hashes_agree_are_compared():
    """hash(-1) == hash(-2): the tokens collide in a dict of hashes, and in Python's own."""
    assert hash((-1,)) == hash((-2,))
    allocator = BlockAllocator(8, 1, prefix_caching=True)
    allocator.add([-1, 5])
    assert allocator.find([-2, 5]) == 0
    assert allocator.find([-1, 5]) == 1


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings():
    allocator = BlockAllocator(6, 1, prefix_caching=True)
    old, new = allocator.add([1, 2, 3]), allocator.add([4, 5, 6])
    old.free()
    new.free()
    assert allocator.find([1, 2, 3, 0]) == 3
    held = [allocator.allocate()]
    assert allocator.find([1, 2, 3, 0]) == 2
    again = allocator.add([1])  # a hit makes nothing: one token is computed in a new block
    assert allocator.find([1, 2, 3, 0]) == 1
    again.free()
    held += [allocator.allocate() for _ in range(2)]
    assert allocator.find([1, 2, 3, 0]) == 0
    assert allocator.find([4, 5, 6, 0]) == 3
    assert (allocator.num_free, allocator.num_used, allocator.num_cached) == (0, 3, 3)


def test_a_hit_is_used_recently():
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    for token in (1, 2, 3):
        allocator.add([token, 0]).free()
    allocator.add([1, 0]).free()
    for _ in range(2):
        allocator.allocate()
    assert [allocator.find([token, 0]) for token in (1, 2, 3)] == [1, 0, 0]


def test_a_cached_prefix_is_not_evicted_for_its_own_end():
    allocator = BlockAllocator(3, 2, prefix_caching=True)
    allocator.add([1, 2, 3, 4]).free()
    sequence = allocator.add([1, 2, 3, 4, 5])
    assert sequence.num_cached_tokens == 4
    with pytest.raises(OutOfBlocksError):
        sequence.append([6, 7])
    sequence.free()
    with pytest.raises(OutOfBlocksError, match=r"4 blocks .* 1 are free or cached besides 2 of"):
        allocator.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])


def test_add_leaves_the_watermark():
    allocator = BlockAllocator(4, 2, watermark=2)
    sequence = allocator.add([1, 2])
    with pytest.raises(OutOfBlocksError, match="with a watermark of 2"):
        allocator.add([1, 2, 3, 4])
    sequence.append([3, 4, 5, 6, 7])  # which append may take
    assert allocator.num_free == 0


def test_a_tail_that_is_shared_is_copied_once():
    allocator = BlockAllocator(8, 4)
    first = allocator.add([1, 2, 3, 4, 5])
    second, third = first.fork(), first.fork()
    assert second.append([]) == ()
    assert second.append([6]) == (Copy(1, 2),)
    assert second.append([7]) == ()
    assert first.append([8, 9, 10, 11]) == (Copy(1, 3),)
    assert third.append([12]) == ()
    assert [ids(each) for each in (first, second, third)] == [[0, 3, 4], [0, 2], [0, 1]]


def test_what_is_cut_is_found_no_longer():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    sequence = allocator.add([1, 2, 3, 4, 5, 6])
    sharer = allocator.add([1, 2, 3, 4, 5, 6, 7])
    sequence.truncate(3)
    assert allocator.find([1, 2, 3, 4, 5, 6, 7]) == 2
    assert sequence.append([4]) == (Copy(1, 4),), "its sharer still reads block 1"
    assert allocator.find([1, 2, 3, 4, 5]) == 4
    sharer.free()
    allocator.check()


def test_blocks_behind_a_window_return():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    sequence = allocator.add(range(7))
    assert sequence.evict_before(5) == 2
    assert sequence.evict_before(5) == 0
    assert ids(sequence) == [-1, -1, 2, 3]
    assert (allocator.num_free, allocator.num_cached) == (4, 2)
    assert allocator.find(range(7)) == 6
    assert ids(sequence.fork()) == [-1, -1, 2, 3]
    for length in (1, 2, 3, 4):  # at the ends of blocks too: what the next token sees is gone
        with pytest.raises(ValueError, match=f"length {length}, whose last block is evicted"):
            sequence.truncate(length)
        assert (len(sequence), ids(sequence)) == (7, [-1, -1, 2, 3])
    sequence.truncate(6)
    assert ids(sequence) == [-1, -1, 2]
    sequence.truncate(5)
    sequence.truncate(0)
    assert ids(sequence) == []


def test_a_lost_prefix_that_is_computed_again_is_whole_again():
    """A later block waits in the index for the earlier ones that a window has evicted."""
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    sequence = allocator.add([1, 2, 3])
    sequence.evict_before(2)
    held = [allocator.allocate() for _ in range(3)]
    assert allocator.find([1, 2, 3, 4]) == 0
    for block in held:
        allocator.free(block)
    again = allocator.add([1, 2])
    assert again.num_cached_tokens == 0
    assert allocator.find([1, 2, 3, 4]) == 3


def test_swapping_moves_blocks():
    allocator = BlockAllocator(4, 2, num_host_blocks=2, prefix_caching=True)
    sequence = allocator.add([1, 2, 3])
    assert sequence.swap_out() == (Copy(0, 0), Copy(1, 1))
    assert sequence.is_swapped
    assert (len(sequence), allocator.num_used, allocator.num_free_host) == (3, 0, 0)
    with pytest.raises(OutOfBlocksError, match="of 2 host blocks 0 are free"):
        allocator.add([5]).swap_out()
    held = [allocator.allocate() for _ in range(2)]
    with pytest.raises(OutOfBlocksError, match="2 blocks are needed"):
        sequence.swap_in()
    allocator.free(held[0])
    assert [source for source, _ in sequence.swap_in()] == [0, 1]
    assert (sequence.is_swapped, allocator.num_free_host) == (False, 2)
    assert allocator.find([1, 2, 3]) == 2, "found again, though its block was evicted meanwhile"


def test_tokens_come_as_any_integers():
    allocator = BlockAllocator(4, 2, prefix_caching=True)
    allocator.add(np.array([1, 2, 3], np.int32))
    assert allocator.add(np.array([1, 2, 3], np.uint8)).num_cached_tokens == 2
    assert allocator.add(array("q", [1, 2, 3])).num_cached_tokens == 2


def test_blocks_of_any_use():
    allocator = BlockAllocator(2, 4)
    first, second = allocator.allocate(), allocator.allocate()
    assert {first, second} == {0, 1}
    assert allocator.ref_count(first) == 1
    with pytest.raises(OutOfBlocksError):
        allocator.allocate()
    allocator.free(np.int64(first))
    assert type(allocator.allocate()) is int
    allocator.check()


def test_unused_slots_are_counted_once():
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    sequence = allocator.add(range(6))
    assert allocator.num_unused_slots == 2
    other = sequence.fork()
    assert allocator.num_unused_slots == 2
    other.append([9, 9])
    assert allocator.num_unused_slots == 2
    sequence.truncate(2)  # its first block is full for the other
    assert allocator.num_unused_slots == 0


def test_it_says_what_it_is():
    allocator = BlockAllocator(4, 2, num_host_blocks=2)
    sequence = allocator.add([1, 2, 3])
    assert repr(allocator) == "<BlockAllocator of 4 blocks of 2 tokens: 2 free, 2 used, 0 cached>"
    assert repr(sequence) == "<Sequence of 3 tokens in 2 blocks>"
    sequence.swap_out()
    assert repr(sequence) == "<Sequence of 3 tokens in 2 blocks, swapped out>"


@pytest.mark.parametrize(
    ("block", "passed"),
    [
        (4, "got block 4"),
        (-1, "got block -1"),
        ("0", "got block '0'"),
        (None, "got block None"),
        (2.0, "got block 2.0"),
        (True, "got block True"),
        (3, "block 3, which is free already"),
        (0, "block 0, which a sequence uses"),
    ],
)
def test_foreign_and_free_blocks_are_refused(block, passed):
    allocator = BlockAllocator(4, 2)
    sequence = allocator.add([1, 2])
    allocator.free(allocator.allocate())
    with pytest.raises(ValueError, match=passed):
        allocator.free(block)
    if "which" not in passed:
        with pytest.raises(ValueError, match=passed):
            allocator.ref_count(block)
    assert (allocator.num_free, sequence.block_ids.tolist()) == (3, [0])
    allocator.check()


CALLS = {
    "append": lambda sequence: sequence.append([1]),
    "fork": lambda sequence: sequence.fork(),
    "truncate": lambda sequence: sequence.truncate(0),
    "evict_before": lambda sequence: sequence.evict_before(0),
    "swap_out": lambda sequence: sequence.swap_out(),
    "block_ids": lambda sequence: sequence.block_ids,
}
ALIVE = {
    "free": lambda sequence: sequence.free(),
    "len": len,
    "num_cached_tokens": lambda sequence: sequence.num_cached_tokens,
    "is_swapped": lambda sequence: sequence.is_swapped,
    "swap_in": lambda sequence: sequence.swap_in(),
}


@pytest.mark.parametrize("call", [*CALLS, *ALIVE])
def test_a_freed_sequence_is_refused(call):
    allocator = BlockAllocator(4, 2, num_host_blocks=4)
    sequence = allocator.add([1, 2, 3])
    sequence.free()
    with pytest.raises(ValueError, match=r"the sequence is freed; .*; add its tokens again"):
        {**CALLS, **ALIVE}[call](sequence)
    assert repr(sequence) == "<Sequence, freed>"
    assert allocator.num_free == 4
    allocator.check()


@pytest.mark.parametrize("call", CALLS)
def test_a_swapped_sequence_is_refused(call):
    allocator = BlockAllocator(4, 2, num_host_blocks=4)
    sequence = allocator.add([1, 2, 3])
    sequence.swap_out()
    with pytest.raises(ValueError, match=r"the sequence is swapped out; .*; call swap_in first"):
        CALLS[call](sequence)
    allocator.check()


def test_swap_in_of_what_is_there_is_refused():
    with pytest.raises(ValueError, match="in the device's pool; swap_in moves"):
        BlockAllocator(4, 2).add([1]).swap_in()


@pytest.mark.parametrize("tokens", [
    None, 5, [1.5], ["a"], "ab", [[1, 2]], np.ones(2), np.ones(()),
    [1, True], np.array([True]), {1, 2}, {1: 2},
])  # fmt: skip
@pytest.mark.parametrize("call", ["add", "append", "find"])
def test_what_is_no_token_is_refused(call, tokens):
    allocator = BlockAllocator(4, 2, prefix_caching=True)
    sequence = allocator.add([1])
    method = sequence.append if call == "append" else getattr(allocator, call)
    with pytest.raises(TypeError, match="tokens are integers"):
        method(tokens)
    assert (len(sequence), allocator.num_used) == (1, 1)


@pytest.mark.parametrize("method", ["truncate", "evict_before"])
@pytest.mark.parametrize(
    ("length", "kind"), [(-1, ValueError), (4, ValueError), (1.0, TypeError), (None, TypeError)]
)
def test_lengths_out_of_range_are_refused(method, length, kind):
    sequence = BlockAllocator(4, 2).add([1, 2, 3])
    with pytest.raises(kind, match=f"got (length = |position = )?{length}"):
        getattr(sequence, method)(length)
    assert len(sequence) == 3


@pytest.mark.parametrize(
    ("changes", "kind", "passed"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks = 0"),
        ({"num_blocks": 2**31}, ValueError, "num_blocks = 2147483648"),
        ({"num_blocks": 2.0}, TypeError, "num_blocks = 2.0"),
        ({"block_size": 0}, ValueError, "block_size = 0"),
        ({"block_size": "16"}, TypeError, "block_size = '16'"),
        ({"watermark": -1}, ValueError, "watermark = -1"),
        ({"watermark": 4}, ValueError, "watermark = 4; allowed is 0 to 3"),
        ({"watermark": False}, TypeError, "watermark = False"),
        ({"num_blocks": True}, TypeError, "num_blocks = True; it is an integer"),
        ({"block_size": True}, TypeError, "block_size = True; it is an integer"),
        ({"prefix_caching": 16}, TypeError, "prefix_caching = 16; it is True or False; convert it"),
        ({"prefix_caching": "no"}, TypeError, "prefix_caching = 'no'; .*; pass one of these"),
        ({"num_host_blocks": -1}, ValueError, "num_host_blocks = -1"),
    ],
)
def test_bad_pools_are_refused(changes, kind, passed):
    with pytest.raises(kind, match=passed):
        BlockAllocator(**{"num_blocks": 4, "block_size": 16, **changes})


@pytest.mark.parametrize("given", [{"num_blocks": 10**9}, {"num_host_blocks": 10**9 - 4}])
def test_more_blocks_than_memory_holds_are_refused_before_any_is_made(given, monkeypatch):
    monkeypatch.setattr(pool, "host_memory", lambda: 16 * 10**9)
    begun = time.monotonic()
    with pytest.raises(MemoryError, match=r"num_blocks = .* take 44\.00 GB .*; it has 16\.00 GB; "):
        BlockAllocator(**{"num_blocks": 4, "block_size": 16, **given})
    assert time.monotonic() - begun < 1
    monkeypatch.setattr(pool, "host_memory", lambda: None)  # not every system tells
    BlockAllocator(4, 16)


def test_the_memory_of_the_host_is_that_of_the_machine_or_of_the_process():
    resource = pytest.importorskip("resource")
    found = pool.host_memory()
    assert found is not None and found > 1 << 28
    assert found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    program = (
        "import resource, sys; from cupyattn.kv_cache.pool import host_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), resource.RLIM_INFINITY))\n"
        "print(host_memory())"
    )
    if limits == (resource.RLIM_INFINITY, resource.RLIM_INFINITY):
        call = [sys.executable, "-c", program, str(found - 4096)]
        assert int(subprocess.check_output(call)) == found - 4096


def test_a_block_takes_the_memory_that_is_said():
    tracemalloc.start()
    try:
        allocator = BlockAllocator(100_000, 16)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocator.num_free == 100_000
    assert 0.9 * BYTES_OF_A_BLOCK < held / 100_000 < 1.1 * BYTES_OF_A_BLOCK


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_a_pool_nor_its_sequences_are_copied_or_pickled(how):
    cache = PagedKVCache(1, 4, 16, 1, 4, dtype="float32", xp=np)
    for made in (cache, cache.allocator):
        with pytest.raises(TypeError, match="the same blocks twice; make another one"):
            how(made)
    with pytest.raises(TypeError, match="call its fork"):
        how(cache.allocator.add([1]))


def test_a_sequence_that_was_dropped_is_reported():
    allocator = BlockAllocator(4, 2, prefix_caching=True)
    allocator.add([1, 2, 3])
    gc.collect()
    with pytest.raises(RuntimeError, match="has a count of 1 and 0 owners"):
        allocator.check()


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
