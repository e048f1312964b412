"""``python -m cupyattn.benchmark attention``: its arguments, and what it prints and writes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from support.fake_gpu import HEADER, FakeTimer
from support.processes import run

from cupyattn.benchmark import gpu_command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention import arguments as attention_arguments
from cupyattn.benchmark.attention import forward as attention
from cupyattn.benchmark.attention.arguments import cases_of
from cupyattn.benchmark.attention.cases import OPTIONS, PLAIN
from cupyattn.benchmark.attention.times import time_cases
from cupyattn.benchmark.contenders import forward_contenders
from cupyattn.functional.device_info import device_count


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels, their times and what they ran on."""
    timer = FakeTimer(*[0.004, 0.002, 0.001, 0.006] * 8)
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        rows = time_cases(
            cases_of(arguments),
            forward_contenders(arguments.implementation),
            arguments.options,
            np,
            timer,
        )
        more = {"torch": None, "calls": arguments.calls, "warm_up": arguments.warm_up}
        return {"command": "attention", **HEADER, **more, "rows": rows}

    monkeypatch.setattr(attention, "measure", measure)


SMALL = ("attention", "--tokens", "32", "--width", "128", "--seqlen", "16", "--window", "3")


def test_text(a_gpu, capsys):
    assert main([*SMALL, "--head-dim", "64", "--options", "causal,window,softcap"]) == 0
    printed = capsys.readouterr().out
    assert "Attention forward on A GPU, 2026-11-20" in printed
    assert "compute_75 PTX, translated by the driver" in printed
    assert "D 64, 2 x 16 tokens, 2 heads, float16" in printed
    lines = {line.split()[0]: " ".join(line.split()) for line in printed.splitlines() if line}
    assert lines["plain"] == "plain flash 4.000 ms 0.0"
    assert lines["causal"].endswith("2.00 x faster")
    assert lines["window"].startswith("window 3 flash 1.000 ms")
    assert lines["window"].endswith("4.00 x faster")
    assert lines["softcap"].endswith("1.50 x the time")


def test_json_is_written_beside_the_text(a_gpu, capsys, tmp_path):
    file = tmp_path / "attention.json"
    arguments = ("--head-dim", "32", "64", "--head-dim-v", "16", "--options", "none", "--causal")
    assert main([*SMALL, *arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "D 32, Dv 16, 2 x 16 tokens, 4 heads, float16, every call causal" in printed
    result = json.loads(file.read_text())
    assert {name: result[name] for name in HEADER} == HEADER
    assert [(row["head_dim"], row["option"]) for row in result["rows"]] == [
        (32, PLAIN), (64, PLAIN),
    ]  # fmt: skip
    assert all(row["causal"] for row in result["rows"])


def test_few_queries_have_a_rate_of_bytes(a_gpu, capsys, tmp_path):
    """K and V count once, and what is as long as the queries."""
    file = tmp_path / "attention.json"
    arguments = ("--head-dim", "64", "--queries", "2", "16", "--options", "causal")
    assert main([*SMALL, *arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "D 64, 2 x 2 queries of 16 tokens, 2 heads, float16" in printed
    assert "GB/s" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [(row["queries"], row["option"]) for row in rows] == [
        (2, PLAIN), (2, "causal"), (16, PLAIN), (16, "causal"),
    ]  # fmt: skip
    few, _, all_tokens, causal = rows
    row_bytes = 2 * 2 * 64 * 2  # of both sequences
    assert few["gb_per_s"] == pytest.approx(row_bytes * 2 * (2 + 16) / few["seconds"] / 1e9)
    products = 4 * 2 * 2 * 64 / 1e12
    assert few["tflops"] == pytest.approx(products * 2 * 16 / few["seconds"])
    assert all_tokens["tflops"] == pytest.approx(products * 16**2 / all_tokens["seconds"])
    assert causal["tflops"] == pytest.approx(products * 16**2 / 2 / causal["seconds"])


@pytest.mark.parametrize(
    ("text", "names"), [("all", list(OPTIONS)), ("none", []), ("bias,mask", ["bias", "mask"])]
)
def test_option_names(text, names):
    assert attention_arguments.option_names(text) == names


def test_unknown_options(capsys):
    with pytest.raises(SystemExit):
        main(["attention", "--options", "softcap,rope"])
    assert "'rope' is no option; they are causal," in capsys.readouterr().err


def test_a_file_that_cannot_be_written(a_gpu, capsys, tmp_path):
    assert main([*SMALL, "--head-dim", "64", "--json", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")
def test_needs_a_gpu():
    result = run("attention", launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "no CUDA device" in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [None, "75"])
def test_on_a_gpu(tmp_path, arch):
    """Every option once; the target is what the loaded code says."""
    file = tmp_path / "attention.json"
    sizes = ("--tokens", "512", "--width", "128", "--seqlen", "256", "--head-dim", "64")
    arguments = (*sizes, "--options", "all", "--calls", "3", "--warm-up", "1", "--json", str(file))
    variable = {} if arch is None else {"CUPYATTN_ARCH": arch}
    result = run("attention", *arguments, launcher=("-m", "cupyattn.benchmark"), env=variable)
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    rows = {row["option"]: row for row in report["rows"]}
    assert set(rows) == {PLAIN, *OPTIONS}
    assert all(0 < row["fastest_s"] <= row["seconds"] for row in rows.values())
    capability = report["compute_capability"].replace(".", "")
    turing = "sm_75" if capability == "75" else "compute_75"
    expected = turing if arch else f"sm_{capability}"
    if arch or "CUPYATTN_ARCH" not in os.environ:
        assert report["code"] == [expected]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_kernels_on_a_gpu(tmp_path, dtype):
    file = tmp_path / "attention.json"
    sizes = ("--tokens", "64", "--width", "64", "--seqlen", "64", "--head-dim", "32")
    kernels = ("--implementation", "tiled", "naive", "--dtype", dtype, "--options", "none")
    arguments = (*sizes, *kernels, "--calls", "2", "--warm-up", "1", "--json", str(file))
    result = run("attention", *arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["tiled", "naive"]
    assert all(row["seconds"] > 0 for row in rows)
