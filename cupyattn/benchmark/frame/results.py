"""The file of ``--json``: what benchmarks write, and what is read of them again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.benchmark.frame.rows import FIGURES
from cupyattn.cli.terminal import Result
from cupyattn.errors import error, shown

_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    **{"command": (str,), "rows": (list,), "device": (str, _NONE), "date": (str, _NONE)},
    **{"code": (list, _NONE), "ceilings": (dict, _NONE)},
    **{"machine": (str, _NONE), "cpu": (str, _NONE)},
}
"""Of what is read of a result."""
_WITHIN = ("also", "modelled", "counts", "unavailable", "left_out")
"""Figures of which there is no number for a picture."""


def device_of(result: Mapping[str, Any]) -> str:
    """Return what the figures are of: a device, or the machine that they are modelled for."""
    if result.get("modelled"):
        return f"modelled: {result.get('machine', 'a Turing GPU')}"
    return result.get("device") or result.get("cpu") or "this machine's CPU"


def on_what(device: str, codes: Sequence[str]) -> str:
    """Write what figures were measured on."""
    return device + (f" running {', '.join(codes)} code" if codes else "")


def place_of(result: Mapping[str, Any]) -> str:
    """Return device and code of a result.

    Examples
    --------
    >>> place_of({"device": "NVIDIA H200", "code": ["compute_75"]})
    'NVIDIA H200 running compute_75 code'
    """
    return on_what(device_of(result), result.get("code") or ())


def require_writable(file: Path) -> None:
    """Raise OSError where a file cannot be written: before hours of measuring, not behind them."""
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
        If it holds something else.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:
        raise _no_results(file, f"is no JSON file ({failure})") from None
    results = held if isinstance(held, list) else [held]
    for result in results:
        wrong = _wrong_in(result)
        if wrong:
            raise _no_results(file, f"holds something else: {wrong}")
    return results


def _wrong_in(result: Any) -> str:
    """Return what of a result no benchmark writes; nothing of one that is right."""
    if not isinstance(result, dict):
        return shown(result)
    for name, kinds in _KINDS.items():
        if not isinstance(result.get(name), kinds):
            return f"{name} is {shown(result.get(name))}"
    if not result["command"].isidentifier():
        return f"command is {shown(result['command'])}"
    if not all(isinstance(target, str) for target in result.get("code") or ()):
        return f"code is {shown(result['code'])}"
    figures: list[Any] = [result.get("ceilings") or {}]
    for row in result["rows"]:
        if not isinstance(row, dict) or not isinstance(row.get("times", {}), dict):
            return f"a row {shown(row)}"
        if "contender" in row:  # others are of commands that have a form of their own
            if not (isinstance(row["contender"], str) and row["contender"].strip()):
                return f"a contender {shown(row['contender'])}"
            times = row.get("times", {"p50_s": 0})
            if None in (times.get("p50_s"), *times.values()):
                return f"times are {shown(times)}"
            figures += [_telling(row), times]
    for each in figures:
        for name, value in each.items():
            if not _right(name, value):
                return f"{name} is {shown(value)}"
    return ""


def _telling(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in (*_WITHIN, "times")}


def _right(name: str, value: Any) -> bool:
    """Tell whether a label is one value, and a figure a number that something took or did."""
    if isinstance(value, (int, float)):
        return math.isfinite(value) and (name not in _NUMBERS or value >= 0)
    return value is None or (isinstance(value, str) and name not in _NUMBERS)


_NUMBERS = FIGURES | {f"{name}_s" for name in ("mean", "std", "min", "max", "p50", "p95", "p99")}


def _no_results(file: Path, what: str) -> ValueError:
    return error(
        ValueError,
        f"{file} {what}",
        "results are what a benchmark writes with --json, or a list of that",
        "write some with python -m cupyattn.benchmark all --json FILE",
    )
