"""Checks of attention's values, as far as the layouts do not tell: they read memory."""

from __future__ import annotations

import numpy as np

from cupyattn.ops.attention.options import MAX_HALF_SUM_VALUE, MAX_OFFSET
from cupyattn.ops.attention.problem import AttentionArrays, AttentionProblem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.value_checks import on_host

MAX_SINK = 2e38
MAX_ALIBI = 2**20
"""The largest slope times distance: float32 keeps scores of that size to a sixteenth."""


def check_values(problem: AttentionProblem, arrays: AttentionArrays[Array]) -> None:
    """Check cu_seqlens, q_offset, seqused_k, sinks and slopes, and that rotary tables reach far.

    Arrays on a GPU are waited for and fetched.

    Raises
    ------
    ValueError
        If one is out of range.
    """
    queries, keys = _lengths(problem, arrays)
    offsets = None if arrays.q_offset is None else on_host(arrays.q_offset)
    used = None if arrays.seqused_k is None else on_host(arrays.seqused_k)
    if offsets is not None and (np.abs(offsets.astype(float)) > MAX_OFFSET).any():
        raise error(
            ValueError,
            f"q_offset has values from {offsets.min()} to {offsets.max()}",
            f"each is between -{MAX_OFFSET} and {MAX_OFFSET}",
            "pass the key positions of query 0",
        )
    if used is not None:
        most = "the keys of its sequence" if problem.packed else f"Sk = {problem.sk}"
        require_used(used, keys, most)
    if arrays.sinks is not None:
        require_sinks(arrays.sinks)
    if problem.options.accumulator == "float16":
        _require_small_values(problem, arrays, keys if used is None else used)
    positions = _positions(problem, offsets, used, queries, keys)
    if arrays.alibi_slopes is not None:
        require_alibi(problem, arrays.alibi_slopes, *positions)
    if problem.layouts.cos is not None:
        _require_rotary_positions(problem, problem.layouts.cos.shape[0], *positions)


def require_used(used: np.ndarray, keys: np.ndarray, most: str, arrays: str = "k and v") -> None:
    """Raise ValueError for a seqused_k outside of 0 to the keys that exist, `most` in words."""
    if ((used < 0) | (used > keys)).any():
        raise error(
            ValueError,
            f"seqused_k has values from {used.min()} to {used.max()}",
            f"each is at least 0 and at most {most}",
            f"clip it, or pass longer {arrays}",
        )


