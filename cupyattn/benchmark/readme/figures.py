"""The figures that README shows: committed as JSON, and brought up to date by fresh results.

``attention.json`` and ``layers.json`` are lists of results, as the benchmarks write them, with
their medians alone. ``others.json`` is a list of sentences, each with the rows that it quotes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.benchmark.plot.results import Result, Row, device_of, on_what, rows_of
from cupyattn.errors import error

FOLDER = Path(".github") / "figures"
TABLES = ("attention", "layers")
SENTENCES = "others"
RATES = ("tflops", "gb_per_s")
"""What a row is quoted with, where not with its time: the one of them that it has."""
BESIDE = {"layers": ("torch compile", "torch eager")}
"""Peers that a table shows where their row is measured together with one that it has."""
_HEADER = (
    *("command", "invocation", "date", "device", "code", "arch_override", "cuda_driver", "cupy"),
    *("torch", "torch_compile", "ceilings"),
)

Figures = dict[str, list[dict[str, Any]]]
"""The contents of the files, by their names."""


def load(checkout: Path) -> Figures:
    """Read the committed figures.

    Raises
    ------
    ValueError
        For a folder that is no checkout.
    """
    if not (checkout / FOLDER).is_dir():
        raise error(
            ValueError,
            f"there is no {FOLDER} in {checkout.resolve()}",
            "README's figures are those of a checkout",
            "run it there, or pass --checkout DIR",
        )
    return {
        name: json.loads((checkout / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        for name in (*TABLES, SENTENCES)
    }


def store(checkout: Path, figures: Figures) -> None:
    """Write them, a row a line, so that a diff shows which rows are new."""
    for name, entries in figures.items():
        text = ",\n".join(_entry(entry) for entry in entries)
        (checkout / FOLDER / f"{name}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


def _entry(entry: Mapping[str, Any]) -> str:
    lines = [
        f"    {json.dumps(name)}: {json.dumps(value)}"
        for name, value in entry.items()
        if name != "rows"
    ]
    if "rows" in entry:
        rows = ",\n".join(f"      {json.dumps(row)}" for row in entry["rows"])
        lines.append(f'    "rows": [\n{rows}\n    ]')
    return "  {\n" + ",\n".join(lines) + "\n  }"


class Merged(NamedTuple):
    """What became of fresh results."""

    figures: Figures
    replaced: int
    """How many committed rows have new figures."""
    kept: Counter[str]
    """How many have none among the results: of which benchmark, by whom, of when."""


def merge(figures: Figures, results: Sequence[Result]) -> Merged:
    """Bring figures up to date with fresh results.

    A committed row is replaced by one of the same command and contender that has all of its
    labels, measured on the same device running the same code. It goes into a result of its own,
    with the new date, together with the peers `BESIDE` it; the rest keep theirs, as do those of
    whom nobody asked this time. A sentence is replaced if all of its rows are there.
    """
    merged: Figures = {}
    replaced, kept = 0, Counter[str]()
    for name in TABLES:
        old: list[dict[str, Any]] = []
        new: dict[int, dict[str, Any]] = {}
        committed = [_labels(row) for block in figures[name] for row in block["rows"]]
        for block in figures[name]:
            rest = []
            for row in block["rows"]:
                found = _successor(row, block["command"], block, results)
                if found is None:
                    rest.append(row)
                    kept[_whence(block["command"], row, block)] += 1
                else:
                    number, figure = found
                    there = new.setdefault(number, {**_header(results[number]), "rows": []})
                    fresh = [{**_labels(row), **figure}]
                    for peer in BESIDE.get(name, ()):
                        beside = {**_labels(row), "contender": peer}
                        if beside not in committed:
                            fresh += _beside({**row, **beside}, block, results[number])
                            committed.append(beside)
                    there["rows"] += fresh
                    replaced += len(fresh)
            old += [{**block, "rows": rest}] if rest else []
        merged[name] = [*new.values(), *old]
    sentences = [_sentence(each, results) for each in figures[SENTENCES]]
    merged[SENTENCES] = [now for now, _ in sentences]
    for now, is_new in sentences:
        rows = now.get("rows", ())
        replaced += is_new * len(rows)
        kept.update(_whence(row["command"], row, now) for row in rows if not is_new)
    return Merged(merged, replaced, kept)


def _beside(
    row: Mapping[str, Any], block: Mapping[str, Any], result: Result
) -> list[dict[str, Any]]:
    """Return a peer's row of a result, if it has figures there."""
    found = _successor(row, block["command"], block, [result])
    return [] if found is None or "unavailable" in found[1] else [{**_labels(row), **found[1]}]


def _whence(command: str, row: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    return f"{command}, {row['contender']}, of {measured['date']}"


def require_new(merged: Merged, results: Sequence[Result], committed: Figures) -> None:
    """Raise ValueError if results replaced no row."""
    if not merged.replaced:
        theirs, ours = (
            sorted({on_what(device_of(each), each.get("code") or ()) for each in of})
            for of in (results, [each for entries in committed.values() for each in entries])
        )
        raise error(
            ValueError,
            f"results of {', '.join(theirs) or 'nothing'}, with no row that README shows",
            f"its figures are of {', '.join(ours)}, in the cases of all --quick",
            "measure them there",
        )


def _sentence(sentence: dict[str, Any], results: Sequence[Result]) -> tuple[dict[str, Any], bool]:
    """Return a sentence with new figures, if there are all of them, and whether there are."""
    rows = sentence.get("rows", [])
    found = [_successor(row, row["command"], sentence, results) for row in rows]
    there = [each for each in found if each is not None]
    if not rows or len(there) < len(rows) or any("unavailable" in each for _, each in there):
        return sentence, False
    quoted = [{**_labels(row), **figure} for row, (_, figure) in zip(rows, there, strict=True)]
    dates = [results[number]["date"] for number, _ in there]
    return {**sentence, "date": max(dates), "rows": quoted}, True


def _successor(
    row: Mapping[str, Any], command: str, old: Mapping[str, Any], results: Sequence[Result]
) -> tuple[int, dict[str, Any]] | None:
    """Return the number of the last result that measured a row anew, and the figures."""
    labels = _labels(row)
    wanted = {name: labels[name] for name in labels if name not in ("command", "contender")}
    for number in reversed(range(len(results))):
        result = results[number]
        same = result["command"] == command and result.get("date") and not result.get("modelled")
        if not same or any(result.get(name) != old[name] for name in ("device", "code")):
            continue
        for each in rows_of(result):
            if each.contender == row["contender"] and wanted.items() <= each.case.items():
                figure = _figure(each, row)
                if figure:
                    return number, figure
    return None


def _figure(row: Row, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a row: the figures that the old one has.

    Six digits of them: README rounds once more, and a half of its last digit would go either way.
    """
    if row.refused:
        return {"unavailable": row.figures["unavailable"]}
    median = row.time("p50")
    if "times" in old:
        return {} if median is None else {"times": {"p50_s": _rounded(median)}}
    rate = next((name for name in RATES if name in old), RATES[0])
    value = row.figures.get(rate)
    return {} if value is None else {rate: _rounded(value)}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _labels(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in row if name not in ("times", *RATES, "unavailable")}


def _header(result: Result) -> dict[str, Any]:
    return {name: result[name] for name in _HEADER if result.get(name) is not None}
