"""The scheduler: every request ends with the tokens that it gives alone, and nothing leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.block_memory import VOCABULARY, BlockMemory, alone, finish, require_empty
from support.search import examples

from cupyattn import BlockAllocator, Scheduler
from cupyattn.kv_cache import scheduler as scheduler_module
from cupyattn.kv_cache.admission import Admission
from cupyattn.kv_cache.moves import Moves


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
    if not allocator.num_host_blocks:
        preempt = "recompute"
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
    others = [each for each in zip(requests, expected, strict=True) if each[0].outputs != each[1]]
    assert not others  # of whole lists pytest would seek the difference for seconds
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
@examples(27)
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
    monkeypatch.setattr(Moves, "run", lambda self: self._waiting.clear())


def keeps_what_found_unwritten_blocks(monkeypatch):
    undo = Scheduler._undo

    def wrong(self, taken):
        for run in self._running:
            run.written = run.written or run.sequence.num_cached_tokens
        undo(self, taken)

    monkeypatch.setattr(Scheduler, "_undo", wrong)


def keeps_what_lost_its_copies(monkeypatch):
    undo = Moves.undo

    def wrong(self, running, waiting):
        self._missing = False
        undo(self, running, waiting)

    monkeypatch.setattr(Moves, "undo", wrong)


def undoes_nothing(monkeypatch):
    monkeypatch.setattr(Scheduler, "_undo", lambda self, taken: None)


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
    def wrong(self, runs):
        for run in runs if self._left is not None else ():
            run.sequence.evict_before(max(0, len(run.sequence) - self._left + 1))

    monkeypatch.setattr(Admission, "evict", wrong)


def gives_back_nothing(monkeypatch):
    monkeypatch.setattr(Admission, "evict", lambda self, runs: None)


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
            trial(seed, faulty=seed % 2 == 1, windowed=True)

    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        trials()
