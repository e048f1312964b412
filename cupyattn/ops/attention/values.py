"""Checks of attention's values, as far as the layouts do not tell: they read memory."""

from __future__ import annotations

import numpy as np

from cupyattn.ops.attention.options import MAX_OFFSET
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error
from cupyattn.runtime.value_checks import on_host

INTEGERS = ("q_offset", "seqused_k")
"""The arrays of a few numbers for each batch element."""

MAX_SINK = 2e38
MAX_ALIBI = 2**20
"""Of slope times distance: float32 keeps scores of that size to a sixteenth."""


def check_values(
    problem: AttentionProblem,
    arrays: dict[str, Array],
    lengths: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Check q_offset, seqused_k, sinks and slopes, and that rotary tables reach far enough.

    `lengths` are the queries and keys of each sequence, where these differ. Arrays on a GPU are
    waited for and fetched.

    Raises
    ------
    ValueError
        If one is out of range.
    """
    integers = {name: on_host(arrays[name]) for name in INTEGERS if name in arrays}
    offsets, used = integers.get("q_offset"), integers.get("seqused_k")
    if offsets is not None and (np.abs(offsets.astype(float)) > MAX_OFFSET).any():
        raise error(
            ValueError,
            f"q_offset has values from {offsets.min()} to {offsets.max()}",
            f"each is between -{MAX_OFFSET} and {MAX_OFFSET}",
            "pass the key positions of query 0",
        )
    queries, keys = lengths or (np.asarray(problem.sq), np.asarray(problem.sk))
    if used is not None and ((used < 0) | (used > keys)).any():
        most = f"Sk = {problem.sk}" if lengths is None else "the keys of its sequence"
        raise error(
            ValueError,
            f"seqused_k has values from {used.min()} to {used.max()}",
            f"each is at least 0 and at most {most}",
            "clip it, or pass longer k and v",
        )
    if "sinks" in arrays:
        require_sinks(arrays["sinks"])
    positions = _positions(problem, integers, queries, keys)
    if "alibi_slopes" in arrays:
        require_alibi(problem, arrays["alibi_slopes"], *positions)
    if "cos" in arrays:
        _require_rotary_positions(problem, *positions)


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
    """Raise ValueError for tables that are too short, where no array has a say in positions."""
    if "cos" in problem.layouts and not problem.layouts.keys() & set(INTEGERS):
        lengths = np.asarray(problem.sq), np.asarray(problem.sk)
        _require_rotary_positions(problem, *_positions(problem, {}, *lengths))


def _positions(
    problem: AttentionProblem,
    integers: dict[str, np.ndarray],
    queries: np.ndarray,
    keys: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of each sequence where query 0 stands, its queries, and its keys in use."""
    used = np.asarray(integers.get("seqused_k", keys))
    from_end = used - queries if problem.q_offset is None else np.asarray(problem.q_offset)
    offsets = np.asarray(integers.get("q_offset", from_end))
    of_sequences = np.broadcast_arrays(offsets, queries, used)
    # Sides of windows, which are added to them, have up to 61 bits.
    offsets, queries, used = (x.astype(np.int64) for x in of_sequences)
    return offsets, queries, used


def _require_rotary_positions(
    problem: AttentionProblem, offsets: np.ndarray, queries: np.ndarray, used: np.ndarray
) -> None:
    if problem.batch == 0:
        return
    positions = problem.layouts["cos"].shape[0]
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
                f"{name} stand at positions {first} to {last}",
                f"the rotary tables have positions 0 to {positions - 1}",
                "pass another q_offset" if first < 0 else "pass longer tables, or another q_offset",
            )
