"""TFLOP/s of what computes and GB/s of what moves bytes, beside the card's as measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cupyattn.benchmark.plot.bars_or_lines import draw
from cupyattn.benchmark.plot.chart import LINEAR, Reference, chart_of, three
from cupyattn.benchmark.plot.results import Measured, Row
from cupyattn.benchmark.plot.style import Pages

_LITTLE = 16
"""FLOP for each byte; a T4's products bind from 203 on."""
_MEASURED = {"mma_tflops": "mma alone: {} TFLOP/s", "copy_gb_per_s": "a copy: {} GB/s"}
_OF_A_CARD = {
    "mma_tflops": "a T4's tensor cores: {} TFLOP/s",
    "copy_gb_per_s": "a T4's memory: {} GB/s",
}


def pictures(measured: Measured) -> dict[str, Pages]:
    """Return the pictures by name."""
    tensor_cores = all(row.case.get("dtype") == "float16" for row in measured.rows)
    names = _OF_A_CARD if measured.modelled else _MEASURED
    computed = _ceiling(measured, "mma_tflops", names) if tensor_cores else None
    tflops = chart_of(
        measured,
        "TFLOP/s (more is better)",
        lambda row: None if _computes_little(row) else row.figures.get("tflops"),
        three,
        scale=LINEAR,
        reference=computed,
    )
    gb_per_s = chart_of(
        measured,
        "GB/s (more is better)",
        lambda row: row.figures.get("gb_per_s") if _moves_bytes(row) else None,
        three,
        scale=LINEAR,
        reference=_ceiling(measured, "copy_gb_per_s", names),
    )
    return {"tflops": partial(draw, tflops), "bandwidth": partial(draw, gb_per_s)}


def _moves_bytes(row: Row) -> bool:
    """Whether a case is memory's on every card, or counts no products."""
    return not row.figures.get("flops") or _computes_little(row)


def _computes_little(row: Row) -> bool:
    """Whether it computes little with each byte."""
    flops, least = row.figures.get("flops"), row.figures.get("bytes")
    return flops / least <= _LITTLE if flops and least else False


def _ceiling(measured: Measured, name: str, names: Mapping[str, str]) -> Reference | None:
    value = measured.ceilings.get(name)
    return Reference(value, names[name].format(three(value))) if value else None
