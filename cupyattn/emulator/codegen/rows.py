"""Rows of stacks: many registers in one array, and the expressions that bring them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Row", "gather"]


@dataclass(eq=False, slots=True)
class Row:
    """A value of the lanes: the expression that gives it, perhaps a row of a stack.

    The expression is empty as long as nothing has been written that computes the value.
    """

    expression: str = ""
    stack: str = ""
    index: int = 0


def gather(rows: Sequence[Row], dtype: str) -> str:
    """Return an expression for the stack of `rows`, or for the one row that they all are."""
    distinct = {row.expression: row for row in rows}
    if len(distinct) == 1:
        return rows[0].expression
    if len({row.stack for row in rows}) == 1 and rows[0].stack:
        found = _runs(rows)
        if len(found) == 1:
            return found[0]
        return f"pick({rows[0].stack}, {[row.index for row in rows]})"
    if 2 * len(distinct) <= len(rows):
        order = {expression: i for i, expression in enumerate(distinct)}
        every = gather(list(distinct.values()), dtype)
        return f"pick({every}, {[order[row.expression] for row in rows]})"
    return f"pile(({', '.join(_runs(rows))},), {len(rows)}, shape, {dtype})"


def _runs(rows: Sequence[Row]) -> list[str]:
    """Return expressions for `rows`: slices of stacks where several follow each other."""
    found = []
    start = 0
    while start < len(rows):
        first = rows[start]
        end, step = start + 1, 0
        while end < len(rows) and first.stack and rows[end].stack == first.stack:
            ahead = rows[end].index - rows[end - 1].index
            if ahead < 1 or step not in (0, ahead):
                break
            step = ahead
            end += 1
        if end - start > 1:
            stop = rows[end - 1].index + 1
            found.append(f"{first.stack}[{first.index}:{stop}{f':{step}' if step > 1 else ''}]")
        else:
            found.append(first.expression)
        start = end
    return found
