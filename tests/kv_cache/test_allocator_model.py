"""The allocator against a model that keeps every token: rules, long runs, planted bugs."""

from __future__ import annotations

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
from support.block_model import BlockModel
from support.long_search import search
from support.search import deep

from cupyattn import BlockAllocator, Copy, Sequence
from cupyattn.kv_cache.pool import Pool
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


@pytest.mark.parametrize(("operations", "seed"), [(6_000, 1), (6_000, 2), *deep((500_000, 3))])
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


def copies_the_wrong_way(monkeypatch):
    append = Sequence.append
    monkeypatch.setattr(
        Sequence, "append", lambda self, tokens: tuple(Copy(b, a) for a, b in append(self, tokens))
    )


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


def finds_the_last_token_too(monkeypatch):
    match = PrefixIndex.match
    monkeypatch.setattr(PrefixIndex, "match", lambda self, tokens: match(self, [*tokens, -1]))


def frees_blocks_under_their_users(monkeypatch):
    def release(self, blocks):
        for block in blocks:
            if block >= 0:
                self.refs[block] = 0
                self.free.append(block)

    monkeypatch.setattr(Pool, "release", release)


def leaks_blocks_that_are_shared(monkeypatch):
    share = Pool.share
    monkeypatch.setattr(Pool, "share", lambda self, blocks: share(self, [*blocks, *blocks[:1]]))


def takes_some_blocks_before_it_refuses(monkeypatch):
    take = Pool.take

    def wrong(self, count):
        if count > self.available and self.free:
            self.refs[self.free.pop()] = 1
        return take(self, count)

    monkeypatch.setattr(Pool, "take", wrong)


def fills_blocks_with_other_tokens(monkeypatch):
    append = Prefix.append
    monkeypatch.setattr(
        Prefix, "append", lambda self, tokens, ids: append(self, sorted(tokens), ids)
    )


def keeps_the_tail_that_was_cut(monkeypatch):
    truncate = Prefix.truncate

    def wrong(self, length, ids):
        place = truncate(self, length, ids)
        place.tail = (self.tail + place.tail)[: len(place.tail)]
        return place

    monkeypatch.setattr(Prefix, "truncate", wrong)


def evicts_what_is_used(monkeypatch):
    share = Pool.share

    def wrong(self, blocks):
        cached = dict(self.cached)
        share(self, blocks)
        self.cached.update(cached)

    monkeypatch.setattr(Pool, "share", wrong)


BUGS = (
    writes_into_shared_blocks,
    copies_the_wrong_way,
    finds_what_was_cut,
    finds_blocks_after_any_prefix,
    finds_the_last_token_too,
    frees_blocks_under_their_users,
    leaks_blocks_that_are_shared,
    takes_some_blocks_before_it_refuses,
    fills_blocks_with_other_tokens,
    keeps_the_tail_that_was_cut,
    evicts_what_is_used,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("checked", [True, False], ids=["", "without check()"])
def test_planted_bugs_are_found(bug, checked, monkeypatch):
    """By the model itself too: `check` looks at the inside, and might believe what it sees."""
    bug(monkeypatch)
    if not checked:
        monkeypatch.setattr(BlockAllocator, "check", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        search(60_000, seed=1, look=10)
