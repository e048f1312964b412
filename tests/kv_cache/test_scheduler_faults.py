"""Steps and cancellations that are cut short anywhere: by Ctrl-C, and for want of memory."""

from __future__ import annotations

import inspect
import random
import sys
from types import FrameType
from typing import Any

import pytest
from support.block_memory import BlockMemory, alone, require_empty
from support.search import Search

from cupyattn import BlockAllocator, Scheduler
from cupyattn.kv_cache import admission, moves, requests, scheduler, taken

FILES = frozenset(map(inspect.getfile, (admission, moves, requests, scheduler, taken)))
MOST_STEPS = 500


class Interrupts:
    """Ctrl-C at the lines of these numbers of the scheduler's own code, and as functions return.

    Calls of the allocator are whole: `test_allocator_faults.py` cuts those short. So is what
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
    stride = 5 if Search.deep else 29
    for number in range(random.Random(3).randrange(stride) + 1, places, stride):
        interrupted(kind, number)


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_a_second_one_while_the_first_is_mended(kind):
    rng = random.Random(4)
    places = interrupted(kind)
    for _ in range(600 if Search.deep else 120):
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
    for _ in range(600 if Search.deep else 150):
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
    assert faults > 100
