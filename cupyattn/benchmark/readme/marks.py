"""Tables of Markdown, between the marks that say who writes them."""

from __future__ import annotations

from collections.abc import Sequence

from cupyattn.errors import error


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table.

    Examples
    --------
    >>> print(table(("D", "TFLOP/s"), [("64", "284")]), end="")
    | D | TFLOP/s |
    | --- | --- |
    | 64 | 284 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def between(text: str, name: str, written_by: str, content: str) -> str:
    """Put what a command writes between the marks of its name.

    Raises
    ------
    ValueError
        If they are not there.
    """
    begin, end = f"<!-- {name}: written by {written_by} -->\n", f"<!-- {name}: end -->\n"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise error(
            ValueError,
            f"a text without marks for the table {name}",
            f"they are the lines {begin!r} and {end!r}",
            "put them where the table belongs",
        )
    return before + begin + content + end + after
