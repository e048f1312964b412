"""A pool of block ids: how often each is referenced, which are free, and which wait as cached.

A pool on the host may be as large as the memory that the system reports.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

from cupyattn.kv_cache.prefix_index import Node, PrefixIndex
from cupyattn.runtime.errors import error, size_text

if sys.platform == "win32":

    def _limit() -> int | None:
        return None

else:
    import resource

    def _limit() -> int | None:
        """Return the limit of the process (``ulimit -v``), if there is one."""
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if soft == resource.RLIM_INFINITY else soft


def host_memory() -> int | None:
    """Return the most bytes of memory that this process can have; None if unknown.

    What other processes use is not counted.
    """
    limits = [_limit()]
    with suppress(AttributeError, OSError, ValueError):  # not every system reports it
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((each for each in limits if each is not None and each > 0), default=None)


def require_host_memory(what: str, size: int, fix: str) -> None:
    """Raise MemoryError if an allocation would take more bytes than the host has."""
    memory = host_memory()
    if memory is not None and size > memory:
        raise error(
            MemoryError,
            f"got {what}, which take {size_text(size)} of the host's memory",
            f"it has {size_text(memory)}",
            fix,
        )


HELD = -1
"""In place of a reference count: the block belongs to the caller of `BlockAllocator.allocate`."""


BYTES_OF_A_BLOCK = 44
"""Memory of the host: a count and a place in a list, of 8 bytes each, and the id's own 28."""

EVICTED = -1
"""In place of a block's id in a sequence: a window has given the block back."""

HERE, SWAPPED, FREED = "in the device's pool", "swapped out", "freed"
"""The states of a sequence."""


class OutOfBlocksError(RuntimeError):
    """The pool has too few blocks for a call, which has changed nothing.

    Free or swap out a sequence, then call again. `Scheduler` does so by itself.
    """


class Copy(NamedTuple):
    """A block to copy, whole, before anything is written.

    Attributes
    ----------
    src, dst : int
        The block to read and the block to write: in the device's pool, except that ``swap_out``
        writes and ``swap_in`` reads, which are blocks of host memory.
    """

    src: int
    dst: int


def moved(ids: array[int], taken: list[int]) -> tuple[array[int], tuple[Copy, ...]]:
    """Put blocks in the places of those that are there; return these ids and the copies."""
    fresh = iter(taken)
    placed = array("i", [EVICTED if block == EVICTED else next(fresh) for block in ids])
    pairs = zip(ids, placed, strict=True)
    return placed, tuple(Copy(src, dst) for src, dst in pairs if src != EVICTED)


