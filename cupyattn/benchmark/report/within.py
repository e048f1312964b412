"""Rows within a time: as many as it allows, and the word that it did not allow all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from cupyattn.benchmark.frame.benchmark import Benchmark
from cupyattn.benchmark.frame.rows import Row
from cupyattn.benchmark.frame.subjects import Gauge

Clock = Callable[[], float]
"""Seconds, such as `time.monotonic` tells."""


class Within:
    """Rows of a benchmark until a time has come; the row that is under way then is the last."""

    def __init__(
        self,
        rows: Callable[[argparse.Namespace, Gauge], Iterable[Row]],
        ends: float,
        clock: Clock,
    ) -> None:
        self._rows, self._ends, self._clock = rows, ends, clock
        self.cut = False
        """Whether the time came."""

    def __call__(self, arguments: argparse.Namespace, gauge: Gauge) -> Iterator[Row]:
        """Yield the rows."""
        for row in self._rows(arguments, gauge):
            yield row
            if self._clock() >= self._ends:
                self.cut = True
                return


def rows_within(
    benchmark: Benchmark, arguments: argparse.Namespace, ends: float, clock: Clock
) -> tuple[list[Row], bool]:
    """Return a benchmark's rows, and whether it was cut; none if the time has come already."""
    if clock() >= ends:
        return [], True
    within = Within(benchmark.rows, ends, clock)
    return replace(benchmark, rows=within).result(arguments)["rows"], within.cut
