"""TFLOP/s of attention by head dim, forward and backward, plain and causal: README's picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.benchmark.plot import style
from cupyattn.benchmark.plot.inks import Ink, inks
from cupyattn.benchmark.plot.results import STEPS, Measured, Row, is_ours, ours_first, source_of
from cupyattn.benchmark.plot.style import LEFT, RIGHT, WIDTH, Key, Page, Theme

NAME = "attention-by-head-dim"
_DIRECTIONS = {"attention": "forward", "attention_backward": "backward"}
_LABELS = {"batch": int, "seqlen": int, "head_dim": int, "dtype": str}
_PANEL = 1.75
_TITLE, _BELOW = 0.3, 0.2
_BETWEEN = 1.1  # the bars of two head dims, in bars
_MOST_CONTENDERS = 6
_WIDEST = 30.0  # bars of a panel that two panels side by side have room for
_MOST_DIMS = 14  # head dims of one bar each whose numbers have room side by side

Bars = Mapping[int, float | None]
"""TFLOP/s by head dim; None where the contender has no kernel."""


class Panel(NamedTuple):
    """One of the four parts of the picture."""

    direction: str
    causal: bool

    @property
    def title(self) -> str:
        """What stands above it."""
        return f"{self.direction}, causal" if self.causal else self.direction


PANELS = tuple(
    Panel(direction, causal) for direction in _DIRECTIONS.values() for causal in (False, True)
)


@dataclass(frozen=True)
class Figures:
    """TFLOP/s of one device, one dtype and one length."""

    caption: str
    """What belongs to every figure: device, code, problem, date."""
    panels: Mapping[Panel, Mapping[str, Bars]]
    """The bars of each contender, in those of `PANELS` that have any."""

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Every head dim of every contender, in order."""
        every = [bars for panel in self.panels.values() for bars in panel.values()]
        return tuple(sorted({head_dim for bars in every for head_dim in bars}))

    @property
    def contenders(self) -> tuple[str, ...]:
        """Every contender, the library's own first."""
        return ours_first(name for panel in self.panels.values() for name in panel)


def figures_of(every: Sequence[Measured]) -> Figures | None:
    """Gather the plain and causal calls, of one dtype, at the longest length, in largest batches.

    Returns
    -------
    Figures or None
        None if no benchmark of attention is among the results.
    """
    rows = [
        (one, row)
        for one in every
        if one.command in _DIRECTIONS
        for row in one.rows
        if row.case.get("option", "plain") in ("plain", "causal")
        and not row.case.get("queries")
        and all(isinstance(row.case.get(name), kind) for name, kind in _LABELS.items())
        and (row.refused or row.figures.get("tflops") is not None)
    ]
    if not rows:
        return None
    dtype = rows[0][1].case["dtype"]
    rows = [(one, row) for one, row in rows if row.case["dtype"] == dtype]
    longest = max(row.case["seqlen"] for _, row in rows)
    panels: dict[Panel, dict[str, dict[int, float | None]]] = {panel: {} for panel in PANELS}
    for one, row in sorted(rows, key=lambda pair: pair[1].case["batch"]):
        if row.case["seqlen"] == longest:
            bars = panels[_panel(one, row)].setdefault(row.contender, {})
            bars[row.case["head_dim"]] = row.figures.get("tflops")
    source = source_of(
        rows[0][0].device,
        sorted({code for one, _ in rows for code in one.codes}),
        [date for one, _ in rows for date in one.dates],
    )
    caption = f"{source}; {dtype}, sequences of {longest:,} tokens"
    return Figures(caption, {panel: bars for panel, bars in panels.items() if bars})


def _panel(one: Measured, row: Row) -> Panel:
    causal = row.case.get("causal") or row.case.get("option") == "causal"
    return Panel(_DIRECTIONS[one.command], bool(causal))


def write(
    every: Sequence[Measured],
    folder: Path,
    name: str = NAME,
    suffixes: Sequence[str] = ("svg", "png"),
) -> Iterator[Path]:
    """Write the picture, if there is attention among the results."""
    figures = figures_of(every)
    if figures is not None:
        yield from style.write(partial(draw, figures), folder, name, suffixes)


