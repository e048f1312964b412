"""Variants of a benchmark: what their flags run, which options they take, what they count."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, FakeTorch, harness
from support.processes import run

import cupyattn
from cupyattn.benchmark import attention, decode, libraries
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention import BLOCK_MASKED, Inputs, Problem
from cupyattn.benchmark.cases import Case, Harness, rows_of
from cupyattn.benchmark.command import Benchmark, Option
from cupyattn.functional.device_info import device_count

DOCUMENTS = Problem(1, 2, 300, 8, 8, "float32", causal=False, window=0, documents=4)


# --- options


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


# --- attention --block-mask


def test_documents_share_the_sequence_out():
    document = DOCUMENTS.document()
    assert len(document) == 300
    assert (np.diff(document) >= 0).all()
    assert np.unique(document).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("length", "documents"), [(300, 4), (1000, 9)])
def test_kept_is_the_share_of_tiles_that_are_seen(length, documents):
    problem = Problem(1, 1, length, 8, 8, "float32", False, 0, documents=documents)
    document = problem.document()
    seen = document[:, None] == document
    rows, keys = attention.TILE
    tiles = [
        seen[i : i + rows, j : j + keys].any()
        for i in range(0, length, rows)
        for j in range(0, length, keys)
    ]
    assert problem.kept() == np.mean(tiles) < 1
    plain = problem.flops("forward", "plain")
    assert problem.flops("forward", "block_mask") == problem.kept() * plain


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_both_masks_give_the_same(direction):
    _, arguments = attention.BACKWARD.parse("--implementation", "flash")
    found = []
    for option in (*BLOCK_MASKED, "plain"):
        inputs = Inputs(DOCUMENTS, option, Harness(np))
        (call,) = attention.implementations(direction, arguments, inputs)[0].prepare()
        result = call()
        found.append(result if direction == "forward" else np.stack(result[:3]))
    assert np.array_equal(found[0], found[1])
    assert not np.allclose(found[0], found[2])


BLOCKS = ("--block-mask", "--seqlen", "300", "--documents", "4", "--heads", "2", "--head-dim", "8")


def test_block_masks_are_compared_with_the_plain_call(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [4e-3, 5e-3, 1e-3]
    file = tmp_path / "block_mask.json"
    assert main(["attention", *BLOCKS, "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Attention forward of documents in one sequence on A GPU" in printed
    assert "documents 4" in printed
    result = json.loads(file.read_text())
    assert result["command"] == "block_mask"
    assert [row["option"] for row in result["rows"]] == ["plain", *BLOCK_MASKED]
    assert printed.split("block_mask cupyattn flash 1.000 ms")[1].split()[7] == "0.25"


def exactly(torch, seen, sq, sk):
    """What PyTorch's function does, by NumPy; of other documents if `torch` is `Astray`."""
    i, j = np.indices((sq, sk))
    mask = i >= 0 if seen is None else seen(0, 0, i, j) if type(torch) is FakeTorch else i >= j

    def attend(*tensors):
        turned = [np.asarray(x).swapaxes(1, 2) for x in tensors]
        return torch.from_dlpack(cupyattn.attention(*turned, mask=mask).swapaxes(1, 2))

    return attend


class Astray(FakeTorch):
    pass


@pytest.mark.parametrize(("torch", "agrees"), [(FakeTorch(), True), (Astray(), False)])
def test_flex_attention_has_the_same_documents(torch, agrees, monkeypatch):
    monkeypatch.setattr(libraries, "flex_attention", exactly)
    chosen, arguments = attention.FORWARD.parse(*BLOCKS, "--dtype", "float32")
    measure = harness(torch=torch, baselines=("triton",))
    rows = list(chosen.harness_rows(arguments, measure))
    flex = {row["option"]: row for row in rows if row["implementation"] == "triton"}
    assert list(flex) == ["plain", "block_mask"]
    assert ("times" in flex["block_mask"]) is agrees
    if agrees:
        assert flex["block_mask"]["flops"] < flex["plain"]["flops"]
    else:
        assert "differs from cupyattn's" in flex["block_mask"]["unavailable"]


# --- attention --training-step

STEP = ("--training-step", "--batch", "2", "--seqlen", "16", "--heads", "3", "--head-dim", "8")


