"""What a scheduler refuses, and that a step that is refused loses nothing."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from support.block_memory import BlockMemory, FaultError, alone, finish, require_empty

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


@pytest.mark.parametrize("call", ["cancel", "cancel one sample", "step"])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_forward_that_changes_its_step_is_refused(memory, call, lazily):
    """The step is computed again, whether forward or what reads its result made the call."""
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=6, n=3)
    other = scheduler.submit([2, 2, 3], max_new_tokens=6)
    calls = {
        "cancel": lambda: scheduler.cancel(request),
        "cancel one sample": lambda: scheduler.cancel(request, 1),
        "step": lambda: scheduler.step(memory.forward),
    }

    def forward(batch):
        drawn = memory.forward(batch)
        if lazily:
            return (calls[call]() or tokens for tokens in drawn)
        calls[call]()
        return drawn

    with pytest.raises(RuntimeError, match=f"{call[:6].strip()} was called within a step; "):
        scheduler.step(forward)
    memory.allocator.check()
    assert request.outputs == ([], [], [])
    finish(scheduler, memory)
    for each in (request, other):
        assert each.outputs == tuple(alone(each.tokens, 6, sample) for sample in range(each.n))
    require_empty(memory.allocator)


def test_a_copy_that_changes_its_step_is_refused(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=4, n=2)
    copy = memory.copy
    memory.copy = lambda copies: scheduler.cancel(request)
    scheduler.step(memory.forward)
    with pytest.raises(RuntimeError, match="cancel was called within a step"):
        scheduler.step(memory.forward)
    memory.copy = copy
    finish(scheduler, memory)
    assert request.outputs == tuple(alone([1, 2, 3], 4, sample) for sample in range(2))
    require_empty(memory.allocator)


def test_a_forward_may_submit(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    requests = [scheduler.submit([1, 2, 3], max_new_tokens=4)]

    def forward(batch):
        if len(requests) < 4:
            requests.append(scheduler.submit([len(requests)], max_new_tokens=3))
        return memory.forward(batch)

    while not scheduler.idle:
        scheduler.step(forward)
    assert len(requests) == 4
    for each in requests:
        assert each.outputs == (alone(each.tokens, each.max_new_tokens, 0),)


def test_a_result_that_frees_a_sequence_as_it_is_read_is_refused(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=4)

    def forward(batch):
        for work, tokens in zip(batch, memory.forward(batch), strict=True):
            yield tokens
            work.sequence.free()

    with pytest.raises(ValueError, match="forward has left <Sequence, freed>"):
        scheduler.step(forward)
    finish(scheduler, memory)
    assert request.outputs == (alone([1, 2, 3], 4, 0),)


@pytest.mark.parametrize(
    ("request_of", "kind", "passed"),
    [
        (lambda other: None, TypeError, "got None as a request"),
        (lambda other: 0, TypeError, "got 0 as a request"),
        (lambda other: other, ValueError, "got <Request of 2 tokens.* of another scheduler"),
    ],
)
def test_what_is_no_request_of_the_scheduler_is_not_cancelled(memory, request_of, kind, passed):
    other = Scheduler(memory, max_batch=4, max_tokens=64)
    foreign = other.submit([1, 2], max_new_tokens=2)
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    mine = scheduler.submit([1, 2], max_new_tokens=2)
    with pytest.raises(kind, match=rf"{passed}.*; pass what this scheduler's submit returned"):
        scheduler.cancel(request_of(foreign))
    assert not (mine.finished or foreign.finished)


@pytest.mark.parametrize("forward", [None, 7, [[1]]])
@pytest.mark.parametrize("idle", [False, True])
def test_what_is_no_function_is_refused(memory, forward, idle):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    if not idle:
        scheduler.submit([1], max_new_tokens=3)
    with pytest.raises(TypeError, match="as forward; it is a function that takes a tuple of Work"):
        scheduler.step(forward)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, int(not idle))


def test_tokens_that_end_a_sample_may_be_a_set(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    assert scheduler.submit([1], max_new_tokens=3, stop={4, 2}).stop == {4, 2}


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_a_scheduler_knows_is_neither_copied_nor_pickled(memory, how):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    with pytest.raises(TypeError, match="a Scheduler was to be copied or pickled"):
        how(scheduler)
    with pytest.raises(TypeError, match="cancel it; copy its tokens and outputs"):
        how(scheduler.submit([1], max_new_tokens=3))


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
    with pytest.raises(TypeError, match="without allocator; "):
        Scheduler(CopiesOnTheDevice(None), max_batch=4, max_tokens=64)


def test_swapping_without_host_memory_is_refused():
    cache = BlockMemory(BlockAllocator(8, 4))
    with pytest.raises(ValueError, match=r"no host blocks; .*; pass num_host_blocks= to it, or"):
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
        ({"window_size": (2, "0")}, TypeError, "right = '0'"),
        ({"preempt": np.arange(2)}, ValueError, "preempt = <array"),
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
        ([1], {"stop": 3}, TypeError, "stop = 3; .* or a set; "),
        ([1], {"stop": [True]}, TypeError, r"stop = \[True\]; "),
        ({1, 2}, {}, TypeError, "tokens {1, 2}"),
        ([1] * 30, {"max_new_tokens": 4}, ValueError, "need 9 blocks"),
    ],
)
def test_bad_requests_are_refused(memory, tokens, changes, kind, passed):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    with pytest.raises(kind, match=passed):
        scheduler.submit(tokens, **{"max_new_tokens": 1, **changes})
    assert scheduler.idle
