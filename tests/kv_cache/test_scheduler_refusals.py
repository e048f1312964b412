"""What a scheduler refuses, and that a step that is refused loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support.block_memory import FaultError, alone, finish, require_empty

from cupyattn import BlockAllocator, Scheduler


@pytest.mark.parametrize("returned", [[[[1, 2]]], [[[]]], [[[1], [2]]]])
def test_several_tokens_need_a_sequence_that_has_them(memory, returned):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=6)
    with pytest.raises(ValueError, match="forward returned"):
        scheduler.step(lambda batch: returned)
    finish(scheduler, memory)
    assert request.outputs[0] == alone(request.tokens, 6, 0)


@pytest.mark.parametrize("returned", [[], [[]], [[1, 2]], [[1], [2]]])
def test_wrong_numbers_of_tokens_are_refused(memory, returned):
    scheduler = Scheduler(memory, max_batch=2, max_tokens=64)
    request = scheduler.submit(range(4), max_new_tokens=2)
    with pytest.raises(ValueError, match="forward returned"):
        scheduler.step(lambda batch: returned)
    with pytest.raises(TypeError, match="tokens are integers"):
        scheduler.step(lambda batch: [[1.5]])
    finish(scheduler, memory)
    assert request.outputs == (alone(range(4), 2, 0),)


@pytest.mark.parametrize("returned", [None, 7, np.array(7)])
def test_what_is_no_list_of_tokens_is_refused(memory, returned):
    scheduler = Scheduler(memory, max_batch=2, max_tokens=64)
    request = scheduler.submit(range(4), max_new_tokens=2)
    with pytest.raises(TypeError, match=r"forward returned .*; return a list for each work"):
        scheduler.step(lambda batch: returned)
    finish(scheduler, memory)
    assert request.outputs == (alone(range(4), 2, 0),)


def frees(sequence):
    sequence.free()


def moves(sequence):
    sequence.swap_out()


def cuts(sequence):
    sequence.truncate(1)


@pytest.mark.parametrize("misuse", [frees, moves, cuts])
@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_that_gives_back_a_sequence_is_refused(memory, misuse, raises):
    """The sequence is computed anew, and the others go on."""
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    requests = [scheduler.submit(range(n), max_new_tokens=4) for n in (3, 6)]
    scheduler.step(memory.forward)

    def forward(batch):
        drawn = memory.forward(batch)
        misuse(batch[0].sequence)
        if raises:
            raise FaultError
        return drawn

    expected = FaultError if raises else ValueError
    with pytest.raises(expected, match=None if raises else "forward has left <Sequence.* 4 tokens"):
        scheduler.step(forward)
    memory.allocator.check()
    finish(scheduler, memory)
    for request in requests:
        assert request.finished
        assert request.outputs == (alone(request.tokens, 4, 0),)
    require_empty(memory.allocator)


class CopiesOnTheDevice:
    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator

    def copy(self, copies) -> None: ...


def test_what_is_no_cache_is_refused():
    allocator = BlockAllocator(8, 4)
    with pytest.raises(TypeError, match=r"without allocator, copy; .*as \.allocator"):
        Scheduler(allocator, max_batch=4, max_tokens=64)
    cache = CopiesOnTheDevice(allocator)
    with pytest.raises(TypeError, match="without copy_to_host, copy_from_host; "):
        Scheduler(cache, max_batch=4, max_tokens=64, preempt="swap")
    assert Scheduler(cache, max_batch=4, max_tokens=64).idle


@pytest.mark.parametrize(
    ("changes", "kind", "passed"),
    [
        ({"max_batch": 0}, ValueError, "max_batch = 0"),
        ({"max_batch": 1.0}, TypeError, "max_batch = 1.0"),
        ({"max_tokens": 3}, ValueError, "max_tokens = 3"),
        ({"preempt": "drop"}, ValueError, "preempt = 'drop'"),
        ({"window_size": 8}, TypeError, "window_size = 8"),
        ({"window_size": (-1, 0)}, ValueError, "left = -1"),
        ({"window_size": (2.0, 0)}, TypeError, r"left = 2\.0"),
    ],
)
def test_bad_schedulers_are_refused(memory, changes, kind, passed):
    with pytest.raises(kind, match=passed):
        Scheduler(memory, **{"max_batch": 4, "max_tokens": 64, **changes})


@pytest.mark.parametrize(
    ("tokens", "changes", "kind", "passed"),
    [
        ([], {}, ValueError, "no tokens"),
        ("ab", {}, TypeError, "tokens 'ab'"),
        ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens = 0"),
        ([1], {"n": 0}, ValueError, "n = 0"),
        ([1], {"n": 5}, ValueError, "n = 5"),
        ([1], {"stop": 3}, TypeError, "tokens 3"),
        ([1] * 30, {"max_new_tokens": 4}, ValueError, "need 9 blocks"),
    ],
)
def test_bad_requests_are_refused(memory, tokens, changes, kind, passed):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    with pytest.raises(kind, match=passed):
        scheduler.submit(tokens, **{"max_new_tokens": 1, **changes})
    assert scheduler.idle
