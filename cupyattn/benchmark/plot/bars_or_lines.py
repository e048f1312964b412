"""A chart drawn as its cases suit: as lines along a length, or as bars."""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.benchmark.plot import bars, labels, lines
from cupyattn.benchmark.plot.chart import Chart
from cupyattn.benchmark.plot.style import Page, Theme

_FEW = 2
"""So many lengths are bars still; more are a line."""


def draw(chart: Chart | None, theme: Theme) -> Iterator[Page]:
    """Draw lines along the length where most cases have several lengths, bars otherwise."""
    if chart is None:
        return
    along = labels.length_of(chart.cases)
    panels = [] if along is None else labels.panels(chart.cases, along)
    if along is not None and 2 * sum(len(panel) > _FEW for panel in panels) > len(panels):
        yield from lines.draw(chart, along, theme)
    else:
        yield from bars.draw(chart, theme)
