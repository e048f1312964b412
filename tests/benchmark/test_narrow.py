"""Tables of 80 columns: no name of a row is cut or lost, and what is long has lines of its own."""

from __future__ import annotations

import pytest
from support.made_up_results import attention, layers
from support.memory_calls import every_call

from cupyattn.benchmark.__main__ import BENCHMARKS, main
from cupyattn.benchmark.memory import show as show_memory
from cupyattn.benchmark.table import show_result
from cupyattn.cli.terminal import Terminal
from cupyattn.turing import MACHINES

WIDTH = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def shown(result, capsys):
    (benchmark,) = (each for each in BENCHMARKS if each.name == result["command"])
    result |= {"calls": 100, "warm_up": 10}
    show_result(benchmark.title, benchmark.note, benchmark.beside, result, Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    return [" ".join(line.split()) for line in lines]


def test_many_labels_stand_in_the_line_above_the_figures(capsys):
    result = attention((512, 4096), (64, 80, 128))
    lines = shown(result, capsys)
    for row in result["rows"]:
        case = (row[name] for name in ("heads", "seqlen", "head_dim", "option", "implementation"))
        at = lines.index(" ".join(map(str, case)))
        assert lines[at + 1].split()[1] in ("us", "ms") if "times" in row else "none"


def test_rows_of_one_case_stand_below_it(capsys):
    result = layers()
    lines = shown(result, capsys)
    case = None
    for row in result["rows"]:
        names = (row[name] for name in ("operation", "rows", "width", "direction"))
        last, case = case, " ".join(map(str, names))
        if case != last:
            at = lines.index(case)
        at += 1
        assert lines[at].startswith(f"{row['implementation']} ")
        assert f"{row['gb_per_s']:.0f} " in lines[at]


def test_profiles_name_every_kernel(capsys):
    assert main(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    at = lines.index("  attention_forward")
    assert lines[at + 1].split()[1:3] == ["255", "32768"] and "waits for" in lines[at + 2]


def test_calls_of_memory_stand_beside_their_figures(capsys):
    rows = [
        {"call": call.name, "sector_ratio": 16.73, "bound": "memory",
         "bandwidth_share": dict.fromkeys(MACHINES, 0.5)}
        for call in every_call()
    ]  # fmt: skip
    show_memory({"nvrtc": "12.9", "machines": list(MACHINES), "rows": rows}, Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    for row in rows:
        assert any(
            line.startswith(f"  {row['call']}  ") and f"{row['sector_ratio']:.2f}" in line
            for line in lines
        ), row["call"]
