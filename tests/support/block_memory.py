"""A cache without arrays, and a model whose tokens depend on all that it reads: for schedulers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from support.block_model import NEVER_WRITTEN, content

from cupyattn import BlockAllocator, Copy, Scheduler
from cupyattn.kv_cache import Request, Work

VOCABULARY = 5


class FaultError(Exception):
    """What a model or a copy raises at times."""


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
        """What the last token of a sequence sees; what the first new one does has to be there."""
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
    """What a request gives that has a memory of its own."""
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
