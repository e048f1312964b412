"""The allocator of a paged KV cache: which blocks of a fixed pool belong to which sequence.

`require_sound` checks the invariants of pools, sequences and the prefix index.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from operator import index as as_int
from typing import TYPE_CHECKING, Literal

from cupyattn.kv_cache.arguments import as_count, as_switch, as_tokens, uncopied
from cupyattn.kv_cache.pool import FREED, HELD, HERE, SWAPPED, Pool, Pools
from cupyattn.kv_cache.prefix_index import Prefix
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.runtime import html
from cupyattn.runtime.errors import error, shown

if TYPE_CHECKING:
    from cupyattn.kv_cache.sequence import Sequence


def require_sound(pools: Pools) -> None:
    """Raise RuntimeError for the first thing that is broken."""
    sequences: list[Sequence] = pools.living()
    _require(all(sequence._state is not FREED for sequence in sequences), "a freed one lives on")
    for pool, state in ((pools.device, HERE), (pools.host, SWAPPED)):
        inside = [sequence for sequence in sequences if sequence._state is state]
        _require_states(pool)
        _require_owners(pool, inside)
    for sequence in sequences:
        _require_lengths(sequence, pools.block_size)
    if pools.device.index is not None:
        _require_index(pools, sequences)


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise error(
            RuntimeError,
            broken,
            "the allocator keeps this right whatever is called",
            "free every sequence before dropping it; otherwise this is a bug to report",
        )


def _require_states(pool: Pool) -> None:
    """Free + used + cached = pool, and no block in two of them."""
    free, cached = set(pool.free), set(pool.cached)
    _require(len(free) == len(pool.free), f"a {pool.name} block is free twice")
    _require(not free & cached, f"a {pool.name} block is both free and cached")
    unused = {block for block, count in enumerate(pool.refs) if not count}
    _require(unused == free | cached, f"unused {pool.name} blocks are neither free nor cached")
    nodes = pool.index.nodes if pool.index is not None else [None] * len(pool.refs)
    _require(
        all(nodes[block] is not None for block in cached), "a cached block is not in the index"
    )
    _require(all(nodes[block] is None for block in free), "a free block is in the index")


def _require_owners(pool: Pool, sequences: list[Sequence]) -> None:
    """Each block's count is the number of its owners."""
    owners = Counter(block for sequence in sequences for block in sequence._ids if block >= 0)
    for block, count in enumerate(pool.refs):
        expected = 0 if count == HELD else count
        _require(
            owners[block] == expected,
            f"{pool.name} block {block} has a count of {count} and {owners[block]} owners",
        )


