"""``python -m cupyattn.benchmark emulator``: what it times, and what it prints."""

from __future__ import annotations

import json

import pytest

import cupyattn
from cupyattn.benchmark import emulator
from cupyattn.benchmark.__main__ import main
from cupyattn.emulator import Checks


def test_the_first_call_is_not_counted(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr(emulator.time, "process_time", lambda: next(clock))
    calls = []
    assert emulator.cpu_seconds(lambda: calls.append(1), Checks.fast(), 3) == 2.0
    assert len(calls) == 4


@pytest.mark.nvrtc
def test_rows(monkeypatch, capsys):
    monkeypatch.setattr(emulator, "SIZES", (emulator.Size(1, 1, 16, 0.005),))
    assert main(["emulator", "--calls", "1", "--problems", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["rows"]] == [
        "(B, H, N) = (1, 1, 16)",
        "2 random problems",
    ]
    assert [row["budget_s"] for row in result["rows"]] == [0.005, 0.08]
    for row in result["rows"]:
        assert row["fast_s"] > 0
        assert row["all_checks_s"] > 0


def test_text(monkeypatch, capsys):
    row = {"name": "a", "fast_s": 0.002, "all_checks_s": 0.005, "budget_s": 0.005}
    monkeypatch.setattr(emulator, "_size_row", lambda size, calls: row)
    monkeypatch.setattr(emulator, "_random_row", lambda count: row)
    assert main(["emulator"]) == 0
    printed = capsys.readouterr().out
    assert "2.0 ms" in printed
    assert "5 ms" in printed
    assert "2.5" in printed


def test_without_a_compiler(monkeypatch, capsys):
    def absent(*_, **__):
        raise RuntimeError("NVRTC is not here")

    monkeypatch.setattr(cupyattn, "attention", absent)
    assert main(["emulator", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "NVRTC is not here"
