"""What ``python -m cupyattn.benchmark attention`` times, and how it counts."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from support.dtypes import DTYPES, dtype_of
from support.fake_gpu import FakeTorch, harness
from support.search import wider

import cupyattn
from cupyattn.benchmark import attention
from cupyattn.benchmark.attention import OPTIONS, PLAIN, Inputs, Problem, arguments_of, problems
from cupyattn.benchmark.cases import Case, Harness, rows_of
from cupyattn.functional.device_info import device_count

FEW = ("bias", "window")  # what a plain run compiles of OPTIONS
CASE = Problem(2, 4, 24, 16, 8, "float16", causal=False, window=5)


def kept_scores(case: Problem, option: str) -> int:
    """Counted one by one."""
    i, j = np.indices((case.seqlen, case.seqlen))
    keep = np.abs(i - j) <= case.window if option == "window" else np.ones_like(i, bool)
    return int((keep & (j <= i) if case.causal else keep).sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 5, 23, 100])
def test_scores_of_a_window(causal, window):
    case = Problem(1, 1, 24, 8, 8, "float16", causal, window)
    assert case.scores("window") == kept_scores(case, "window")


def test_flops_count_both_products():
    """Multiplications and additions of q k and p v; causal calls count half of the scores."""
    assert CASE.flops("forward", PLAIN) == 2 * 2 * 4 * 24**2 * (16 + 8)
    assert CASE.flops("forward", "causal") == CASE.flops("forward", PLAIN) / 2
    assert CASE.flops("forward", "softcap") == CASE.flops("forward", PLAIN)
    causal = Problem(2, 4, 24, 16, 8, "float16", causal=True, window=5)
    assert causal.flops("forward", PLAIN) == CASE.flops("forward", PLAIN) / 2
    assert causal.flops("forward", "bias") == CASE.flops("forward", PLAIN) / 2


def parsed(*words: str) -> argparse.Namespace:
    return attention.FORWARD.parse(*words)[1]


def test_the_cases_are_those_of_the_command_line():
    cases = list(problems(parsed()))
    assert {case.seqlen for case in cases} >= {128, 4096}
    for name, values in (
        ("head_dim", {64, 80, 128}),
        ("batch", {1, 4, 8}),
        ("dtype", {"float16", "float32"}),
    ):
        assert {getattr(case, name) for case in cases} == values
    words = ("--seqlen", "24", "99", "--tokens", "50", "--width", "250", "--dtype", "float16")
    few = list(problems(parsed(*words, "--head-dim", "80", "256", "--queries", "3", "7")))
    assert [(case.shapes["q"], case.shapes["k"][1]) for case in few[::2]] == [
        ((2, 3, 3, 80), 24), ((1, 3, 3, 80), 99), ((2, 3, 1, 256), 24), ((1, 3, 1, 256), 99),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_a_case(dtype):
    case = Problem(2, 4, 24, 16, 8, dtype, causal=False, window=5)
    q, k, v, dout, out, lse = Inputs(case, PLAIN, Harness(np)).arrays
    assert q.shape == k.shape == case.shapes["q"]
    assert v.shape == dout.shape == out.shape == case.shapes["v"]
    assert {array.dtype for array in (q, k, v, dout, out)} == {dtype_of(dtype)}
    assert (lse.shape, lse.dtype) == ((case.batch, case.heads, case.seqlen), np.float32)
    assert not np.array_equal(q, k) and not np.array_equal(v, dout)


def rows(names, *options, case=CASE, measure=None):
    """Every row of a case."""
    measure = harness() if measure is None else measure
    arguments = parsed("--implementation", *names)
    found = []
    for option in (PLAIN, *options):
        inputs = Inputs(case, option, measure)
        made = attention.implementations("forward", arguments, inputs)
        flops = case.flops("forward", option)
        found += rows_of(Case({"option": option}, made, flops=flops, tolerance=0.02), measure)
    return found


def test_rows():
    measure = harness(0.004, 0.002, 0.001, 0.005)
    found = rows(["flash"], "causal", "window", "softcap", measure=measure)
    assert [row["times"]["p50_s"] for row in found] == [0.004, 0.002, 0.001, 0.005]
    assert found[0]["tflops"] == pytest.approx(CASE.flops("forward", PLAIN) / 0.004 / 1e12)
    assert found[1]["tflops"] == pytest.approx(found[0]["tflops"])
    plain, causal, window, softcap = measure.times.results
    for other in (causal, window, softcap):
        assert not np.array_equal(plain, other), "the option reached the call"


def test_every_implementation_is_timed():
    names = ["flash", "tiled", "naive"]
    assert [row["implementation"] for row in rows(names)] == [f"cupyattn {name}" for name in names]


def test_kernels_to_be_read_are_not_timed_for_hours(monkeypatch):
    monkeypatch.setattr(attention, "TEACHING_FLOPS", CASE.flops("forward", "causal"))
    found = rows(["flash", "naive"], "causal")
    assert "is a teaching kernel" in found[1]["unavailable"]
    assert all("times" in found[index] for index in (0, 2, 3))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_of_options_are_taken(option, dtype):
    case = Problem(2, 4, 24, 16, 8, dtype, causal=False, window=5, documents=3)
    q, k, v, _, out, _ = Inputs(case, PLAIN, Harness(np)).arrays
    arguments = arguments_of(option, case, np)
    cupyattn.attention(q, k, v, out=out, **arguments)
    assert np.isfinite(out.astype(np.float32)).all()
    if "bias" in arguments:
        assert arguments["bias"].shape == (1, 4, 24, 24)
        assert arguments["bias"].dtype == dtype_of(dtype)


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU")
def test_the_kernel_has_every_option():
    case = Problem(1, 2, 16, 64, 64, "float16", causal=False, window=3)
    options = wider(FEW, [option for option in OPTIONS if option not in FEW])
    with cupyattn.backend("emulator"):
        found = rows(["flash"], *options, case=case)
    assert not [row["unavailable"] for row in found if "unavailable" in row]


def test_what_has_no_room_is_a_row(monkeypatch):
    def full(*_):
        raise MemoryError("64 GB asked for")

    monkeypatch.setattr(attention, "_bias", full)
    found = rows(["flash"], "bias", "causal")
    assert [row.get("unavailable") for row in found] == [None, "MemoryError: 64 GB asked for", None]


BASELINES = ("eager", "math", "compile", "cupy")


def test_peers_are_timed_where_they_have_the_option():
    torch = FakeTorch()
    measure = harness(torch=torch, baselines=BASELINES)
    found = rows(["flash"], "causal", "softcap", "mask", measure=measure)
    assert [(row["option"], row["implementation"]) for row in found if "times" in row] == [
        *((PLAIN, name) for name in (
            "cupyattn flash", "torch eager", "torch math", "torch compile", "cupy")),
        *(("causal", name) for name in (
            "cupyattn flash", "torch eager", "torch math", "torch compile", "cupy")),
        ("softcap", "cupyattn flash"), ("mask", "cupyattn flash"),
    ]  # fmt: skip
    assert [row["unavailable"] for row in found if "unavailable" in row] == (
        ["RuntimeError: no kernel"] * 3
    )
    assert set(torch.backends) == {"math"}
    assert set(torch.compiled) == {"default"}
    shapes = ((2, 4, 24, 16), (2, 4, 24, 8))  # (B, H, S, D), as PyTorch has them
    assert torch.asked[0] == (*shapes, False, 0.0, None)
    assert (*shapes, True, 0.0, None) in torch.asked
    assert torch.asked[-1][-1].shape == (1, 1, 24, 24) and torch.asked[-1][-1].dtype == np.bool_


def test_few_queries_stand_at_the_end():
    """PyTorch's stand at the beginning: as peers of causal calls they would be others."""
    case = Problem(2, 4, 24, 16, 8, "float16", causal=False, window=5, queries=3)
    measure = harness(torch=FakeTorch(), baselines=("eager", "cupy"))
    found = rows(["flash"], "causal", case=case, measure=measure)
    assert [(row["option"], row["implementation"]) for row in found] == [
        (PLAIN, "cupyattn flash"), (PLAIN, "torch eager"), (PLAIN, "cupy"),
        ("causal", "cupyattn flash"),
    ]  # fmt: skip
    assert all("times" in row for row in found)
