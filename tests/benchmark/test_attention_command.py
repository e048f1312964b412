"""The commands attention and attention_backward: their arguments, and what they print and write."""

from __future__ import annotations

import json
import os

import pytest
from support.fake_gpu import CEILINGS, HEADER
from support.processes import run

from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention import OPTIONS, PLAIN

SIZES = ("--tokens", "32", "--width", "128", "--seqlen", "16", "--dtype", "float16",
         "--implementation", "flash")  # fmt: skip
SMALL = ("attention", *SIZES, "--window", "3", "--head-dim", "64")


def result_of(tmp_path, *words):
    file = tmp_path / "result.json"
    assert main([*words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def lines_of(capsys):
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_options_are_compared_with_the_plain_call(a_gpu, capsys):
    a_gpu.times.seconds += [0.004, 0.002, 0.001, 0.006]
    assert main([*SMALL, "--options", "causal,window,softcap"]) == 0
    printed = lines_of(capsys)
    assert printed[0] == "Attention forward on A GPU, 2026-11-20"
    text = " ".join(printed)
    assert "compute_75 PTX, translated by the driver" in text and "copy 4 GB/s, read 5 GB/s" in text
    assert "batch 2, heads 2, seqlen 16, head_dim 64, head_dim_v 64, float16, window 3" in text
    lines = {line.split()[0]: line for line in printed if line}
    assert lines["plain"].startswith("plain cupyattn flash 4.000 ms 11.200 ms 0.0 ")
    for option, ratio in (("causal", "0.50"), ("window", "0.25"), ("softcap", "1.50")):
        assert lines[option].endswith(f"5.0 MB {ratio}")


def test_json_has_labels_figures_and_the_machine(a_gpu, tmp_path):
    words = ("--head-dim", "32", "64", "--head-dim-v", "16", "--options", "none", "--causal")
    result = result_of(tmp_path, *SMALL, *words)
    assert {name: result[name] for name in HEADER} == HEADER
    assert result["ceilings"] == CEILINGS
    assert (result["calls"], result["warm_up"]) == (1000, 100)
    assert "python -m cupyattn.benchmark" in result["invocation"]
    row, other = result["rows"]
    assert (row["head_dim"], other["head_dim"]) == (32, 64)
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


def test_few_queries_have_a_rate_of_bytes(a_gpu, tmp_path):
    """K and V count once, and what is as long as the queries."""
    rows = result_of(tmp_path, *SMALL, "--queries", "2", "16", "--options", "causal")["rows"]
    few, _, all_tokens, causal = rows
    row_bytes = 2 * 2 * 64 * 2  # of both sequences
    assert few["bytes"] == row_bytes * 2 * (2 + 16)
    assert few["gb_per_s"] == pytest.approx(few["bytes"] / 2e-6 / 1e9)
    assert few["of_ceiling"] == pytest.approx(few["gb_per_s"] / CEILINGS["read_gb_per_s"])
    products = 4 * 2 * 2 * 64
    assert few["flops"] == products * 2 * 16
    assert all_tokens["flops"] == 2 * causal["flops"] == products * 16**2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("attention", "--options", "softcap,rope"), "'rope' is not among causal,"),
        (("attention", "--peers", "eager,jax"), "'jax' is not among eager, cudnn"),
        (("attention_backward", "--implementation", "tiled"), "invalid choice: 'tiled'"),
    ],
)
def test_unknown_names(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_cannot_be_written_is_reported(a_gpu, capsys, tmp_path):
    assert main([*SMALL, "--json", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


# --- on a GPU


def on_a_gpu(tmp_path, *words, **variables):
    file = tmp_path / "result.json"
    result = run(*words, "--json", str(file), launcher=("-m", "cupyattn.benchmark"), env=variables)
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    refused = [row for row in report["rows"] if "unavailable" in row]
    assert not refused, "probably out of memory: other processes use the GPU too"
    assert all(row["times"]["p50_s"] > 0 for row in report["rows"])
    return report


TINY = ("--tokens", "512", "--width", "128", "--seqlen", "256", "--head-dim", "64",
        "--dtype", "float16", "--options", "all", "--calls", "3")  # fmt: skip


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("arch", [None, "75"])
def test_forward_on_a_gpu(tmp_path, arch):
    """Every option runs once; the target is read from the loaded code."""
    words = ("attention", *TINY, "--implementation", "flash", "--peers", "cupy", "--documents", "2")
    report = on_a_gpu(tmp_path, *words, **({"CUPYATTN_ARCH": arch} if arch else {}))
    assert {row["option"] for row in report["rows"]} == {PLAIN, *OPTIONS}
    rates = report["ceilings"]
    assert all(rate > 0 for rate in rates.values() if rate is not None)
    assert rates["fma_tflops"]
    capability = report["compute_capability"].replace(".", "")
    turing = "sm_75" if capability == "75" else "compute_75"
    if arch or "CUPYATTN_ARCH" not in os.environ:
        assert report["code"] == [turing if arch else f"sm_{capability}"]


@pytest.mark.alone
@pytest.mark.gpu
def test_backward_on_a_gpu(tmp_path):
    """Every option once, one-pass and deterministic, and the naive kernels plain and causal."""
    report = on_a_gpu(tmp_path, "attention_backward", *TINY, "--implementation", "flash", "naive")
    assert len(report["rows"]) == 2 * (1 + len(OPTIONS)) + 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_teaching_kernels_on_a_gpu(tmp_path, dtype):
    sizes = "--tokens 64 --width 64 --seqlen 64 --head-dim 32 --options none --calls 2"
    words = (*sizes.split(), "--dtype", dtype, "--implementation", "tiled", "naive")
    rows = on_a_gpu(tmp_path, "attention", *words)["rows"]
    assert [row["implementation"] for row in rows] == ["cupyattn tiled", "cupyattn naive"]


@pytest.mark.alone
@pytest.mark.gpu
def test_a_step_on_a_gpu_takes_the_documented_workspace(tmp_path):
    sizes = ("--batch", "8", "--seqlen", "1024", "--heads", "16", "--head-dim", "80")
    words = ("attention", "--training-step", *sizes, "--calls", "3", "--warm-up", "1")
    flash, deterministic, naive = on_a_gpu(tmp_path, *words)["rows"]
    assert flash["times"]["p50_s"] < naive["times"]["p50_s"]
    rows = 8 * 16 * 1024
    statistics = (8 + 2 * 8 / 16) * rows  # 8 bytes for every 16 rows of q and of v
    for row, workspace in ((deterministic, statistics), (flash, statistics + 4 * 80 * rows)):
        assert workspace <= row["peak_bytes"] <= workspace + 100_000
