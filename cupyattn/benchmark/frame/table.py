"""The table that every benchmark prints: labels that vary, who computed it, what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.benchmark.frame.rows import Row, labels_of, median_of
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.turing.disassembler import WHEEL


def show_machine(what: str, result: Result, terminal: Terminal) -> None:
    """Print what belongs to every figure: GPU, date, architecture of the code, versions."""
    terminal.title(f"{what} on {result['device']}, {result['date']}")
    terminal.facts(
        {
            "compute capability": result["compute_capability"],
            "kernels": ", ".join(map(_code_text, result["code"])) or "none ran",
            "CUPYATTN_ARCH": result["arch_override"] or "not set",
            "float16": "on tensor cores" if result["tensor_cores"] else "in float32 arithmetic",
            "driver": ", of ".join(
                filter(None, (result.get("driver_version"), f"CUDA {result['cuda_driver']}"))
            ),
            **_host(result),
            **_about_the_run(result),
        }
    )


_VERSIONS = {
    "version": "cupyattn",
    "cupy": "CuPy",
    "nvrtc": "NVRTC",
    "nvdisasm": "nvdisasm",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "python": "Python",
}


def _host(result: Result) -> dict[str, str]:
    """Return what belongs to figures of any kind; a record may be older than some of it."""
    versions = (f"{name} {result[key]}" for key, name in _VERSIONS.items() if result.get(key))
    host = ", ".join(result[name] for name in ("cpu", "os") if name in result)
    facts = {"host": host, "versions": ", ".join(versions), "commit": result.get("commit")}
    return {name: said for name, said in facts.items() if said}


def _about_the_run(result: Result) -> dict[str, str]:
    """Return what a benchmark's run says beside the machine; other commands have none of it."""
    if "ceilings" not in result:
        return {}
    clocks = result["clocks"] or {}
    told = (("sm_mhz", "MHz"), ("memory_mhz", "MHz of memory"), ("power_w", "W"),
            ("temperature_c", "C"))  # fmt: skip
    return {
        "measured ceilings": ceilings_text(result["ceilings"]),
        "clocks": ", ".join(f"{clocks[name]:.0f} {unit}" for name, unit in told if name in clocks)
        or "not told",
    }


def ceilings_text(ceilings: Mapping[str, float | None]) -> str:
    """Return what the GPU can do at the most.

    Examples
    --------
    >>> ceilings_text({"copy_gb_per_s": 4254.2, "mma_tflops": None, "fma_tflops": 61.3})
    'copy 4254 GB/s, fma 61 TFLOP/s'
    """
    units = (("copy_gb_per_s", "GB/s"), ("read_gb_per_s", "GB/s"), ("mma_tflops", "TFLOP/s"),
             ("fma_tflops", "TFLOP/s"))  # fmt: skip
    return ", ".join(
        f"{name.partition('_')[0]} {ceilings[name]:.0f} {unit}"
        for name, unit in units
        if ceilings.get(name) is not None
    )


def _code_text(target: str) -> str:
    if target.startswith("compute_"):
        return f"{target} PTX, translated by the driver"
    return f"{target} machine code"


_ABOVE = 1.05
"""Shares that are no noise of a ceiling."""


def show_result(
    title: str, note: str, beside: str | None, result: Result, terminal: Terminal
) -> None:
    """Print a result for people."""
    if result.get("modelled"):
        terminal.title(
            f"{title}, MODELLED and not measured, for a {result['machine']}: nothing was timed"
        )
        terminal.facts({"date": result["date"], **_host(result)})
    elif "device" in result:
        show_machine(title, result, terminal)
    else:
        terminal.title(f"{title}, {result['date']}")
        terminal.facts(_host(result))
    show_rows(result["rows"], beside, terminal)
    if result.get("nvdisasm", "") is None and not all("times" in row for row in result["rows"]):
        terminal.text(
            "  Products have no times: the model of Turing reads machine code that nvdisasm lists, "
            f"and there is none here; pip install {WHEEL}"
        )
    if any((row.get("of_ceiling") or 0) > _ABOVE for row in result["rows"]):
        note += (
            " A share above 1 is of bytes that a cache held, or of a peer's tensor cores where "
            "float32 arithmetic is the ceiling."
        )
    if "calls" in result:
        note = f"Medians of at most {result['calls']} calls after {result['warm_up']}. {note}"
    terminal.text(f"  {note}")


