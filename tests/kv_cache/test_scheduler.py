"""The scheduler: every request ends with the tokens that it gives alone, and nothing leaks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.block_memory import VOCABULARY, BlockMemory, FaultError, alone, next_token
from support.search import examples

from cupyattn import BlockAllocator, OutOfBlocksError, Scheduler
from cupyattn.kv_cache import scheduler as scheduler_module
from cupyattn.kv_cache.admission import Admission


def finish(scheduler, memory, arrivals=()):
    """Step until all is done; requests of `arrivals` come in one a step. Return those finished."""
    finished, faults = [], 0
    arrivals = list(arrivals)
    for _ in range(5_000):
        if arrivals:
            arrivals.pop(0)()
        elif scheduler.idle:
            break
        try:
            finished += scheduler.step(memory.forward)
        except FaultError:
            faults += 1
        memory.allocator.check()
    assert scheduler.idle
    return finished, faults


def require_empty(allocator):
    allocator.check()
    assert allocator.num_used == 0
    assert allocator.num_free_host == allocator.num_host_blocks


def trial(seed, *, faulty=False, windowed=False):
    """One pool of a random shape, and requests that share prompts; return what it came to."""
    rng = random.Random(seed)
    allocator = BlockAllocator(
        rng.choice((6, 10, 20, 60)),
        rng.choice((1, 2, 3, 5)),
        prefix_caching=rng.random() < 0.6,
        watermark=rng.choice((0, 0, 1)),
        num_host_blocks=rng.choice((0, 4, 30)),
    )
    left = rng.choice((1, 2, 5, 12)) if windowed else None
    memory = BlockMemory(allocator, random.Random(seed) if faulty else None, left)
    max_batch = rng.choice((1, 3, 8))
    max_tokens = max_batch + rng.choice((0, 3, 20))
    preempt = rng.choice(("recompute", "swap"))
    scheduler = Scheduler(
        memory,
        max_batch=max_batch,
        max_tokens=max_tokens,
        preempt=preempt,
        window_size=None if left is None else (left, 0),
    )
    room = (allocator.num_blocks - allocator.watermark) * allocator.block_size
    system = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(room // 3 + 1))]
    requests, expected = [], []

    def request():
        prompt = system[: rng.choice((0, len(system)))]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, room // 3))]
        new = rng.randint(1, min(room - len(prompt) + 1, 12))
        if left is not None:  # longer than the pool
            window_blocks = -(-(left + max_tokens - 1) // allocator.block_size) + 1
            if window_blocks + allocator.watermark <= allocator.num_blocks:
                new = rng.randint(1, 2 * room)
        n = rng.randint(1, max_batch)
        stop = rng.sample(range(VOCABULARY), rng.choice((0, 0, 1)))

        def submit():
            requests.append(scheduler.submit(prompt, max_new_tokens=new, n=n, stop=stop))
            expected.append(tuple(alone(prompt, new, sample, stop, left) for sample in range(n)))

        return submit

    finished, faults = finish(scheduler, memory, [request() for _ in range(rng.randint(1, 8))])
    assert [each.outputs for each in requests] == expected
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    assert all(each.finished for each in requests)
    assert memory.largest_batch <= max_batch
    assert memory.most_tokens <= max_tokens
    assert preempt == "swap" or not memory.copied["copy_to_host"]
    require_empty(allocator)
    return scheduler.num_preempted, memory.copied, faults


@given(seed=st.integers(0, 2**32))
def test_every_request_gives_what_it_gives_alone(seed):
    trial(seed)


@given(seed=st.integers(0, 2**32))
def test_a_step_that_fails_loses_nothing(seed):
    trial(seed, faulty=True)


@given(seed=st.integers(0, 2**32), faulty=st.booleans())
@examples(40)
def test_a_window_gives_back_what_no_token_sees(seed, faulty):
    trial(seed, faulty=faulty, windowed=True)


def test_the_trials_above_meet_what_they_are_for():
    outcomes = [trial(seed, faulty=seed % 2 == 0) for seed in range(60)]
    assert sum(preempted > 0 for preempted, _, _ in outcomes) > 15
    for kind in ("copy", "copy_to_host", "copy_from_host"):
        assert sum(copied[kind] > 0 for _, copied, _ in outcomes) > 5
    assert sum(faults > 0 for _, _, faults in outcomes) > 15


# Bugs of schedulers, each found by the trials.


def writes_before_it_copies(monkeypatch):
    monkeypatch.setattr(Scheduler, "_run_copies", lambda self: self._copies.clear())


def keeps_what_found_unwritten_blocks(monkeypatch):
    undo = Scheduler._undo

    def wrong(self):
        for run in self._running:
            run.written = run.written or run.sequence.num_cached_tokens
        undo(self)

    monkeypatch.setattr(Scheduler, "_undo", wrong)


def keeps_what_lost_its_copies(monkeypatch):
    undo = Scheduler._undo

    def wrong(self):
        self._copies = []
        undo(self)

    monkeypatch.setattr(Scheduler, "_undo", wrong)


def undoes_nothing(monkeypatch):
    monkeypatch.setattr(Scheduler, "_undo", lambda self: None)


def forgets_what_was_drawn(monkeypatch):
    preempt = Scheduler._preempt

    def wrong(self, run):
        preempt(self, run)
        if run.sequence is None:
            run.tokens = [*run.request.tokens]

    monkeypatch.setattr(Scheduler, "_preempt", wrong)


def leaks_what_ends(monkeypatch):
    monkeypatch.setattr(scheduler_module.Run, "drop", lambda self: setattr(self, "sequence", None))


def gives_back_what_the_next_token_sees(monkeypatch):
    def wrong(self, sequence):
        if self._left is not None:
            sequence.evict_before(max(0, len(sequence) - self._left + 1))

    monkeypatch.setattr(Admission, "evict", wrong)


def gives_back_nothing(monkeypatch):
    monkeypatch.setattr(Admission, "evict", lambda self, sequence: None)


@pytest.mark.parametrize(
    "bug",
    [
        gives_back_nothing,
        gives_back_what_the_next_token_sees,
        writes_before_it_copies,
        keeps_what_found_unwritten_blocks,
        keeps_what_lost_its_copies,
        undoes_nothing,
        forgets_what_was_drawn,
        leaks_what_ends,
    ],
    ids=lambda bug: bug.__name__,
)
def test_planted_bugs_are_found(bug, monkeypatch):
    def trials():
        for seed in range(300):
            trial(seed, faulty=seed % 2 == 0)
            trial(seed, windowed=True)

    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        trials()


@pytest.fixture
def memory():
    return BlockMemory(BlockAllocator(8, 4, num_host_blocks=8, prefix_caching=True))


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
    assert steps == 4  # 3 tokens a step beside the first's one
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


def test_the_earliest_goes_on(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    requests = [scheduler.submit([i] * 12, max_new_tokens=12) for i in range(3)]
    finished, _ = finish(scheduler, memory)
    assert scheduler.num_preempted > 0
    assert finished == requests


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


def test_a_request_ends_with_its_last_sample(memory):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=6, n=2)
    scheduler.step(memory.forward)
    scheduler.cancel(request, 0)
    assert not request.finished
    scheduler.cancel(request, 1)
    assert request.finished
    assert scheduler.idle
    require_empty(memory.allocator)


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
    """They are those that come one by one, and those behind an end are dropped."""
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


@pytest.mark.parametrize("returned", [[[[1, 2]]], [[[]]], [[[1], [2]]]])
def test_several_tokens_need_a_sequence_that_has_them(memory, returned):
    scheduler = Scheduler(memory, max_batch=4, max_tokens=64)
    request = scheduler.submit([1, 2, 3], max_new_tokens=6)
    with pytest.raises(ValueError, match="forward returned"):
        scheduler.step(lambda batch: returned)
    finish(scheduler, memory)
    assert request.outputs[0] == alone(request.tokens, 6, 0)


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
