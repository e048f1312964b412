"""The roofline: TFLOP/s over operations for each byte, under the roofs of this card and of a T4.

After Williams, Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cupyattn.benchmark.frame.rows import PRODUCTS, binding, products_of
from cupyattn.benchmark.plot import labels
from cupyattn.benchmark.plot.chart import thousands, three
from cupyattn.benchmark.plot.inks import Ink, inks
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import (
    LEFT,
    RIGHT,
    SMALL,
    WIDTH,
    Key,
    Page,
    Pages,
    Theme,
    ticks,
)

_HIGH = 3.6
_BELOW, _BESIDE = 0.6, 0.6


class Roof(NamedTuple):
    """What a card can do at most; of its products None if that was not measured."""

    name: str
    tflops: float | None
    gb_per_s: float

    def at(self, intensity: float) -> float:
        """Return the TFLOP/s of so many operations for each byte.

        Examples
        --------
        >>> T4.at(100), T4.at(1000)
        (32.0, 65)
        """
        memory = self.gb_per_s * intensity / 1e3
        return memory if self.tflops is None else min(self.tflops, memory)

    @property
    def ridge(self) -> float | None:
        """Where products begin to bind."""
        return None if self.tflops is None else self.tflops / self.gb_per_s * 1e3


T4 = Roof("a T4, as specified", 65, 320)
"""Its tensor cores in float16, and its memory."""
T4_FLOAT32 = T4._replace(tflops=8.1)


class Point(NamedTuple):
    """A row of the results in the picture."""

    row: Row
    intensity: float
    tflops: float


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the picture by its name; rows of one dtype are expected."""
    points = [
        Point(row, row.figures["flops"] / row.figures["bytes"], row.figures["tflops"])
        for row in measured.rows
        if all(row.figures.get(name) for name in ("flops", "bytes", "tflops"))
    ]
    return {"roofline": partial(_draw, measured, _fastest(points))} if points else {}


def roofs_of(measured: Measured) -> list[Roof]:
    """Return the card's roof, as it was measured, and a T4's; of what is modelled the latter."""
    memory = [measured.ceilings.get(name) for name in ("read_gb_per_s", "copy_gb_per_s")]
    known = [rate for rate in memory if rate and not measured.modelled]
    of = products_of(measured.rows[0].case.get("dtype", "float16"))
    products = measured.ceilings.get(binding(of, measured.ceilings))
    own = [Roof("our code in this run", products, max(known))] if known else []
    return [*own, T4 if of == PRODUCTS else T4_FLOAT32]


def _fastest(points: Sequence[Point]) -> list[Point]:
    """Return the fastest case of each contender at each intensity, to half a power of two."""
    best: dict[tuple[str, int], Point] = {}
    for point in points:
        at = point.row.contender, round(2 * math.log2(point.intensity))
        if at not in best or point.tflops > best[at].tflops:
            best[at] = point
    return sorted(best.values(), key=lambda point: point.intensity)


def _draw(measured: Measured, points: Sequence[Point], theme: Theme) -> Iterator[Page]:
    roofs = roofs_of(measured)
    there = {point.row.contender for point in points}
    looks = inks([name for name in measured.contenders if name in there], theme)
    lines = dict(zip(roofs, _lines(theme)[-len(roofs) :], strict=True))
    keys = [Key(name, ink.points(theme)) for name, ink in looks.items()]
    keys += [Key(_name(roof), line) for roof, line in lines.items()]
    alike = labels.shared([point.row.case for point in points])
    title = f"{measured.command}: TFLOP/s over operations for each byte that has to move"
    caption = "; ".join(filter(None, (measured.source, alike, "the fastest case at each place")))
    page = Page(title, caption, keys, _HIGH + _BELOW, theme)
    left = LEFT + _BESIDE
    axes = page.axes(left, 0.1, WIDTH - left - RIGHT - 0.1, _HIGH)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _draw_points(axes, points, looks, theme)
    _draw_roofs(axes, lines, points)
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: thousands(value))
    axes.set_xlabel("FLOP for each byte", color=theme.text, fontsize=SMALL)
    axes.set_ylabel("TFLOP/s", color=theme.text, fontsize=SMALL)
    yield page


def _draw_points(
    axes: Any, points: Sequence[Point], looks: Mapping[str, Ink], theme: Theme
) -> None:
    for name, ink in reversed(list(looks.items())):  # the first lies above the others
        own = [(point.intensity, point.tflops) for point in points if point.row.contender == name]
        axes.plot(*zip(*own, strict=True), zorder=3, **{**ink.line(theme), "linewidth": 0.6})


def _draw_roofs(
    axes: Any, lines: Mapping[Roof, Mapping[str, Any]], points: Sequence[Point]
) -> None:
    """Draw the roofs over all points, from where memory binds to where products do."""
    places = [point.intensity for point in points] + [roof.ridge for roof in lines if roof.ridge]
    left, right = min(places) / 2, max(places) * 2
    for roof, line in lines.items():
        along = [left, *([roof.ridge] if roof.ridge else []), right]
        axes.plot(along, [roof.at(intensity) for intensity in along], zorder=2, **line)
    rates = [point.tflops for point in points]
    highest = max([*rates, *(roof.tflops for roof in lines if roof.tflops)]) * 1.6
    lowest = min([*rates, *(roof.at(left) for roof in lines)]) / 1.6
    axes.set_xlim(left, right)
    axes.set_ylim(lowest, highest)
    axes.set_yticks(ticks(lowest, highest, most=7))


def _lines(theme: Theme) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"color": theme.text, "linewidth": 1.5, "linestyle": "-"},
        {"color": theme.text, "linewidth": 1.3, "linestyle": (0, (4, 2))},
    )


def _name(roof: Roof) -> str:
    products = "" if roof.tflops is None else f"{three(roof.tflops)} TFLOP/s, "
    return f"roof: {roof.name}, {products}{three(roof.gb_per_s)} GB/s"
