"""Checks of attention's values, as far as the layouts do not tell: they read memory."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error
from cupyattn.ops.attention.options import MAX_OFFSET
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.value_checks import on_host

INTEGERS = ("q_offset", "seqused_k")
"""The arrays of a few numbers for each batch element."""

MAX_SINK = 2e38


def check_values(
    problem: AttentionProblem,
    arrays: dict[str, Array],
    lengths: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Check the contents of q_offset, seqused_k and sinks, and that rotary tables reach far enough.

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
    if "cos" in arrays:
        _require_rotary_positions(problem, integers, queries, keys)


def require_sinks(sinks: Array) -> None:
    """Raise ValueError unless float32 kernels can hold every sink in units of log2."""
    values = on_host(sinks)
    if (values.astype(float) > MAX_SINK).any():
        raise error(
            ValueError,
            f"sinks has values up to {values.max()}",
            f"each is at most {MAX_SINK:g}: times log2(e) it is still a float32",
            "pass smaller ones; -inf is no sink",
        )


def require_rotary_positions(problem: AttentionProblem) -> None:
    """Raise ValueError for tables that are too short, where no array has a say in positions."""
    if "cos" in problem.layouts and not problem.layouts.keys() & set(INTEGERS):
        lengths = np.asarray(problem.sq), np.asarray(problem.sk)
        _require_rotary_positions(problem, {}, *lengths)


def _require_rotary_positions(
    problem: AttentionProblem,
    integers: dict[str, np.ndarray],
    queries: np.ndarray,
    keys: np.ndarray,
) -> None:
    if problem.batch == 0:
        return
    positions = problem.layouts["cos"].shape[0]
    used = np.asarray(integers.get("seqused_k", keys))
    from_end = used - queries if problem.q_offset is None else np.asarray(problem.q_offset)
    offsets = np.asarray(integers.get("q_offset", from_end))
    occupied = {"keys": (0, int(used.max()) - 1)} if used.any() else {}
    offsets, queries = np.broadcast_arrays(offsets, queries)
    if queries.any():
        begin, end = offsets[queries > 0], (offsets + queries)[queries > 0]
        occupied["queries"] = (int(begin.min()), int(end.max()) - 1)
    for name, (first, last) in occupied.items():
        if first < 0 or last >= positions:
            raise error(
                ValueError,
                f"{name} stand at positions {first} to {last}",
                f"the rotary tables have positions 0 to {positions - 1}",
                "pass another q_offset" if first < 0 else "pass longer tables, or another q_offset",
            )
