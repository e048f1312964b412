"""The chart of attention's speed, drawn with matplotlib for light and for dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.benchmark.plot.figures import Bars, Figures
from cupyattn.errors import error

# In inches.
_WIDTH = 8.6  # 826 pixels of a page: about the width of a README
_PANEL = 2.2
_HEAD = 1.05  # title, caption, legend
_GAP = 1.1  # between the bars of two head dims, in bars
_NO_KERNEL = "x"
_PIXELS_PER_INCH = 200  # of the PNG: twice a page's


class Theme(NamedTuple):
    """The colours of a page, and those of the bars on it."""

    name: str
    page: str
    text: str
    faint: str
    bars: tuple[str, ...]


# Okabe and Ito's colours, which colour-blind readers tell apart ("Color Universal Design", 2008).
# Black, the eighth, is for text. Neighbours differ in lightness too, for print without colours.
THEMES = (
    Theme(
        "light",
        page="#ffffff",
        text="#1f2328",
        faint="#d1d9e0",
        bars=("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7", "#f0e442"),
    ),
    Theme(
        "dark",
        page="#0d1117",
        text="#f0f6fc",
        faint="#3d444d",
        bars=("#56b4e9", "#009e73", "#e69f00", "#0072b2", "#cc79a7", "#d55e00", "#f0e442"),
    ),
)


def write_charts(figures: Figures, folder: Path, name: str) -> Iterator[Path]:
    """Write ``name-light.svg``, ``name-dark.svg`` and the same as PNG; yield each when it is there.

    Raises
    ------
    RuntimeError
        If matplotlib is not installed.
    ValueError
        If there are more contenders than colours.
    """
    matplotlib = _load_matplotlib()
    _require_colours(figures)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "font.size": 10,
        "svg.fonttype": "none",  # text stays text: readable by machines, a fifth of the size
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
        "svg.hashsalt": "cupyattn",  # the same figures give the same file
    }
    for theme in THEMES:
        with matplotlib.rc_context(settings):
            figure = draw(figures, theme)
            for suffix in ("svg", "png"):
                path = folder / f"{name}-{theme.name}.{suffix}"
                metadata = {"Date": None, "Creator": None} if suffix == "svg" else None
                figure.savefig(path, dpi=_PIXELS_PER_INCH, facecolor=theme.page, metadata=metadata)
                yield path


def draw(figures: Figures, theme: Theme) -> Any:
    """Return the chart as a figure of matplotlib."""
    from matplotlib.figure import Figure

    columns = min(len(figures.panels), 2)
    rows = -(-len(figures.panels) // columns)
    height = _HEAD + _PANEL * rows
    chart = Figure(figsize=(_WIDTH, height))
    chart.subplots_adjust(
        left=0.05,
        right=0.99,
        top=1 - _HEAD / height,
        bottom=0.28 / height,
        hspace=0.32,
        wspace=0.05,
    )
    axes = chart.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    colours = dict(zip(figures.contenders, theme.bars, strict=False))
    places = _places(figures)
    for axis, (panel, contenders) in zip(axes, figures.panels.items(), strict=False):
        axis.set_title(panel.title, loc="left", fontsize=10, color=theme.text)
        _draw_bars(axis, contenders, places, colours, theme)
    for axis in list(axes)[len(figures.panels) :]:
        axis.remove()
    _draw_head(chart, figures, colours, theme)
    return chart


def _places(figures: Figures) -> dict[int, dict[str, float]]:
    """Return where each bar of a head dim stands: side by side, the same in every panel."""
    places: dict[int, dict[str, float]] = {}
    x = 0.0
    for head_dim in figures.head_dims:
        there = [
            name
            for name in figures.contenders
            if any(head_dim in panel.get(name, {}) for panel in figures.panels.values())
        ]
        places[head_dim] = {name: x + index for index, name in enumerate(there)}
        x += len(there) + _GAP
    return places


def _draw_bars(
    axis: Any,
    contenders: Mapping[str, Bars],
    places: Mapping[int, Mapping[str, float]],
    colours: Mapping[str, str],
    theme: Theme,
) -> None:
    first = next(iter(colours))
    for name, bars in contenders.items():
        for head_dim, tflops in bars.items():
            x = places[head_dim][name]
            if tflops is None:
                axis.plot(x, 0, _NO_KERNEL, color=colours[name], clip_on=False, zorder=3)
                continue
            axis.bar(x, tflops, width=0.9, color=colours[name], zorder=2)
            if name == first:  # the others' numbers would overlap
                label = f"{tflops:.0f}"
                axis.text(x, tflops, label, ha="center", va="bottom", fontsize=8, color=theme.text)
    middles = [sum(bars.values()) / len(bars) for bars in places.values()]
    axis.set_xticks(middles, [str(head_dim) for head_dim in places])
    axis.tick_params(length=0, labelcolor=theme.text, labelbottom=True)
    axis.margins(x=0.02, y=0.12)
    axis.grid(axis="y", color=theme.faint, linewidth=0.6, zorder=0)
    axis.set_facecolor(theme.page)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.faint)


def _draw_head(chart: Any, figures: Figures, colours: Mapping[str, str], theme: Theme) -> None:
    """Write above the panels what they show, and which colour is whose."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    height = chart.get_figheight()
    title = "TFLOP/s of attention by head dim (more is better)"
    chart.text(0.01, 1 - 0.24 / height, title, fontsize=12, weight="bold", color=theme.text)
    chart.text(0.01, 1 - 0.47 / height, figures.caption, fontsize=9, color=theme.text)
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    every = [bars for panel in figures.panels.values() for bars in panel.values()]
    if any(None in bars.values() for bars in every):
        cross = Line2D([], [], marker=_NO_KERNEL, linestyle="", color=theme.text, label="no kernel")
        handles.append(cross)
    chart.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.5 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=theme.text,
        handlelength=1,
        handleheight=1,
        columnspacing=1.5,
    )


def _load_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise error(
            RuntimeError,
            "no matplotlib, which draws the chart",
            "it is no dependency of the library, and comes with the extra notebooks",
            "pip install matplotlib",
        ) from None
    return matplotlib


def _require_colours(figures: Figures) -> None:
    most = min(len(theme.bars) for theme in THEMES)
    if len(figures.contenders) > most:
        raise error(
            ValueError,
            f"{len(figures.contenders)} contenders: {', '.join(figures.contenders)}",
            f"a chart has colours for {most}",
            "leave some of the results out",
        )
