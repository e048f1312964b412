"""A pool of block ids: how often each is referenced, which are free, and which wait as cached."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

from cupyattn.errors import error
from cupyattn.kv_cache.prefix_index import PrefixIndex

HELD = -1
"""In place of a reference count: the block belongs to who called `BlockAllocator.allocate`."""


EVICTED = -1
"""In place of a block's id in a sequence: a window has given the block back."""


class OutOfBlocksError(RuntimeError):
    """The pool has too few blocks for a call, which has changed nothing.

    Free or swap out a sequence, then call again. `Scheduler` does so by itself.
    """


class Copy(NamedTuple):
    """A block to copy, whole, before anything is written.

    Attributes
    ----------
    src, dst : int
        The block to read and the block to write: in the device's pool, but for what ``swap_out``
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

    __slots__ = ("cached", "free", "index", "name", "refs")

    def __init__(self, name: str, num_blocks: int, index: PrefixIndex | None = None) -> None:
        self.name = name
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.index = index

    @property
    def available(self) -> int:
        """How many blocks `take` can give."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """Give blocks, each referenced once; all of them or none.

        This alone can fail in a call that needs blocks, so calls take before they change anything.
        """
        free = self.free
        if len(free) < count:
            self.require(count)
            while len(free) < count:
                self._evict()
        first = len(free) - count
        taken = free[first:]
        taken.reverse()
        del free[first:]
        for block in taken:
            self.refs[block] = 1
        return taken

    def require(self, count: int, *, spare: int = 0, revived: int = 0) -> None:
        """Refuse to give more blocks than there are beside `spare` and the cached ones revived."""
        available = self.available - revived
        if count + spare > available:
            raise error(
                OutOfBlocksError,
                f"{count} blocks are needed{f' beside a watermark of {spare}' if spare else ''}, "
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
        """Count one reference less of each block; give the last of a sequence first.

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


class Pools:
    """What an allocator and its sequences share: both pools, the lock, the living sequences."""

    __slots__ = ("block_size", "device", "host", "lock", "sequences")

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool, num_host_blocks: int
    ) -> None:
        self.block_size = block_size
        index = PrefixIndex(num_blocks, block_size) if prefix_caching else None
        self.device = Pool("device", num_blocks, index)
        self.host = Pool("host", num_host_blocks)
        self.lock = Lock()
        # Weak, by id: `check` finds the blocks of a sequence that was dropped before it was freed.
        self.sequences: dict[int, ref[Any]] = {}

    def living(self) -> list[Any]:
        """Return the sequences that are not freed."""
        return [sequence for each in self.sequences.values() if (sequence := each()) is not None]
