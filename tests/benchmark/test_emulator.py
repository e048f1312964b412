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
    assert emulator.cpu_seconds(lambda: calls.append(1), Checks.fast(), 3) == [1.0, 3.0, 2.0]
    assert len(calls) == 4


@pytest.mark.nvrtc
def test_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(emulator, "SIZES", (emulator.Size(1, 1, 16, 0.005),))
    file = tmp_path / "emulator.json"
    assert main(["emulator", "--calls", "100", "--problems", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert all(result[name] for name in ("date", "cpu", "os", "python", "version"))
    rows = result["rows"]
    assert [(row["problem"], row["checks"]) for row in rows] == [
        (problem, checks)
        for problem in ("(B, H, N) = (1, 1, 16)", "2 random problems")
        for checks in ("bounds", "all")
    ]
    assert [row["also"]["budget_s"] for row in rows[::2]] == [0.005, 0.08]
    assert all(row["times"]["p50_s"] > 0 for row in rows)
    assert [row["times"]["samples"] for row in rows] == [3] * 4, "of few asked for too"
    assert "x first checks" in capsys.readouterr().out


def test_without_a_compiler(monkeypatch, capsys):
    def absent(*_, **__):
        raise RuntimeError("NVRTC is not here")

    monkeypatch.setattr(cupyattn, "attention", absent)
    assert main(["emulator"]) == 1
    assert "NVRTC is not here" in capsys.readouterr().err
