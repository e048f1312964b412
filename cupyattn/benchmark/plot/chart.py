"""A chart of one quantity: a value for each case and contender, as bars or along a length."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cupyattn.benchmark.plot import labels
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import ticks

Value = Callable[[Row], float | None]


class Scale(NamedTuple):
    """How an axis goes: what matplotlib calls it, and up to where it is linear."""

    name: str
    linear_to: float = 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """What ``set_xscale`` takes."""
        more = {"linthresh": self.linear_to, "linscale": 0.3} if self.linear_to else {}
        return {"value": self.name, **more}


LINEAR, LOGARITHMIC = Scale("linear"), Scale("log")


class Axis(NamedTuple):
    """What an axis shows; the ticks of a linear one are matplotlib's."""

    low: float
    high: float
    ticks: list[float] | None


@dataclass(frozen=True)
class Reference:
    """A value that the others are looked at beside, drawn as a line."""

    value: float
    name: str


@dataclass(frozen=True)
class Chart:
    """What is drawn: None stands for a contender that could not compute a case."""

    title: str
    caption: str
    cases: tuple[Mapping[str, Any], ...]
    contenders: tuple[str, ...]
    values: Mapping[tuple[Any, str], float | None]
    """By case, as `Row.key` writes it, and contender; what is absent was not measured."""
    show: Callable[[float], str]
    scale: Scale
    reference: Reference | None = None
    also: tuple[float, ...] = ()
    """What the axis has to show beside the values."""

    @property
    def axis(self) -> Axis:
        """What its axis of values shows."""
        values = [value for value in self.values.values() if value is not None]
        values += [*self.also, *([self.reference.value] if self.reference else [])]
        least, most = min(values), max(values)
        if self.scale is LOGARITHMIC:
            room = 1.02 * (most / least) ** 0.02
            return Axis(least / room, most * room, ticks(least / room, most * room, most=7))
        if self.scale is LINEAR:
            return Axis(0.0, most * 1.03 or 1.0, None)
        start = self.scale.linear_to
        if most <= start:
            return Axis(0.0, 1.5 * start, [0.0, start])
        return Axis(0.0, 1.5 * most, [0.0, *ticks(start, 1.5 * most, most=6)])

    def on_page(self, cases: Sequence[Mapping[str, Any]]) -> Chart:
        """Return what one page shows: its axis is that of its own values."""
        keys = set(map(key_of, cases))
        values = {at: value for at, value in self.values.items() if at[0] in keys}
        return replace(self, cases=tuple(cases), values=values)

    def of(self, case: Mapping[str, Any], contender: str) -> float | None:
        """Return a value that is there; None otherwise."""
        return self.values.get((key_of(case), contender))

    def failed(self, case: Mapping[str, Any], contender: str) -> bool:
        """Whether the contender was asked, and had no figure."""
        return self.values.get((key_of(case), contender), 0.0) is None

    @property
    def present(self) -> tuple[str, ...]:
        """The contenders that have a figure here, or were asked for one."""
        there = {name for _, name in self.values}
        return tuple(name for name in self.contenders if name in there)

    @property
    def any_failed(self) -> bool:
        """Whether a cross stands anywhere."""
        return None in self.values.values()


def key_of(case: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return a case as something to be compared and remembered."""
    return tuple(sorted(case.items()))


def chart_of(
    measured: Measured,
    title: str,
    value: Value,
    show: Callable[[float], str],
    *,
    scale: Scale,
    contenders: tuple[str, ...] | None = None,
    reference: Reference | None = None,
) -> Chart | None:
    """Return the chart of a value of the rows; None where no row has it.

    A case is there if any contender has the value. A row that was refused is a cross.
    """
    who = measured.contenders if contenders is None else contenders
    rows = [row for row in measured.rows if row.contender in who]
    having = {row.key for row in rows if value(row) is not None}
    rows = [row for row in rows if row.key in having]
    values = {
        (row.key, row.contender): found
        for row in rows
        if (found := value(row)) is not None or row.refused
    }
    if not values:
        return None
    there = {contender for _, contender in values}
    cases = tuple(sorted({row.key: row.case for row in rows}.values(), key=_head_dim))
    alike = labels.shared(cases)
    return Chart(
        f"{measured.command}: {title}",
        f"{measured.source}{'; ' if alike else ''}{alike}",
        cases,
        tuple(name for name in who if name in there),
        values,
        show,
        scale,
        reference,
    )


def _head_dim(case: Mapping[str, Any]) -> int:
    """Return what cases are put in order by: --quick has the usual head dims first."""
    found = case.get("head_dim")
    return found if isinstance(found, int) else 0


def tick(chart: Chart, value: float) -> str:
    """Write a value at an axis, without zeros that say nothing."""
    return re.sub(r"\.(\d*?)0+(?!\d)", r".\1", chart.show(value)).replace(". ", " ").rstrip(".")


def seconds(value: float) -> str:
    """Write a time.

    Examples
    --------
    >>> seconds(0.0000093), seconds(0.0321), seconds(1.057)
    ('9.30 us', '32.1 ms', '1.06 s')
    """
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if value < 999.5 * unit:
            return f"{three(value / unit)} {name}"
    return f"{three(value)} s"


def thousands(value: float) -> str:
    """Write a round number.

    Examples
    --------
    >>> thousands(4096.0), thousands(0.125)
    ('4,096', '0.125')
    """
    return f"{value:,g}"


def three(value: float) -> str:
    """Write a number with three digits that count.

    Examples
    --------
    >>> three(0.4567), three(32.14), three(999.6), three(4254.2)
    ('0.457', '32.1', '1,000', '4,254')
    """
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 9.995 else 2 if value >= 0.9995 else 3}f}"
