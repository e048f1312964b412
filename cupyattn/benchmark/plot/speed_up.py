"""How many times as fast contenders are as "naive", and the library's kernel as its peers."""

from __future__ import annotations

from functools import partial

from cupyattn.benchmark.plot.bars_or_lines import draw
from cupyattn.benchmark.plot.chart import LOGARITHMIC, Chart, Reference, chart_of, three
from cupyattn.benchmark.plot.results import STEPS, Measured, Row, is_ours
from cupyattn.benchmark.plot.style import Pages

_NAIVE = STEPS[-1]


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the pictures by name."""
    charts: dict[str, Chart | None] = {}
    if _NAIVE in measured.contenders:
        charts["speed-up"] = _beside(measured, _NAIVE, of_others=True)
    ours = _of_the_peers_work(measured)
    if ours is not None:
        charts["speed-up-peers"] = _beside(measured, ours, of_others=False)
    return {name: partial(draw, chart) for name, chart in charts.items()}


def _of_the_peers_work(measured: Measured) -> str | None:
    """Return whom of ours the peers are held against: the first that does as much as one of them.

    Where none does, the first.
    """
    ours = [name for name in measured.contenders if is_ours(name) and name not in STEPS]
    theirs = {
        (row.key, row.figures.get("flops")) for row in measured.rows if not is_ours(row.contender)
    }
    alike = {
        row.contender for row in measured.rows if (row.key, row.figures.get("flops")) in theirs
    }
    return next((name for name in ours if name in alike), ours[0] if ours else None)


def _beside(measured: Measured, one: str, *, of_others: bool) -> Chart | None:
    """Return how many times as fast the others are as one; or that one as each other."""
    alone = {
        row.key: found
        for row in measured.rows
        if row.contender == one and (found := row.time("p50")) is not None
    }

    def times(row: Row) -> float | None:
        taken, beside = row.time("p50"), alone.get(row.key)
        if taken is None or beside is None:
            return None
        return beside / taken if of_others else taken / beside

    others = tuple(
        name for name in measured.contenders if name != one and (of_others or not is_ours(name))
    )
    title = f"times as fast as {one}" if of_others else f"how many times as fast {one} is"
    return chart_of(
        measured,
        title,
        times,
        three,
        scale=LOGARITHMIC,
        contenders=others,
        reference=Reference(1.0, "as fast"),
    )
