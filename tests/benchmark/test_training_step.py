"""``python -m cupyattn.benchmark training_step``: what it times, how it counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, FakeTorch, gauge
from support.processes import run

import cupyattn
from cupyattn.benchmark import training_step
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention.cases import Case, arrays_of
from cupyattn.functional.device_info import device_count
from cupyattn.gradients import AttentionGrads

CASE = Case(2, 2, 24, 16, 16, "float16", causal=True, window=0)
SMALL = ("training_step", "--batch", "2", "--seqlen", "16", "--heads", "3", "--head-dim", "8")


def test_the_step_is_forward_and_backward():
    arrays = arrays_of(CASE, np)
    q, k, v, dout, _, _ = arrays
    grads = AttentionGrads(*map(np.empty_like, (q, k, v)))
    (step,) = training_step.training_step(arrays, grads, **training_step.KERNELS["flash"])
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    for got, gradient in zip(step()[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(got, gradient)


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
def test_the_kernels_agree(a_gpu, tmp_path):
    """A row whose gradients differ from the first's would have no times."""
    file = tmp_path / "step.json"
    with cupyattn.backend("emulator"):
        assert main([*SMALL, "--json", str(file)]) == 0
    assert all("times" in row for row in json.loads(file.read_text())["rows"])


def test_text_and_json(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [0.004, 0.005, 0.4]
    file = tmp_path / "step.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Attention's training step on A GPU, 2026-11-20" in printed
    assert "under 400 MB" in " ".join(printed.split())
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == [
        "cupyattn flash", "cupyattn flash deterministic", "cupyattn naive",
    ]  # fmt: skip
    forward = 4 * 2 * 3 * 16**2 * 8 / 2
    assert rows[0]["flops"] == 3.5 * forward
    assert rows[0]["of_ceiling"] == pytest.approx(rows[0]["tflops"] / CEILINGS["mma_tflops"])
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    (naive,) = (line for line in lines if line.startswith("cupyattn naive"))
    assert naive.endswith("5.0 MB 100.00"), "beside the first"


def test_peers_and_kernels_that_are_named():
    torch = FakeTorch()
    arguments = main_arguments("--kernels", "deterministic")
    measure = gauge(torch=torch, peers=("eager", "compile"))
    (subject,) = training_step.subjects(arguments, measure)
    assert [each.name for each in subject.contenders] == [
        "cupyattn flash deterministic", "torch eager", "torch compile",
    ]  # fmt: skip


def main_arguments(*words):
    import argparse

    parser = argparse.ArgumentParser()
    training_step.BENCHMARK.add_parser(parser.add_subparsers())
    return parser.parse_args([*SMALL, *words])


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The memory is that of the documented workspace, and of nothing else of its order."""
    file = tmp_path / "step.json"
    sizes = ("--batch", "8", "--seqlen", "1024", "--heads", "16", "--head-dim", "80")
    arguments = (*sizes, "--calls", "3", "--warm-up", "1", "--json", str(file))
    result = run("training_step", *arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    flash, deterministic, naive = json.loads(file.read_text())["rows"]
    assert flash["times"]["p50_s"] < naive["times"]["p50_s"]
    rows = 8 * 16 * 1024
    statistics = (8 + 2 * 8 / 16) * rows  # 8 bytes for every 16 rows of q and of v
    for row, workspace in ((deterministic, statistics), (flash, statistics + 4 * 80 * rows)):
        assert workspace <= row["peak_bytes"] <= workspace + 100_000
