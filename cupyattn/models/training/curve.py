"""The result of each step as lines of JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupyattn.models.checkpoints.writing import write_whole
from cupyattn.models.extras import extra
from cupyattn.models.training.checkpoint import way_on
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, explaining, shown
from cupyattn.runtime.reading import lines_of, parsed

_LONGEST_LINE = 1 << 16
_SMOOTHING = 0.9
_ENOUGH = 30  # steps: the mean of fewer lags
_INCHES = 8.0, 4.0
_PIXELS_PER_INCH = 150
_COLOURS = "#56b4e9", "#0072b2", "#d55e00"
"""Okabe and Ito's, which colour-blind readers tell apart ("Color Universal Design", 2008)."""


class StepLog:
    """A file with a line for each step.

    Lines after step `until`, from which a training goes on, are dropped; 0 starts a new file.
    Errors name the folder of checkpoints to resume from.
    """

    def __init__(self, path: Path, until: int, checkpoints: Path) -> None:
        self.path = path
        self.checkpoints = checkpoints
        with explaining(
            f"no losses in {path}",
            "lines of earlier steps are kept, and lines of repeated steps are removed",
            "make room, or move away the file or folder of that name: losses then begin with the "
            "next step",
        ):
            kept = [row for row in read(path) if row["step"] <= until] if until else []
            lines = "".join(map(_line, kept)).encode()
            write_whole({path: lambda file: file.write(lines)})

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a line, which has a ``step``."""
        with (
            explaining(
                f"{self.path} of step {row['step']}",
                "the loss of each step is written",
                lambda: way_on(self.checkpoints),
            ),
            self.path.open("a", encoding="utf-8") as file,
        ):
            file.write(_line(row))


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(row) + "\n"


def read(path: Path) -> list[Json]:
    """Return the lines of a file, none if there is no file.

    The last line may be incomplete, if a process ended while it wrote, and is then left out.
    """
    rows: list[Json] = []
    wrong = None
    for number, line in lines_of(path, _LONGEST_LINE, _damaged) if path.exists() else ():
        if wrong is not None:
            raise wrong
        where = f"line {number} of {path}"
        try:
            row = parsed(line, where, _damaged)
        except ValueError:
            row = None
        if _is_row(row):
            rows.append(row)
        else:
            wrong = _wrong(f"{where} is {shown(line.rstrip())}")
    return rows


def _damaged(where: str, what: str) -> ValueError:
    return _wrong(f"{where}: {what}")


def _wrong(line: str) -> ValueError:
    return error(
        ValueError,
        line,
        'a line is an object with a "step" and its "loss" or "eval_loss"',
        "put the file back as it was, or move it away: losses then begin with the next step",
    )


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    losses = [row[name] for name in ("loss", "eval_loss") if name in row]
    return bool(losses) and all(isinstance(loss, int | float | None) for loss in losses)


def smoothed(losses: list[float]) -> list[float]:
    """Return the exponential means of losses, without a bias towards the first."""
    found, total, weight = [], 0.0, 0.0
    for loss in losses:
        total = _SMOOTHING * total + loss
        weight = _SMOOTHING * weight + 1
        found.append(total / weight)
    return found


def draw(rows: list[Json], path: Path, title: str) -> None:
    """Draw the losses of all steps, and those of samples that are held back, as a PNG."""
    drawing = extra(
        "matplotlib.figure", "draws the losses (they are in the .jsonl file too)", "training"
    )
    steps = [row for row in rows if row.get("loss") is not None and not row.get("skipped")]
    looked_at = [row for row in rows if "eval_loss" in row]
    figure = drawing.Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    numbers, losses = [row["step"] for row in steps], [row["loss"] for row in steps]
    one, mean, held = _COLOURS
    axes.plot(numbers, losses, color=one, linewidth=0.8, label="of each step")
    if len(steps) >= _ENOUGH:
        axes.plot(numbers, smoothed(losses), color=mean, linewidth=2, label="smoothed")
    if looked_at:
        points = [row["step"] for row in looked_at], [row["eval_loss"] for row in looked_at]
        axes.plot(*points, color=held, marker="o", label="of samples held back")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write_whole({path: lambda file: figure.savefig(file, dpi=_PIXELS_PER_INCH, format="png")})
