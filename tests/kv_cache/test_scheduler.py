"""The scheduler: every request ends with the tokens that it gives alone, whatever cuts it short."""

from __future__ import annotations

import inspect
import random
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.block_model import VOCABULARY, BlockMemory, alone, finish, require_empty
from support.search import Search, examples

from cupyattn import BlockAllocator, Scheduler
from cupyattn.kv_cache import requests as requests_module
from cupyattn.kv_cache import scheduler as scheduler_module
from cupyattn.kv_cache.scheduler import Admission, BlockMoves


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


@given(seed=st.integers(0, 2**32), faulty=st.booleans(), windowed=st.booleans())
@examples(25, deep=300)
def test_every_request_gives_what_it_gives_alone(seed, faulty, windowed):
    """Steps may fail, and a window may give back blocks."""
    trial(seed, faulty=faulty, windowed=windowed)


def test_the_trials_above_meet_what_they_are_for():
    outcomes = [trial(seed, faulty=seed % 2 == 0) for seed in range(40)]
    assert sum(preempted > 0 for preempted, _, _ in outcomes) > 10
    for kind in ("copy", "copy_to_host", "copy_from_host"):
        assert sum(copied[kind] > 0 for _, copied, _ in outcomes) > 3
    assert sum(faults > 0 for _, _, faults in outcomes) > 10


# Bugs of schedulers, each found by the trials.


def writes_before_it_copies(monkeypatch):
    monkeypatch.setattr(BlockMoves, "run", lambda self: self._waiting.clear())


def keeps_what_found_unwritten_blocks(monkeypatch):
    undo = Scheduler._undo

    def wrong(self, taken):
        for run in self._running:
            run.written = run.written or run.sequence.num_cached_tokens
        undo(self, taken)

    monkeypatch.setattr(Scheduler, "_undo", wrong)


def undoes_nothing(monkeypatch):
    monkeypatch.setattr(Scheduler, "_undo", lambda self, taken: None)


def leaks_what_ends(monkeypatch):
    monkeypatch.setattr(
        scheduler_module.RequestRun, "drop", lambda self: setattr(self, "sequence", None)
    )


def gives_back_what_the_next_token_sees(monkeypatch):
    def wrong(self, runs):
        for run in runs if self._left is not None else ():
            run.sequence.evict_before(max(0, len(run.sequence) - self._left + 1))

    monkeypatch.setattr(Admission, "evict", wrong)


@pytest.mark.parametrize(
    "bug",
    [
        gives_back_what_the_next_token_sees,
        writes_before_it_copies,
        keeps_what_found_unwritten_blocks,
        undoes_nothing,
        leaks_what_ends,
    ],
    ids=lambda bug: bug.__name__,
)
def test_mutants_are_found(bug, monkeypatch):
    def trials():
        for seed in range(300):
            trial(seed, faulty=seed % 2 == 0)
            trial(seed, faulty=seed % 2 == 1, windowed=True)

    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        trials()


FILES = frozenset(map(inspect.getfile, (requests_module, scheduler_module)))
MOST_STEPS = 500


class Interrupts:
    """Ctrl-C at the lines of these numbers of the scheduler's own code, and as functions return.

    Calls of the allocator are whole: `test_allocator_model.py` cuts those short. So is what
    `step` does between calls, where CPython looks for no signal.
    """

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)
        self.places = 0

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code is Scheduler.step.__code__:
            return None
        if event in ("line", "return"):
            self.places += 1
            if self.places in self.numbers:
                raise KeyboardInterrupt
        return self.trace


class Story:
    """Requests that share prompts and blocks, make room, end by a token, and are cancelled."""

    def __init__(self, preempt: str, left: int | None, fault=KeyboardInterrupt) -> None:
        self.allocator = BlockAllocator(8, 2, prefix_caching=True, num_host_blocks=5)
        self.memory = BlockMemory(self.allocator, left=left)
        self.scheduler = Scheduler(
            self.memory, max_batch=5, max_tokens=9, preempt=preempt,
            window_size=None if left is None else (left, 0),
        )  # fmt: skip
        asked = (([1, 2, 3], 5, 1, ()), ([1, 2, 3, 4], 5, 3, (1,)), ([2, 2], 6, 2, ()))
        self.left = left
        self.requests = [
            self.scheduler.submit(prompt, max_new_tokens=new, n=n, stop=stop)
            for prompt, new, n, stop in asked
        ]
        self.cancelled = self.scheduler.submit([1, 2, 5], max_new_tokens=6, n=2)
        self.finished: list[Any] = []
        self.fault, self.faults = fault, 0

    def tried(self, call) -> bool:
        """Make a call; tell whether it was not cut short."""
        try:
            self.finished += call() or ()
        except self.fault:
            self.faults += 1
            return False
        return True

    def run(self, cut) -> None:
        """Go to the end; `cut` makes a call, and may cut it short."""

        def cancel(*sample: int) -> None:
            while not self.tried(
                lambda: cut(lambda: self.scheduler.cancel(self.cancelled, *sample))
            ):
                pass

        for number in range(MOST_STEPS):
            if self.scheduler.idle:
                break
            self.tried(lambda: cut(lambda: self.scheduler.step(self.memory.forward)))
            if number == 4:
                cancel(1)
            if number == 7:
                cancel()

    def require_right(self) -> None:
        assert self.scheduler.idle
        for request in self.requests:
            assert request.finished
            assert request.outputs == tuple(
                alone(request.tokens, request.max_new_tokens, sample, request.stop, self.left)
                for sample in range(request.n)
            )
        assert self.cancelled.finished
        assert {*map(id, self.requests)} <= {*map(id, self.finished)}
        assert len(self.finished) == len({*map(id, self.finished)}), "each is told once"
        require_empty(self.allocator)


KINDS = [("recompute", None), ("swap", None), ("swap", 3)]


def interrupted(kind, *numbers: int) -> int:
    """Interrupt a story at these places; return how many there were."""
    story, interrupts = Story(*kind), Interrupts(*numbers)

    def cut(call):
        with interrupts:
            return call()

    story.run(cut)
    story.require_right()
    assert story.faults <= len(numbers)
    return interrupts.places


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_any_line_loses_nothing(kind):
    """The step is computed again, or what it has finished is returned by the next."""
    places = interrupted(kind)
    assert places > 1500
    stride = 5 if Search.deep else 89
    for number in range(random.Random(3).randrange(stride) + 1, places, stride):
        interrupted(kind, number)


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_a_second_one_while_the_first_is_mended(kind):
    rng = random.Random(4)
    places = interrupted(kind)
    for _ in range(600 if Search.deep else 40):
        first = rng.randrange(1, places)
        interrupted(kind, *(first + behind for behind in (0, *rng.sample(range(1, 60), 2))))


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="CPython 3.12 itself dies of memory that is refused it"
)
@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_nothing_is_lost(kind):
    """Each step has an allocation of memory in it that fails, if it has so many."""
    testcapi: Any = pytest.importorskip("_testcapi")
    rng = random.Random(5)
    faults = 0
    for _ in range(600 if Search.deep else 60):
        # CPython 3.11 forgets the error in places, and says SystemError.
        story = Story(*kind, (MemoryError, SystemError))

        def cut(call):
            which = rng.randrange(1, 2000)
            testcapi.set_nomemory(which, which + 1)
            try:
                return call()
            finally:
                testcapi.remove_mem_hooks()

        story.run(cut)
        story.require_right()
        faults += story.faults
    assert faults > 40
