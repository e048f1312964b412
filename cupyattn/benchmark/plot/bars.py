"""Bars, a group for each case and one in it for each contender, with the value behind each.

Where the axis is logarithmic, and nothing is zero, points stand instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cupyattn.benchmark.plot import labels
from cupyattn.benchmark.plot.chart import LOGARITHMIC, Chart, tick
from cupyattn.benchmark.plot.inks import Ink, inks
from cupyattn.benchmark.plot.style import (
    LEFT,
    NO_FIGURE,
    RIGHT,
    SMALL,
    WIDTH,
    Key,
    Page,
    Theme,
    no_figure,
    width_of,
    wrapped,
)

Case = Mapping[str, Any]
Mark = Callable[[Any, Chart, Case, str, float, Ink, Theme], None]
"""Draws a value that is there: axes, chart, case, contender, y, its look, theme."""

LINE = 0.145  # of one contender
_GAP = 0.2  # between two cases
_TEXT_LINE = 0.14
_LONGEST_NAME = 2.6
_BEHIND = 0.75  # for the value behind the longest bar
_TALLEST = 10.0  # what is higher goes on another page
_AXIS = 0.3


def bar(axes: Any, chart: Chart, case: Case, name: str, y: float, ink: Ink, theme: Theme) -> None:
    """Draw a bar, or a point, and the value behind it."""
    value = chart.of(case, name)
    assert value is not None
    if chart.scale is LOGARITHMIC:
        axes.plot(value, y, zorder=3, **ink.points(theme))
    else:
        axes.barh(y, value, height=0.82 * LINE, **ink.bar(theme))
    write_behind(axes, value, y, chart.show(value), theme)


def write_behind(axes: Any, x: float, y: float, text: str, theme: Theme) -> None:
    """Write a value behind its mark."""
    axes.annotate(
        text, (x, y), xytext=(6.5, -0.4), textcoords="offset points", va="center",
        fontsize=7, color=theme.text, annotation_clip=False, zorder=4,
        bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 0.3},
    )  # fmt: skip


def draw(chart: Chart, theme: Theme, *, mark: Mark = bar) -> Iterator[Page]:
    """Yield the pages."""
    names = labels.distinguishing(chart.cases)
    pages = list(_pages(chart, names))
    for number, cases in enumerate(pages, 1):
        of = f" ({number}/{len(pages)})" if len(pages) > 1 else ""
        yield _page(chart, cases, names, of, theme, mark)


def _pages(chart: Chart, names: Sequence[str]) -> Iterator[list[Case]]:
    """Cut the cases where a page is full, into parts about as high as each other."""
    heights = [_height(chart, case, names) for case in chart.cases]
    full = sum(heights) / -(-sum(heights) // _TALLEST)
    page: list[Case] = []
    high = done = 0.0
    for case, height in zip(chart.cases, heights, strict=True):
        if page and done + high + height / 2 > full * (1 + round(done / full)):
            yield page
            page, done, high = [], done + high, 0.0
        page.append(case)
        high += height
    yield page


def _asked(chart: Chart, case: Case) -> list[str]:
    return [
        name
        for name in chart.contenders
        if chart.of(case, name) is not None or chart.failed(case, name)
    ]


def _lines_of(case: Case, names: Sequence[str]) -> list[str]:
    """Return the lines of text that stand before a case."""
    return wrapped(labels.text_of(case, names), _LONGEST_NAME, SMALL)


def _height(chart: Chart, case: Case, names: Sequence[str]) -> float:
    lines = len(_lines_of(case, names))
    return max(LINE * len(_asked(chart, case)), _TEXT_LINE * lines) + _GAP


def _page(
    chart: Chart,
    cases: Sequence[Case],
    names: Sequence[str],
    of: str,
    theme: Theme,
    mark: Mark,
) -> Page:
    every = chart
    chart = chart.on_page(cases)
    looks = inks(chart.contenders, theme)
    points = chart.scale is LOGARITHMIC
    keys = [
        Key(name, looks[name].points(theme) if points else looks[name].patch(theme))
        for name in chart.present
    ]
    if chart.any_failed:
        keys.append(no_figure(theme))
    body = sum(_height(chart, case, names) for case in cases)
    above = 0.16 if chart.reference else 0.0
    page = Page(chart.title + of, chart.caption, keys, above + body + _AXIS, theme)
    lines = [line for case in every.cases for line in _lines_of(case, names)]
    left = LEFT + max(width_of(line, SMALL) for line in lines) + 0.12
    axes = page.axes(left, above, WIDTH - left - RIGHT - _BEHIND, body)
    axes.set_ylim(body, 0)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    y = 0.0
    for case in cases:
        high = _height(chart, case, names)
        _write_name(page, left, page.top + above + y + high / 2, _lines_of(case, names))
        asked = _asked(chart, case)
        start = y + (high - LINE * len(asked)) / 2
        for number, name in enumerate(asked):
            at = start + LINE * (number + 0.5)
            if chart.of(case, name) is None:
                _cross(axes, at, looks[name])
            else:
                mark(axes, chart, case, name, at, looks[name], theme)
        y += high
        axes.axhline(y, color=theme.faint, linewidth=0.6, zorder=0)
    _scale(axes, chart)
    if chart.reference is not None:
        _reference(axes, chart.reference.value, chart.reference.name, theme)
    return page


def _write_name(page: Page, left: float, middle: float, lines: Sequence[str]) -> None:
    first = middle + 0.04 - _TEXT_LINE * (len(lines) - 1) / 2
    for number, line in enumerate(lines):
        page.text(left - 0.08, first + _TEXT_LINE * number, line, ha="right")


def _cross(axes: Any, y: float, ink: Ink) -> None:
    share = axes.get_yaxis_transform()  # x as a share of the axes
    axes.plot(0.008, y, NO_FIGURE, color=ink.colour, transform=share, clip_on=False, markersize=5)


def _scale(axes: Any, chart: Chart) -> None:
    axis = chart.axis
    axes.set_xscale(**chart.scale.arguments)
    axes.set_xlim(axis.low, axis.high)
    if axis.ticks is not None:
        axes.set_xticks(axis.ticks)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: tick(chart, value))


def _reference(axes: Any, value: float, name: str, theme: Theme) -> None:
    axes.axvline(value, color=theme.text, linewidth=1, linestyle=(0, (1, 1.5)), zorder=3)
    axes.annotate(
        name, (value, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), ha="center",
        textcoords="offset points", fontsize=7, color=theme.text, annotation_clip=False,
    )  # fmt: skip
