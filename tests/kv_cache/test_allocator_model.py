"""The allocator against a model that keeps every token: rules, long runs, mutants."""

from __future__ import annotations

import inspect
import random
import sys
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.block_model import BlockModel, random_step
from support.long_search import search
from support.search import Search, deep

from cupyattn import BlockAllocator, Sequence, kv_cache
from cupyattn.kv_cache import pool, sequence
from cupyattn.kv_cache.pool import FREED, Pool, Pools
from cupyattn.kv_cache.prefix_index import Prefix, PrefixIndex

TOKENS = st.lists(st.integers(0, 1), max_size=12)


def among(machine: Machine, draw: st.DataObject, *, swapped: bool = False):
    """Draw one of the sequences."""
    there = [each for each in machine.model.living if each.swapped is swapped]
    return there[draw.draw(st.integers(0, len(there) - 1), label="sequence")]


class Machine(RuleBasedStateMachine):
    """Every operation, in any order, on any pool; everything is looked at after each."""

    model: BlockModel

    @initialize(
        blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        caching=st.booleans(),
        watermark=st.integers(0, 1),
        host=st.integers(0, 6),
    )
    def make(self, blocks, block_size, caching, watermark, host):
        self.model = BlockModel(
            BlockAllocator(
                blocks,
                block_size,
                prefix_caching=caching,
                watermark=min(watermark, blocks - 1),
                num_host_blocks=host,
            )
        )

    def has(self, swapped: bool) -> bool:
        return any(each.swapped is swapped for each in self.model.living)

    @rule(prompts=st.lists(TOKENS, min_size=1, max_size=3))
    def add(self, prompts):
        self.model.add(*prompts)

    @rule(prompt=TOKENS, more=TOKENS)
    def add_sharing_what_is_not_written(self, prompt, more):
        self.model.add(prompt, prompt + more)

    @rule(prompt=TOKENS, written=st.integers(0, 12))
    def add_and_stop(self, prompt, written):
        self.model.add(prompt, written=written)

    @precondition(lambda self: self.model.living)
    @rule(data=st.data(), more=TOKENS)
    def add_what_is_known(self, data, more):
        tokens = data.draw(st.sampled_from([each.tokens for each in self.model.living]))
        self.model.add(tokens + more)

    @precondition(lambda self: self.has(swapped=False))
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data, tokens):
        self.model.append(among(self, data), tokens)

    @precondition(lambda self: self.has(swapped=False))
    @rule(data=st.data())
    def fork(self, data):
        self.model.fork(among(self, data))

    @precondition(lambda self: self.has(swapped=False))
    @rule(data=st.data())
    def truncate(self, data):
        paged = among(self, data)
        shortest = min(paged.evicted + 1, len(paged.tokens)) if paged.evicted else 0
        lengths = st.just(0) | st.integers(shortest, len(paged.tokens))
        self.model.truncate(paged, data.draw(lengths, label="length"))

    @precondition(lambda self: self.has(swapped=False))
    @rule(data=st.data())
    def evict_before(self, data):
        paged = among(self, data)
        self.model.evict_before(paged, data.draw(st.integers(0, len(paged.tokens))))

    @precondition(lambda self: self.has(swapped=False))
    @rule(data=st.data())
    def swap_out(self, data):
        self.model.swap_out(among(self, data))

    @precondition(lambda self: self.has(swapped=True))
    @rule(data=st.data())
    def swap_in(self, data):
        self.model.swap_in(among(self, data, swapped=True))

    @precondition(lambda self: self.model.living)
    @rule(data=st.data())
    def free(self, data):
        self.model.free(among(self, data, swapped=not self.has(swapped=False)))

    @rule()
    def allocate(self):
        self.model.allocate()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def give_back(self, data):
        self.model.give_back(data.draw(st.integers(0, len(self.model.held) - 1)))

    @invariant()
    def sound(self):
        self.model.require_sound()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.require_empty()


def test_every_operation_keeps_the_model():
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))


