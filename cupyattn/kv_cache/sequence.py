"""A sequence of tokens in blocks of a pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from weakref import ref

from cupyattn.kv_cache.arguments import as_count, as_tokens, uncopied
from cupyattn.kv_cache.pool import EVICTED, FREED, HERE, SWAPPED, Copy, Pools, moved
from cupyattn.kv_cache.prefix_index import Prefix
from cupyattn.runtime.errors import error


class Sequence:
    """Tokens of one generation, and the blocks that hold their keys and values.

    `BlockAllocator.add` and `fork` make sequences. Token i is in slot ``i % block_size`` of
    block ``block_ids[i // block_size]``. A block may belong to several sequences; `append` gives
    this one a separate block before it would write a shared one.

    Every sequence ends by `free`; from then on all of its methods but `is_freed` raise ValueError.
    Each call is atomic: see `BlockAllocator` about threads.

    Examples
    --------
    >>> import cupyattn
    >>> allocator = cupyattn.BlockAllocator(num_blocks=8, block_size=4)
    >>> prompt = allocator.add([11, 12, 13, 14, 15, 16])
    >>> other = prompt.fork()
    >>> prompt.block_ids, other.block_ids
    (array('i', [0, 1]), array('i', [0, 1]))
    >>> other.append([17])  # block 1 is shared: copy it, then write into the copy
    (Copy(src=1, dst=2),)
    >>> prompt.append([18])  # now it is not
    ()
    >>> other.free()
    >>> len(prompt), prompt.block_ids, allocator.num_free
    (7, array('i', [0, 1]), 6)
    """

    __slots__ = ("__weakref__", "_cached", "_ids", "_length", "_pools", "_prefix", "_state")

    def __init__(
        self, pools: Pools, ids: array[int], length: int, cached: int, prefix: Prefix | None
    ) -> None:
        self._pools = pools
        self._ids = ids  # never changed in place: forks have the same array
        self._length = length
        self._cached = cached
        self._prefix = prefix
        self._state = HERE
        pools.sequences[id(self)] = ref(self)

    def __len__(self) -> int:
        self._require_alive()
        return self._length

    def __repr__(self) -> str:
        if self._state is FREED:
            return "<Sequence, freed>"
        swapped = ", swapped out" if self._state is SWAPPED else ""
        return f"<Sequence of {self._length} tokens in {len(self._ids)} blocks{swapped}>"

    __reduce_ex__ = uncopied("a copy would own blocks that nobody counts", "call its fork()")

    @property
    def block_ids(self) -> array[int]:
        """The blocks in the order of the tokens, -1 for those evicted: a new ``array('i')``.

        NumPy copies it into a row of an int32 table by its buffer: ``row[: len(ids)] = ids``.
        """
        with self._pools.lock:
            self._require_here()
            return self._ids[:]

    @property
    def num_cached_tokens(self) -> int:
        """How many of its first tokens ``add`` found in the cache: they need not be computed.

        A multiple of the block size, and less than the tokens added: one must still be computed.
        A fork has its source's; `truncate` leaves the whole blocks that are kept.
        """
        self._require_alive()
        return self._cached

    @property
    def is_freed(self) -> bool:
        """Whether it has ended; its other members then raise."""
        return self._state is FREED

    @property
    def is_swapped(self) -> bool:
        """Whether it is in host memory."""
        self._require_alive()
        return self._state is SWAPPED

    def append(self, tokens: Iterable[int]) -> tuple[Copy, ...]:
        """Make room for tokens after the last.

        Parameters
        ----------
        tokens : iterable of int
            The tokens' ids: a list, or an array of one axis.

        Returns
        -------
        tuple of Copy
            Blocks to copy before anything is written: run those of all calls, in the order of the
            calls. None, or one if the last block is partly filled and shared.

        Raises
        ------
        OutOfBlocksError
            If the pool has too few blocks; nothing has changed.
        ValueError
            If the sequence is freed or swapped out.
        TypeError
            If a token is no integer.

        Notes
        -----
        A block that this fills can be shared at once, by an ``add`` before the tokens are written.
        Who then does not write them all calls ``truncate(written)``, for such sharers too.
        """
        values = as_tokens(tokens)
        pools = self._pools
        with pools.lock, pools:
            self._require_here()
            ids, prefix, pool = self._ids, self._prefix, pools.device
            filled = self._length % pools.block_size
            source = ids[-1] if filled else EVICTED
            copied = bool(filled and values and pool.refs[source] > 1)
            length = self._length + len(values)
            count = -(-length // pools.block_size) - len(ids) + copied
            copies: tuple[Copy, ...] = ()
            if count:
                taken = pool.take(count)
                if copied:
                    pool.refs[source] -= 1
                    copies = (Copy(source, taken[0]),)
                ids = ids[: len(ids) - copied] + array("i", taken)
            if prefix is not None:
                prefix = prefix.append(values, ids)
            self._ids, self._length, self._prefix = ids, length, prefix
            return copies

    def fork(self) -> Sequence:
        """Return a sequence of the same tokens in the same blocks: to sample another continuation.

        Raises
        ------
        ValueError
            If the sequence is freed or swapped out.
        """
        with self._pools.lock, self._pools:
            self._require_here()
            self._pools.device.share(self._ids)
            prefix = None if self._prefix is None else self._prefix.hold()
            return Sequence(self._pools, self._ids, self._length, self._cached, prefix)

    def truncate(self, length: int) -> None:
        """Give back the tokens from `length` on: drafts that were refused, or never written.

        Blocks that held any of them leave the prefix index, and no later ``add`` finds them. A
        block that is kept in part is copied by the next `append` if it is shared.

        Parameters
        ----------
        length : int
            How many tokens to keep, 0 to ``len(self)``.

        Raises
        ------
        ValueError
            If the length is out of range, the last token kept is in a block that was evicted,
            or the sequence is freed or swapped out.
        """
        length = as_count("length", length, 0)
        pools = self._pools
        with pools.lock, pools:
            self._require_here()
            self._require_within(length)
            size, ids, prefix = pools.block_size, self._ids, self._prefix
            kept = -(-length // size)
            if kept and length < self._length and ids[kept - 1] == EVICTED:
                raise error(
                    ValueError,
                    f"truncate got length {length}, whose last block is evicted",
                    "the block of the last token kept must be there",
                    "keep more tokens, or none",
                )
            if prefix is not None:
                prefix = prefix.truncate(length, ids)
            pools.device.release(reversed(ids[kept:]))
            cached = min(self._cached, length // size * size)
            ids = ids[:kept]
            self._ids, self._length, self._cached, self._prefix = ids, length, cached, prefix

    def evict_before(self, position: int) -> int:
        """Free the blocks before a sliding window, which only have earlier tokens.

        They are -1 in `block_ids`. A full block stays cached.

        Parameters
        ----------
        position : int
            The first position that is still attended to, 0 to ``len(self)``.

        Returns
        -------
        int
            How many blocks it gave back.

        Raises
        ------
        ValueError
            If the position is out of range, or the sequence is freed or swapped out.
        """
        position = as_count("position", position, 0)
        pools = self._pools
        with pools.lock, pools:
            self._require_here()
            self._require_within(position)
            ids = self._ids
            last = first = position // pools.block_size
            while first and ids[first - 1] != EVICTED:
                first -= 1
            if count := last - first:
                pools.device.release(reversed(ids[first:last]))
                self._ids = array("i", [EVICTED]) * last + ids[last:]
            return count

    def free(self) -> None:
        """Give back all blocks; full ones stay cached, until their room is needed.

        Raises
        ------
        ValueError
            If the sequence is freed already.
        """
        pools = self._pools
        with pools.lock, pools:
            self._require_alive()
            pool = pools.host if self._state is SWAPPED else pools.device
            pool.release(reversed(self._ids))
            if self._prefix is not None:
                self._prefix.drop()
            key, ids = id(self), array("i")
            self._ids, self._prefix, self._state = ids, None, FREED
            del pools.sequences[key]

    def swap_out(self) -> tuple[Copy, ...]:
        """Move to host memory: the blocks in the device's pool are given back.

        Returns
        -------
        tuple of Copy
            From blocks of the device to blocks of the host, to be run before anything is written.

        Raises
        ------
        OutOfBlocksError
            If host memory has too few blocks; nothing has changed.
        ValueError
            If the sequence is freed or swapped out already.
        """
        with self._pools.lock, self._pools:
            self._require_here()
            pool = self._pools.device
            taken, copies = moved(self._ids, self._pools.host.take(self._num_present()))
            pool.release(reversed(self._ids))
            self._ids, self._state = taken, SWAPPED
            return copies

    def swap_in(self) -> tuple[Copy, ...]:
        """Move back from host memory, into separate blocks.

        Returns
        -------
        tuple of Copy
            From blocks of the host to blocks of the device, to be run before anything is written.

        Raises
        ------
        OutOfBlocksError
            If the device's pool has too few blocks; nothing has changed.
        ValueError
            If the sequence is not swapped out.

        Notes
        -----
        Its full blocks can be shared at once. Who then does not copy calls ``truncate(0)``.
        """
        with self._pools.lock, self._pools:
            if self._state is not SWAPPED:
                raise self._wrong_state("swap_in moves a sequence that swap_out has moved")
            pool = self._pools.device
            taken, copies = moved(self._ids, pool.take(self._num_present()))
            self._pools.host.release(reversed(self._ids))
            if self._prefix is not None:
                self._prefix.restore(taken)
            self._ids, self._state = taken, HERE
            return copies

    def _num_present(self) -> int:
        return len(self._ids) - self._ids.count(EVICTED)

    def _require_within(self, length: int) -> None:
        if length > self._length:
            raise error(
                ValueError,
                f"got {length} for a sequence of {self._length} tokens",
                f"allowed is 0 to {self._length}",
                "append adds tokens",
            )

    def _require_alive(self) -> None:
        if self._state is FREED:
            raise self._wrong_state("a sequence that is freed has neither tokens nor blocks")

    def _require_here(self) -> None:
        if self._state is not HERE:
            raise self._wrong_state("this needs a sequence in the device's pool")

    def _wrong_state(self, allowed: str) -> ValueError:
        fix = "call swap_in first" if self._state is SWAPPED else "add its tokens again"
        if self._state is HERE:
            fix = "use it as it is"
        return error(ValueError, f"the sequence is {self._state}", allowed, fix)
