"""The run of a benchmark on a GPU: clocks, peers that are there or not, what is said."""

from __future__ import annotations

import json
import types
from contextlib import nullcontext

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, HEADER, SCRATCH

from cupyattn.benchmark import command as driver
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.timer import Samples, Timer

WORDS = ("attention", "--seqlen", "8", "--head-dim", "16", "--width", "16", "--batch", "1",
         "--dtype", "float16", "--implementation", "flash", "--options", "none")  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """What a benchmark asks of a GPU, answered; the rest is its own. Returns the clock's calls."""
    asked = []
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(Device=lambda ordinal: nullcontext()),
        **{name: getattr(np, name) for name in (
            "asarray", "resize", "empty", "abs", "matmul", "arange", "where", "exp", "float32")},
    )  # fmt: skip

    def times(self, calls, torch=None):
        asked.append((self, torch))
        return Samples([2e-6] * 3, 50)

    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "load_cupy", lambda: cupy)
    monkeypatch.setattr(driver, "cuda_device", lambda n: types.SimpleNamespace(ordinal=n))
    monkeypatch.setattr(driver, "measured_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(driver, "measured_on", lambda device, torch: HEADER)
    monkeypatch.setattr(driver, "peak_bytes", lambda call, torch: SCRATCH)
    monkeypatch.setattr(driver, "free_memory", lambda torch: None)
    monkeypatch.setattr(Timer, "times", times)
    return asked


def test_a_run(machine, tmp_path, capsys):
    file = tmp_path / "run.json"
    words = (*WORDS, "--calls", "7", "--warm-up", "2", "--budget", "0.5", "--peers", "cupy")
    assert main([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert {name: result[name] for name in HEADER} == HEADER
    assert result["ceilings"] == CEILINGS
    assert (result["calls"], result["warm_up"]) == (7, 2)
    assert "torch_compile" not in result
    assert [row["implementation"] for row in result["rows"]] == ["cupyattn flash", "cupy"]
    assert machine == [(Timer(7, 2, 0.5), None)] * 2
    assert {row["times"]["calls_per_sample"] for row in result["rows"]} == {50}
    printed = " ".join(capsys.readouterr().out.split())
    assert "cupyattn flash 2.0 us 2.0 us, mean of 50 calls" in printed
    assert "copy 4 GB/s, read 5 GB/s" in printed


def test_a_library_that_is_not_there_is_said_in_its_rows(machine, monkeypatch, tmp_path):
    def absent():
        raise RuntimeError("a peer of PyTorch without it; pip install torch")

    monkeypatch.setattr(driver, "load_torch", absent)
    file = tmp_path / "run.json"
    assert main([*WORDS, "--peers", "eager,compile", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [row.get("unavailable", "")[-17:] for row in result["rows"]] == [
        "", "pip install torch", "pip install torch"
    ]  # fmt: skip
    assert result["torch_compile"] == "max-autotune-no-cudagraphs"


def test_what_follows_from_quick(machine, tmp_path):
    assert main([*WORDS, "--quick"]) == 0
    assert main([*WORDS, "--quick", "--calls", "77"]) == 0
    assert main([*WORDS, "--quick", "--warm-up", "100"]) == 0
    (first, _), (second, _), (usual, _) = machine
    assert (first.calls, first.budget_s) == (driver.QUICK["calls"], driver.QUICK["budget"])
    assert (second.calls, second.budget_s) == (77, driver.QUICK["budget"])
    assert (usual.calls, usual.warm_up) == (driver.QUICK["calls"], 100)