def test_the_step_is_forward_and_backward():
    problem = Problem(2, 2, 24, 16, 16, "float16", causal=True, window=0)
    inputs = Inputs(problem, "plain", Harness(np))
    _, arguments = attention.BACKWARD.parse("--implementation", "flash")
    (step,) = attention.implementations("step", arguments, inputs)[0].prepare()
    q, k, v, dout, _, _ = inputs.arrays
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    for got, gradient in zip(step()[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(got, gradient)


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
def test_the_kernels_of_a_step_agree(a_gpu, tmp_path):
    """A row whose gradients differ from the first's would have no times."""
    file = tmp_path / "step.json"
    with cupyattn.backend("emulator"):
        assert main(["attention", *STEP, "--json", str(file)]) == 0
    assert all("times" in row for row in json.loads(file.read_text())["rows"])


def test_a_step_is_one_row_for_each_kernel(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [0.004, 0.005, 0.4]
    file = tmp_path / "step.json"
    assert main(["attention", *STEP, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Attention's training step on A GPU, 2026-11-20" in printed
    assert "under 400 MB" in " ".join(printed.split())
    result = json.loads(file.read_text())
    assert result["command"] == "training_step"
    assert [row["implementation"] for row in result["rows"]] == [
        "cupyattn flash", "cupyattn flash deterministic", "cupyattn naive",
    ]  # fmt: skip
    first = result["rows"][0]
    assert first["flops"] == 3.5 * (4 * 2 * 3 * 16**2 * 8 / 2)
    assert first["of_ceiling"] == pytest.approx(first["tflops"] / CEILINGS["mma_tflops"])
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    (naive,) = (line for line in lines if line.startswith("cupyattn naive"))
    assert naive.endswith("5.0 MB 100.00"), "compared with the first"


def test_pytorch_takes_the_same_step():
    chosen, arguments = attention.FORWARD.parse(*STEP, "--implementation", "flash")
    measure = harness(torch=FakeTorch(), baselines=("eager", "compile"))
    (case,) = chosen.cases(arguments, measure)
    assert [each.name for each in case.implementations] == [
        "cupyattn flash", "cupyattn flash deterministic", "torch eager", "torch compile",
    ]  # fmt: skip


@pytest.mark.gpu
def test_a_step_on_a_gpu_takes_the_documented_workspace(tmp_path):
    file = tmp_path / "step.json"
    sizes = ("--batch", "8", "--seqlen", "1024", "--heads", "16", "--head-dim", "80")
    words = ("--training-step", *sizes, "--calls", "3", "--warm-up", "1", "--json", str(file))
    found = run("attention", *words, launcher=("-m", "cupyattn.benchmark"))
    assert found.returncode == 0, found.stderr
    flash, deterministic, naive = json.loads(file.read_text())["rows"]
    assert flash["times"]["p50_s"] < naive["times"]["p50_s"]
    rows = 8 * 16 * 1024
    statistics = (8 + 2 * 8 / 16) * rows  # 8 bytes for every 16 rows of q and of v
    for row, workspace in ((deterministic, statistics), (flash, statistics + 4 * 80 * rows)):
        assert workspace <= row["peak_bytes"] <= workspace + 100_000


# --- decode --prefill

CHUNK = decode.Chunk(2, 70, 20, 4, 2, 8, 16, "float32")


def test_the_cache_holds_the_dense_keys():
    q, k, v = CHUNK.dense(Harness(np))
    paged = cupyattn.paged_attention(q, *CHUNK.paged(np, k, v), causal=True)
    assert np.array_equal(paged, cupyattn.attention(q, k, v, causal=True))
    assert CHUNK.flops == 4 * 2 * 4 * 8 * sum(range(51, 71))


def test_a_chunk_has_a_row_for_each_layout(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [3e-6, 2e-6, 4e-6] * 2
    file = tmp_path / "prefill.json"
    call = ["decode", "--prefill", "--batch", "1", "--context", "40", "12", "--block-size", "16",
            "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--queries", "20",
            "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    assert "40 20 cupyattn paged 2.0 us" in " ".join(capsys.readouterr().out.split())
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["command"] == "prefill"
    assert [(row["queries"], row["implementation"]) for row in result["rows"]] == [
        (queries, f"cupyattn {way}") for queries in (20, 12) for way in ("dense", "paged", "packed")
    ]
    assert all("times" in row for row in result["rows"]), "and all agree"


def test_more_queries_than_a_step_has_are_refused(a_gpu, capsys):
    assert main(["decode", "--queries", "2048"]) == 1
    assert "with --prefill" in capsys.readouterr().err


# --- decode --cache-operations

BLOCKS_OF_A_CACHE = decode.Blocks("append", "float", 37, 4, 2, 8, 16, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("cache", decode.CACHES)
@pytest.mark.parametrize("operation", decode.OPERATIONS)
def test_a_cache_operation_is_a_valid_call(operation, cache, dtype):
    case = BLOCKS_OF_A_CACHE._replace(operation=operation, cache=cache, dtype=dtype)
    case.round(np)[0]()


def test_bytes_of_cache_operations_count_scales_and_rotated_queries():
    token, stored = 2 * 2 * 8 * 2, 2 * 2 * (4 + 4)
    assert BLOCKS_OF_A_CACHE.bytes == 37 * (2 * 4 * 8 * 2 + 2 * token)
    assert BLOCKS_OF_A_CACHE._replace(operation="copy", cache="int4").bytes == 2 * 8 * 16 * stored
    gathered = BLOCKS_OF_A_CACHE._replace(operation="gather", cache="int4")
    assert gathered.bytes == 37 * (stored + token)


def test_cache_operations_have_a_share_of_a_copy(a_gpu, capsys, tmp_path):
    file = tmp_path / "kv_cache.json"
    call = ["decode", "--cache-operations", "--tokens", "20", "--cache", "float", "int8",
            "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    assert "append int8 cupyattn 2.0 us" in " ".join(capsys.readouterr().out.split())
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["command"] == "kv_cache"
    rows = result["rows"]
    assert [row["operation"] for row in rows] == ["append"] * 2 + ["copy"] * 2 + ["gather"] * 2
    assert rows[0]["of_ceiling"] == pytest.approx(rows[0]["gb_per_s"] / CEILINGS["copy_gb_per_s"])


def test_without_torch_that_is_reported():
    missing = harness(torch=RuntimeError("a baseline of PyTorch"), baselines=("triton",))
    inputs = Inputs(DOCUMENTS, "block_mask", missing)
    _, arguments = attention.FORWARD.parse("--implementation", "flash")
    _, row = rows_of(Case({}, attention.implementations("forward", arguments, inputs)), missing)
    assert row["unavailable"].endswith("a baseline of PyTorch")
