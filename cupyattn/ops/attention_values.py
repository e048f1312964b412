"""Checks of attention's values, as far as the layouts do not tell: they read memory."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error
from cupyattn.ops.attention_problem import AttentionProblem


def check_values(problem: AttentionProblem, arrays: dict[str, Array]) -> None:
    """Check the contents of seqused_k and that rotary tables reach every position.

    Raises
    ------
    ValueError
        If one is out of range.
    """
    if "seqused_k" in arrays:
        used = arrays["seqused_k"]
        if ((used < 0) | (used > problem.sk)).any():
            raise error(
                ValueError,
                f"seqused_k has values from {used.min()} to {used.max()}",
                f"each is at least 0 and at most Sk = {problem.sk}",
                "clip it, or pass longer k and v",
            )
    if "cos" in arrays and problem.sq and problem.batch:
        offsets = np.asarray(arrays.get("q_offset", problem.q_offset))
        positions = arrays["cos"].shape[0]
        lowest, highest = int(offsets.min()), int(offsets.max()) + problem.sq - 1
        if lowest < 0 or max(highest, problem.sk - 1) >= positions:
            raise error(
                ValueError,
                f"queries stand at positions {lowest} to {highest}, keys at 0 to {problem.sk - 1}",
                f"the rotary tables have positions 0 to {positions - 1}",
                "pass longer tables, or another q_offset",
            )
