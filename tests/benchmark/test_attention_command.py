"""``python -m cupyattn.benchmark attention``: its arguments, and what it prints and writes."""

from __future__ import annotations

import json
import os

import pytest
from support.fake_gpu import CEILINGS, HEADER, FakeTorch
from support.processes import run

from cupyattn.benchmark import attention
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention import OPTIONS, PLAIN

SMALL = ("attention", "--tokens", "32", "--width", "128", "--seqlen", "16", "--window", "3",
         "--dtype", "float16", "--implementation", "flash")  # fmt: skip


def test_text(a_gpu, capsys):
    a_gpu.times.seconds += [0.004, 0.002, 0.001, 0.006]
    assert main([*SMALL, "--head-dim", "64", "--options", "causal,window,softcap"]) == 0
    printed = capsys.readouterr().out
    assert "Attention forward on A GPU, 2026-11-20" in printed
    assert "compute_75 PTX, translated by the driver" in printed
    assert "copy 4 GB/s, read 5 GB/s" in printed
    assert "batch 2, heads 2, seqlen 16, head_dim 64, head_dim_v 64, float16, window 3" in printed
    lines = {line.split()[0]: " ".join(line.split()) for line in printed.splitlines() if line}
    assert lines["plain"].startswith("plain cupyattn flash 4.000 ms 11.200 ms 0.0 ")
    assert lines["causal"].endswith("5.0 MB 0.50")
    assert lines["window"].endswith("5.0 MB 0.25")
    assert lines["softcap"].endswith("5.0 MB 1.50")


@pytest.mark.parametrize("options", ["none", "causal"])
def test_the_size_of_a_window_is_left_out_where_no_call_has_one(a_gpu, capsys, options):
    """As if plain calls had it."""
    a_gpu.times.seconds += [0.004, 0.002]
    assert main([*SMALL, "--head-dim", "64", "--options", options]) == 0
    printed = capsys.readouterr().out
    assert "batch 2, heads 2, seqlen 16, head_dim 64, head_dim_v 64, float16" in printed
    assert "window 3" not in printed


def test_json_is_as_others_read_it(a_gpu, tmp_path):
    file = tmp_path / "attention.json"
    arguments = ("--head-dim", "32", "64", "--head-dim-v", "16", "--options", "none", "--causal")
    assert main([*SMALL, *arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert {name: result[name] for name in HEADER} == HEADER
    assert result["ceilings"] == CEILINGS
    assert (result["calls"], result["warm_up"]) == (1000, 100)
    assert "python -m cupyattn.benchmark" in result["invocation"]
    assert [row["head_dim"] for row in result["rows"]] == [32, 64]
    row = result["rows"][0]
    assert set(row) == {
        "batch", "heads", "seqlen", "head_dim", "head_dim_v", "dtype", "causal", "window", "option",
        "implementation", "times", "flops", "bytes", "tflops", "gb_per_s", "of_ceiling", "ceiling",
        "peak_bytes",
    }  # fmt: skip
    assert (row["option"], row["implementation"], row["causal"]) == (PLAIN, "cupyattn flash", True)
    assert set(row["times"]) == {
        "mean_s", "std_s", "min_s", "max_s", "p50_s", "p95_s", "p99_s", "samples",
        "calls_per_sample",
    }  # fmt: skip


def test_quick_has_the_rows_of_the_readme_and_gives_way_to_what_is_said(a_gpu, tmp_path):
    file = tmp_path / "attention.json"
    words = ("attention", "--quick", "--seqlen", "16", "--width", "16", "--batch", "1")
    assert main([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["calls"] == 100
    rows = result["rows"]
    assert {row["head_dim"] for row in rows} == {40, 64, 80, 96, 128, 160, 192, 256}
    assert {(row["option"], row["batch"], row["seqlen"]) for row in rows} == {
        (PLAIN, 1, 16), ("causal", 1, 16),
    }  # fmt: skip


def test_few_queries_have_a_rate_of_bytes(a_gpu, capsys, tmp_path):
    """K and V count once, and what is as long as the queries."""
    file = tmp_path / "attention.json"
    arguments = ("--head-dim", "64", "--queries", "2", "16", "--options", "causal")
    assert main([*SMALL, *arguments, "--json", str(file)]) == 0
    assert "GB/s" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["queries"], row["option"]) for row in rows] == [
        (2, PLAIN), (2, "causal"), (16, PLAIN), (16, "causal"),
    ]  # fmt: skip
    few, _, all_tokens, causal = rows
    row_bytes = 2 * 2 * 64 * 2  # of both sequences
    assert few["bytes"] == row_bytes * 2 * (2 + 16)
    assert few["gb_per_s"] == pytest.approx(few["bytes"] / 2e-6 / 1e9)
    assert few["of_ceiling"] == pytest.approx(few["gb_per_s"] / CEILINGS["read_gb_per_s"])
    products = 4 * 2 * 2 * 64
    assert few["flops"] == products * 2 * 16
    assert all_tokens["flops"] == 2 * causal["flops"] == products * 16**2


def test_peers(a_gpu, tmp_path):
    file = tmp_path / "attention.json"
    object.__setattr__(a_gpu, "torch", FakeTorch())
    object.__setattr__(a_gpu, "baselines", ("eager", "flash"))
    assert main([*SMALL, "--head-dim", "64", "--options", "none", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["implementation"] for row in rows] == [
        "cupyattn flash",
        "torch eager",
        "torch flash",
    ]


@pytest.mark.parametrize(
    ("text", "names"), [("all", list(OPTIONS)), ("none", []), ("bias,mask", ["bias", "mask"])]
)
def test_option_names(text, names):
    assert attention.option_names(text) == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--options", "softcap,rope"), "'rope' is not among causal,"),
        (("--peers", "eager,jax"), "'jax' is not among eager, cudnn"),
    ],
)
def test_unknown_names(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["attention", *words])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_cannot_be_written(a_gpu, capsys, tmp_path):
    assert main([*SMALL, "--head-dim", "64", "--json", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [None, "75"])
def test_on_a_gpu(tmp_path, arch):
    """Every option once; the target is what the loaded code says."""
    file = tmp_path / "attention.json"
    sizes = ("--tokens", "512", "--width", "128", "--seqlen", "256", "--head-dim", "64")
    kinds = ("--dtype", "float16", "--implementation", "flash", "--peers", "cupy")
    arguments = (
        *sizes,
        *kinds,
        "--options",
        "all",
        "--documents",
        "2",
        "--calls",
        "3",
        "--json",
        str(file),
    )
    variable = {} if arch is None else {"CUPYATTN_ARCH": arch}
    result = run("attention", *arguments, launcher=("-m", "cupyattn.benchmark"), env=variable)
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    rows = {row["option"]: row for row in report["rows"] if row["implementation"] != "cupy"}
    assert set(rows) == {PLAIN, *OPTIONS}
    assert all(row["times"]["p50_s"] > 0 for row in report["rows"])
    assert all(rate > 0 for rate in report["ceilings"].values())
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
    assert [row["implementation"] for row in rows] == ["cupyattn tiled", "cupyattn naive"]
    assert all(row["times"]["p50_s"] > 0 for row in rows)
