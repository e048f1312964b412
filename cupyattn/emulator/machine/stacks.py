"""Stacks: registers as rows of one array, so that one NumPy operation computes many of them.

An operation on the lanes of a small launch costs more in overhead than in arithmetic. A stack is an
array (rows, blocks, threads); with so many lanes that a few rows fill the cache, where there is no
overhead to save, it is a list of rows instead, and nothing is copied to make one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.emulator.machine.floating import flush
from cupyattn.emulator.machine.lanes import Array

Stack = Any  # (rows, blocks, threads) array, or a list of rows

_ELEMENTS = 1 << 14  # of an operation: its operands and intermediates should stay in the cache
_FEWEST_ROWS = 4


def _rows_at_once(shape: tuple[int, int]) -> int:
    """Return how many rows to compute together, 1 if stacks are lists."""
    rows = _ELEMENTS // (shape[0] * shape[1])
    return rows if rows >= _FEWEST_ROWS else 1


def _is_stack(part: Stack) -> bool:
    return isinstance(part, list) or part.ndim == 3


def pile(parts: tuple[Stack, ...], count: int, shape: tuple[int, int], dtype: np.dtype) -> Stack:
    """Return the stack of `count` rows made of `parts`: rows, and stacks of several."""
    if _rows_at_once(shape) == 1:
        return [row for part in parts for row in (part if _is_stack(part) else (part,))]
    stack = np.empty((count, *shape), dtype)
    at = 0
    for part in parts:
        if part.ndim == 3:
            stack[at : at + len(part)] = part
            at += len(part)
        else:
            stack[at] = part
            at += 1
    return stack


def pick(stack: Stack, rows: list[int]) -> Stack:
    """Return the stack of some rows of another, in any order."""
    return [stack[row] for row in rows] if isinstance(stack, list) else stack.take(rows, 0)


def stacked(
    function: Callable[..., Array],
    count: int,
    shape: tuple[int, int],
    dtype: np.dtype,
    operands: tuple[Stack, ...],
    flushed: tuple[bool, ...] | None = None,
    flushes: bool = False,
) -> Stack:
    """Apply a function of registers to stacks of them.

    Parameters
    ----------
    function : callable
        Works lane by lane.
    count : int
        Number of rows.
    shape : (int, int)
        Shape of the lanes.
    dtype : dtype
        Of the result.
    operands : tuple
        Stacks, and registers that all rows have in common.
    flushed : tuple of bool, optional
        Which operands may hold subnormal numbers that count as zeros.
    flushes : bool
        Whether subnormal results become zeros.
    """
    at_once = _rows_at_once(shape)

    def rows(operands: list[Array]) -> Array:
        if flushed is not None:
            operands = [
                flush(operand) if chosen else operand
                for operand, chosen in zip(operands, flushed, strict=True)
            ]
        result = function(*operands)
        return flush(result) if flushes else result

    if at_once == 1:
        return [rows([o[i] if _is_stack(o) else o for o in operands]) for i in range(count)]
    if count <= at_once:
        return rows(list(operands))
    result = np.empty((count, *shape), dtype)
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        result[part] = rows([o[part] if o.ndim == 3 else o for o in operands])
    return result