def _lengths(
    problem: AttentionProblem, arrays: AttentionArrays[Array]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the queries and keys of each sequence; of a batch those of all."""
    if arrays.cu_seqlens_q is None or arrays.cu_seqlens_k is None:
        return np.asarray(problem.sq), np.asarray(problem.sk)
    return (
        counts_of("cu_seqlens_q", arrays.cu_seqlens_q, problem.total_q, problem.sq),
        counts_of("cu_seqlens_k", arrays.cu_seqlens_k, problem.total_k, problem.sk, "k and v"),
    )


def require_alibi(
    problem: AttentionProblem,
    slopes: Array,
    offsets: np.ndarray,
    queries: np.ndarray,
    used: np.ndarray,
) -> None:
    """Raise ValueError where ALiBi leaves scores of float32 no digits.

    What weighs in a row is its nearest key, of a slope below 0 the furthest; the others may be any
    number of times as far away. Keys that a mask hides count as seen.
    """
    values, (left, right) = on_host(slopes).astype(float), problem.window
    last_query, last_key = offsets + queries - 1, used - 1
    nearest = np.maximum(np.clip(last_query - last_key, 0, left), np.clip(-offsets, 0, right))
    furthest = np.maximum(np.clip(last_query, 0, left), np.clip(last_key - offsets, 0, right))
    weighing = np.where(values > 0, nearest[..., None], furthest[..., None])
    seen = ((queries > 0) & (used > 0))[..., None]
    with np.errstate(invalid="ignore"):  # of an infinite slope at the query itself, which is NaN
        largest = np.nanmax(np.abs(values) * np.where(seen, weighing, 0), initial=0)
    limit = 2**49 if problem.dtype == np.float64 else MAX_ALIBI
    if largest > limit:
        raise error(
            ValueError,
            f"alibi_slopes times distances come to {largest:.9g}",
            "of a query's nearest key (with a slope below 0 its furthest) it is at most "
            f"{limit:,}: larger scores have no digits left",
            "pass smaller slopes, or a q_offset nearer to the keys"
            + (", or NumPy arrays of float64" if limit == MAX_ALIBI else ""),
        )


def _require_small_values(
    problem: AttentionProblem, arrays: AttentionArrays[Array], used: np.ndarray
) -> None:
    """Check the rows of v in use for float16 accumulators."""
    v, counts = on_host(arrays.v), np.broadcast_to(used, problem.batch)
    firsts = np.zeros(problem.batch, np.int64)
    if arrays.cu_seqlens_k is not None:
        firsts = on_host(arrays.cu_seqlens_k).astype(np.int64)[:-1]
    for b, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        require_half_sum_values((v if problem.packed else v[b])[first : first + count])


def require_half_sum_values(v: np.ndarray) -> None:
    """Raise ValueError for values whose float16 sums may overflow, or are infinite.

    A product with the identity matrix adds those to float32 ones (output_sums.cuh), and 0 times an
    infinity is NaN, in columns of other values. A NaN does the same there.
    """
    sizes = np.abs(v)
    sizes = sizes[~np.isnan(sizes)]
    if sizes.size and sizes.max() > MAX_HALF_SUM_VALUE:
        raise error(
            ValueError,
            f"v has absolute values up to {sizes.max()!s} with accumulator='float16'",
            f"each is at most {MAX_HALF_SUM_VALUE:g}: sums of more may overflow, and infinities "
            "reach other columns as NaN",
            "scale v down and the result up, or leave accumulator out",
        )


def require_sinks(sinks: Array) -> None:
    """Raise ValueError unless float32 kernels can hold every sink in units of log2."""
    values = on_host(sinks)
    if (values.astype(float) > MAX_SINK).any():
        raise error(
            ValueError,
            f"sinks has values up to {values.max()!s}",  # in the digits of its dtype
            f"each is at most {MAX_SINK:g}: times log2(e) it is still a float32",
            "pass smaller ones; -inf is no sink",
        )


def require_rotary_positions(problem: AttentionProblem) -> None:
    """Raise ValueError for tables that are too short, where no array decides positions."""
    layouts = problem.layouts
    in_arrays = layouts.q_offset is not None or layouts.seqused_k is not None or problem.packed
    if layouts.cos is not None and not in_arrays:
        lengths = np.asarray(problem.sq), np.asarray(problem.sk)
        positions = _positions(problem, None, None, *lengths)
        _require_rotary_positions(problem, layouts.cos.shape[0], *positions)


def _positions(
    problem: AttentionProblem,
    given: np.ndarray | None,
    in_use: np.ndarray | None,
    queries: np.ndarray,
    keys: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each sequence the position of query 0, its queries, and its keys in use."""
    used = np.asarray(keys if in_use is None else in_use)
    from_end = used - queries if problem.q_offset is None else np.asarray(problem.q_offset)
    offsets = np.asarray(from_end if given is None else given)
    of_sequences = np.broadcast_arrays(offsets, queries, used)
    # Sides of windows, which are added to them, have up to 61 bits.
    offsets, queries, used = (x.astype(np.int64) for x in of_sequences)
    return offsets, queries, used


def _require_rotary_positions(
    problem: AttentionProblem,
    positions: int,
    offsets: np.ndarray,
    queries: np.ndarray,
    used: np.ndarray,
) -> None:
    if problem.batch == 0:
        return
    occupied = {"keys": (0, int(used.max()) - 1)} if used.any() else {}
    left, right = problem.window
    first = offsets if right is None else np.maximum(offsets, -right)
    last = offsets + queries - 1
    last = last if left is None else np.minimum(last, used - 1 + left)
    if (sees := (first <= last) & (used > 0)).any():
        occupied["queries that see a key"] = (int(first[sees].min()), int(last[sees].max()))
    for name, (first, last) in occupied.items():
        if first < 0 or last >= positions:
            raise error(
                ValueError,
                f"{name} are at positions {first} to {last}",
                f"the rotary tables have positions 0 to {positions - 1}",
                "pass another q_offset" if first < 0 else "pass longer tables, or another q_offset",
            )


def counts_of(
    name: str, bounds: Array, total: int, longest: int, of: str = "q", *, whole: bool = True
) -> np.ndarray:
    """Return how many rows each sequence has, int64; a GPU is waited for.

    The first sequence begins at row 0, unless they need not be the `whole` array.

    Raises
    ------
    ValueError
        Unless cu_seqlens fits its arrays and max_seqlen.
    """
    items = on_host(bounds).astype(np.int64)
    counts = np.diff(items)
    first_row = "0" if whole else "0 or more"
    if items[0] < 0 or (whole and items[0]) or items[-1] > total or (counts < 0).any():
        raise error(
            ValueError,
            f"{name} = {shown(items.tolist())}",
            f"it begins with {first_row}, never falls, and ends at {total} at the most: the rows "
            f"of {of}",
            "pass numpy.cumsum of the lengths, with a 0 in front",
        )
    if (counts > longest).any():
        at = int(np.argmax(counts > longest))
        most = name.replace("cu_seqlens", "max_seqlen")
        raise error(
            ValueError,
            f"sequence {at} of {name} has {counts[at]} rows",
            f"each has at most {most} = {longest}",
            f"pass the largest number as {most}",
        )
    return counts
