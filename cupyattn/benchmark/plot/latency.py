"""The median time of a call."""

from __future__ import annotations

from functools import partial

from cupyattn.benchmark.plot.bars_or_lines import draw
from cupyattn.benchmark.plot.chart import LOGARITHMIC, chart_of, seconds
from cupyattn.benchmark.plot.results import Measured
from cupyattn.benchmark.plot.style import Pages


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the picture by its name."""
    title = "median time of a call (less is better)"
    chart = chart_of(measured, title, lambda row: row.time("p50"), seconds, scale=LOGARITHMIC)
    return {"latency": partial(draw, chart)}
