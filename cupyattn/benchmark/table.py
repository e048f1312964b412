"""The table of every benchmark: the labels that differ, the implementation, the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from cupyattn.benchmark.cases import CEILINGS, Row, labels_of, median_of
from cupyattn.benchmark.timer import ARITHMETIC
from cupyattn.cli.terminal import Result, Terminal

_VERSIONS = {
    "version": "cupyattn",
    "cupy": "CuPy",
    "nvrtc": "NVRTC",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "python": "Python",
}
_ABOVE = 1.05  # of a ceiling: more is not noise


def show_machine(what: str, result: Result, terminal: Terminal) -> None:
    """Print what every figure depends on: GPU, date, architecture of the code, versions."""
    terminal.title(f"{what} on {result['device']}, {result['date']}")
    driver = filter(None, (result.get("driver_version"), f"CUDA {result['cuda_driver']}"))
    facts = {
        "compute capability": result["compute_capability"],
        "kernels": ", ".join(map(_code_text, result["code"])) or "none ran",
        "CUPYATTN_ARCH": result["arch_override"] or "not set",
        "float16": "on tensor cores" if result["tensor_cores"] else "in float32 arithmetic",
        "driver": ", of ".join(driver),
        **_host(result),
    }
    if "ceilings" in result:  # of a benchmark's run
        facts["measured ceilings"] = ceilings_text(result["ceilings"])
    terminal.facts(facts)


def _host(result: Result) -> dict[str, str]:
    """Return the host's facts; a record may be older than some of them."""
    versions = (f"{name} {result[key]}" for key, name in _VERSIONS.items() if result.get(key))
    host = ", ".join(result[name] for name in ("cpu", "os") if name in result)
    facts = {"host": host, "versions": ", ".join(versions)}
    return {name: fact for name, fact in facts.items() if fact}


def ceilings_text(ceilings: Mapping[str, float | None]) -> str:
    """Return what the GPU can do at most.

    Examples
    --------
    >>> ceilings_text({"copy_gb_per_s": 4254.2, "mma_tflops": None, "fma_tflops": 61.3})
    'copy 4254 GB/s, fma 61 TFLOP/s'
    """
    return ", ".join(
        f"{name.partition('_')[0]} {rate:.0f} {'TFLOP/s' if 'tflops' in name else 'GB/s'}"
        for name in CEILINGS
        if (rate := ceilings.get(name)) is not None
    )


def _code_text(target: str) -> str:
    if target.startswith("compute_"):
        return f"{target} PTX, translated by the driver"
    return f"{target} machine code"


def show_result(
    title: str, note: str, compare: str | None, result: Result, terminal: Terminal
) -> None:
    """Print a result for people."""
    if result.get("modelled"):
        terminal.title(
            f"{title}, MODELLED and not measured, for a {result['machine']}: nothing was timed"
        )
        terminal.facts({"date": result["date"], **_host(result)})
    else:
        show_machine(title, result, terminal)
    show_rows(result["rows"], compare, terminal)
    if any((row.get("of_ceiling") or 0) > _ABOVE for row in result["rows"]):
        note += (
            " A share above 1 means bytes that a cache held, or another library's tensor cores "
            "where float32 arithmetic is the ceiling."
        )
    if "calls" in result:
        note = f"Medians of at most {result['calls']} calls after {result['warm_up']}. {note}"
    terminal.text(f"  {note}")


_RATES: Mapping[str, tuple[str, str]] = {
    "tflops": ("TFLOP/s", "{:.1f}"),
    "gb_per_s": ("GB/s", "{:.0f}"),
    "of_ceiling": ("of ceiling", "{:.2f}"),
    "peak_bytes": ("memory", "{:.1f} MB"),
}
"""Title and form of the columns of figures."""


def show_rows(rows: Sequence[Row], compare: str | None, terminal: Terminal) -> None:
    """Print rows: labels that all have in common above the table, the others as its columns."""
    if not rows:
        return
    labels = [labels_of(row) for row in rows]
    names = list(dict.fromkeys(name for each in labels for name in each))
    names.remove("implementation")
    columns = {name: tuple(_key(each.get(name)) for each in labels) for name in names}
    vary = [name for name in names if len(set(columns[name])) > 1]
    same = {name: labels[0].get(name) for name in names if name not in vary}
    vary = list({columns[name]: name for name in reversed(vary)}.values())[::-1]  # none twice
    if "option" in names and all(each.get("option") != "window" for each in labels):
        same.pop("window", None)  # no row has one
    if same:
        terminal.title(label_text(same))
    also = list(dict.fromkeys(name for row in rows for name in _also(row)))
    spread = any("p95_s" in row.get("times", {}) for row in rows)
    rates = [name for name in _RATES if any(row.get(name) is not None for row in rows)]
    several = len({each["implementation"] for each in labels}) > 1
    compared = {"implementation": "x the first"} if several else {}
    if compare in vary:
        compared[str(compare)] = f"x first {compare}"
    firsts = {name: _firsts(rows, name) for name in compared}
    lines = [
        (
            *(_value(each.get(name)) for name in vary),
            each["implementation"],
            *_times(row, spread),
            *(_rate(name, row.get(name)) for name in rates),
            *(_ratio(row, firsts[name][_others(row, name)]) for name in compared),
            *(_value(_also(row).get(name)) for name in also),
        )
        for row, each in zip(rows, labels, strict=True)
    ]
    heading = (*(name.replace("_", " ") for name in vary), "ran", "p50", *["p95"] * spread,
               *(_RATES[name][0] for name in rates), *compared.values(), *also)  # fmt: skip
    products = any(row.get("ceiling") in ARITHMETIC for row in rows)
    less = _RATES["gb_per_s" if products else "tflops"][0]
    terminal.left_out(
        terminal.table(heading, lines, len(vary) + 1, ("p95", "memory", less, "of ceiling"))
    )
    for reason in dict.fromkeys(row["unavailable"] for row in rows if "unavailable" in row):
        refused = [row for row in rows if row.get("unavailable") == reason]
        who = dict.fromkeys(row["implementation"] for row in refused)
        terminal.text(f"  {', '.join(who)}: {reason}")


def _rate(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return _RATES[name][1].format(value / 1e6 if name == "peak_bytes" else value)


def _times(row: Row, spread: bool) -> tuple[str, ...]:
    if median_of(row) is None:
        return ("none" if "unavailable" in row else "", *[""] * spread)
    times = row["times"]
    count = times.get("calls_per_sample", 1)
    means = f", mean of {count} calls" if count > 1 else ""
    p95 = seconds_text(times["p95_s"]) + means if "p95_s" in times else ""
    return (seconds_text(times["p50_s"]), *[p95] * spread)


def seconds_text(seconds: float) -> str:
    """Return a time with its unit.

    Examples
    --------
    >>> seconds_text(12.34e-6), seconds_text(0.01234)
    ('12.3 us', '12.340 ms')
    """
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def _also(row: Row) -> Mapping[str, object]:
    """Return the single values among a row's own figures."""
    figures = row.get("also", {}).items()
    return {name: value for name, value in figures if not isinstance(value, (dict, list))}


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _others(row: Row, name: str) -> str:
    return _key({label: value for label, value in labels_of(row).items() if label != name})


def _firsts(rows: Sequence[Row], name: str) -> dict[str, Row]:
    """Return the first of the rows that differ in one label only."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(_others(row, name), row)
    return found


def _ratio(row: Row, first: Row) -> str:
    ours, theirs = median_of(row), median_of(first)
    return "" if row is first or not ours or not theirs else f"{ours / theirs:.2f}"


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def label_text(labels: Mapping[str, object]) -> str:
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
