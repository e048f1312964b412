"""The one style of all pictures: page, head, axes, files. Sizes are in inches."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.errors import error

WIDTH = 8.6  # 826 pixels of a page: about the width of a README
LEFT, RIGHT = 0.1, 0.12  # of the page, empty
SMALL = 8.0  # points
_BOLD = 1.15  # times as wide as other letters
_PIXELS_PER_INCH = 200  # of the PNG: twice a page's
NO_FIGURE = "x"


class Theme(NamedTuple):
    """The colours of a page; `inks` has those of what is drawn on it."""

    name: str
    page: str
    text: str
    faint: str


THEMES = (
    Theme("light", page="#ffffff", text="#1f2328", faint="#d1d9e0"),
    Theme("dark", page="#0d1117", text="#f0f6fc", faint="#3d444d"),
)


class Key(NamedTuple):
    """An entry of the legend: a name, and the properties of the line that stands before it."""

    name: str
    line: Mapping[str, Any]


class Page:
    """A figure of matplotlib with its head written; what is below it is placed from the top."""

    def __init__(
        self, title: str, caption: str, keys: Sequence[Key], height: float, theme: Theme
    ) -> None:
        from matplotlib.figure import Figure

        self.theme = theme
        heads = wrapped(title, (WIDTH - 2 * LEFT) / _BOLD, 12)
        lines = wrapped(caption, WIDTH - 2 * LEFT, 9)
        legend = list(_legend_rows(keys))
        head = 0.42 + 0.21 * (len(heads) - 1)
        self.top = head + 0.17 * len(lines) + 0.22 * len(legend) + 0.08
        """Where the head ends."""
        self.height = self.top + height
        self.figure = Figure(figsize=(WIDTH, self.height))
        for number, line in enumerate(heads):
            self.text(LEFT, 0.26 + 0.21 * number, line, size=12, weight="bold")
        for number, line in enumerate(lines):
            self.text(LEFT, head + 0.04 + 0.17 * number, line, size=9)
        for number, row in enumerate(legend):
            self._legend_row(row, head + 0.17 * len(lines) + 0.22 * number + 0.11)

    def text(self, x: float, y: float, text: str, **more: Any) -> None:
        """Write a line of text: its baseline is `y` below the top."""
        size = more.pop("size", SMALL)
        self.figure.text(
            x / WIDTH, 1 - y / self.height, text, color=self.theme.text, fontsize=size, **more
        )

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Place axes, `top` below the end of the head, with no more ink than they need."""
        bottom = self.height - self.top - top - height
        axes = self.figure.add_axes(
            (left / WIDTH, bottom / self.height, width / WIDTH, height / self.height)
        )
        axes.set_facecolor(self.theme.page)
        axes.tick_params(which="both", length=0, labelcolor=self.theme.text, labelsize=SMALL)
        axes.grid(color=self.theme.faint, linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(self.theme.faint)
        return axes

    def _legend_row(self, row: Sequence[tuple[float, Key]], y: float) -> None:
        from matplotlib.lines import Line2D

        for x, key in row:
            at = 1 - (y - 0.04) / self.height
            line = Line2D(
                [x / WIDTH, (x + 0.13) / WIDTH, (x + 0.26) / WIDTH], [at] * 3, markevery=[1],
                transform=self.figure.transFigure, **key.line,
            )  # fmt: skip
            self.figure.add_artist(line)
            self.text(x + 0.34, y, key.name, size=9)


def _legend_rows(keys: Sequence[Key]) -> Iterator[list[tuple[float, Key]]]:
    """Yield the keys of each line, with where they begin."""
    row: list[tuple[float, Key]] = []
    x = LEFT
    for key in keys:
        wide = 0.34 + width_of(key.name, 9) + 0.25
        if row and x + wide > WIDTH:
            yield row
            row, x = [], LEFT
        row.append((x, key))
        x += wide
    if row:
        yield row


@lru_cache(maxsize=1024)  # the pages of two themes have the same, and it takes 5 ms
def width_of(text: str, size: float) -> float:
    """Return how wide a line of text is, in DejaVu Sans, which is wider than most."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=size).get_extents().x1 / 72 if text.strip() else 0.0


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Return the lines of a text that is to be so wide at most."""
    letter = width_of(text, size) / max(len(text), 1)
    return textwrap.wrap(text, max(int(0.97 * width / letter), 1)) if letter else [""]


_STEPS: tuple[tuple[int, tuple[float, ...]], ...] = (
    *((3, (1,)), (2, (1,)), (1, (1,)), (1, (1, 3)), (1, (1, 2, 5))),
    (1, (1, 1.5, 2, 3, 5, 7)),
)
"""Where ticks of a logarithmic axis may stand: each so many decades, and within one."""


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Return round values between two on a logarithmic axis: powers of ten if those are enough.

    Examples
    --------
    >>> ticks(0.02, 300, most=6), ticks(0.8, 30, most=6)
    ([0.1, 1.0, 10.0, 100.0], [1.0, 3.0, 10.0, 30.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for every, steps in _STEPS:
        found = [step * 10.0**n for n in decades if n % every == 0 for step in steps]
        there = [value for value in found if low <= value <= high]
        if most / 2 <= len(there) <= most:
            return there
    from matplotlib.ticker import MaxNLocator

    return [value for value in MaxNLocator(most - 1).tick_values(low, high) if low <= value <= high]


def no_figure(theme: Theme) -> Key:
    """Return the legend's entry of the cross that stands where there is no figure."""
    return Key("no kernel, or no room", {"marker": NO_FIGURE, "color": theme.text, "linestyle": ""})


Pages = Callable[[Theme], Iterator[Page]]
"""Draws a picture's pages with the colours of a theme."""


def write(
    pages: Pages, folder: Path, name: str, suffixes: Sequence[str] = ("svg", "png")
) -> Iterator[Path]:
    """Write each page for light and for dark, as SVG and as PNG; yield each when it is there.

    Names are ``name-light.svg`` and so on; of several pages the second is ``name-2-light.svg``.
    """
    from matplotlib import rc_context

    settings: Any = {
        "font.size": SMALL,
        "svg.fonttype": "none",  # text stays text: readable by machines, a fifth of the size
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
        "svg.hashsalt": "cupyattn",  # the same figures give the same file
    }
    for theme in THEMES:
        with rc_context(settings):
            for number, page in enumerate(pages(theme), 1):
                of_page = name if number == 1 else f"{name}-{number}"
                for suffix in suffixes:
                    path = folder / f"{of_page}-{theme.name}.{suffix}"
                    metadata = {"Date": None, "Creator": None} if suffix == "svg" else None
                    folder.mkdir(parents=True, exist_ok=True)
                    page.figure.savefig(
                        path, dpi=_PIXELS_PER_INCH, facecolor=theme.page, metadata=metadata
                    )
                    yield path


def require_matplotlib() -> None:
    """Raise RuntimeError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise error(
            RuntimeError,
            "no matplotlib, which draws the pictures",
            "it is no dependency of the library, and comes with the extra notebooks",
            "pip install matplotlib",
        ) from None
