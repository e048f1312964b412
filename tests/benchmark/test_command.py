"""The run of a benchmark on a GPU: clocks, other libraries, options, and what it ran on."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import types
from contextlib import nullcontext

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, HEADER, SCRATCH

from cupyattn.benchmark import command as driver
from cupyattn.benchmark import libraries, results
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.benchmark.timer import Samples, Timer

WORDS = ("attention", "--seqlen", "8", "--head-dim", "16", "--width", "16", "--batch", "1",
         "--dtype", "float16", "--implementation", "flash", "--options", "none")  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Stand in for the parts of a GPU that a benchmark reads; return the timer's calls."""
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


def resolved(*words: str) -> tuple[str, argparse.Namespace]:
    parent = Benchmark(
        "parent", "", "", "", "", options=(Option("size", 1, ""), Option("own", [2], "")),
        quick={"size": 5}, variants={"small": Benchmark(
            "small", "", "", "", "", options=(Option("size", 7, ""),), quick={"size": 6})},
    )  # fmt: skip
    chosen, arguments = parent.parse(*words)
    return chosen.name, arguments


@pytest.mark.parametrize(
    ("words", "name", "size"),
    [
        ((), "parent", 1),
        (("--quick",), "parent", 5),
        (("--quick", "--size", "1"), "parent", 1),
        (("--small",), "small", 7),
        (("--small", "--quick"), "small", 6),
        (("--small", "--size", "9"), "small", 9),
    ],
)
def test_the_command_line_comes_before_quick_and_defaults(words, name, size):
    found, arguments = resolved(*words)
    assert (found, arguments.size) == (name, size)


def test_a_variant_refuses_options_that_it_does_not_take():
    with pytest.raises(ValueError, match=r"--small with --own; of this .* it takes --size"):
        resolved("--small", "--own", "3")


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"without PyTorch; .*; pip install torch"):
        libraries.load_torch()


def test_torch_without_a_gpu(monkeypatch):
    cpu = types.SimpleNamespace(is_available=lambda: False)
    torch = types.SimpleNamespace(__version__="2.11.0+cpu", cuda=cpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError, match=r"2\.11\.0\+cpu sees no GPU"):
        libraries.load_torch()


def test_the_header_names_the_target_in_the_code(monkeypatch, tmp_path):
    """Here the code is of another architecture than the device and what is asked of it."""
    runtime = types.SimpleNamespace(driverGetVersion=lambda: 13020)
    a_program(tmp_path, "nvidia-smi", '[ "$3" = --query-gpu=driver_version ] && echo 580.95.05')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cupy = types.SimpleNamespace(__version__="14.2", cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(results, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    device = types.SimpleNamespace(
        name="A GPU", ordinal=0, capability=90, loaded=("a", "b"), tensor_cores=False,
        load=lambda specialisation: types.SimpleNamespace(target="compute_80"),
    )  # fmt: skip
    header = results.measured_on(device, types.SimpleNamespace(__version__="2.11"))
    assert set(header) == set(HEADER)
    assert header["code"] == ["compute_80"]
    assert (header["compute_capability"], header["cuda_driver"]) == ("9.0", "13.2")
    assert (header["arch_override"], header["torch"]) == ("75", "2.11")
    assert header["tensor_cores"] is False
    assert header["driver_version"] == "580.95.05"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    header = results.measured_on(device)
    assert (header["torch"], header["driver_version"]) == (None, None)


def a_program(folder, name, script):
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_every_result_says_where_and_of_what_it_is():
    host = results.this_host()
    assert set(host) < set(HEADER)
    assert host["python"] == platform.python_version()
    assert host["cpu"] and host["os"]
    assert datetime.date.fromisoformat(host["date"]) <= datetime.date.today()
