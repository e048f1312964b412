"""README's table that follows from the code, and its examples.

``python tests/support/readme.py`` writes the table anew; a test says when it is stale.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import cupyattn
from cupyattn.ops.attention.choice import IMPLEMENTATIONS
from cupyattn.ops.attention.reference.scores import ScoreBlocks

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
WRITTEN_BY = "tests/support/readme.py"

Implementation = tuple[str, str]
"""Name and dtype."""
Registered = Mapping[str, Mapping[Implementation, Collection[str]]]
"""The options of each implementation of each function."""

CPU = "NumPy arrays on a CPU"
# What says how a call runs and what it returns, not what it computes.
NO_OPTIONS = {"seed", "return_lse", "implementation", "accumulator", "out", "workspace"}
OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(cupyattn.attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in NO_OPTIONS
)


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
    """Put what a script writes between the marks of its name."""
    begin, end = f"<!-- {name}: written by {written_by} -->\n", f"<!-- {name}: end -->\n"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"a text without the lines {begin!r} and {end!r}")
    return before + begin + content + end + after


def registered() -> dict[str, dict[Implementation, Collection[str]]]:
    """Return what the kernels have."""
    return {function: {**kernels} for function, kernels in IMPLEMENTATIONS.items()}


def reference_options() -> set[str]:
    """Return what the CPU path has."""
    return {field.name for field in fields(ScoreBlocks) if field.init}


def options_table(functions: Registered, cpu: Collection[str], options: Collection[str]) -> str:
    """Return which implementations have which options.

    Implementations with the same options share a column, options with the same implementations a
    row.
    """
    columns = {
        f"`{function}`: {_names(implementations, having)}": having
        for function, implementations in functions.items()
        for having in dict.fromkeys(map(frozenset, implementations.values()))
    }
    columns[CPU] = frozenset(cpu)
    rows: dict[tuple[str, ...], list[str]] = {}
    for option in options:
        cells = tuple("yes" if option in having else "-" for having in columns.values())
        rows.setdefault(cells, []).append(f"`{option}`")
    return table(
        ("option", *columns), [(", ".join(names), *cells) for cells, names in rows.items()]
    )


def _names(
    implementations: Mapping[Implementation, Collection[str]], options: frozenset[str]
) -> str:
    """Name those that have just these options, with their dtypes where others have not."""
    dtypes: dict[str, list[str]] = {}
    for (name, dtype), having in implementations.items():
        if frozenset(having) == options:
            dtypes.setdefault(name, []).append(dtype)
    every = {name: [dtype for other, dtype in implementations if other == name] for name in dtypes}
    return ", ".join(
        f'"{name}"' + ("" if of == every[name] else f" ({', '.join(of)})")
        for name, of in dtypes.items()
    )


WEIGHTS = 'models.load("smollm2")'


def examples(*, with_weights: bool = False) -> list[str]:
    """Return README's examples in Python: those that need a package of weights, or all others."""
    text = README.read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return [example for example in found if (WEIGHTS in example) == with_weights]


def with_options(text: str) -> str:
    """Return README's text with its table of options as it is now."""
    options = options_table(registered(), reference_options(), OPTIONS)
    return between(text, "options", WRITTEN_BY, options)


if __name__ == "__main__":
    README.write_text(with_options(README.read_text(encoding="utf-8")), encoding="utf-8")
