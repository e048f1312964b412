"""The scheduler step by step: what runs, what it shares and gives back, and what is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from support.block_model import BlockMemory, FaultError, alone, finish, next_token, require_empty

from cupyattn import BlockAllocator, OutOfBlocksError, Scheduler
from cupyattn.kv_cache.requests import RequestRun


def test_samples_share_the_prompt(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=16)
    request = scheduler.submit(range(6), max_new_tokens=3, n=3)
    assert scheduler.step(memory.forward) == ()
    assert (scheduler.num_running, memory.allocator.num_used, memory.computed) == (3, 2, 6)
    scheduler.step(memory.forward)
    assert memory.allocator.num_used == 4, "the last block is copied twice, for three samples"
    assert memory.copied["copy"] == 2
    assert scheduler.step(memory.forward) == (request,)
    assert request.outputs == tuple(alone(range(6), 3, sample) for sample in range(3))
    require_empty(memory.allocator)


def test_a_long_prompt_is_computed_in_parts_beside_others(memory):
    scheduler = Scheduler(memory, max_batch=2, max_tokens=4)
    first = scheduler.submit([1], max_new_tokens=8)
    scheduler.step(memory.forward)
    second = scheduler.submit(range(10), max_new_tokens=1)
    steps = 0
    while not second.finished:
        scheduler.step(memory.forward)
        steps += 1
    assert steps == 4  # 3 tokens a step, and one of the first
    assert len(first.outputs[0]) == 1 + steps


def test_a_prompt_that_is_cached_is_computed_once(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    requests = [scheduler.submit([*range(8), last], max_new_tokens=2) for last in (1, 2)]
    scheduler.step(memory.forward)
    assert memory.computed == 9 + 1
    finish(scheduler, memory)
    assert [each.outputs[0] for each in requests] == [
        alone([*range(8), last], 2, 0) for last in (1, 2)
    ]


@pytest.mark.parametrize("max_tokens", [5, 8, 64])
def test_what_was_found_of_a_prompt_does_not_depend_on_its_parts(max_tokens):
    memory = BlockMemory(BlockAllocator(200, 4, prefix_caching=True))
    scheduler = Scheduler(memory, max_batch=2, max_tokens=max_tokens)
    for last in (1, 2):
        scheduler.submit([*range(40), *[last] * 60], max_new_tokens=3, n=2)
        finish(scheduler, memory)
    allocator = memory.allocator
    assert (allocator.num_found_tokens, allocator.num_added_tokens) == (40, 200)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_prompt_that_begins_anew_is_counted_once(memory, preempt):
    """After it made room, and after a step that failed."""
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64, preempt=preempt)
    for i in range(3):
        scheduler.submit([i] * 12, max_new_tokens=12)
    with pytest.raises(TypeError, match="forward returned"):
        scheduler.step(lambda batch: None)
    finish(scheduler, memory)
    assert scheduler.num_preempted
    allocator = memory.allocator
    assert (allocator.num_found_tokens, allocator.num_added_tokens) == (0, 36)


def test_cancelled_requests_give_back_all(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64, preempt="swap")
    requests = [scheduler.submit([i] * 12, max_new_tokens=12, n=2) for i in range(3)]
    while not scheduler.num_preempted:
        scheduler.step(memory.forward)
    scheduler.cancel(requests[0])
    scheduler.cancel(requests[2])
    assert [each.finished for each in requests] == [True, False, True]
    finished, _ = finish(scheduler, memory)
    assert finished == [requests[1]]
    scheduler.cancel(requests[1])
    require_empty(memory.allocator)


@pytest.mark.parametrize("order", [1, -1])
def test_cancelling_waiting_requests_looks_at_each_a_few_times(memory, monkeypatch, order):
    looked, leave = [], RequestRun.leave
    monkeypatch.setattr(RequestRun, "leave", lambda run: (looked.append(run), leave(run)))
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    requests = [scheduler.submit([i], max_new_tokens=4) for i in range(1000)]
    scheduler.step(memory.forward)
    for request in requests[::order]:
        scheduler.cancel(request)
    assert all(request.finished for request in requests)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.idle) == (0, 0, True)
    assert len(looked) < 2 * len(requests)
    assert scheduler.step(memory.forward) == ()
    require_empty(memory.allocator)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_one_sample_is_cancelled(memory, when):
    """Before it has a sequence of its own and after; the others go on to their end."""
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=6, n=3)
    other = scheduler.submit([1, 2, 3], max_new_tokens=6)
    for _ in range(when):
        scheduler.step(memory.forward)
    scheduler.cancel(request, 1)
    scheduler.cancel(request, 1)
    assert not request.finished
    finished, _ = finish(scheduler, memory)
    assert sorted(map(id, finished)) == sorted(map(id, (request, other)))
    assert [len(output) for output in request.outputs] == [6, when, 6]
    assert request.outputs[0] == other.outputs[0] == alone(request.tokens, 6, 0)
    for sample in range(3):
        scheduler.cancel(request, sample)
    require_empty(memory.allocator)
    with pytest.raises(ValueError, match="sample = 3; allowed is 0 to 2"):
        scheduler.cancel(request, 3)


def several_at_once(memory, most):
    """A forward that goes on by itself: it appends its own tokens, and returns all of them."""

    def forward(batch):
        returned = []
        for work, tokens in zip(batch, memory.forward(batch), strict=True):
            while len(work.samples) == 1 and len(tokens) < most:
                try:
                    copies = work.sequence.append(tokens[-1:])
                except OutOfBlocksError:
                    break
                if copies:
                    memory.copy(copies)
                later = work._replace(tokens=(tokens[-1],))
                memory._write(later)
                prompt = work.request.tokens
                tokens.append(next_token(prompt, memory.read(later), work.samples[0]))
            returned.append([tokens] if len(work.samples) == 1 else tokens)
        return returned

    return forward


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("stop", [(), (1,)])
def test_a_model_may_return_several_tokens(stop, preempt):
    """They are the same as one by one, and tokens after an end are dropped."""
    allocator = BlockAllocator(8, 4, prefix_caching=True, num_host_blocks=4)
    memory = BlockMemory(allocator)
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64, preempt=preempt)
    requests = [
        scheduler.submit([i, 2, 3], max_new_tokens=12 + i, n=1 + i % 2, stop=stop) for i in range(6)
    ]
    forward = several_at_once(memory, 3)
    while not scheduler.idle:
        scheduler.step(forward)
        allocator.check()
    for request in requests:
        for sample, output in enumerate(request.outputs):
            assert output == alone(request.tokens, request.max_new_tokens, sample, stop)
    assert stop or scheduler.num_preempted
    require_empty(allocator)


def test_nothing_to_do(memory):
    scheduler = Scheduler(memory, max_batch=1, max_tokens=1)
    assert scheduler.idle
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preempted) == (0, 0, 0)
    assert scheduler.step(memory.forward) == ()


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_blocks_that_others_hold(memory, preempt):
    """There is no room for one sequence: an error, and all goes on when there is."""
    scheduler = Scheduler(memory, max_batch=2, max_tokens=64, preempt=preempt)
    request = scheduler.submit(range(4), max_new_tokens=8)
    scheduler.step(memory.forward)
    held = [memory.allocator.allocate() for _ in range(7)]
    with pytest.raises(OutOfBlocksError):
        scheduler.step(memory.forward)
    later = scheduler.submit(range(5, 9), max_new_tokens=2)
    memory.allocator.free(held.pop())
    for block in held:
        scheduler.step(memory.forward)
        memory.allocator.free(block)
    finish(scheduler, memory)
    assert request.outputs == (alone(range(4), 8, 0),)
    assert later.outputs == (alone(range(5, 9), 2, 0),)


def test_no_room_to_begin(memory):
    scheduler = Scheduler(memory, max_batch=2, max_tokens=64)
    scheduler.submit(range(9), max_new_tokens=2)
    held = [memory.allocator.allocate() for _ in range(6)]
    with pytest.raises(OutOfBlocksError, match="the next sequence needs 3 blocks"):
        scheduler.step(memory.forward)
    memory.allocator.free(held[0])
    scheduler.step(memory.forward)
    assert scheduler.num_running == 1


def test_it_says_what_it_is(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2], max_new_tokens=1, n=2)
    assert repr(request) == "<Request of 2 tokens, 0, 0 new ones, not finished>"
    scheduler.step(memory.forward)
    assert repr(request) == "<Request of 2 tokens, 1, 1 new ones, finished>"


def test_a_window_bounds_what_a_sequence_holds():
    """A generation goes on for longer than the pool has room."""
    memory = BlockMemory(BlockAllocator(3, 4), left=3)
    scheduler = Scheduler(memory, max_batch=2, max_tokens=5, window_size=(3, 0))
    request = scheduler.submit(range(16), max_new_tokens=50)
    used = []

    def forward(batch):
        used.append(memory.allocator.num_used)
        return memory.forward(batch)

    while not scheduler.idle:
        scheduler.step(forward)
    assert max(used) == 3, "positions 2 to 9, for one"
    assert max(used[4:]) == 2, "positions 2 to 5, for one"
    assert request.outputs == (alone(range(16), 50, 0, left=3),)
    require_empty(memory.allocator)


def test_without_a_window_such_a_request_is_refused():
    for window_size in (None, (None, 0)):
        scheduler = Scheduler(
            BlockMemory(BlockAllocator(3, 4)), max_batch=2, max_tokens=5, window_size=window_size
        )
        with pytest.raises(ValueError, match="need 17 blocks"):
            scheduler.submit(range(16), max_new_tokens=50)
    scheduler = Scheduler(
        BlockMemory(BlockAllocator(2, 4)), max_batch=2, max_tokens=5, window_size=(3, 0)
    )
    with pytest.raises(ValueError, match="need 3 blocks"):
        scheduler.submit(range(16), max_new_tokens=50)


def test_a_cached_prefix_that_fills_the_pool_is_begun_in_part():
    memory = BlockMemory(BlockAllocator(4, 4, prefix_caching=True), left=3)
    scheduler = Scheduler(memory, max_batch=1, max_tokens=4, window_size=(3, 0))
    prompt = list(range(16))
    scheduler.submit(prompt, max_new_tokens=1)
    finish(scheduler, memory)
    assert memory.allocator.find([*prompt, 9]) == 16
    request = scheduler.submit([*prompt, 9], max_new_tokens=3)
    finish(scheduler, memory)
    assert request.outputs == (alone([*prompt, 9], 3, 0, left=3),)
    require_empty(memory.allocator)


@pytest.mark.parametrize("returned", [[], [[]], [[1, 2]], [[1], [2]], [[[1, 2]]], [[[1], [2]]]])
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
    """The sequence is recomputed, and the others continue."""
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
    with pytest.raises(
        kind, match=rf"{passed}.*; pass a request that this scheduler's submit returned"
    ):
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
