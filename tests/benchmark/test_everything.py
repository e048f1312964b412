"""``python -m cupyattn.benchmark all``: what runs, what is written, what failures end."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest

from cupyattn.benchmark import everything
from cupyattn.benchmark.__main__ import BENCHMARKS, main
from cupyattn.benchmark.everything import parts_of, run_part


def test_every_benchmark_and_variant_is_run():
    parts = parts_of(BENCHMARKS)
    assert [name for name, part in parts.items() if part.runs_with(0)] == ["generate"]
    assert {name for name, part in parts.items() if part.runs_with(1)} == {
        *("attention", "attention_backward", "training_step", "linear", "layers", "decode"),
        *("varlen", "kv_cache", "block_mask", "block_mask_backward", "generate", "host"),
        *("prefill", "finetune", "matmul"),
    }  # fmt: skip
    assert parts["prefill"].words == ("decode", "--prefill")


@pytest.fixture
def parts(monkeypatch):
    """Record the command lines of parts instead of running them."""
    told = []

    def part(words, seconds):
        told.append((words[0], words[1:], seconds))
        if words[0] == "linear":
            return None, "FAILED with exit code 1: 0 rows"
        return {"command": words[0], "rows": []}, "all rows: 0 rows"

    monkeypatch.setattr(everything, "run_part", part)
    monkeypatch.setattr(everything, "device_count", lambda: 1)
    return told


def test_a_part_that_fails_takes_no_other_with_it(parts, tmp_path, capsys):
    file = tmp_path / "all.json"
    assert main(["all", "--quick", "--peers", "eager,cupy", "--json", str(file)]) == 1
    written = [result["command"] for result in json.loads(file.read_text())]
    ran = [name for name, *_ in parts]
    assert written == [name for name in ran if name != "linear"]
    assert "ring" not in ran and "host" in ran
    assert all(words[-3:] == ["--quick", "--peers", "eager,cupy"] for _, words, _ in parts)
    assert all(seconds <= everything._QUICK_PART_S for *_, seconds in parts)
    printed = " ".join(capsys.readouterr().out.split())
    assert "FAILED with exit code 1" in printed
    assert "ring left out: it takes 2 or more GPUs" in printed


def test_some_alone_and_all_is_well(parts, tmp_path):
    assert main(["all", "--only", "layers", "host", "--peers", "none"]) == 0
    assert main(["all", "--only", "decode"]) == 0
    assert [(name, words) for name, words, _ in parts] == [
        ("layers", ["--peers", "none"]), ("host", ["--peers", "none"]),
        ("decode", ["--peers", "all"]),
    ]  # fmt: skip


def test_in_a_quick_run_parts_leave_the_later_ones_some_time(parts, monkeypatch):
    now = 0.0
    monkeypatch.setattr(everything.time, "monotonic", lambda: now)
    part = everything.run_part

    def takes_all(words, seconds):
        nonlocal now
        now += seconds
        return part(words, seconds)

    monkeypatch.setattr(everything, "run_part", takes_all)
    main(["all", "--quick"])
    left = [seconds for *_, seconds in parts]
    assert len(left) == 15 and left[0] == everything._QUICK_PART_S
    assert min(left) == everything._QUICK_LEAST_S
    assert now == 60 * everything.QUICK_MINUTES


@pytest.fixture
def scripted(monkeypatch):
    """Parts whose process is a script; it finds the JSON's path as its last argument."""

    real = everything.subprocess.Popen

    def run(script, seconds=30.0):
        # Processes that a shell starts in the background ignore SIGINT, and so do their children.
        heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        made = ("-c", f"import sys, json, time; {heeding}; file = sys.argv[-1]\n{script}")

        def popen(command):
            return real([sys.executable, *made, *command[1:]])

        monkeypatch.setattr(everything.subprocess, "Popen", popen)
        return run_part(["linear"], seconds)

    return run


WRITE = "json.dump({'command': 'linear', 'rows': [{'unavailable': ''}, {}]}, open(file, 'w'))"


def test_what_a_part_wrote_is_read(scripted):
    result, verdict = scripted(WRITE)
    assert result["command"] == "linear"
    assert verdict == "all rows: 1 rows, 1 unavailable"


def test_a_part_that_breaks_off_still_gives_its_rows(scripted):
    result, verdict = scripted(f"{WRITE}; sys.exit(1)")
    assert len(result["rows"]) == 2
    assert verdict.startswith("FAILED with exit code 1: 1 rows")
    assert scripted("raise SystemExit(3)") == (None, "FAILED with exit code 3")
    assert scripted("pass") == (None, "FAILED: no result")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for a child")
def test_a_part_that_takes_too_long_is_interrupted_and_writes_what_it_has(scripted):
    began = time.monotonic()
    script = f"try:\n  time.sleep(60)\nexcept KeyboardInterrupt:\n  {WRITE}"
    result, verdict = scripted(script, 2.0)  # of which Python's start takes some on a busy machine
    assert time.monotonic() - began < 45
    assert len(result["rows"]) == 2
    assert verdict == "cut after 2 s: 1 rows, 1 unavailable"
    _, verdict = scripted("try:\n  time.sleep(60)\nexcept KeyboardInterrupt:\n  pass", 1.0)
    assert verdict == "FAILED: cut after 1 s, before its first row"
    for seconds in (-1.0, 0.6):
        assert scripted(WRITE, seconds) == (None, "FAILED: no time was left")


def test_rows_before_a_failure_are_kept(a_gpu, tmp_path, capsys, monkeypatch):
    benchmark = next(each for each in BENCHMARKS if each.name == "layers")

    def rows(arguments, harness):
        yield next(iter(benchmark.harness_rows(arguments, harness)))
        raise RuntimeError("an illegal memory access was encountered")

    broken = replace(benchmark, rows=rows)
    monkeypatch.setattr("cupyattn.benchmark.__main__.BENCHMARKS", (broken,))
    file = tmp_path / "layers.json"
    words = ("--operation", "gelu", "--rows", "4", "--width", "64")
    assert main(["layers", *words, "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert len(result["rows"]) == 1
    assert result["failed"] == "RuntimeError: an illegal memory access was encountered"
    assert "illegal memory access" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    file = tmp_path / "all.json"
    words = ["--only", "kv_cache", "host", "--peers", "none", "--json", str(file)]
    assert main(["all", "--quick", *words]) == 0
    assert [result["command"] for result in json.loads(file.read_text())] == ["kv_cache", "host"]