@pytest.mark.parametrize(("operations", "seed"), [(6_000, 1), *deep((6_000, 2), (500_000, 3))])
def test_long_runs_keep_the_model(operations, seed):
    counts = search(operations, seed)
    assert counts.operations == operations
    assert counts.refused > operations / 100
    assert counts.found_tokens > operations / 10


# Bugs: each is what an allocator was once shipped with.


def writes_into_shared_blocks(monkeypatch):
    append = Sequence.append

    def wrong(self, tokens):
        append(self, tokens)
        return ()

    monkeypatch.setattr(Sequence, "append", wrong)


def finds_what_was_cut(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "forget", lambda self, block: None)


def finds_blocks_after_any_prefix(monkeypatch):
    def match(self, tokens):
        found = []
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            wanted = tuple(tokens[start : start + self.block_size])
            nodes = [node for node in self.walk() if node.tokens == wanted and node.block >= 0]
            if not nodes:
                break
            found.append(nodes[-1])
        return found

    monkeypatch.setattr(PrefixIndex, "match", match)


def frees_blocks_under_their_users(monkeypatch):
    def release(self, blocks):
        for block in blocks:
            if block >= 0:
                self.refs[block] = 0
                self.free.append(block)

    monkeypatch.setattr(Pool, "release", release)


def keeps_the_tail_that_was_cut(monkeypatch):
    truncate = Prefix.truncate

    def wrong(self, length, ids):
        place = truncate(self, length, ids)
        place.tail = (self.tail + place.tail)[: len(place.tail)]
        return place

    monkeypatch.setattr(Prefix, "truncate", wrong)


