"""The most device memory that a call takes beyond its inputs and outputs."""

from __future__ import annotations

from functools import partial

from cupyattn.benchmark.plot.bars_or_lines import draw
from cupyattn.benchmark.plot.chart import Scale, chart_of, three
from cupyattn.benchmark.plot.results import Measured
from cupyattn.benchmark.plot.style import Pages

_FROM_NOTHING: Scale = Scale("symlog", 1e6)
"""Logarithmic from a megabyte on: many calls take nothing."""


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the picture by its name."""
    title = "most memory beside inputs and outputs (less is better)"
    chart = chart_of(
        measured, title, lambda row: row.figures.get("peak_bytes"), _bytes, scale=_FROM_NOTHING
    )
    return {"memory": partial(draw, chart)}


def _bytes(value: float) -> str:
    for unit, name in ((1e3, "B"), (1e6, "KB"), (1e9, "MB")):
        if value < 0.9995 * unit:
            return f"{three(value / unit * 1e3)} {name}" if value else "0"
    return f"{three(value / 1e9)} GB"
