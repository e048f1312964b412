"""Lines along a length: a panel for each case without it, a line for each contender."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from cupyattn.benchmark.plot import labels
from cupyattn.benchmark.plot.chart import Chart, Reference, tick
from cupyattn.benchmark.plot.inks import Ink, inks
from cupyattn.benchmark.plot.style import LEFT, RIGHT, WIDTH, Key, Page, Theme

_COLUMNS = 2
_PANEL = 1.75  # how high
_TITLE, _BELOW = 0.3, 0.3
_BESIDE = 0.62  # room for the numbers of an axis
_MOST_ROWS = 4  # of panels, on a page
_ALIKE = 0.01
"""By what share of a value two lines differ that cannot be told apart."""
_AXES = {"seqlen": "tokens of a sequence", "context": "keys", "M": "rows (M)", "width": "width"}

Cases = Sequence[Mapping[str, Any]]


def draw(
    chart: Chart, along: str, theme: Theme, guides: Sequence[Reference] = ()
) -> Iterator[Page]:
    """Yield the pages; `guides` are powers of the length, drawn from the first point on."""
    every = sorted(labels.panels(chart.cases, along), key=lambda panel: len(panel) == 1)
    named = list(zip(labels.titles(every, along), every, strict=True))
    step = _COLUMNS * _MOST_ROWS
    count = -(-len(every) // step)
    for number in range(count):
        of = f" ({number + 1}/{count})" if count > 1 else ""
        some = named[number * step : (number + 1) * step]
        shown = chart.on_page([case for _, cases in some for case in cases])
        yield _page(shown, along, some, of, theme, guides)


def _page(
    chart: Chart,
    along: str,
    panels: Sequence[tuple[str, Cases]],
    of: str,
    theme: Theme,
    guides: Sequence[Reference],
) -> Page:
    looks = inks(chart.contenders, theme)
    under = coinciding(chart)
    keys = [
        Key(f"{name}: as {under[name]}" if name in under else name, looks[name].line(theme))
        for name in chart.present
    ]
    keys += [Key(guide.name, _guide_line(theme, n)) for n, guide in enumerate(guides)]
    if chart.reference is not None:
        keys.append(Key(chart.reference.name, _guide_line(theme, 0)))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    high = _TITLE + _PANEL + _BELOW
    length = _AXES.get(along, along)
    gaps = "; a gap: no kernel, or no room" if chart.any_failed else ""
    caption = f"{chart.caption}; along {length}{gaps}"
    page = Page(chart.title + of, caption, keys, rows * high, theme)
    wide = (WIDTH - LEFT - RIGHT) / columns
    for number, (title, cases) in enumerate(panels):
        row, column = divmod(number, columns)
        left = LEFT + column * wide
        axes = page.axes(left + _BESIDE, row * high + _TITLE, wide - _BESIDE - 0.1, _PANEL)
        page.text(left + _BESIDE, page.top + row * high + _TITLE - 0.08, title, size=9)
        _panel(axes, chart, along, cases, looks, theme, guides)
    return page


def coinciding(chart: Chart) -> dict[str, str]:
    """Return the contenders whose lines lie below another's, wherever they are on a page."""
    found: dict[str, str] = {}
    for one, other in combinations(chart.present, 2):
        pairs = [(chart.of(case, one), chart.of(case, other)) for case in chart.cases]
        drawn = [(above, value) for above, value in pairs if value is not None]
        alike = all(above is not None and _alike(above, value) for above, value in drawn)
        if drawn and alike and one not in found:
            found.setdefault(other, one)
    return found


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _ALIKE * max(abs(one), abs(other))


def _panel(
    axes: Any,
    chart: Chart,
    along: str,
    cases: Cases,
    looks: Mapping[str, Ink],
    theme: Theme,
    guides: Sequence[Reference],
) -> None:
    lengths = [case[along] for case in cases]
    axes.set_xscale("log", base=2)
    for name, ink in reversed(list(looks.items())):  # the first lies above the others
        values = [chart.of(case, name) for case in cases]
        if any(value is not None for value in values):
            there = [float("nan") if value is None else value for value in values]
            axes.plot(lengths, there, clip_on=False, zorder=3, **ink.line(theme))
    for number, guide in enumerate(guides):
        powers = [(length / lengths[0]) ** guide.value for length in lengths]
        axes.plot(lengths, powers, zorder=1, **_guide_line(theme, number))
    if chart.reference is not None:
        axes.axhline(chart.reference.value, zorder=1, **_guide_line(theme, 0))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    _scale(axes, chart)
    axes.margins(x=0.03)


def _scale(axes: Any, chart: Chart) -> None:
    """Give every panel of a page the same axis."""
    axis = chart.axis
    axes.set_yscale(**chart.scale.arguments)
    axes.set_ylim(axis.low, axis.high)
    if axis.ticks is not None:
        axes.set_yticks(axis.ticks)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: tick(chart, value))


def _guide_line(theme: Theme, number: int) -> dict[str, Any]:
    dashes = ((0, (1, 1.5)), (0, (6, 3)))[number]
    return {"color": theme.text, "linewidth": 0.9, "linestyle": dashes}