BUGS = (
    writes_into_shared_blocks,
    finds_what_was_cut,
    finds_blocks_after_any_prefix,
    frees_blocks_under_their_users,
    keeps_the_tail_that_was_cut,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_mutants_are_found(bug, monkeypatch):
    """By the model itself: `check` looks at the inside, and might believe what it sees."""
    bug(monkeypatch)
    monkeypatch.setattr(BlockAllocator, "check", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        search(60_000, seed=1, look=10)


class FaultError(Exception):
    """Something that happened in the middle of a call."""


POOLS = ((4, 1), (8, 3), (30, 4), (60, 2)) if Search.deep else ((4, 1), (8, 3), (30, 4))
STEPS = 1000 if Search.deep else 400

PARTS = [
    *((Pool, name) for name in ("take", "make_room", "_evict", "share", "release")),
    *((PrefixIndex, name) for name in ("match", "extend", "forget", "move", "prune")),
    *((Prefix, name) for name in ("hold", "append", "truncate", "restore", "drop")),
    (Sequence, "_num_present"),
]


def long_run(model: BlockModel, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        random_step(model, rng, 12, [[0, 1, 1, 0], [1, 1]])
    model.require_sound()
    model.require_empty()


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (Pool, "take", "before"),
        (Pool, "_evict", "before"),
        *((owner, name, "after") for owner, name in PARTS),
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_fault_in_any_part_of_a_call_changes_nothing(owner, name, when, monkeypatch):
    """A part that fails after it is done leaves more to undo than one that fails at once."""
    whole = getattr(owner, name)
    rng = random.Random(5)
    faults = 0

    def failing(self, *arguments, **options):
        nonlocal faults
        fails = rng.random() < 0.3
        result = None if fails and when == "before" else whole(self, *arguments, **options)
        if fails:
            faults += 1
            raise FaultError
        return result

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(Pools, "recover", undisturbed(monkeypatch, owner, name, whole, failing))
    for blocks, block_size in POOLS:
        allocator = BlockAllocator(blocks, block_size, prefix_caching=True, num_host_blocks=9)
        long_run(BlockModel(allocator, fault=FaultError), rng, STEPS)
    assert faults > 2


def undisturbed(monkeypatch, owner, name, whole, failing):
    """A recovery in which there are no faults."""
    recover = Pools.recover

    def wrapped(self):
        monkeypatch.setattr(owner, name, whole)
        recover(self)
        monkeypatch.setattr(owner, name, failing)

    return wrapped


class ShortOfMemory(BlockModel):
    """Each call is made with an allocation of memory in it that fails, if it has so many."""

    def __init__(self, allocator: BlockAllocator, rng: random.Random) -> None:
        # CPython 3.11 forgets the error in places, and says SystemError.
        super().__init__(allocator, fault=(MemoryError, SystemError))
        self.rng = rng
        self.faults = 0
        self.testcapi: Any = pytest.importorskip("_testcapi")

    def make(self, call):
        which = self.rng.randrange(1, 60)
        self.testcapi.set_nomemory(which, which + 1)
        try:
            return call()
        except self.fault:
            self.faults += 1
            raise
        finally:
            self.testcapi.remove_mem_hooks()


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="CPython 3.12 itself dies of memory that is refused it"
)
@pytest.mark.parametrize("caching", [True, False])
def test_a_call_without_memory_changes_nothing(caching):
    rng = random.Random(7)
    for blocks, block_size in POOLS:
        allocator = BlockAllocator(blocks, block_size, prefix_caching=caching, num_host_blocks=9)
        model = ShortOfMemory(allocator, rng)
        long_run(model, rng, 400)
        assert model.faults > 100


CALLS = {
    "add": lambda allocator, *_: allocator.add([1, 2, 5, 6, 7]),
    "append": lambda allocator, shared, *_: shared.append([4, 5, 6]),
    "fork": lambda allocator, shared, *_: shared.fork(),
    "truncate": lambda allocator, shared, *_: shared.truncate(1),
    "free": lambda allocator, shared, *_: shared.free(),
    "evict_before": lambda allocator, shared, *_: shared.evict_before(2),
    "swap_out": lambda allocator, shared, *_: shared.swap_out(),
    "swap_in": lambda allocator, shared, swapped: swapped.swap_in(),
    "free of a swapped one": lambda allocator, shared, swapped: swapped.free(),
    "allocate": lambda allocator, *_: [allocator.allocate() for _ in range(5)],
    "free of a block": lambda allocator, *_: allocator.free(allocator.allocate()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted_at_any_line_leaves_all_sound(call, monkeypatch):
    """So Ctrl-C does, wherever it comes. As a call returns it may lose the sequence that was made,
    which is kept here."""
    for module in (sequence, pool):
        monkeypatch.setattr(module, "ref", lambda kept: lambda: kept)
    line = lines = 0
    while lines == line:
        line += 1
        allocator = BlockAllocator(8, 2, prefix_caching=True, num_host_blocks=8)
        shared = allocator.add([1, 2, 3])
        other = shared.fork()
        allocator.add([5, 6, 7, 8]).free()
        swapped = allocator.add([9, 9])
        swapped.swap_out()
        lines = interrupted(partial(CALLS[call], allocator, shared, swapped), line)
        locked = allocator._lock.locked()  # pytest would show the allocator, which waits for it
        assert not locked
        allocator.check()
        assert len(other) == 3
    assert lines > 5


def interrupted(call, line: int) -> int:
    """Interrupt a call at the line of this number, and return how many there were."""
    lines, latest = 0, None
    files = inspect.getfile(kv_cache).removesuffix("__init__.py")

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines, latest
        if not frame.f_code.co_filename.startswith(files):
            return None
        # From CPython 3.12 on each round of a comprehension is told of as its line anew, and what
        # is raised there by a trace function passes over the `with` around it.
        previous, latest = latest, (frame.f_code, frame.f_lineno)
        again = sys.version_info >= (3, 12) and latest == previous
        if event == "line" and not again:
            lines += 1
            if lines == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        call()
    sys.settrace(before)
    return lines


def test_a_sequence_that_is_half_freed_is_reported():
    allocator = BlockAllocator(8, 2)
    half_freed = allocator.add([1, 2, 3])
    half_freed._state = FREED
    with pytest.raises(RuntimeError, match="a freed one lives on"):
        allocator.check()
