"""What changed between two runs, beyond noise."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.benchmark.frame.rows import labels_of, median_of
from cupyattn.benchmark.frame.table import label_text, seconds_text
from cupyattn.cli.terminal import Result, emit

LEAST = 0.03
RULE = (
    "rows are matched by their labels, and a median has changed if it differs by more than the "
    f"larger of {LEAST:.0%} and the two rows' standard deviations, combined as the root of the sum "
    "of their squares"
)


class Change(NamedTuple):
    """A row of both runs: its labels, the medians, and what noise could have made of them."""

    labels: Mapping[str, Any]
    old_s: float
    new_s: float
    noise_s: float

    @property
    def real(self) -> bool:
        """Whether it is beyond noise."""
        return abs(self.new_s - self.old_s) > self.noise_s


class Comparison(NamedTuple):
    """The rows of both runs, and how many only one of them has."""

    both: list[Change]
    only_old: int
    only_new: int


def compared(old: Iterable[Result], new: Iterable[Result]) -> Comparison:
    """Match the rows of two runs by command and labels.

    Examples
    --------
    >>> times = {"p50_s": 1.0, "std_s": 0.01}
    >>> def run(seconds):
    ...     row = {"M": 8, "contender": "cupyattn", "times": {**times, "p50_s": seconds}}
    ...     return [{"command": "linear", "rows": [row]}]
    >>> [compared(run(1.0), run(seconds)).both[0].real for seconds in (1.02, 1.04)]
    [False, True]
    """
    before, after = dict(_by_labels(old)), dict(_by_labels(new))
    both = [
        Change({"command": name[0], **labels_of(row)}, *_figures(before[name], row))
        for name, row in after.items()
        if name in before
    ]
    return Comparison(both, len(before) - len(both), len(after) - len(both))


def _by_labels(results: Iterable[Result]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for result in results:
        for row in result.get("rows", ()):
            if median_of(row):
                yield (result["command"], json.dumps(labels_of(row), sort_keys=True)), row


def _figures(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[float, float, float]:
    spread = math.hypot(old["times"].get("std_s", 0.0), new["times"].get("std_s", 0.0))
    was = float(old["times"]["p50_s"])
    return was, float(new["times"]["p50_s"]), max(LEAST * was, spread)


def show_changes(new: Iterable[Result], old: Iterable[Result], old_file: Path) -> None:
    """Print what changed since a file was written, of which `old` was read."""
    comparison = compared(old, new)
    changed = [change for change in comparison.both if change.real]

    def show(result: Result, terminal: Any) -> None:
        terminal.title(f"Since {old_file}")
        if changed:
            terminal.table(
                ("row", "old", "new", "new / old", "noise"),
                [
                    (
                        label_text(change.labels),
                        seconds_text(change.old_s),
                        seconds_text(change.new_s),
                        f"{change.new_s / change.old_s:.2f}",
                        f"{change.noise_s / change.old_s:.0%}",
                    )
                    for change in sorted(changed, key=lambda each: each.new_s / each.old_s)
                ],
            )
        terminal.text(
            f"  {len(changed)} of {len(comparison.both)} rows changed: {RULE}. "
            f"{comparison.only_old} rows are in {old_file} alone, {comparison.only_new} are new."
        )

    sys.stdout.flush()
    emit({}, show, as_json=False)
