"""What changed between two runs, beyond noise."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.benchmark.frame.results import place_of
from cupyattn.benchmark.frame.rows import labels_of, median_of
from cupyattn.benchmark.frame.table import label_text, seconds_text
from cupyattn.cli.terminal import Result, Terminal, emit

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
    """The rows of two runs: of both, and of either alone."""

    both: list[Change]
    lost: list[tuple[Mapping[str, Any], str]]
    """Labels of what has no time any more, and why."""
    gone: list[Mapping[str, Any]]
    """Labels of what the new run does not have, of commands that it has."""
    not_run: dict[str, int]
    """Rows of commands that the new run does not have."""
    only_new: int
    elsewhere: dict[str, tuple[str, str]]
    """By command, where its rows of both runs were measured, if that differs."""
    incomparable: dict[str, tuple[str, str]]
    """By command, what its rows are, if one of the two is a model's: they are not compared."""


class _Found(NamedTuple):
    """A row of a run, and what it was measured on."""

    command: str
    row: Mapping[str, Any]
    where: str
    modelled: bool

    @property
    def labels(self) -> dict[str, Any]:
        """What tells it from others."""
        return {"command": self.command, **labels_of(self.row)}


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
    before, after = _by_labels(old), _by_labels(new)
    found = Comparison([], [], [], {}, 0, {}, {})
    run = {each.command: each for each in after.values()}
    for key, was in before.items():
        now, any_now = after.get(key), run.get(was.command)
        if not median_of(was.row):
            continue
        if any_now is None:
            found.not_run[was.command] = found.not_run.get(was.command, 0) + 1
        elif was.modelled != any_now.modelled:
            found.incomparable[was.command] = was.where, any_now.where
        elif now is None:
            found.gone.append(was.labels)
        elif not median_of(now.row):
            found.lost.append((was.labels, now.row.get("unavailable", "it has no time")))
        else:
            found.both.append(Change(was.labels, *_figures(was.row, now.row)))
            if was.where != now.where:
                found.elsewhere[was.command] = was.where, now.where
    timed = {key for key, was in before.items() if median_of(was.row)}
    fresh = sum(bool(median_of(now.row)) and key not in timed for key, now in after.items())
    return found._replace(only_new=fresh)


def _by_labels(results: Iterable[Result]) -> dict[tuple[str, str], _Found]:
    return {
        (result["command"], json.dumps(labels_of(row), sort_keys=True)): _Found(
            result["command"], row, place_of(result), bool(result.get("modelled"))
        )
        for result in results
        for row in result.get("rows", ())
        if "contender" in row
    }


def _figures(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[float, float, float]:
    spread = math.hypot(old["times"].get("std_s", 0.0), new["times"].get("std_s", 0.0))
    was = float(old["times"]["p50_s"])
    return was, float(new["times"]["p50_s"]), max(LEAST * was, spread)


def show_changes(new: Iterable[Result], old: Iterable[Result], old_file: Path) -> None:
    """Print what changed since a file was written, of which `old` was read."""
    comparison = compared(old, new)

    def show(result: Result, terminal: Terminal) -> None:
        terminal.title(f"Since {old_file}")
        _warn(comparison, terminal)
        _show_changes(comparison, old_file, terminal)

    sys.stdout.flush()
    emit({}, show, as_json=False)


def _warn(comparison: Comparison, terminal: Terminal) -> None:
    """Print where times that are compared are not of the same GPU, or are not compared."""
    for command, (was, now) in comparison.elsewhere.items():
        terminal.verdict(
            False, f"  {command} was measured elsewhere: on {was}; now on {now}. What differs need "
            "not be the code."
        )  # fmt: skip
    for command, (was, now) in comparison.incomparable.items():
        terminal.verdict(
            False, f"  {command} is not compared: of the two one is measured, and the other "
            f"modelled. It was of {was}; now it is of {now}."
        )  # fmt: skip


def _show_changes(comparison: Comparison, old_file: Path, terminal: Terminal) -> None:
    changed = [change for change in comparison.both if change.real]
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
    for labels, reason in comparison.lost:
        terminal.verdict(False, f"  now unavailable: {label_text(labels)}: {reason}")
    for labels in comparison.gone:
        terminal.verdict(False, f"  gone: {label_text(labels)}")
    for command, count in comparison.not_run.items():
        terminal.text(f"  {command} did not run: rows in {old_file} alone: {count}.")
    terminal.text(
        f"  {len(changed)} of {len(comparison.both)} rows changed: {RULE}. "
        f"Unavailable now: {len(comparison.lost)}, gone: {len(comparison.gone)}, "
        f"new: {comparison.only_new}."
    )
