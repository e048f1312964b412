"""TFLOP/s of what computes and GB/s of what moves bytes, beside the card's as measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cupyattn.benchmark.frame.rows import COPY, FLOAT32, PRODUCTS, binding, products_of
from cupyattn.benchmark.plot.bars_or_lines import draw
from cupyattn.benchmark.plot.chart import LINEAR, Reference, chart_of, three
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import Pages

_LITTLE = 16
"""FLOP for each byte; a T4's products bind from 203 on."""
_MEASURED = {
    PRODUCTS: "mma alone: {} TFLOP/s",
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
    tflops = chart_of(
        measured,
        "TFLOP/s (more is better)",
        lambda row: None if _computes_little(row) else row.figures.get("tflops"),
        three,
        scale=LINEAR,
        reference=_products(measured, names),
    )
    gb_per_s = chart_of(
        measured,
        "GB/s (more is better)",
        lambda row: row.figures.get("gb_per_s") if _moves_bytes(row) else None,
        three,
        scale=LINEAR,
        reference=_ceiling(measured, COPY, names),
    )
    return {"tflops": partial(draw, tflops), "bandwidth": partial(draw, gb_per_s)}


def _moves_bytes(row: Row) -> bool:
    """Whether a case is memory's on every card, or counts no products."""
    return not row.figures.get("flops") or _computes_little(row)


def _computes_little(row: Row) -> bool:
    """Whether it computes little with each byte."""
    flops, least = row.figures.get("flops"), row.figures.get("bytes")
    return flops / least <= _LITTLE if flops and least else False


def _products(measured: Measured, names: Mapping[str, str]) -> Reference | None:
    """Return the ceiling of the products of rows that say their dtype."""
    dtype = measured.rows[0].case.get("dtype")
    if dtype is None:
        return None
    return _ceiling(measured, binding(products_of(dtype), measured.ceilings), names)


def _ceiling(measured: Measured, name: str, names: Mapping[str, str]) -> Reference | None:
    value = measured.ceilings.get(name)
    return Reference(value, names[name].format(three(value))) if value else None
