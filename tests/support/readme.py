"""README's tables that follow from the code and from recorded figures.

``python tests/support/readme.py`` writes them anew; a test says when one is stale.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import cupyattn
from cupyattn.benchmark.plot.figures import Figures, Panel, figures_of, results_in
from cupyattn.ops.attention import backward, forward, varlen
from cupyattn.reference.attention.scores import ScoreBlocks

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
MEASURED = ROOT / ".github" / "speed.json"
MODELLED = ROOT / "tests" / "figures" / "sm_75.json"

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


def registered() -> dict[str, dict[Implementation, Collection[str]]]:
    """Return what the kernels have."""
    functions = {
        "attention": forward.IMPLEMENTATIONS,
        "attention_backward": backward.IMPLEMENTATIONS,
        "attention_varlen": varlen.FORWARD,
        "attention_varlen_backward": varlen.BACKWARD,
    }
    return {
        function: {key: each.options for key, each in implementations.items()}
        for function, implementations in functions.items()
    }


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
    return _markdown(
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


def speed_table(measured: Figures, modelled: Mapping[str, Any]) -> str:
    """Return TFLOP/s, plain / causal, of each contender, and the model's T4."""
    columns = [
        (direction, contender)
        for direction in ("forward", "backward")
        for contender in measured.contenders
    ]
    rows = [
        (
            str(head_dim),
            *(_speed(measured, direction, contender, head_dim) for direction, contender in columns),
            " / ".join(_utilisation(modelled, head_dim)),
        )
        for head_dim in measured.head_dims
    ]
    heads = [f"{direction}: {contender}" for direction, contender in columns]
    return _markdown(("head dim", *heads, "T4, modelled: forward / backward"), rows)


def _speed(measured: Figures, direction: str, contender: str, head_dim: int) -> str:
    """Return what was measured, "none" where there is no kernel, and nothing for the rest."""
    bars = [
        measured.panels[Panel(direction, causal)].get(contender, {}) for causal in (False, True)
    ]
    if not all(head_dim in of for of in bars):
        return ""
    figures = [of[head_dim] for of in bars]
    return "none" if None in figures else " / ".join(f"{figure:.0f}" for figure in figures)


def _utilisation(modelled: Mapping[str, Any], head_dim: int) -> tuple[str, str]:
    """Return the tensor cores' utilisation in the forward's and the one-pass backward's loop."""
    of_row = {
        (kernel["kernel"].removesuffix("_paired"), kernel["row"]): kernel["main"]["utilisation"]
        for kernel in modelled["rows"]
    }
    forward = of_row["attention_forward", f"D {head_dim}"]
    backward = of_row["attention_backward_dkdv", f"D {head_dim}, ONE_PASS"]
    return f"{forward['mean']:.2f}", f"{backward['mean']:.2f}"


WEIGHTS = 'models.load("smollm2")'


def examples(*, with_weights: bool = False) -> list[str]:
    """Return README's examples in Python: those that need a package of weights, or all others."""
    text = README.read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return [example for example in found if (WEIGHTS in example) == with_weights]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables() -> dict[str, str]:
    """Return every table by its name in README."""
    return {
        "options": options_table(registered(), reference_options(), OPTIONS),
        "speed": speed_table(
            figures_of(results_in(MEASURED)), json.loads(MODELLED.read_text(encoding="utf-8"))
        ),
    }


def with_table(text: str, name: str, table: str) -> str:
    """Put a table between the marks of its name."""
    begin, end = f"<!-- {name}: written by tests/support/readme.py -->\n", f"<!-- {name}: end -->\n"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"README has no marks for the table {name}: {begin!r} and {end!r}")
    return before + begin + table + end + after


def with_tables(text: str) -> str:
    """Return README's text with every table as it is now."""
    for name, table in tables().items():
        text = with_table(text, name, table)
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
