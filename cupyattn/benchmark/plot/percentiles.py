"""How even the times of one call are: from the fastest to the 99th percentile, over the median."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cupyattn.benchmark.plot import bars, labels
from cupyattn.benchmark.plot.chart import LOGARITHMIC, Chart, chart_of, key_of, seconds
from cupyattn.benchmark.plot.inks import Ink
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import Page, Pages, Theme

_WITHOUT = "without short calls, of which a sample is a mean of several"
_LEGEND = "mark: the median, which stands behind; line: the fastest to p99; thick: to p95"
_NAMES = ("min", "p50", "p95", "p99")


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the picture by its name."""
    return {"percentiles": partial(_draw, measured)}


def _draw(measured: Measured, theme: Theme) -> Iterator[Page]:
    cases = list({row.key: row.case for row in measured.rows}.values())
    along = labels.length_of(cases)
    longest = cases if along is None else [panel[-1] for panel in labels.panels(cases, along)]
    keys = set(map(key_of, longest))
    rows = {
        (row.key, row.contender): row
        for row in measured.rows
        if row.key in keys and _share(row, "p99")
    }
    chart = chart_of(
        replace(measured, rows=tuple(rows.values())),
        "times of single calls over their median",
        lambda row: _share(row, "p99"),
        lambda value: f"{value:.3g}",
        scale=LOGARITHMIC,
    )
    if chart is None:
        return

    def mark(
        axes: Any,
        chart: Chart,
        case: bars.Case,
        name: str,
        y: float,
        ink: Ink,
        theme: Theme,
    ) -> None:
        row = rows[key_of(case), name]
        least, p95, p99 = (_share(row, name) for name in ("min", "p95", "p99"))
        axes.plot([least, p99], [y, y], color=ink.colour, linewidth=1, solid_capstyle="butt")
        axes.plot([1, p95], [y, y], color=ink.colour, linewidth=4, solid_capstyle="butt")
        axes.plot([p99], [y], color=ink.colour, marker="|", markersize=7, markeredgewidth=1.5)
        axes.plot([1], [y], zorder=3, **ink.points(theme))
        bars.write_behind(axes, p99 or 1, y, seconds(row.time("p50") or 0), theme)

    least = min(_share(row, "min") or 1 for row in rows.values())
    without = f"; {_WITHOUT}" if any(map(_of_means, measured.rows)) else ""
    chart = replace(chart, caption=f"{chart.caption}; {_LEGEND}{without}", also=(least,))
    yield from bars.draw(chart, theme, mark=mark)


def _of_means(row: Row) -> bool:
    """Whether calls were timed several at a time: their means differ less than they do."""
    return bool(row.figures.get("times", {}).get("calls_per_sample", 1) > 1)


def _share(row: Row, name: str) -> float | None:
    """Return a percentile over the median; None where not all are there, or are of means."""
    times = [row.time(each) for each in _NAMES]
    if None in times or _of_means(row):
        return None
    return (row.time(name) or 0) / (row.time("p50") or 1)
