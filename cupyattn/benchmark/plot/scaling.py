"""How the time grows with the length: times that of the shortest, beside n and n squared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyattn.benchmark.plot import labels, lines
from cupyattn.benchmark.plot.chart import LOGARITHMIC, Reference, chart_of, key_of, thousands
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import Page, Pages, Theme

_FEWEST = 3
_GUIDES = (Reference(1, "as the length"), Reference(2, "as its square"))


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the picture by its name; two lengths are no curve."""
    cases = [row.case for row in measured.rows]
    along = labels.length_of(cases)
    if along is None:
        return {}
    times = {(row.key, row.contender): row.time("p50") for row in measured.rows}
    shortest: dict[tuple[Any, str], float] = {}
    for panel in labels.panels(list({row.key: row.case for row in measured.rows}.values()), along):
        for name in measured.contenders:
            there = [found for case in panel if (found := times.get((key_of(case), name)))]
            if len(there) >= _FEWEST:
                shortest.update({(key_of(case), name): there[0] for case in panel})

    def growth(row: Row) -> float | None:
        taken, first = row.time("p50"), shortest.get((row.key, row.contender))
        return None if taken is None or first is None else taken / first

    def pages(theme: Theme) -> Iterator[Page]:
        title = "how the time grows, times that of the shortest"
        chart = chart_of(measured, title, growth, thousands, scale=LOGARITHMIC)
        if chart is not None:
            yield from lines.draw(chart, along, theme, _GUIDES)

    return {"scaling": pages}
