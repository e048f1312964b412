"""What a chart of attention's speed shows, gathered from the benchmarks' results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.benchmark.attention.cases import PLAIN
from cupyattn.benchmark.attention.table import contender_name
from cupyattn.benchmark.torch_peer import TORCH
from cupyattn.errors import error
from cupyattn.ops.attention.options import IMPLEMENTATIONS

_DIRECTIONS = {"attention": "forward", "attention_backward": "backward"}


class Panel(NamedTuple):
    """One of the four parts of a chart."""

    direction: str
    causal: bool

    @property
    def title(self) -> str:
        """What stands above it."""
        return f"{self.direction}, causal" if self.causal else self.direction


PANELS = tuple(
    Panel(direction, causal) for direction in _DIRECTIONS.values() for causal in (False, True)
)

Bars = Mapping[int, float | None]
"""TFLOP/s by head dim; None where the contender has no kernel."""


@dataclass(frozen=True)
class Figures:
    """TFLOP/s of one device, one dtype and one length."""

    device: str
    codes: tuple[str, ...]
    """Targets of the code that ran, such as "compute_75"."""
    dates: tuple[str, ...]
    dtype: str
    seqlen: int
    panels: Mapping[Panel, Mapping[str, Bars]]
    """The bars of each contender, in those of `PANELS` that have any."""

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Every head dim of every contender, in order."""
        every = [bars for panel in self.panels.values() for bars in panel.values()]
        return tuple(sorted({head_dim for bars in every for head_dim in bars}))

    @property
    def contenders(self) -> tuple[str, ...]:
        """Every contender, in the order of the results."""
        return tuple(dict.fromkeys(name for panel in self.panels.values() for name in panel))

    @property
    def caption(self) -> str:
        """What belongs to every figure: device, code, problem, date."""
        code = f" running {', '.join(self.codes)} code" if self.codes else ""
        first, last = min(self.dates), max(self.dates)
        when = first if first == last else f"{first} to {last}"
        return f"{self.device}{code}; {self.dtype}, sequences of {self.seqlen} tokens; {when}"


def results_in(file: Path) -> list[dict[str, Any]]:
    """Return the results that a file holds.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise _not_results(file, f"is no JSON file ({failure})") from None
    results = content if isinstance(content, list) else [content]
    for result in results:
        if not isinstance(result, dict) or result.get("command") not in _DIRECTIONS:
            raise _not_results(file, "holds something else")
    return results


def _not_results(file: Path, what: str) -> ValueError:
    return error(
        ValueError,
        f"{file} {what}",
        f"it is what {' and '.join(_DIRECTIONS)} write with --json, or a list of that",
        "write one with python -m cupyattn.benchmark attention --json FILE",
    )


def figures_of(results: Sequence[Mapping[str, Any]]) -> Figures:
    """Gather the plain and the causal calls of some results, at the longest length among them.

    Parameters
    ----------
    results : sequence of dict
        What the benchmarks attention and attention_backward measured.

    Raises
    ------
    ValueError
        If there are none, if they are of several devices or dtypes, or if two are of one bar.
    """
    every = [
        (result, row)
        for result in results
        for row in result["rows"]
        if row["option"] in (PLAIN, "causal")
    ]
    longest = max((row["seqlen"] for _, row in every), default=0)
    rows = [(result, row) for result, row in every if row["seqlen"] == longest]
    panels: dict[Panel, dict[str, dict[int, float | None]]] = {panel: {} for panel in PANELS}
    for result, row in rows:
        causal = row["causal"] or row["option"] == "causal"
        panel = panels[Panel(_DIRECTIONS[result["command"]], causal)]
        name, head_dim = _name_of(row), row["head_dim"]
        bars = panel.setdefault(name, {})
        if head_dim in bars:
            raise error(
                ValueError,
                f"two figures of {name} at head dim {head_dim}",
                "a chart has one bar for each contender and head dim",
                "leave one of the results out",
            )
        bars[head_dim] = row.get("tflops")
    return Figures(
        device=_one_of("device", (result["device"] for result, _ in rows)),
        codes=tuple(sorted({code for result, _ in rows for code in result["code"]})),
        dates=tuple(sorted({result["date"] for result, _ in rows})),
        dtype=_one_of("dtype", (row["dtype"] for _, row in rows)),
        seqlen=longest,
        panels={panel: bars for panel, bars in panels.items() if bars},
    )


def _name_of(row: Mapping[str, Any]) -> str:
    name = contender_name(row)
    if row["implementation"] in IMPLEMENTATIONS:
        return f"cupyattn {name}"
    return "PyTorch" if row["implementation"] == TORCH else name


def _one_of(what: str, names: Iterable[str]) -> str:
    distinct = sorted(set(names))
    if not distinct:
        raise error(
            ValueError,
            "no plain or causal call among the results",
            "a chart shows those",
            "pass what python -m cupyattn.benchmark attention --json FILE wrote",
        )
    if len(distinct) > 1:
        raise error(
            ValueError,
            f"figures of {len(distinct)} {what}s: {', '.join(distinct)}",
            f"a chart compares what ran on one {what}" if what == "device" else "a chart has one",
            f"draw a chart for each {what}",
        )
    return distinct[0]