def _require_lengths(sequence: Sequence, size: int) -> None:
    present = [block for block in sequence._ids if block >= 0]
    _require(len(set(present)) == len(present), f"{sequence} has a block twice")
    _require(len(sequence._ids) == -(-sequence._length // size), f"{sequence} has a wrong length")


def _require_index(pools: Pools, sequences: list[Sequence]) -> None:
    """Require that the index finds blocks by their tokens, and has no node that nothing needs."""
    index, size = pools.device.index, pools.block_size
    assert index is not None
    prefixes = [sequence._prefix for sequence in sequences if sequence._prefix is not None]
    _require(len(prefixes) == len(sequences), "a sequence has no place in the index")
    holders = Counter(id(prefix.node) for prefix in prefixes)
    _require(index.root.holders == holders[id(index.root)], "the root counts its holders wrongly")
    found = {}
    for node in index.walk():
        parent = node.parent
        _require(
            parent is not None and parent.children.get(node.tokens) is node,
            "a node of the index is not its parent's child",
        )
        _require(len(node.tokens) == size, "a node of the index is no whole block")
        _require(node.holders == holders[id(node)], "a node counts its holders wrongly")
        _require(
            bool(node.children or node.holders or node.block >= 0), "a node without use was kept"
        )
        if node.block >= 0:
            _require(node.block not in found, f"block {node.block} is found in two places")
            found[node.block] = node
    for block, place in enumerate(index.nodes):
        _require(found.get(block) is place, f"block {block} and its node disagree")
    for sequence, prefix in zip(sequences, prefixes, strict=True):
        depth, over = divmod(sequence._length, size)
        _require(prefix.depth == depth, f"{sequence} has a wrong place in the index")
        _require(len(prefix.tail) == over, f"{sequence} lost its last tokens")
        nodes = [prefix.node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        _require(nodes.pop() is index.root, f"{sequence} is not in the index")
        _require(len(nodes) == depth, f"{sequence} has too short or too long a prefix")
        if sequence._state is HERE:
            for block, own in zip(sequence._ids, [*reversed(nodes), None], strict=False):
                _require(
                    block < 0 or index.nodes[block] in (None, own),
                    f"block {block} is found by other tokens than it has",
                )


MOST_BLOCKS = 2**31 - 1  # ids are int32


_MOST_SHOWN = 8
"""Sequences in a notebook."""


class BlockAllocator:
    """Blocks of a fixed pool, given to sequences of tokens and shared between them.

    It knows block ids and token ids, but no arrays: `Sequence.append`, `Sequence.swap_out` and
    `Sequence.swap_in` return the blocks to copy, and the caller copies and writes. Allocating or
    freeing a block is O(1). Paged attention is that of Kwon et al. (arXiv:2309.06180).

    Parameters
    ----------
    num_blocks : int
        Blocks in the device's pool.
    block_size : int
        Tokens in a block, from 1.
    prefix_caching : bool
        Find the full blocks of a new sequence's prefix among those of all others, of freed ones
        too while their room is not needed: the least recently used are evicted first.
    watermark : int
        How many blocks `add` leaves free or cached, so that running sequences can grow. At most
        num_blocks - 1, so that a sequence can begin.
    num_host_blocks : int
        Blocks of host memory, for `Sequence.swap_out`.

    Raises
    ------
    TypeError
        If a number is no integer (a bool is none), or prefix_caching no bool.
    ValueError, MemoryError
        If a number is out of range; if the host has less memory than 44 bytes for each block.

    Notes
    -----
    **Copies.** Whoever calls `Sequence.append` runs the copies that it returns, in the order of the
    calls, before writing anything; those of swaps too. A later copy may write what an earlier one
    read.

    **Threads.** Each call of an allocator and of its sequences is atomic, under the allocator's one
    lock: counts stay right whatever threads call. The order of copies and writes is the callers'
    affair: append, copy and write in one thread, or under a lock of your own. Do not call from
    finalizers and signal handlers, which may interrupt a call of the same thread.

    **Faults.** A call that a MemoryError or Ctrl-C cuts short has changed nothing, but may have
    evicted cached blocks. Of one that ends as it returns, what it returned is lost.

    Examples
    --------
    >>> import cupyattn
    >>> allocator = cupyattn.BlockAllocator(num_blocks=8, block_size=4, prefix_caching=True)
    >>> first = allocator.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> second = allocator.add([1, 2, 3, 4, 5, 6, 7, 8, 10])
    >>> second.num_cached_tokens, allocator.num_used
    (8, 4)
    >>> first.free(), second.free()
    (None, None)
    >>> allocator.num_free, allocator.num_used, allocator.num_cached
    (6, 0, 2)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = False,
        watermark: int = 0,
        num_host_blocks: int = 0,
    ) -> None:
        self._num_blocks = as_count("num_blocks", num_blocks, 1, MOST_BLOCKS)
        self._block_size = as_count("block_size", block_size, 1)
        self._watermark = as_count("watermark", watermark, 0, self._num_blocks - 1)
        self._num_host_blocks = as_count("num_host_blocks", num_host_blocks, 0, MOST_BLOCKS)
        self._prefix_caching = as_switch("prefix_caching", prefix_caching)
        self._pools = Pools(
            self._num_blocks, self._block_size, self._prefix_caching, self._num_host_blocks
        )
        self._pool = self._pools.device
        self._lock = self._pools.lock
        self._refs, self._free = self._pool.refs, self._pool.free
        self._num_added_tokens = self._num_found_tokens = 0

    __reduce_ex__ = uncopied("two would give the same blocks twice", "make another one")

    def __contains__(self, sequence: object) -> bool:
        """Tell whether something is a sequence of this allocator that is not freed."""
        known = self._pools.sequences.get(id(sequence))
        return known is not None and known() is sequence

    def __repr__(self) -> str:
        return (
            f"<BlockAllocator of {self._num_blocks} blocks of {self._block_size} tokens: "
            f"{self.num_free} free, {self.num_used} used, {self.num_cached} cached>"
        )

    def _repr_html_(self) -> str:
        size = f"{self._num_blocks:,} blocks of {self._block_size} tokens"
        return html.section(f"BlockAllocator of {size}", self._pool_html())

    def _pool_html(self) -> str:
        """Return the pool's blocks by their states, and its first sequences."""
        with self._lock:
            living = self._pools.living()
            shared = {block for block, count in enumerate(self._refs) if count > 1}
            unused = self._pool.available
            cached = len(self._pool.cached)
            rows = [
                (
                    f"{len(each)} tokens",
                    sum(block >= 0 for block in each._ids),
                    0 if each._state is SWAPPED else len(shared.intersection(each._ids)),
                    each._state,
                )
                for each in living[:_MOST_SHOWN]
            ]
        used = self._num_blocks - unused - len(shared)
        shares = [
            html.Share("used by one", used, html.BLUE),
            html.Share("shared", len(shared), html.VIOLET),
            html.Share("cached", cached, html.ORANGE),
            html.Share("free", unused - cached, html.GREY),
        ]
        parts = [html.bar(shares)]
        if self._num_host_blocks:
            host = f"{self._num_host_blocks - self.num_free_host:,} of {self._num_host_blocks:,}"
            parts.append(html.paragraph(f"{host} blocks of host memory are used"))
        if rows:
            parts.append(html.table(("sequence", "blocks", "shared blocks", "state"), rows))
        if len(living) > _MOST_SHOWN:
            parts.append(html.paragraph(f"and {len(living) - _MOST_SHOWN:,} more sequences"))
        return "".join(parts)

    @property
    def num_blocks(self) -> int:
        """Blocks in the device's pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def prefix_caching(self) -> bool:
        """Whether `add` finds prefixes."""
        return self._prefix_caching

    @property
    def watermark(self) -> int:
        """How many blocks `add` leaves free or cached."""
        return self._watermark

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory."""
        return self._num_host_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence uses, but `add` may find; they are taken when none is free."""
        return len(self._pool.cached)

    @property
    def num_used(self) -> int:
        """Blocks of sequences, and those that `allocate` gave."""
        with self._lock:
            return self._num_blocks - self._pool.available

    @property
    def num_free_host(self) -> int:
        """Blocks of host memory that hold nothing."""
        return len(self._pools.host.free)

    @property
    def num_added_tokens(self) -> int:
        """Tokens of all sequences that `add` has made and was asked to count."""
        return self._num_added_tokens

    @property
    def num_found_tokens(self) -> int:
        """Tokens that `add` found cached; divided by `num_added_tokens` it is the hit rate."""
        return self._num_found_tokens

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences that are not freed, the earliest first."""
        with self._lock:
            return tuple(self._pools.living())

    @property
    def num_unused_slots(self) -> int:
        """Slots for tokens in used blocks that hold none: at the ends of sequences, so it is exact.

        Over ``num_used * block_size`` it is the fragmentation of the pool.
        """
        with self._lock:
            filled: dict[int, int] = {}
            for sequence in self._pools.living():
                if (over := sequence._length % self._block_size) and not sequence.is_swapped:
                    block = sequence._ids[-1]
                    # A sharer that was not cut there fills the block.
                    filled[block] = max(filled.get(block, 0), over)
            shared = {block for block in filled if self._refs[block] > 1}
            for sequence in self._pools.living() if shared else ():
                if not sequence.is_swapped:
                    full = sequence._ids[: sequence._length // self._block_size]
                    for block in shared.intersection(full):
                        filled[block] = self._block_size
            return sum(self._block_size - slots for slots in filled.values())

    def ref_count(self, block: int) -> int:
        """Return how many sequences use a block; 1 for one that `allocate` gave.

        Raises
        ------
        ValueError
            If the pool has no such block.
        """
        return abs(self._refs[self._known(block)])

    def state(self, block: int) -> Literal["used", "free", "cached"]:
        """Return the state of a block, as `num_used`, `num_free` and `num_cached` count it.

        Raises
        ------
        ValueError
            If the pool has no such block.
        """
        block = self._known(block)
        with self._lock:
            if self._refs[block]:
                return "used"
            return "cached" if block in self._pool.cached else "free"

    def allocate(self) -> int:
        """Return a block for any use of the caller, which returns it by `free`.

        Raises
        ------
        OutOfBlocksError
            If no block is free or cached; nothing has changed.
        """
        with self._lock, self._pools:
            free = self._free
            if not free:
                self._pool.make_room(1)
            block = free.pop()
            self._refs[block] = HELD
            return block

    def free(self, block: int) -> None:
        """Take back a block that `allocate` gave.

        Raises
        ------
        ValueError
            If the block is not one of those: free already, a sequence's, or not of this pool.
        """
        if type(block) is not int:
            block = self._known(block)
        with self._lock, self._pools:
            if not 0 <= block < self._num_blocks or self._refs[block] != HELD:
                raise self._not_given(block)
            self._free.append(block)
            self._refs[block] = 0

    def _not_given(self, block: int) -> ValueError:
        count = self._refs[self._known(block)]
        return error(
            ValueError,
            f"free got block {block}, which {'a sequence uses' if count else 'is free already'}",
            "it takes a block that allocate gave, once",
            "call the sequence's free()" if count else "drop the id with the first free",
        )

    def find(self, tokens: Iterable[int]) -> int:
        """Return how many tokens `add` would find cached, without adding anything.

        Parameters
        ----------
        tokens : iterable of int
            The tokens' ids.

        Raises
        ------
        TypeError
            If a token is no integer.
        """
        values, index = as_tokens(tokens), self._pool.index
        with self._lock:
            return 0 if index is None else len(index.match(values)) * self._block_size

    def add(self, tokens: Iterable[int], *, counted: int | None = None) -> Sequence:
        """Make a sequence, with room for its tokens.

        Parameters
        ----------
        tokens : iterable of int
            The tokens' ids: a list, or an array of one axis; none is allowed.
        counted : int, optional
            How many tokens `num_added_tokens` counts, by default these: those of a whole prompt
            whose rest is to be appended, or 0 for a prompt that was counted before.

        Returns
        -------
        Sequence
            Its first ``num_cached_tokens`` tokens are in the cache; the caller computes the
            others and writes their keys and values. Sequences can share them at once, so those that
            are added for one step are written in one step, or in their order.

        Raises
        ------
        OutOfBlocksError
            If the pool has too few blocks in addition to the watermark; nothing has changed.
        TypeError
            If a token is no integer.
        """
        values = as_tokens(tokens)
        counted = len(values) if counted is None else as_count("counted", counted, 0)
        size, pool, pools = self._block_size, self._pool, self._pools
        with self._lock, pools:
            index = pool.index
            nodes = [] if index is None else index.match(values)
            found = [node.block for node in nodes]
            count = -(-len(values) // size) - len(found)
            revived = sum(not self._refs[block] for block in found)
            pool.require(count, spare=self._watermark, revived=revived)
            pool.share(found)  # from here on no block of the prefix can be evicted
            ids = array("i", found + pool.take(count))
            cached = len(found) * size
            prefix = None
            if index is not None:
                node = nodes[-1] if nodes else index.root
                prefix = Prefix(index, node, len(nodes), []).hold().append(values[cached:], ids)
            added = self._num_added_tokens + counted
            found_tokens = self._num_found_tokens + min(cached, counted)
            sequence = Sequence(pools, ids, len(values), cached, prefix)
            self._num_added_tokens, self._num_found_tokens = added, found_tokens
            return sequence

    def check(self) -> None:
        """Require that all is as it must be: counts, owners, the prefix index.

        For tests and for finding bugs: it checks every block and every sequence.

        Raises
        ------
        RuntimeError
            With a description, if something is broken, or a sequence was dropped but not freed.
        """
        with self._lock:
            require_sound(self._pools)

    def _known(self, block: int) -> int:
        """Read a block id of this pool, or refuse it."""
        try:
            number = -1 if isinstance(block, bool) else as_int(block)
        except TypeError:
            number = -1
        if not 0 <= number < self._num_blocks:
            raise error(
                ValueError, f"got block {shown(block)}",
                f"the pool's blocks are 0 to {self._num_blocks - 1}", "pass one of this allocator",
            )  # fmt: skip
        return int(number)