def show_rows(rows: Sequence[Row], beside: str | None, terminal: Terminal) -> None:
    """Print rows: labels that all share above the table, the others as its columns."""
    if not rows:
        return
    labels = [labels_of(row) for row in rows]
    names = list(dict.fromkeys(name for each in labels for name in each if name != "contender"))
    columns = {name: tuple(_key(each.get(name)) for each in labels) for name in names}
    vary = [name for name in names if len(set(columns[name])) > 1]
    same = {name: labels[0].get(name) for name in names if name not in vary}
    vary = list({columns[name]: name for name in reversed(vary)}.values())[::-1]  # none twice
    if "option" in names and all(each.get("option") != "window" for each in labels):
        same.pop("window", None)  # which no row has: every case has the size
    if same:
        terminal.title(label_text(same))
    also = list(dict.fromkeys(name for row in rows for name in _also(row)))
    spread = [name for name in ("p95_s",) if any(name in row.get("times", {}) for row in rows)]
    rates = [name for name in _RATES if any(row.get(name) is not None for row in rows)]
    over = [beside] if beside in vary else []
    compares = [*(["contender"] if len({each["contender"] for each in labels}) > 1 else []), *over]
    firsts = {name: _firsts(rows, name) for name in compares}
    lines = [
        (
            *(_value(each.get(name)) for name in vary),
            each["contender"],
            *_times(row, spread),
            *(_RATES[name](row.get(name)) for name in rates),
            *(_ratio(row, firsts[name][_others(row, name)]) for name in compares),
            *(_value(_also(row).get(name)) for name in also),
        )
        for row, each in zip(rows, labels, strict=True)
    ]
    titles = {"contender": "x the first", beside: f"x first {beside}"}
    heading = (*vary, "ran", "p50",
               *(name.removesuffix("_s") for name in spread), *(_TITLES[name] for name in rates),
               *(titles[name] for name in compares), *also)  # fmt: skip
    terminal.table(heading, lines, names=len(vary) + 1)
    for reason in dict.fromkeys(row["unavailable"] for row in rows if "unavailable" in row):
        who = dict.fromkeys(row["contender"] for row in rows if row.get("unavailable") == reason)
        terminal.text(f"  {', '.join(who)}: {reason}")


_RATES = {
    "tflops": lambda rate: "" if rate is None else f"{rate:.1f}",
    "gb_per_s": lambda rate: "" if rate is None else f"{rate:.0f}",
    "of_ceiling": lambda share: "" if share is None else f"{share:.2f}",
    "peak_bytes": lambda taken: "" if taken is None else f"{taken / 1e6:.1f} MB",
}
_TITLES = {
    "tflops": "TFLOP/s",
    "gb_per_s": "GB/s",
    "of_ceiling": "of ceiling",
    "peak_bytes": "memory",
}


def _times(row: Row, spread: Sequence[str]) -> tuple[str, ...]:
    if median_of(row) is None:
        return ("none" if "unavailable" in row else "", *[""] * len(spread))
    times = row["times"]
    count = times.get("calls_per_sample", 1)
    of = f", mean of {count} calls" if count > 1 else ""
    return (
        seconds_text(times["p50_s"]),
        *(seconds_text(times[name]) + of if name in times else "" for name in spread),
    )


def seconds_text(seconds: float | None) -> str:
    """Return a time with its unit.

    Examples
    --------
    >>> seconds_text(12.34e-6), seconds_text(0.01234)
    ('12.3 us', '12.340 ms')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def _also(row: Row) -> Mapping[str, Any]:
    """Return a row's own figures, and the counts of a modelled one, that are single values."""
    figures = {**row.get("also", {}), **row.get("counts", {})}
    return {name: value for name, value in figures.items() if not isinstance(value, (dict, list))}


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _others(row: Row, name: str) -> str:
    return _key({label: value for label, value in labels_of(row).items() if label != name})


def _firsts(rows: Sequence[Row], name: str) -> dict[str, Row]:
    """Return the first row of those that differ in one label alone."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(_others(row, name), row)
    return found


def _ratio(row: Row, first: Row) -> str:
    ours, theirs = median_of(row), median_of(first)
    return "" if row is first or not ours or not theirs else f"{ours / theirs:.2f}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def label_text(labels: Mapping[str, Any]) -> str:
    """Return labels in a line.

    Examples
    --------
    >>> label_text({"operation": "softmax", "width": 768, "causal": False, "window": None})
    'softmax, width 768'
    """
    return ", ".join(
        str(value) if isinstance(value, str) else name if value is True else f"{name} {value}"
        for name, value in labels.items()
        if value is not None and value is not False
    )