def fewer(figures: Figures) -> Figures:
    """Return the library's kernel and its fastest peers, as many as there is room for."""
    fastest = dict.fromkeys(figures.contenders, 0.0)
    for panel in figures.panels.values():
        for name, bars in panel.items():
            fastest[name] = max(fastest[name], *(value or 0.0 for value in bars.values()))
    ranked = sorted(fastest, key=lambda name: (name in STEPS, not is_ours(name), -fastest[name]))[
        :_MOST_CONTENDERS
    ]
    if len(ranked) == len(fastest):
        return figures
    panels = {
        panel: {name: bars for name, bars in of.items() if name in ranked}
        for panel, of in figures.panels.items()
    }
    caption = f"{figures.caption}; the fastest {len(ranked)} of {len(fastest)}"
    return Figures(caption, {panel: of for panel, of in panels.items() if of})


def draw(figures: Figures, theme: Theme) -> Iterator[Page]:
    """Yield the one page."""
    figures = fewer(figures)
    looks = inks(figures.contenders, theme)
    keys = [Key(name, ink.patch(theme)) for name, ink in looks.items()]
    every = [bars for panel in figures.panels.values() for bars in panel.values()]
    if any(None in bars.values() for bars in every):
        keys.append(style.no_figure(theme))
    places = _places(figures)
    right = max(max(bars.values()) for bars in places.values()) + 1
    columns = 1 if right > _WIDEST else min(len(figures.panels), 2)
    rows = -(-len(figures.panels) // columns)
    high = _TITLE + _PANEL + _BELOW
    title = "TFLOP/s of attention by head dim (more is better)"
    page = Page(title, figures.caption, keys, rows * high, theme)
    most = max((value or 0 for bars in every for value in bars.values()), default=0)
    wide = (WIDTH - LEFT - RIGHT) / columns
    for number, (panel, contenders) in enumerate(figures.panels.items()):
        row, column = divmod(number, columns)
        left, top = LEFT + column * wide + 0.3, row * high + _TITLE
        page.text(left, page.top + top - 0.06, panel.title, size=10)
        axes = page.axes(left, top, wide - 0.35, _PANEL)
        axes.set_ylim(0, most * 1.12 or 1)
        axes.set_xlim(-1, right)
        _draw_bars(axes, contenders, places, looks, theme)
    yield page


def _places(figures: Figures) -> dict[int, dict[str, float]]:
    """Return where each bar of a head dim stands: side by side, the same in every panel."""
    there = {
        head_dim: [
            name
            for name in figures.contenders
            if any(head_dim in panel.get(name, {}) for panel in figures.panels.values())
        ]
        for head_dim in figures.head_dims
    }
    least = sum(len(names) + _BETWEEN for names in there.values()) / _MOST_DIMS
    places: dict[int, dict[str, float]] = {}
    x = 0.0
    for head_dim, names in there.items():
        wide = max(len(names) + _BETWEEN, least)
        first = x + (wide - len(names)) / 2
        places[head_dim] = {name: first + index for index, name in enumerate(names)}
        x += wide
    return places


def _draw_bars(
    axes: Any,
    contenders: Mapping[str, Bars],
    places: Mapping[int, Mapping[str, float]],
    looks: Mapping[str, Ink],
    theme: Theme,
) -> None:
    first = next(iter(looks))
    for name, bars in contenders.items():
        for head_dim, tflops in bars.items():
            x = places[head_dim][name]
            if tflops is None:
                cross = {"color": looks[name].colour, "markersize": 5, "clip_on": False}
                axes.plot(x, 0, style.NO_FIGURE, zorder=3, **cross)
                continue
            axes.bar(x, tflops, width=0.84, **looks[name].bar(theme))
            if name == first:  # the others' numbers would overlap
                alone = len(places[head_dim]) == 1  # or there is room to the left alone
                at, side = (x, "center") if alone else (x + 0.42, "right")
                axes.text(
                    at, tflops, f"{tflops:.0f}", ha=side, va="bottom", fontsize=8,
                    bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 0.4}, zorder=1,
                    color=theme.text,
                )  # fmt: skip
    middles = [sum(bars.values()) / len(bars) for bars in places.values()]
    axes.set_xticks(middles, [str(head_dim) for head_dim in places])
    axes.grid(visible=False, axis="x")
