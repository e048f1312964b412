"""TFLOP/s of what computes and GB/s of what moves bytes, beside the card's as measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cupyattn.benchmark.frame.rows import COPY, FLOAT32, PRODUCTS, binding, products_of
from cupyattn.benchmark.plot.bars_or_lines import draw
from cupyattn.benchmark.plot.chart import LINEAR, Reference, chart_of, three
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import Pages

_LITTLE = 16
"""FLOP for each byte; a T4's products bind from 203 on."""
_MEASURED = {
    PRODUCTS: "our code's mma alone: {} TFLOP/s",
    FLOAT32: "float32 arithmetic alone: {} TFLOP/s",
    COPY: "a copy: {} GB/s",
}
_OF_A_CARD = {
    PRODUCTS: "a T4's tensor cores: {} TFLOP/s",
    FLOAT32: "a T4's float32 arithmetic: {} TFLOP/s",
    COPY: "a T4's memory: {} GB/s",
}


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the pictures by name; rows of one dtype are expected."""
    names = _OF_A_CARD if measured.modelled else _MEASURED
    little = _little(measured)
    tflops = chart_of(
        measured,
        "TFLOP/s (more is better)",
        lambda row: None if _kind(row) in little else row.figures.get("tflops"),
        three,
        scale=LINEAR,
        reference=_products(measured, names),
    )
    gb_per_s = chart_of(
        measured,
        "GB/s (more is better)",
        lambda row: (
            row.figures.get("gb_per_s")
            if not row.figures.get("flops") or _kind(row) in little
            else None
        ),
        three,
        scale=LINEAR,
        reference=_ceiling(measured, COPY, names),
    )
    return {"tflops": partial(draw, tflops), "bandwidth": partial(draw, gb_per_s)}


Kind = tuple[tuple[str, Any], ...]


def _kind(row: Row) -> Kind:
    """Return what cases of a line have alike: all but how long the sequences are."""
    return tuple(sorted((name, str(value)) for name, value in row.case.items() if name != "seqlen"))


def _little(measured: Measured) -> set[Kind]:
    """Return which cases compute little with each byte, the longest too: memory's on every card."""
    most: dict[Kind, float] = {}
    for row in measured.rows:
        flops, least = row.figures.get("flops"), row.figures.get("bytes")
        if flops and least:
            most[_kind(row)] = max(most.get(_kind(row), 0.0), flops / least)
    return {kind for kind, intensity in most.items() if intensity <= _LITTLE}


def _products(measured: Measured, names: Mapping[str, str]) -> Reference | None:
    """Return the ceiling of the products of rows that say their dtype."""
    dtype = measured.rows[0].case.get("dtype")
    if dtype is None:
        return None
    return _ceiling(measured, binding(products_of(dtype), measured.ceilings), names)


def _ceiling(measured: Measured, name: str, names: Mapping[str, str]) -> Reference | None:
    value = measured.ceilings.get(name)
    return Reference(value, names[name].format(three(value))) if value else None
