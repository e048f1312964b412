"""A model of paged sequences that keeps every token, and the memory of their blocks.

A slot holds a number made of its token and of all before it, as keys and values are: a block shared
after another prefix shows, as one whose content is stale, or was never written, or was changed by
somebody else. Nothing here looks inside the allocator; `BlockAllocator.check` does that.

For schedulers: a cache without arrays, and a model whose tokens depend on all that it reads.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cupyattn
from cupyattn import BlockAllocator, Copy, OutOfBlocksError, Scheduler
from cupyattn.kv_cache import Request, Work

NEVER_WRITTEN = -1


def content(before: int, token: int) -> int:
    """Return the content of a slot, which depends on all tokens up to its own."""
    return (before * 1000003 + token + 7) % (2**61 - 1)


class Paged:
    """A sequence, and the contents that its blocks must give."""

    def __init__(self, sequence: cupyattn.Sequence) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.contents: list[int] = []
        self.evicted = 0  # tokens in blocks that are gone
        self.swapped = False

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.contents.append(content(self.contents[-1] if self.contents else 0, token))

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.contents[length:]


class BlockModel:
    """An allocator, its sequences, and two memories of blocks of slots.

    A call that ends by an exception of `fault` has to have changed nothing, and is made again.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        fault: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> None:
        self.allocator = allocator
        self.fault = fault
        self.size = allocator.block_size
        self.device = [[NEVER_WRITTEN] * self.size for _ in range(allocator.num_blocks)]
        self.host = [[NEVER_WRITTEN] * self.size for _ in range(allocator.num_host_blocks)]
        self.living: list[Paged] = []
        self.held: list[int] = []
        self.refused = self.relieved = 0
        self.found_tokens = 0

    # Operations: each returns whether the allocator had the blocks.

    def add(self, *prompts: Sequence[int], written: int | None = None) -> bool:
        """Add prompts for one step, then write them in their order, or only the first so far."""
        added = [paged for prompt in prompts if (paged := self._added(prompt)) is not None]
        for paged in added:
            self._write(paged, paged.sequence.num_cached_tokens)
        if written is not None and len(added) == 1:
            (paged,) = added
            cached = paged.sequence.num_cached_tokens
            kept = min(len(paged.tokens), cached + written)
            for position in range(kept, len(paged.tokens)):
                block = paged.sequence.block_ids[position // self.size]
                self.device[block][position % self.size] = NEVER_WRITTEN
            self.truncate(paged, kept)
        return len(added) == len(prompts)

    def _added(self, prompt: Sequence[int]) -> Paged | None:
        allocator, size = self.allocator, self.size
        available = allocator.num_free + allocator.num_cached
        promised = self._attempt(lambda: allocator.find(prompt), False)
        scarce = -(-len(prompt) // size) + allocator.watermark > available
        sequence = self._attempt(lambda: allocator.add(prompt), scarce)
        if sequence is None:
            return None
        cached = sequence.num_cached_tokens
        assert cached == promised
        assert cached % size == 0
        assert cached < len(prompt) or not len(prompt)
        assert len(sequence) == len(prompt)
        left = allocator.num_free + allocator.num_cached
        assert left >= allocator.watermark or available == left
        self.found_tokens += cached
        paged = Paged(sequence)
        paged.extend(prompt)
        for block in sequence.block_ids[cached // size :]:
            self.device[block] = [NEVER_WRITTEN] * size
        self.living.append(paged)
        return paged

    def append(self, paged: Paged, tokens: Sequence[int]) -> bool:
        sequence, size = paged.sequence, self.size
        before = sequence.block_ids
        start = len(paged.tokens)
        partly = start % size and len(tokens) and self.allocator.ref_count(before[-1]) > 1
        needed = -(-(start + len(tokens)) // size) - len(before) + bool(partly)
        available = self.allocator.num_free + self.allocator.num_cached
        copies = self._attempt(lambda: sequence.append(tokens), needed > available)
        assert (copies is None) == (needed > available)
        if copies is None:
            return False
        assert len(copies) == bool(partly)
        for block in sequence.block_ids[len(before) :]:
            self.device[block] = [NEVER_WRITTEN] * size
        self._copy(copies, self.device, self.device)
        paged.extend(tokens)
        self._write(paged, start)
        return True

    def fork(self, paged: Paged) -> bool:
        other = Paged(self._attempt(paged.sequence.fork, False))
        other.tokens, other.contents = paged.tokens[:], paged.contents[:]
        other.evicted = paged.evicted
        assert other.sequence.block_ids == paged.sequence.block_ids
        assert other.sequence.num_cached_tokens == paged.sequence.num_cached_tokens
        self.living.append(other)
        return True

    def truncate(self, paged: Paged, length: int) -> bool:
        self._attempt(lambda: paged.sequence.truncate(length), False)
        paged.cut(length)
        paged.evicted = min(paged.evicted, length)
        return True

    def evict_before(self, paged: Paged, position: int) -> bool:
        given_back = self._attempt(lambda: paged.sequence.evict_before(position), False)
        evicted = max(paged.evicted, position // self.size * self.size)
        assert given_back == (evicted - paged.evicted) // self.size
        paged.evicted = evicted
        return True

    def free(self, paged: Paged) -> bool:
        self._attempt(paged.sequence.free, False)
        self.living.remove(paged)
        return True

    def swap_out(self, paged: Paged) -> bool:
        needed = len([block for block in paged.sequence.block_ids if block >= 0])
        available = self.allocator.num_free_host
        copies = self._attempt(paged.sequence.swap_out, needed > available)
        assert (copies is None) == (needed > available)
        if copies is None:
            return False
        assert len(copies) == needed
        self._copy(copies, self.device, self.host)
        paged.swapped = True
        return True

    def swap_in(self, paged: Paged) -> bool:
        needed = -(-len(paged.tokens) // self.size) - paged.evicted // self.size
        available = self.allocator.num_free + self.allocator.num_cached
        copies = self._attempt(paged.sequence.swap_in, needed > available)
        assert (copies is None) == (needed > available)
        if copies is None:
            return False
        assert len(copies) == needed
        self._copy(copies, self.host, self.device)
        paged.swapped = False
        return True

    def allocate(self) -> bool:
        scarce = self.allocator.num_used == self.allocator.num_blocks
        block = self._attempt(self.allocator.allocate, scarce)
        assert (block is None) == scarce
        if block is None:
            return False
        self.device[block] = [NEVER_WRITTEN] * self.size
        self.held.append(block)
        return True

    def give_back(self, number: int) -> bool:
        block = self.held.pop(number)
        self._attempt(lambda: self.allocator.free(block), False)
        return True

    # Memory.

    def _write(self, paged: Paged, start: int) -> None:
        ids = paged.sequence.block_ids
        for position in range(start, len(paged.contents)):
            block = ids[position // self.size]
            slots, slot = self.device[block], position % self.size
            # Others may share it before it is written, not after.
            assert self.allocator.ref_count(block) == 1 or slots[slot] == NEVER_WRITTEN
            slots[slot] = paged.contents[position]

    @staticmethod
    def _copy(copies: Sequence[Copy], source: list[list[int]], target: list[list[int]]) -> None:
        for copy in copies:
            target[copy.dst] = source[copy.src][:]

    # What must hold.

    def require_content(self, paged: Paged) -> None:
        """Require that each sequence reads what it wrote through its block ids."""
        if paged.swapped:
            return
        sequence, size = paged.sequence, self.size
        ids = sequence.block_ids
        assert len(sequence) == len(paged.tokens)
        assert len(ids) == -(-len(paged.tokens) // size)
        gone = paged.evicted // size
        assert all(block < 0 for block in ids[:gone])
        read = [slot for block in ids[gone:] for slot in self.device[block]]
        assert read[: len(paged.tokens) - paged.evicted] == paged.contents[paged.evicted :]

    def require_sound(self) -> None:
        """Counts, owners and contents of everything."""
        allocator = self.allocator
        assert allocator.num_free + allocator.num_used + allocator.num_cached == len(self.device)
        owners = Counter(self.held)
        for paged in self.living:
            if not paged.swapped:
                owners.update(block for block in paged.sequence.block_ids if block >= 0)
            self.require_content(paged)
        assert allocator.num_used == len(owners)
        for block in range(len(self.device)):
            assert allocator.ref_count(block) == owners[block]
        swapped = [paged for paged in self.living if paged.swapped]
        kept = sum(
            -(-len(each.tokens) // self.size) - each.evicted // self.size for each in swapped
        )
        assert allocator.num_free_host == len(self.host) - kept
        assert allocator.num_unused_slots == self._unused_slots(owners)
        allocator.check()

    def _unused_slots(self, owners: Counter[int]) -> int:
        filled = dict.fromkeys(self.held, self.size)
        for paged in self.living:
            for number, block in enumerate(() if paged.swapped else paged.sequence.block_ids):
                within = min(self.size, len(paged.tokens) - number * self.size)
                filled[block] = max(within, filled.get(block, 0))
        filled.pop(-1, None)
        assert filled.keys() == owners.keys()
        return sum(self.size - slots for slots in filled.values())

    def require_empty(self) -> None:
        """After everything is given back nothing is used: no block has leaked."""
        for paged in [*self.living]:
            self.free(paged)
        while self.held:
            self.give_back(-1)
        self.require_sound()
        assert self.allocator.num_used == 0
        assert self.allocator.num_free_host == len(self.host)

    def state(self) -> Any:
        """All that can be seen of the allocator."""
        allocator = self.allocator
        return (
            (allocator.num_free + allocator.num_cached, allocator.num_free_host),
            None if self.fault else allocator.num_cached,  # a fault may come after an eviction
            [allocator.ref_count(block) for block in range(allocator.num_blocks)],
            [
                (len(each.sequence), None if each.swapped else each.sequence.block_ids)
                for each in self.living
            ],
        )

    def make(self, call: Callable[[], Any]) -> Any:
        """Make a call: for those who want it to fail."""
        return call()

    def _attempt(self, call: Callable[[], Any], scarce: bool) -> Any:
        """Call, or find that a refused call has changed nothing; after a fault call again."""
        before = self.state() if scarce or self.fault else None
        while True:
            try:
                return self.make(call)
            except OutOfBlocksError:
                assert scarce
                assert self.state() == before
                self.refused += 1
                return None
            except self.fault:
                assert self.state() == before
                self.allocator.check()


def random_step(
    model: BlockModel, rng: random.Random, longest: int, system: list[list[int]]
) -> None:
    """Do one operation, drawn by a generator; `longest` bounds prompts, `system` begins them."""

    def some_tokens(most: int) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(most + 1))]

    def prompt() -> list[int]:
        if model.living and rng.random() < 0.2:  # all or part of a generation that is known
            return rng.choice(model.living).tokens[: rng.randrange(longest + 1)]
        return rng.choice(system) + some_tokens(longest // 2)

    kind = rng.random()
    if model.refused > model.relieved:  # a pool that stays full refuses nearly everything
        model.relieved = model.refused
        if model.living and kind < 0.7:
            model.free(rng.choice(model.living))
            return
    if kind < 0.18 or not model.living:
        if kind < 0.02:
            same = prompt()
            model.add(same, same + some_tokens(3))
        else:
            model.add(prompt(), written=rng.randrange(longest) if kind < 0.03 else None)
        return
    paged = rng.choice(model.living)
    if paged.swapped:
        if kind < 0.8:
            model.swap_in(paged)
        elif kind < 0.9:
            model.free(paged)
    elif kind < 0.6:
        model.append(paged, some_tokens(rng.choice((1, 1, 3, 2 * model.size))))
    elif kind < 0.68:
        model.fork(paged)
    elif kind < 0.76:
        shortest = min(paged.evicted + 1, len(paged.tokens)) if paged.evicted else 0
        length = rng.randint(max(shortest, len(paged.tokens) - 2 * model.size), len(paged.tokens))
        model.truncate(paged, length if rng.random() < 0.9 else 0)
    elif kind < 0.79:
        model.evict_before(paged, rng.randint(0, len(paged.tokens)))
    elif kind < 0.83:
        model.swap_out(paged)
    elif kind < 0.86:
        model.allocate()
    elif kind < 0.89:
        if model.held:
            model.give_back(rng.randrange(len(model.held)))
    else:
        model.free(paged)
    if paged in model.living:
        model.require_content(paged)


VOCABULARY = 5


class FaultError(Exception):
    """A fault that the tests inject into a model or a copy."""


class BlockMemory:
    """Blocks of slots, each with a number made of all tokens up to its own.

    With a generator of faults, one in ten calls fails: before, within or after its work. With a
    window a token sees no more than `left` tokens before its own.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        faults: random.Random | None = None,
        left: int | None = None,
    ) -> None:
        self.allocator = allocator
        self.left = left
        size = allocator.block_size
        self.device = [[NEVER_WRITTEN] * size for _ in range(allocator.num_blocks)]
        self.host = [[NEVER_WRITTEN] * size for _ in range(allocator.num_host_blocks)]
        self.faults = faults
        self.copied = {"copy": 0, "copy_to_host": 0, "copy_from_host": 0}
        self.computed = 0
        self.largest_batch = self.most_tokens = 0

    def copy(self, copies: Sequence[Copy]) -> None:
        self._run("copy", copies, self.device, self.device)

    def copy_to_host(self, copies: Sequence[Copy]) -> None:
        self._run("copy_to_host", copies, self.device, self.host)

    def copy_from_host(self, copies: Sequence[Copy]) -> None:
        self._run("copy_from_host", copies, self.host, self.device)

    def _run(self, name, copies, source, target) -> None:
        assert copies
        for copy in copies:
            self._may_fail(len(copies))
            target[copy.dst] = source[copy.src][:]
        self.copied[name] += len(copies)

    def _may_fail(self, parts: int) -> None:
        if self.faults is not None and self.faults.random() < 0.1 / parts:
            raise FaultError

    def forward(self, batch: tuple[Work, ...]) -> list[list[int]]:
        """Write the whole batch, then read every sequence as a whole."""
        assert batch
        self.largest_batch = max(self.largest_batch, sum(len(work.samples) for work in batch))
        self.most_tokens = max(self.most_tokens, sum(len(work.tokens) for work in batch))
        for work in batch:
            self._may_fail(len(batch))
            self._write(work)
        drawn = [
            [next_token(work.request.tokens, self.read(work), sample) for sample in work.samples]
            for work in batch
        ]
        self._may_fail(1)
        return drawn

    def _write(self, work: Work) -> None:
        size, ids = self.allocator.block_size, work.sequence.block_ids
        start = len(work.sequence) - len(work.tokens)
        assert start >= 0
        assert work.tokens
        before = self.device[ids[(start - 1) // size]][(start - 1) % size] if start else 0
        for position, token in enumerate(work.tokens, start):
            block = ids[position // size]
            # A block that this step fills may have been found already, by who begins in it too.
            shared = self.allocator.ref_count(block) > 1
            assert not shared or position // size < len(work.sequence) // size
            before = self.device[block][position % size] = content(before, token)
        self.computed += len(work.tokens)

    def read(self, work: Work) -> list[int]:
        """Return the keys that the last token of a sequence reads, after a check of the rest."""
        length, size = len(work.sequence), self.allocator.block_size
        ids = work.sequence.block_ids
        if self.left is not None:
            first = max(0, length - len(work.tokens) - self.left)
            assert all(block >= 0 for block in ids[first // size :])
        slots = [slot for block in ids for slot in self.device[block]]
        return seen(slots[:length], self.left)


def seen(contents: Sequence[int], left: int | None) -> Sequence[int]:
    """The last of the contents, and `left` before it."""
    return contents if left is None else contents[-1 - left :]


def next_token(prompt: Sequence[int], contents: Sequence[int], sample: int) -> int:
    """A token that depends on everything: all that is read, and which sample it is for."""
    return hash((tuple(prompt), tuple(contents), sample)) % VOCABULARY


def alone(
    prompt: Sequence[int],
    max_new_tokens: int,
    sample: int,
    stop: Sequence[int] = (),
    left: int | None = None,
) -> list[int]:
    """Return the tokens that a request generates from memory that it shares with no other."""
    contents: list[int] = []
    for token in prompt:
        contents.append(content(contents[-1] if contents else 0, token))
    output: list[int] = []
    while len(output) < max_new_tokens and not (output and output[-1] in stop):
        output.append(next_token(prompt, seen(contents, left), sample))
        contents.append(content(contents[-1], output[-1]))
    return output


def finish(
    scheduler: Scheduler, memory: BlockMemory, arrivals: Iterable[Callable[[], None]] = ()
) -> tuple[list[Request], int]:
    """Step until all is done; requests of `arrivals` come in one a step. Return those finished."""
    finished: list[Request] = []
    faults = 0
    waiting = list(arrivals)
    for _ in range(5_000):
        if waiting:
            waiting.pop(0)()
        elif scheduler.idle:
            break
        try:
            finished += scheduler.step(memory.forward)
        except FaultError:
            faults += 1
        memory.allocator.check()
    assert scheduler.idle
    return finished, faults


def require_empty(allocator: BlockAllocator) -> None:
    """Nothing is left in use, here and on the host."""
    allocator.check()
    assert allocator.num_used == 0
    assert allocator.num_free_host == allocator.num_host_blocks