class Pool:
    """Block ids, each in one of three states: used (referenced), free, or cached.

    A cached block has no reference, but a full block's tokens that the index still finds. It is
    taken when no free block is left, the one that was released longest ago first.
    """

    __slots__ = ("cached", "free", "index", "name", "refs", "taken")

    def __init__(self, name: str, num_blocks: int, index: PrefixIndex | None = None) -> None:
        self.name = name
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.index = index
        self.taken: Sequence[int] = ()  # in the call that is under way

    @property
    def available(self) -> int:
        """The number of blocks that `take` can return."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """Give blocks, each referenced once; all of them or none."""
        free = self.free
        if len(free) < count:
            self.make_room(count)
        first = len(free) - count
        self.taken = taken = free[first:]
        taken.reverse()
        del free[first:]
        for block in taken:
            self.refs[block] = 1
        return taken

    def make_room(self, count: int) -> None:
        """Evict cached blocks until so many are free, or refuse that before any is evicted."""
        self.require(count)
        while len(self.free) < count:
            self._evict()

    def require(self, count: int, *, spare: int = 0, revived: int = 0) -> None:
        """Raise unless there are enough blocks in addition to `spare` and the revived ones."""
        available = self.available - revived
        if count + spare > available:
            raise error(
                OutOfBlocksError,
                f"{count} blocks are needed{f' with a watermark of {spare}' if spare else ''}, "
                f"and of {len(self.refs)} {self.name} blocks {available} are free or cached"
                f"{f' besides {revived} of the prefix' if revived else ''}",
                "a call takes blocks that no sequence uses",
                "free or swap out a sequence, or make the pool larger",
            )

    def _evict(self) -> None:
        assert self.index is not None  # nothing is cached without it
        block = next(iter(self.cached))
        self.index.forget(block)
        del self.cached[block]
        self.free.append(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more reference of each block; cached ones are used again."""
        refs, cached = self.refs, self.cached
        for block in blocks:
            if block >= 0:
                if not refs[block]:
                    del cached[block]
                refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Count one reference less of each block; pass the last block of a sequence first.

        So of two cached blocks the later is evicted before the one that it is found through.
        """
        refs, free, index = self.refs, self.free, self.index
        for block in blocks:
            if block >= 0:
                refs[block] -= 1
                if not refs[block]:
                    if index is not None and index.nodes[block] is not None:
                        self.cached[block] = None
                    else:
                        free.append(block)

    def recount(self, owners: Counter[int]) -> None:
        """Recount references: blocks without any are cached, if the index finds them, or free.

        The lists stay the same objects, which the allocator has too.
        """
        self.refs[:] = [
            HELD if count == HELD else owners[block] for block, count in enumerate(self.refs)
        ]
        nodes: Sequence[Node | None] = () if self.index is None else self.index.nodes
        unused = [block for block, count in enumerate(self.refs) if not count]
        found = {block for block in unused if nodes and nodes[block] is not None}
        free = set(unused) - found
        self.cached = OrderedDict.fromkeys([*filter(found.__contains__, self.cached), *found])
        self.free[:] = dict.fromkeys([*filter(free.__contains__, self.free), *free])


class Pools:
    """The shared state of an allocator and its sequences: both pools, the lock, living sequences.

    As a context, within the lock, it is for a call that changes something: whatever cuts the call
    short, a MemoryError or Ctrl-C, all that is counted follows again from what sequences own. So
    a call gives its sequence blocks, or takes them, by its last assignment.
    """

    __slots__ = ("block_size", "device", "host", "lock", "sequences")

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool, num_host_blocks: int
    ) -> None:
        self.block_size = block_size
        blocks = f"num_blocks = {num_blocks}"
        if num_host_blocks:
            blocks += f" and num_host_blocks = {num_host_blocks}"
        size = BYTES_OF_A_BLOCK * (num_blocks + num_host_blocks)
        require_host_memory(blocks, size, "pass fewer blocks, or larger ones")
        index = PrefixIndex(num_blocks, block_size) if prefix_caching else None
        self.device = Pool("device", num_blocks, index)
        self.host = Pool("host", num_host_blocks)
        self.lock = Lock()
        # Weak, by id: `check` finds the blocks of a sequence that was dropped before it was freed.
        self.sequences: dict[int, ref[Any]] = {}

    def living(self) -> list[Any]:
        """Return the sequences that are not freed."""
        return [sequence for each in self.sequences.values() if (sequence := each()) is not None]

    def __enter__(self) -> None:
        self.device.taken = ()

    def __exit__(self, kind: type[BaseException] | None, fault: object, trace: object) -> None:
        # What refuses a call does so before it changes anything.
        if kind is not None and not issubclass(kind, OutOfBlocksError | ValueError):
            self.recover()

    def recover(self) -> None:
        """Recount the blocks of sequences, and let the index find only written blocks."""
        living = [sequence for sequence in self.living() if sequence._state is not FREED]
        self.sequences = {id(sequence): ref(sequence) for sequence in living}
        owners = {
            state: Counter(
                block for sequence in living if sequence._state is state for block in sequence._ids
            )
            for state in (HERE, SWAPPED)
        }
        if (index := self.device.index) is not None:
            # Blocks that this call took are not written, and must not be found.
            found = {
                block: node
                for block, node in enumerate(index.nodes)
                if node is not None and not owners[HERE][block] and block not in self.device.taken
            }
            for sequence in living:
                if sequence._state is HERE:
                    for node, block in sequence._prefix.path(sequence._ids):
                        if block >= 0 and index.nodes[block] is node:
                            found[block] = node
            index.rebuild([sequence._prefix.node for sequence in living], found)
        self.device.recount(owners[HERE])
        self.host.recount(owners[SWAPPED])
