"""The checks of paged attention's values: lengths, block ids, packed rows and sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error, shown
from cupyattn.ops.attention.values import require_sinks
from cupyattn.ops.value_checks import on_host

if TYPE_CHECKING:
    from cupyattn.ops.attention.decode_problem import DecodeProblem


def check_values(problem: DecodeProblem, arrays: dict[str, Array]) -> None:
    """Check lengths and the block ids that will be read, and sinks."""
    queries = _query_counts(problem, arrays)
    lengths = on_host(arrays["seqlens_k"]).astype(np.int64)
    capacity, size = problem.attention.sk, problem.block_size
    if ((lengths < 0) | (lengths > capacity)).any():
        at = int(np.argmax((lengths < 0) | (lengths > capacity)))
        raise error(
            ValueError,
            f"seqlens_k[{at}] = {lengths[at]}",
            f"each is at least 0 and at most {capacity}: {problem.max_blocks} blocks of {size}",
            "pass a block_table with more columns, or shorter sequences",
        )
    table = on_host(arrays["block_table"])
    left = problem.attention.window[0]
    first = np.zeros_like(lengths)
    if left is not None:  # of the first query's window
        first = np.clip(lengths - queries - left, 0, lengths) // size
    columns = np.arange(table.shape[1])
    read = (columns >= first[:, None]) & (columns < -(-lengths // size)[:, None])
    read &= (queries > 0)[:, None]
    wrong = read & ((table < 0) | (table >= problem.num_blocks))
    if wrong.any():
        b, column = (int(axis[0]) for axis in np.nonzero(wrong))
        raise error(
            ValueError,
            f"block_table[{b}, {column}] = {table[b, column]}",
            f"the caches have blocks 0 to {problem.num_blocks - 1}, and sequence {b} of "
            f"{lengths[b]} tokens reads this entry",
            "pass the ids of blocks that hold the tokens; -1 may stand only where a window hides "
            "all of a block",
        )
    if "sinks" in arrays:
        require_sinks(arrays["sinks"])


def _query_counts(problem: DecodeProblem, arrays: dict[str, Array]) -> np.ndarray:
    """Return the query tokens of each sequence."""
    attention = problem.attention
    if not problem.packed:
        return np.full(attention.batch, attention.sq, np.int64)
    bounds = on_host(arrays["cu_seqlens_q"]).astype(np.int64)
    total, counts = problem.layouts["q"].shape[0], np.diff(bounds)
    if bounds[0] < 0 or bounds[-1] > total or (counts < 0).any():
        raise error(
            ValueError,
            f"cu_seqlens_q = {shown(bounds.tolist())}",
            f"it begins with 0 or more, never falls, and ends at {total} at the most: the rows "
            "of q",
            "pass numpy.cumsum of the numbers of query tokens, with a 0 in front",
        )
    if (counts > attention.sq).any():
        at = int(np.argmax(counts > attention.sq))
        raise error(
            ValueError,
            f"sequence {at} of cu_seqlens_q has {counts[at]} query tokens",
            f"each has at most max_seqlen_q = {attention.sq}",
            "pass the largest number as max_seqlen_q",
        )
    return counts
