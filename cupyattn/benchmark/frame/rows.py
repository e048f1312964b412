"""The rows of every benchmark: a case's labels, who computed it, its times and what follows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

FIGURES = frozenset(
    ("times", "flops", "bytes", "tflops", "gb_per_s", "of_ceiling", "peak_bytes", "unavailable")
) | {"left_out", "also", "modelled", "counts"}  # fmt: skip
"""What of a row is measured; the rest are labels, which tell it from others."""


class NotAskedError(RuntimeError):
    """Why a contender was not asked: no time, no library. It may have the case all the same."""


PRODUCTS, FLOAT32 = "mma_tflops", "fma_tflops"
COPY, READ = "copy_gb_per_s", "read_gb_per_s"
"""The ceilings that can bind: two of products, and two of bytes."""


def products_of(dtype: str) -> str:
    """Return the ceiling of a dtype's products: tensor cores have float16's alone on Turing.

    Examples
    --------
    >>> products_of("float16"), products_of("bfloat16")
    ('mma_tflops', 'fma_tflops')
    """
    return PRODUCTS if dtype == "float16" else FLOAT32


def binding(ceiling: str, ceilings: Mapping[str, float | None]) -> str:
    """Return which ceiling binds: without tensor cores float16 has float32's arithmetic.

    Examples
    --------
    >>> binding(PRODUCTS, {PRODUCTS: 65.0, FLOAT32: 8.0}), binding(PRODUCTS, {FLOAT32: 4.0})
    ('mma_tflops', 'fma_tflops')
    """
    return FLOAT32 if ceiling == PRODUCTS and ceilings.get(PRODUCTS) is None else ceiling


def times_of(seconds: Sequence[float], calls_per_sample: int = 1) -> dict[str, float]:
    """Return what a row says of the times of its calls; percentiles are interpolated.

    Where a sample is the mean of several calls, all but the mean is of means.

    Examples
    --------
    >>> times = times_of([1.0, 2.0, 3.0, 4.0])
    >>> times["samples"], times["mean_s"], times["p50_s"], times["max_s"]
    (4, 2.5, 2.5, 4.0)
    """
    ordered = sorted(seconds)
    return {
        "mean_s": statistics.fmean(ordered),
        "std_s": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        "min_s": ordered[0],
        "max_s": ordered[-1],
        **{f"p{share}_s": _percentile(ordered, share / 100) for share in (50, 95, 99)},
        "samples": len(ordered),
        "calls_per_sample": calls_per_sample,
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def row_of(
    labels: Mapping[str, Any],
    contender: str,
    seconds: Sequence[float],
    *,
    calls_per_sample: int = 1,
    flops: float | None = None,
    bytes: float | None = None,
    ceiling: str | None = None,
    ceilings: Mapping[str, float | None] | None = None,
    peak_bytes: int | None = None,
    also: Mapping[str, Any] | None = None,
) -> Row:
    """Return a row of measured times.

    Parameters
    ----------
    labels : mapping
        The case.
    contender : str
        Who computed it.
    seconds : sequence of float
        Of each call, or the means of several.
    calls_per_sample : int, optional
        Of how many.
    flops, bytes : float, optional
        The least work of the case.
    ceiling : str, optional
        Which of `ceilings` binds it.
    ceilings : mapping, optional
        What was measured in the same run.
    peak_bytes : int, optional
        The most memory beyond inputs and outputs.
    also : mapping, optional
        Figures that this benchmark alone has.

    Examples
    --------
    >>> row = row_of({"M": 8}, "cupyattn", [0.5], flops=1e12, ceiling=PRODUCTS,
    ...              ceilings={PRODUCTS: 4.0})
    >>> row["tflops"], row["of_ceiling"], row["gb_per_s"]
    (2.0, 0.5, None)
    """
    times = times_of(seconds, calls_per_sample)
    median = times["p50_s"]
    rates = {
        "tflops": None if flops is None else flops / median / 1e12,
        "gb_per_s": None if bytes is None else bytes / median / 1e9,
    }
    ceilings = ceilings or {}
    limit = None if ceiling is None else ceilings.get(binding(ceiling, ceilings))
    rate = rates["tflops" if ceiling in (PRODUCTS, FLOAT32) else "gb_per_s"]
    return {
        **labels,
        "contender": contender,
        "times": times,
        "flops": flops,
        "bytes": bytes,
        **rates,
        "of_ceiling": rate / limit if rate and limit else None,
        "peak_bytes": peak_bytes,
        **({"also": dict(also)} if also else {}),
    }


def without(labels: Mapping[str, Any], contender: str, reason: Exception | str) -> Row:
    r"""Return the row of what could not be measured.

    Examples
    --------
    >>> without({"M": 8}, "torch flash", RuntimeError("No kernel.\nMore lines"))
    {'M': 8, 'contender': 'torch flash', 'unavailable': 'RuntimeError: No kernel.'}
    >>> without({"M": 8}, "torch flash", NotAskedError("no time"))
    {'M': 8, 'contender': 'torch flash', 'unavailable': 'no time', 'left_out': True}
    """
    row = {**labels, "contender": contender, "unavailable": str(reason)[:300]}
    if isinstance(reason, NotAskedError):
        return {**row, "left_out": True}
    if isinstance(reason, Exception):
        first = next(iter(str(reason).strip().splitlines()), "")
        row["unavailable"] = f"{type(reason).__name__}: {first}"[:300]
    return row


def labels_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells a row from others, its contender among it.

    Examples
    --------
    >>> labels_of({"M": 8, "contender": "cupyattn", "times": {}, "flops": None})
    {'M': 8, 'contender': 'cupyattn'}
    """
    return {name: value for name, value in row.items() if name not in FIGURES}


def median_of(row: Mapping[str, Any]) -> float | None:
    """Return the seconds of a row, None of one that was not measured."""
    return None if "times" not in row else float(row["times"]["p50_s"])
