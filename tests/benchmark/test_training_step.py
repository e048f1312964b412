"""``python -m cupyattn.benchmark training_step``: what it times, how it counts and prints."""

from __future__ import annotations

import json
import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest
from support.fake_gpu import HEADER, FakeTimer
from support.processes import run

import cupyattn
from cupyattn.benchmark import gpu_command, training_step
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention.cases import Case, Pool, items
from cupyattn.benchmark.contenders import workspace_bytes
from cupyattn.benchmark.training_step import GOAL_BYTES, PHI_2, Kernels, memory_taken, time_steps
from cupyattn.functional.device_info import device_count

CASE = Case(2, 2, 24, 16, 16, "float16", causal=True, window=0)


def all_kernels(timer: FakeTimer) -> list[Kernels]:
    return [
        Kernels("flash", False, timer),
        Kernels("flash", True, timer),
        Kernels("naive", False, timer),
    ]


def scratch(call):
    call()
    return 5_000_000


def test_rows():
    timer = FakeTimer(0.004, 0.005, 0.4)
    rows = time_steps(CASE, all_kernels(timer), np, scratch)
    assert [(row["implementation"], row["deterministic"]) for row in rows] == [
        ("flash", False), ("flash", True), ("naive", False),
    ]  # fmt: skip
    assert [row["seconds"] for row in rows] == [0.004, 0.005, 0.4]
    assert [row["speedup"] for row in rows] == pytest.approx([100.0, 80.0, 1.0])
    forward = 4 * 2 * 2 * 24**2 * 16 / 2
    assert rows[0]["tflops"] == pytest.approx(3.5 * forward / 0.004 / 1e12)
    assert {row["scratch_bytes"] for row in rows} == {5_000_000}
    assert {row["goal_bytes"] for row in rows} == {None}, "the goal is for another shape"


def test_without_the_naive_kernels():
    (row,) = time_steps(CASE, all_kernels(FakeTimer(0.004))[:1], np, scratch)
    assert row["speedup"] is None


def test_the_step_is_forward_and_backward():
    timer = FakeTimer(0.004)
    time_steps(CASE, all_kernels(timer)[:1], np, scratch)
    q, k, v, dout, _, _ = Pool(items(CASE), "float16", np).arrays(CASE)
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    for got, gradient in zip(timer.results[0][:3], expected[:3], strict=True):
        np.testing.assert_array_equal(got, gradient)


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
def test_the_kernels_agree():
    case = Case(1, 2, 16, 16, 16, "float16", causal=True, window=0)
    timer = FakeTimer(0.001, 0.001, 0.001)
    with cupyattn.backend("emulator"):
        time_steps(case, all_kernels(timer), np, scratch)
    *flash, naive = (result[:3] for result in timer.results)
    for gradients in flash:
        for one, other in zip(gradients, naive, strict=True):
            np.testing.assert_allclose(one, other, rtol=0.01, atol=0.01)


class FakePool:
    """Never gives a block back, as CuPy's while it is used."""

    def __init__(self):
        self.held = 0

    def malloc(self, size):
        self.held += size

    def total_bytes(self):
        return self.held


def test_memory_is_that_of_a_pool_of_its_own(monkeypatch):
    allocators = []

    @contextmanager
    def using_allocator(malloc):
        allocators.append(malloc)
        yield
        allocators.pop()

    stream = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(
        MemoryPool=FakePool, using_allocator=using_allocator, get_current_stream=lambda: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    assert memory_taken(lambda: [allocators[-1](size) for size in (300, 200)]) == 500
    assert memory_taken(lambda: None) == 0


# --- the command


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels, their times and what they ran on."""
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        timer = FakeTimer(0.004, 0.005, 0.4)
        kernels = all_kernels(timer)[: 3 if arguments.naive_calls else 2]
        names = ("calls", "warm_up", "naive_calls")
        more = {name: getattr(arguments, name) for name in names}
        rows = time_steps(training_step.case_of(arguments), kernels, np, scratch)
        return {"command": "training_step", **HEADER, **more, "naive_warm_up": 1, "rows": rows}

    monkeypatch.setattr(training_step, "measure", measure)


SMALL = ("training_step", "--batch", "2", "--seqlen", "16", "--heads", "3", "--head-dim", "8")


def test_text(a_gpu, capsys, monkeypatch):
    small = {"batch": 2, "seqlen": 16, "heads": 3, "head_dim": 8}
    monkeypatch.setattr(training_step, "PHI_2", small)
    assert main([*SMALL]) == 0
    printed = capsys.readouterr().out
    assert "Attention's training step on A GPU, 2026-11-20" in printed
    assert "compute_75 PTX, translated by the driver" in printed
    assert "D 8, 2 x 16 tokens, 3 heads, float16, every call causal" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    first = lines.index("flash 4.000 ms 0.0 100.0 x faster 5.0 MB under 400 MB")
    assert lines[first + 1 : first + 3] == [
        "flash deterministic 5.000 ms 0.0 80.0 x faster 5.0 MB under 400 MB",
        "naive 400.000 ms 0.0 5.0 MB under 400 MB",
    ]
    assert "Median of 20 steps after 3, naive 3 after 1" in printed


def test_json_of_another_shape(a_gpu, capsys, tmp_path):
    file = tmp_path / "step.json"
    assert main([*SMALL, "--naive-calls", "0", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "under 400 MB" not in printed and "naive 0" not in printed
    result = json.loads(file.read_text())
    assert {name: result[name] for name in HEADER} == HEADER
    assert [row["implementation"] for row in result["rows"]] == ["flash", "flash"]
    row = result["rows"][0]
    assert (row["batch"], row["seqlen"], row["heads"], row["head_dim"]) == (2, 16, 3, 8)


def test_the_documented_workspace_of_the_default_shape_meets_the_goal():
    case = Case(**PHI_2, head_dim_v=80, dtype="float16", causal=True, window=0)
    assert workspace_bytes(case, deterministic=False) < GOAL_BYTES


@pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")
def test_needs_a_gpu():
    result = run("training_step", launcher=("-m", "cupyattn.benchmark"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("training_step: there is no CUDA device")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The memory is that of the documented workspace, and of nothing else of its order.

    1,024 tiles of 128 query rows: a grid that leaves a card idle splits its keys, which takes more.
    """
    file = tmp_path / "step.json"
    sizes = ("--batch", "8", "--seqlen", "1024", "--heads", "16", "--head-dim", "80")
    arguments = (*sizes, "--calls", "3", "--warm-up", "1", "--naive-calls", "1")
    result = run(
        "training_step", *arguments, "--json", str(file), launcher=("-m", "cupyattn.benchmark")
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["flash", "flash", "naive"]
    assert all(0 < row["fastest_s"] <= row["seconds"] for row in rows)
    case = Case(8, 16, 1024, 80, 80, "float16", causal=True, window=0)
    for row in rows[:2]:
        workspace = workspace_bytes(case, deterministic=row["deterministic"])
        assert workspace <= row["scratch_bytes"] <= workspace + 100_000


@pytest.mark.gpu
def test_memory_taken_on_a_gpu():
    """The most at a time: the second array takes the place of the first."""
    import cupy

    def call():
        for _ in range(2):
            cupy.empty(1 << 20, cupy.uint8)

    kept = cupy.empty(1 << 24, cupy.uint8)
    assert memory_taken(call) == 1 << 20
    assert kept.nbytes == 1 << 24
