"""Checks of attention's values, as far as the layouts do not tell: they read memory."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error
from cupyattn.ops.attention_options import MAX_OFFSET
from cupyattn.ops.attention_problem import AttentionProblem


def check_values(problem: AttentionProblem, arrays: dict[str, Array]) -> None:
    """Check the contents of seqused_k and that rotary tables reach every position.

    Raises
    ------
    ValueError
        If one is out of range.
    """
    if "q_offset" in arrays and (np.abs(arrays["q_offset"].astype(float)) > MAX_OFFSET).any():
        offsets = arrays["q_offset"]
        raise error(
            ValueError,
            f"q_offset has values from {offsets.min()} to {offsets.max()}",
            f"each is between -{MAX_OFFSET} and {MAX_OFFSET}",
            "pass the key positions of query 0",
        )
    if "seqused_k" in arrays:
        used = arrays["seqused_k"]
        if ((used < 0) | (used > problem.sk)).any():
            raise error(
                ValueError,
                f"seqused_k has values from {used.min()} to {used.max()}",
                f"each is at least 0 and at most Sk = {problem.sk}",
                "clip it, or pass longer k and v",
            )
    if "cos" in arrays and problem.batch:
        _require_rotary_positions(problem, arrays)


def _require_rotary_positions(problem: AttentionProblem, arrays: dict[str, Array]) -> None:
    positions = arrays["cos"].shape[0]
    offsets = np.asarray(arrays.get("q_offset", problem.q_offset))
    keys = int(np.max(arrays.get("seqused_k", problem.sk)))
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
