"""What benchmarks wrote with ``--json``, as pictures see it: the rows of a command on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.benchmark.frame.results import device_of, on_what
from cupyattn.benchmark.frame.rows import FIGURES, labels_of
from cupyattn.errors import error

Result = Mapping[str, Any]

OURS = "cupyattn"
"""The first word of the names of the library's own contenders."""
STEPS = (f"{OURS} tiled", f"{OURS} naive")
"""Kernels of it that are to be read, which no peer is held against."""


@dataclass(frozen=True)
class Row:
    """The figures of one contender at one case."""

    case: Mapping[str, Any]
    """The labels of what was computed: sizes, dtype, options."""
    contender: str
    figures: Mapping[str, Any]
    """What stands beside the labels: ``times``, ``tflops``, ...; or ``unavailable``."""

    @property
    def key(self) -> tuple[tuple[str, Any], ...]:
        """The case as something to be compared and remembered."""
        return tuple(sorted(self.case.items()))

    @property
    def refused(self) -> bool:
        """Whether the contender was asked, and has no kernel or no room."""
        return "unavailable" in self.figures and not self.figures.get("left_out")

    def time(self, name: str) -> float | None:
        """Return the seconds that a name of `times` has, such as "p50".

        None without them, and of a call that the clock was too coarse for.
        """
        return self.figures.get("times", {}).get(f"{name}_s") or None


@dataclass(frozen=True)
class Measured:
    """What one command measured, on one device."""

    command: str
    device: str
    codes: tuple[str, ...]
    """Targets of the code that ran, such as "compute_75"."""
    dates: tuple[str, ...]
    ceilings: Mapping[str, float | None]
    """Those of the last run that measured any."""
    rows: tuple[Row, ...]
    modelled: bool = False
    """Whether the figures are a model's, and the ceilings a data sheet's."""

    @property
    def contenders(self) -> tuple[str, ...]:
        """Everyone: the library's kernels, those of it that are to be read, and its peers."""
        return ours_first(row.contender for row in self.rows)

    @property
    def source(self) -> str:
        """Device, code and date: what belongs to every figure."""
        return source_of(self.device, self.codes, self.dates)


def is_ours(name: str) -> bool:
    """Whether a contender is the library."""
    return name.split()[0] == OURS


def ours_first(names: Iterable[str]) -> tuple[str, ...]:
    """Return each contender once: the library's kernels, those to be read, and the peers.

    Examples
    --------
    >>> ours_first(["torch eager", "cupyattn naive", "cupyattn flash", "cupy", "torch eager"])
    ('cupyattn flash', 'cupyattn naive', 'torch eager', 'cupy')
    """
    once = dict.fromkeys(names)
    return tuple(sorted(once, key=lambda name: (not is_ours(name), name in STEPS)))


def source_of(device: str, codes: Sequence[str], dates: Sequence[str]) -> str:
    """Write what belongs to every figure.

    Examples
    --------
    >>> source_of("NVIDIA H200", ["compute_75"], ["2026-11-21", "2026-11-23"])
    'NVIDIA H200 running compute_75 code, 2026-11-21 to 2026-11-23'
    """
    if not dates:  # as of what is modelled
        return on_what(device, codes)
    first, last = min(dates), max(dates)
    return f"{on_what(device, codes)}, {first if first == last else f'{first} to {last}'}"


def measured(results: Iterable[Result]) -> list[Measured]:
    """Gather the results of each command, in their order; rows without a contender are left out.

    Raises
    ------
    ValueError
        If a command's results are of several devices, or two figures of one thing.
    """
    of_command: dict[str, list[Result]] = {}
    for result in results:
        of_command.setdefault(result["command"], []).append(result)
    every = [_together(command, those) for command, those in of_command.items()]
    return [one for one in every if one.rows]


def by_dtype(one: Measured) -> dict[str, Measured]:
    """Return what is in one picture, by how its name begins: what a command did in one dtype."""
    name = one.command.replace("_", "-")
    dtypes = dict.fromkeys(row.case.get("dtype") for row in one.rows)
    if len(dtypes) < 2:
        return {name: one}
    return {
        f"{name}-{dtype or 'other'}": replace(
            one, rows=tuple(row for row in one.rows if row.case.get("dtype") == dtype)
        )
        for dtype in dtypes
    }


def _together(command: str, results: Sequence[Result]) -> Measured:
    device = _one_device(command, results)
    rows: dict[Any, Row] = {}
    for result in results:
        for row in rows_of(result):
            if (row.key, row.contender) in rows:
                raise error(
                    ValueError,
                    f"two figures of {row.contender} for {command}: {dict(row.case)}",
                    "a picture has one for each contender and case",
                    "leave one of the results out",
                )
            rows[row.key, row.contender] = row
    ceilings = [found for result in results if (found := result.get("ceilings"))]
    return Measured(
        command,
        device,
        tuple(sorted({code for result in results for code in result.get("code") or ()})),
        tuple(sorted({result["date"] for result in results if result.get("date")})),
        ceilings[-1] if ceilings else {},
        tuple(rows.values()),
        any(result.get("modelled") for result in results),
    )


def rows_of(result: Result) -> list[Row]:
    """Return a result's rows; those that name no contender are left out."""
    return [_row(row) for row in result["rows"] if "contender" in row]


def _row(row: Mapping[str, Any]) -> Row:
    case = labels_of(row)
    contender = case.pop("contender")
    return Row(case, contender, {name: row[name] for name in FIGURES if name in row})


def _one_device(command: str, results: Sequence[Result]) -> str:
    devices = sorted(set(map(device_of, results)))
    if len(devices) > 1:
        raise error(
            ValueError,
            f"figures of {command} on {len(devices)} devices: {', '.join(devices)}",
            "a picture is of one",
            "draw each device's results with an --out of its own",
        )
    return devices[0]
