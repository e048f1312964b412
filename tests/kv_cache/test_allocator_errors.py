"""What the allocator and its sequences refuse, and that they are as before then."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from cupyattn import BlockAllocator, PagedKVCache
from cupyattn.kv_cache import host_memory
from cupyattn.kv_cache.pool import BYTES_OF_A_BLOCK


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
    with pytest.raises(ValueError, match=r"the sequence is freed; .*; add its tokens anew"):
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
    monkeypatch.setattr(host_memory, "host_memory", lambda: 16 * 10**9)
    begun = time.monotonic()
    with pytest.raises(MemoryError, match=r"num_blocks = .* take 44\.00 GB .*; it has 16\.00 GB; "):
        BlockAllocator(**{"num_blocks": 4, "block_size": 16, **given})
    assert time.monotonic() - begun < 1
    monkeypatch.setattr(host_memory, "host_memory", lambda: None)  # not every system tells
    BlockAllocator(4, 16)


def test_the_memory_of_the_host_is_that_of_the_machine_or_of_the_process():
    resource = pytest.importorskip("resource")
    found = host_memory.host_memory()
    assert found is not None and found > 1 << 28
    assert found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    program = (
        "import resource, sys; from cupyattn.kv_cache.host_memory import host_memory\n"
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
def test_a_sequence_has_no_copies_but_forks(how):
    with pytest.raises(TypeError, match="call its fork"):
        how(BlockAllocator(4, 2).add([1]))


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("cache", [False, True])
def test_what_gives_blocks_is_neither_copied_nor_pickled(how, cache):
    made = PagedKVCache(1, 4, 16, 1, 4, dtype="float32", xp=np) if cache else BlockAllocator(4, 16)
    with pytest.raises(TypeError, match="the same blocks twice; make another one"):
        how(made)


def test_a_sequence_that_was_dropped_is_reported():
    allocator = BlockAllocator(4, 2, prefix_caching=True)
    allocator.add([1, 2, 3])
    gc.collect()
    with pytest.raises(RuntimeError, match="has a count of 1 and 0 owners"):
        allocator.check()
