"""Tables of the sequences in a model's step: int32 arrays, uploaded in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from collections.abc import Set as AnySet
from types import ModuleType
from typing import Any, cast

import numpy as np

from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_count, uncopied
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.runtime.arrays import Array, CudaArray
from cupyattn.runtime.errors import error, shown

UNUSED = -1
"""An unused entry of the block table or of the slot mapping."""


class StepTables:
    """The tables of a step, at the same place in memory from step to step.

    `PagedKVCache.step_tables` makes them, `update` refills them in place. So a decode step that
    was captured in a CUDA graph with them runs on other sequences: update, then launch the graph.
    Within blocks `advance` does it on the device.

    Attributes
    ----------
    block_table : int32 array (max_batch, max_blocks)
        The blocks of each sequence; -1 after them, in rows without a sequence, and where a window
        has given a block back.
    seqlens_k : int32 array (max_batch,)
        The tokens of each sequence, 0 in rows without one.
    cu_seqlens_q : int32 array (max_batch + 1,)
        Where each sequence's new tokens begin among all new ones; the last is their number.
    slot_mapping : int32 array (max_tokens,)
        The slot ``block * block_size + offset`` of each new token, sequence after
        sequence; -1 after the last.
    positions : int32 array (max_tokens,)
        The position of each new token in its sequence; 0 after the last.
    num_sequences, num_tokens, max_seqlen_q : int
        How many sequences, how many new tokens, and the most new tokens of a sequence.
    num_decoding : int
        How many sequences from the first on have one new token: those before any other.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        xp: ModuleType,
        *,
        max_batch: int,
        max_blocks: int,
        max_tokens: int,
    ) -> None:
        if not isinstance(allocator, BlockAllocator):
            raise error(
                TypeError,
                f"got {shown(allocator)} as an allocator",
                "tables have the block ids of a BlockAllocator",
                "call the step_tables of the cache that they are for",
            )
        self._allocator = allocator
        self._xp = xp
        shapes = {
            "block_table": (max_batch, max_blocks),
            "seqlens_k": (max_batch,),
            "cu_seqlens_q": (max_batch + 1,),
            "slot_mapping": (max_tokens,),
            "positions": (max_tokens,),
        }
        starts, end = {}, 0
        for name, shape in shapes.items():
            starts[name] = end
            end += -(-int(np.prod(shape)) // 4) * 4  # each begins at a multiple of 16 bytes
        self._growing = slice(starts["seqlens_k"], end)
        self._growth = slice(end, end + end - starts["seqlens_k"])
        end = self._growth.stop  # what `advance` adds to each of these numbers
        self._buffer: Array = xp.zeros(end, np.int32)
        self._staged = np.zeros(end, np.int32)

        def pieces(flat: Array) -> dict[str, Array]:
            return {
                name: flat[starts[name] : starts[name] + int(np.prod(shape))].reshape(shape)
                for name, shape in shapes.items()
            }

        self._starts = starts
        self._on_host = pieces(self._staged)
        placed = pieces(self._buffer)
        self.block_table: Array = placed["block_table"]
        self.seqlens_k: Array = placed["seqlens_k"]
        self.cu_seqlens_q: Array = placed["cu_seqlens_q"]
        self.slot_mapping: Array = placed["slot_mapping"]
        self.positions: Array = placed["positions"]
        self.num_sequences = self.num_tokens = self.max_seqlen_q = self.num_decoding = 0
        self.update((), ())

    __reduce_ex__ = uncopied(
        "a captured step would still read the first one's arrays",
        "make others by step_tables; their arrays can be copied",
    )

    def __repr__(self) -> str:
        (batch, blocks), tokens = self.block_table.shape, len(self.slot_mapping)
        return (
            f"<StepTables of {self.num_sequences} sequences and {self.num_tokens} new tokens, with "
            f"room for {batch} of {blocks} blocks and {tokens} tokens>"
        )

    def decodes(self, rows: int) -> bool:
        """Return whether each sequence has one new token, row b that of sequence b."""
        one_each = 0 < self.num_decoding == self.num_sequences
        return one_each and self.num_sequences <= rows <= len(self.seqlens_k)

    def spans(self) -> list[tuple[int, int, int]]:
        """Return where each sequence's new tokens begin and end among all, and its length."""
        starts = self._on_host["cu_seqlens_q"][: self.num_sequences + 1].tolist()
        lengths = self._on_host["seqlens_k"][: self.num_sequences].tolist()
        return list(zip(starts, starts[1:], lengths, strict=False))

    @property
    def allocator(self) -> BlockAllocator:
        """The allocator of the blocks."""
        return self._allocator

    def update(self, sequences: Items[Sequence], new_tokens: int | Iterable[int] = 1) -> None:
        """Fill the tables for other sequences, or for the same ones that have grown, in place.

        The upload is queued on the current stream, after the work that still reads the tables. It
        comes before a graph is launched and is not captured by it.

        Parameters
        ----------
        sequences : sequence of Sequence
            The batch, at most max_batch of them; rows after them are empty.
        new_tokens : int, or an int for each sequence
            How many of each one's last tokens the step computes.

        Raises
        ------
        TypeError
            If something is no sequence, or a number no integer.
        ValueError
            If a sequence is freed, swapped out, of another cache or longer than the tables, or
            there are too many; if it has fewer tokens than are called new; or if two new tokens
            have one slot: a sequence is twice in the batch, or a fork has appended none. The
            tables are as before then.
        """
        tables, size = self._on_host, self._allocator.block_size
        lengths = lengths_of(self._allocator, sequences)
        counts = as_counts(sequences, new_tokens)
        self._require_room(lengths, counts)
        table = tables["block_table"]
        table.fill(UNUSED)
        for row, sequence in zip(table, sequences, strict=False):
            ids = sequence.block_ids
            row[: len(ids)] = ids
        ends = np.cumsum(counts)
        total = int(counts.sum())
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(total) + np.repeat(lengths - ends, counts)
        blocks = table[rows, positions // size].astype(np.int64)
        if (blocks == UNUSED).any():
            row = int(rows[np.argmax(blocks == UNUSED)])
            raise error(
                ValueError,
                f"the {counts[row]} new tokens of sequence {row} are in blocks that are evicted",
                "tokens that a step computes need their slots",
                "evict after the step, and only blocks that the next one does not see",
            )
        slots = blocks * size + positions % size
        _require_own_slots(slots, rows)
        for name, values, rest in (
            ("seqlens_k", lengths, 0),
            ("cu_seqlens_q", np.concatenate(([0], ends)), total),
            ("slot_mapping", slots, UNUSED),
            ("positions", positions, 0),
        ):
            tables[name][: len(values)] = values
            tables[name][len(values) :] = rest
        growth = self._staged[self._growth]
        growth.fill(0)
        for name, count in (
            ("seqlens_k", len(counts)),
            ("slot_mapping", total),
            ("positions", total),
        ):
            start = self._starts[name] - self._growing.start
            growth[start : start + count] = 1
        upload(self._xp, self._buffer, self._staged)
        self.num_sequences, self.num_tokens = len(counts), total
        self.max_seqlen_q = int(counts.max(initial=0))
        self.num_decoding = int(np.argmax(np.append(counts, 0) != 1))

    def advance(self) -> None:
        """Let each sequence grow by a token within its last block: the tables of the next step.

        It is queued on the current stream, and needs no tokens: so the step behind one that is
        queued can be queued too, before anyone has read what the first one chose. A CUDA graph can
        capture it; its replays change what is on the device. The caller knows that each sequence
        has one new token, and that its last block has room for another and is its own. Where that
        is not so, `update` the tables before they are read again.
        """
        for xp, buffer in ((np, self._staged), (self._xp, self._buffer)):
            growing = buffer[self._growing]
            xp.add(growing, buffer[self._growth], out=growing)

    def _require_room(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Raise if the batch does not fit into the tables, before anything is written."""
        size, (batch, blocks) = self._allocator.block_size, self.block_table.shape
        longest = int(lengths.max(initial=0))
        for passed, there, what in (
            (len(lengths), batch, "sequences"),
            (-(-longest // size), blocks, "blocks of a sequence"),
            (int(counts.sum()), len(self.slot_mapping), "new tokens"),
        ):
            if passed > there:
                raise error(
                    ValueError,
                    f"got {passed} {what}",
                    f"the tables have room for {there}",
                    "make tables with a larger max_batch, max_blocks or max_tokens",
                )
        if (counts > lengths).any():
            row = int(np.argmax(counts > lengths))
            raise error(
                ValueError,
                f"got {counts[row]} new tokens of sequence {row}, which has {lengths[row]} tokens",
                "new tokens are its last ones",
                "append them to the sequence first",
            )


def require_tables(tables: object, allocator: BlockAllocator) -> None:
    """Raise for objects that are not tables, and for tables of another pool."""
    if not isinstance(tables, StepTables):
        raise error(
            TypeError,
            f"got {shown(tables)} as the tables of a step",
            "they are StepTables",
            "pass the result of this cache's step_tables",
        )
    if tables.allocator is not allocator:
        raise error(
            ValueError,
            f"got {tables!r} of another cache",
            "its block ids are those of another pool",
            "pass tables that this cache's step_tables made",
        )


def upload(xp: ModuleType, target: Array, staged: np.ndarray) -> None:
    """Queue the copy of an array of the host; it may change as soon as this has returned."""
    if xp is np:
        target[...] = staged
        return
    array = cast("CudaArray", target)
    with array.device:
        # From memory that is not pinned the driver takes what it reads before the call returns.
        array.set(staged, stream=xp.cuda.get_current_stream())


def lengths_of(allocator: BlockAllocator, sequences: Items[Sequence]) -> np.ndarray:
    """Return the lengths of sequences; raise for sequences of another allocator."""
    if isinstance(sequences, Sequence) or not hasattr(sequences, "__len__"):
        raise error(
            TypeError,
            f"got {shown(sequences)}",
            "the sequences of a batch are a list, of one too",
            "pass [sequence]",
        )
    lengths = []
    for sequence in sequences:
        if not isinstance(sequence, Sequence):
            raise error(
                TypeError,
                f"got {shown(sequence)} among the sequences",
                "they are Sequences of this cache's allocator, in a list",
                "pass [sequence] for one",
            )
        lengths.append(len(sequence))  # raises for a freed one
        if sequence not in allocator:
            raise error(
                ValueError,
                f"got {sequence!r} of another allocator",
                "its block ids are those of another pool",
                "pass sequences that this cache's allocator made",
            )
    return np.array(lengths, np.int64)


def _require_own_slots(slots: np.ndarray, rows: np.ndarray) -> None:
    """Refuse new tokens of two sequences in one slot: each would write it, in any order."""
    order = np.argsort(slots, kind="stable")
    same = np.flatnonzero(slots[order[1:]] == slots[order[:-1]])
    if len(same):
        first, second = rows[order[same[0]]], rows[order[same[0] + 1]]
        raise error(
            ValueError,
            f"sequences {first} and {second} have a new token in one slot, {slots[order[same[0]]]}",
            "a slot is written once in a step",
            "leave out one that is twice in the batch, and append to forks the tokens to compute",
        )


def as_counts(sequences: Items[Sequence], new_tokens: int | Iterable[int]) -> np.ndarray:
    """Read how many tokens of each sequence are new."""
    if isinstance(new_tokens, AnySet | Mapping):
        raise error(
            TypeError,
            f"got new_tokens = {shown(new_tokens)}",
            "it is a number for all sequences, or a list of one for each, in their order",
            "pass [new_tokens[i] for i in range(len(sequences))], for one",
        )
    one: Any = new_tokens
    if not isinstance(new_tokens, Iterable) or getattr(one, "shape", None) == ():
        return np.full(len(sequences), as_count("new_tokens", one, 0), np.int64)
    given = list(new_tokens)
    if len(given) != len(sequences):
        raise error(
            ValueError,
            f"got {len(given)} numbers of new tokens for {len(sequences)} sequences",
            "each sequence has one",
            "pass one number for all, or a list as long as that of the sequences",
        )
    return np.array([as_count("new_tokens", each, 0) for each in given], np.int64)
