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


def check_values(problem: AttentionProblem, arrays: dict[str, Array]) -> None:
    """Check the contents of q_offset, seqused_k and sinks, and that rotary tables reach far enough.

    Arrays on a GPU are waited for and fetched.

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
    if used is not None and ((used < 0) | (used > problem.sk)).any():
        raise error(
            ValueError,
            f"seqused_k has values from {used.min()} to {used.max()}",
            f"each is at least 0 and at most Sk = {problem.sk}",
            "clip it, or pass longer k and v",
        )
    if "sinks" in arrays:
        require_sinks(arrays["sinks"])
    if "cos" in arrays and problem.batch:
        _require_rotary_positions(problem, arrays["cos"].shape[0], integers)


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


def _require_rotary_positions(
    problem: AttentionProblem, positions: int, integers: dict[str, np.ndarray]
) -> None:
    used = np.asarray(integers.get("seqused_k", problem.sk))
    from_end = used - problem.sq if problem.q_offset is None else problem.q_offset
    offsets = np.asarray(integers.get("q_offset", from_end))
    keys = int(used.max())
    occupied = {"keys": (0, keys - 1)} if keys else {}
    if problem.sq:
        occupied["queries"] = (int(offsets.min()), int(offsets.max()) + problem.sq - 1)
    for name, (first, last) in occupied.items():
        if first < 0 or last >= positions:
            raise error(
                ValueError,
                f"{name} stand at positions {first} to {last}",
                f"the rotary tables have positions 0 to {positions - 1}",
                "pass longer tables, or another q_offset",
            )
