"""A row of the tables: its name, a change to a valid call, the exception, and what it says.

The last two are texts: of the first part of the message (what was passed) and of the middle (what
is allowed).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

HUGE = 10**400  # an int that no float holds
NAN, INF = float("nan"), float("inf")
ARRAYS = "numpy.ndarray, cupy.ndarray"
FLOATS = "float16, float32, bfloat16"
BOOL = "True or False"
PLACED = "when placed"  # a change of the whole call, made where it is to run
Row = tuple[str, dict[str, Any], type[Exception], str, str]


def of(name: str, kind: type[Exception], passed: str, allowed: str, *values: Any) -> Iterator[Row]:
    """One row for each bad value of an option; {} in `passed` stands for the value."""
    for value in values:
        id = f"array {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)
        yield f"{name} {id[:30]}", {name: value}, kind, passed.replace("{}", str(value)), allowed


def shaped(name: str, allowed: str, *shapes: tuple[int, ...], dtype: Any = "f4") -> Iterator[Row]:
    """One row for each bad shape of an option that is an array."""
    for shape in shapes:
        value = np.ones(shape, dtype)
        yield f"{name} {shape}", {name: value}, ValueError, f"{name} has shape {shape}", allowed
