"""The attention benchmarks' tables: one for each case, a line for each option and contender."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from cupyattn.benchmark.attention.cases import FEWER_SCORES, PLAIN
from cupyattn.cli.terminal import Terminal


def show_rows(rows: list[dict[str, Any]], terminal: Terminal) -> None:
    """Print the rows of `time_cases`."""
    for title, group in groupby(rows, key=case_title):
        of_case = list(group)
        terminal.title(title)
        rates = ("TFLOP/s", "GB/s") if of_case[0].get("queries") else ("TFLOP/s",)
        terminal.table(
            ("call", "ran", "median", *rates, "beside the plain call"),
            [_cells(row, len(rates)) for row in of_case],
        )


def case_title(row: dict[str, Any]) -> str:
    """Return the heading of a case: its shape and dtype."""
    dims = f"D {row['head_dim']}"
    if row["head_dim_v"] != row["head_dim"]:
        dims += f", Dv {row['head_dim_v']}"
    every = ", every call causal" if row["causal"] else ""
    queries = f"{row['queries']} queries of " if row.get("queries") else ""
    return (
        f"{dims}, {row['batch']} x {queries}{row['seqlen']} tokens, {row['heads']} heads, "
        f"{row['dtype']}{every}"
    )


def contender_name(row: Mapping[str, Any]) -> str:
    """Return what ran.

    Examples
    --------
    >>> contender_name({"implementation": "flash", "deterministic": True})
    'flash deterministic'
    """
    return row["implementation"] + (" deterministic" if row.get("deterministic") else "")


def _cells(row: dict[str, Any], rates: int) -> tuple[str, ...]:
    option = row["option"]
    name = f"window {row['window']}" if option == "window" else option
    ran = contender_name(row)
    if "unavailable" in row:
        return name, ran, "-", *["-"] * rates, row["unavailable"]
    ratio = ""
    if option != PLAIN and row["time_ratio"] is not None:
        faster = f"{1 / row['time_ratio']:.2f} x faster"
        ratio = faster if option in FEWER_SCORES else f"{row['time_ratio']:.2f} x the time"
    return (
        name,
        ran,
        f"{row['seconds'] * 1e3:.3f} ms",
        *(f"{row['tflops']:.1f}", f"{row.get('gb_per_s', 0):.0f}")[:rates],
        ratio,
    )
