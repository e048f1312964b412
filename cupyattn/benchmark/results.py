"""The JSON of ``--json``: written, read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupyattn.benchmark.cases import FIGURES
from cupyattn.cli.terminal import Result
from cupyattn.errors import error, shown

_STRINGS = ("device", "date", "machine", "cpu")
_NOT_CHECKED = ("also", "modelled", "counts", "unavailable", "left_out", "times")
_NUMBERS = FIGURES - {"ceiling"} | {
    f"{name}_s" for name in ("mean", "std", "min", "max", "p50", "p95", "p99")
}


def device_of(result: Mapping[str, Any]) -> str:
    """Return the device of the figures, or the machine that they are modelled for."""
    if result.get("modelled"):
        return f"modelled: {result.get('machine', 'a Turing GPU')}"
    return result.get("device") or result.get("cpu") or "this machine's CPU"


def place_of(result: Mapping[str, Any]) -> str:
    """Return device and code of a result."""
    codes = result.get("code") or ()
    return device_of(result) + (f" running {', '.join(codes)} code" if codes else "")


def require_writable(file: Path) -> None:
    """Raise OSError if a file cannot be written: before hours of measuring, not after them."""
    there = file.exists()
    file.open("a").close()
    if not there:
        file.unlink()


def write_json(result: Any, file: Path) -> None:
    """Write a result, or a list of them."""
    file.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def results_of(file: Path) -> list[Result]:
    """Read what --json wrote: one result, or a list of them.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it contains something else.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:
        raise _no_results(file, f"is no JSON file ({failure})") from None
    results = held if isinstance(held, list) else [held]
    for result in results:
        wrong = _wrong_in(result)
        if wrong:
            raise _no_results(file, f"contains something else: {wrong}")
    return results


def _wrong_in(result: Any) -> str:
    """Return what no benchmark writes; nothing if all is right."""
    if not isinstance(result, dict):
        return shown(result)
    command, rows = result.get("command"), result.get("rows")
    if not (isinstance(command, str) and command.isidentifier()):
        return f"command is {shown(command)}"
    for name in _STRINGS:
        if not isinstance(result.get(name), (str, type(None))):
            return f"{name} is {shown(result[name])}"
    code, ceilings = result.get("code") or [], result.get("ceilings") or {}
    if not (isinstance(code, list) and all(isinstance(each, str) for each in code)):
        return f"code is {shown(code)}"
    if not isinstance(rows, list):
        return f"rows is {shown(rows)}"
    figures: list[Any] = [ceilings]
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("times", {}), dict):
            return f"a row {shown(row)}"
        if "contender" in row:  # results until 2026 name the implementation so
            row["implementation"] = row.pop("contender")
        if "implementation" in row:  # other rows are of commands that have another form
            if not (isinstance(row["implementation"], str) and row["implementation"].strip()):
                return f"an implementation {shown(row['implementation'])}"
            times = row.get("times", {"p50_s": 0})
            if None in (times.get("p50_s"), *times.values()):
                return f"times are {shown(times)}"
            figures += [{k: v for k, v in row.items() if k not in _NOT_CHECKED}, times]
    for each in figures:
        for name, value in each.items():
            if not _is_right(name, value):
                return f"{name} is {shown(value)}"
    return ""


def _is_right(name: str, value: Any) -> bool:
    """Tell whether a label is one value, and a figure a finite number that is not negative."""
    if isinstance(value, (int, float)):
        return math.isfinite(value) and (name not in _NUMBERS or value >= 0)
    return value is None or (isinstance(value, str) and name not in _NUMBERS)


def _no_results(file: Path, what: str) -> ValueError:
    return error(
        ValueError,
        f"{file} {what}",
        "results are what a benchmark writes with --json, or a list of that",
        "write some with python -m cupyattn.benchmark all --json FILE",
    )
