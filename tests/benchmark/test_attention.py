"""Benchmarks of attention: forward, backward and both, and their counts of FLOP and bytes."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from support.devices import DTYPES, dtype_of
from support.fake_gpu import FakeTorch, harness

import cupyattn
from cupyattn.benchmark import attention, varlen
from cupyattn.benchmark.attention import (
    BLOCK_MASKED,
    OPTIONS,
    PLAIN,
    AttentionInputs,
    SelfAttentionProblem,
    arguments_of,
    problems,
)
from cupyattn.benchmark.cases import Case, Harness, rows_of

CASE = SelfAttentionProblem(2, 4, 24, 16, 8, "float16", causal=False, window=5)
DOCUMENTS = SelfAttentionProblem(1, 2, 300, 8, 8, "float32", causal=False, window=0, documents=4)


def parsed(*words: str) -> argparse.Namespace:
    return attention.BACKWARD.parse(*words)[1]


def rows(direction, words, *options, case=CASE, measure=None, tolerance=0.05):
    """Every row of a case; the words follow ``--implementation``."""
    measure = harness() if measure is None else measure
    arguments = parsed("--implementation", *words.split())
    found = []
    for option in options:
        inputs = AttentionInputs(case, option, measure)
        made = attention.implementations(direction, arguments, inputs)
        flops = case.flops(direction, option)
        case_of_option = Case({"option": option}, made, flops=flops, tolerance=tolerance)
        found += rows_of(case_of_option, measure)
    return found


# --- what is counted


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 5, 23, 100])
def test_scores_of_a_window_are_those_that_are_kept(causal, window):
    i, j = np.indices((24, 24))
    keep = (np.abs(i - j) <= window) & ((j <= i) | (not causal))
    assert (
        SelfAttentionProblem(1, 1, 24, 8, 8, "float16", causal, window).scores("window")
        == keep.sum()
    )


def test_flops_count_every_product_over_the_kept_scores():
    """Forward q k and p v; backward q k, ds k and ds q over D, dout v and p dout over Dv."""
    assert CASE.flops("forward", PLAIN) == 2 * 2 * 4 * 24**2 * (16 + 8)
    assert CASE.flops("backward", PLAIN) == 2 * 2 * 4 * 24**2 * (3 * 16 + 2 * 8)
    for direction in ("forward", "backward"):
        plain = CASE.flops(direction, PLAIN)
        assert CASE.flops(direction, "causal") == plain / 2
        assert CASE.flops(direction, "softcap") == plain
        causal = SelfAttentionProblem(2, 4, 24, 16, 8, "float16", causal=True, window=5)
        assert causal.flops(direction, "bias") == plain / 2


@pytest.mark.parametrize(("length", "documents"), [(300, 4), (1000, 9)])
def test_kept_is_the_share_of_tiles_that_are_seen(length, documents):
    problem = SelfAttentionProblem(1, 1, length, 8, 8, "float32", False, 0, documents=documents)
    document = problem.document()
    assert (np.diff(document) >= 0).all()
    assert np.unique(document).tolist() == list(range(documents))
    seen = document[:, None] == document
    of_queries, of_keys = attention.TILE
    tiles = [
        seen[i : i + of_queries, j : j + of_keys].any()
        for i in range(0, length, of_queries)
        for j in range(0, length, of_keys)
    ]
    assert problem.kept() == np.mean(tiles) < 1
    plain = problem.flops("forward", "plain")
    assert problem.flops("forward", "block_mask") == problem.kept() * plain


def test_the_cases_are_those_of_the_command_line():
    usual = list(problems(parsed()))
    assert {case.head_dim for case in usual} == {64, 80, 128}
    assert {case.batch for case in usual} == {1, 4, 8}
    words = ("--seqlen", "24", "99", "--tokens", "50", "--width", "250", "--dtype", "float16",
             "--head-dim", "80", "256", "--queries", "3", "7")  # fmt: skip
    few = list(problems(attention.FORWARD.parse(*words)[1]))
    assert [(case.shapes["q"], case.shapes["k"][1]) for case in few[::2]] == [
        ((2, 3, 3, 80), 24), ((1, 3, 3, 80), 99), ((2, 3, 1, 256), 24), ((1, 3, 1, 256), 99),
    ]  # fmt: skip


# --- what is called


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_of_options_are_taken(option, dtype):
    case = SelfAttentionProblem(2, 4, 24, 16, 8, dtype, causal=False, window=5, documents=3)
    q, k, v, dout, out, lse = AttentionInputs(case, PLAIN, Harness(np)).arrays
    assert {array.dtype for array in (q, k, v, dout, out)} == {dtype_of(dtype)}
    assert (lse.shape, lse.dtype) == ((case.batch, case.heads, case.seqlen), np.float32)
    arguments = arguments_of(option, case, np)
    cupyattn.attention(q, k, v, out=out, **arguments)
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("option", [PLAIN, *OPTIONS])
def test_gradients_are_those_of_the_option(option):
    measure = harness()
    rows("backward", "flash --deterministic never", option, measure=measure)
    q, k, v, dout, _, _ = AttentionInputs(CASE, PLAIN, Harness(np)).arrays
    arguments = arguments_of(option, CASE, np)
    out, lse = cupyattn.attention(q, k, v, return_lse=True, **arguments)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, **arguments)
    for name, gradient in measure.times.results[-1]._asdict().items():
        np.testing.assert_array_equal(gradient, getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_mask_mod_and_block_mask_give_the_same(direction):
    measure = harness()
    rows(direction, "flash --deterministic never", *BLOCK_MASKED, "plain", case=DOCUMENTS,
         measure=measure)  # fmt: skip
    by_mod, by_blocks, plain = (
        each if direction == "forward" else np.stack(each[:3]) for each in measure.times.results
    )
    assert np.array_equal(by_mod, by_blocks)
    assert not np.allclose(by_mod, plain)


def test_the_step_is_forward_and_backward():
    problem = SelfAttentionProblem(2, 2, 24, 16, 16, "float16", causal=True, window=0)
    measure = harness()
    rows("step", "flash --deterministic never", PLAIN, case=problem, measure=measure)
    q, k, v, dout, _, _ = AttentionInputs(problem, PLAIN, Harness(np)).arrays
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    for got, gradient in zip(measure.times.results[0][:3], expected[:3], strict=True):
        np.testing.assert_array_equal(got, gradient)


@pytest.mark.parametrize(
    ("words", "timed"),
    [
        ("flash", ["cupyattn flash", "cupyattn flash deterministic"]),
        ("flash --deterministic only", ["cupyattn flash deterministic"]),
        ("flash --deterministic never", ["cupyattn flash"]),
        ("naive", ["cupyattn naive"]),
    ],
)
def test_deterministic_and_one_pass_gradients_are_rows_of_flash(words, timed):
    assert [row["implementation"] for row in rows("backward", words, PLAIN)] == timed


def test_teaching_kernels_are_not_timed_for_hours(monkeypatch):
    monkeypatch.setattr(attention, "TEACHING_FLOPS", CASE.flops("forward", "causal"))
    found = rows("forward", "flash naive", PLAIN, "causal", "softcap")
    assert "is a teaching kernel" in found[1]["unavailable"]
    assert [row["implementation"] for row in found if "times" in row] == [
        "cupyattn flash", "cupyattn flash", "cupyattn naive", "cupyattn flash"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "timed"),
    [
        ("flash int8", [("cupyattn flash", False), ("cupyattn int8", True)]),
        (
            "flash --accumulator float32 float16",
            [("cupyattn flash", False), ("cupyattn flash with float16 sums", True)],
        ),
    ],
)
def test_rows_of_less_accurate_kernels_have_their_errors(words, timed):
    arguments = attention.FORWARD.parse("--implementation", *words.split())[1]
    measure = harness()
    made = attention.implementations("forward", arguments, AttentionInputs(CASE, "causal", measure))
    found = list(rows_of(Case({}, made, tolerance=0.05), measure))
    assert [(row["implementation"], "also" in row) for row in found] == timed
    errors = found[-1]["also"]
    assert 0 < errors["relative_error"] < 0.05
    assert 0 < errors["largest_error"] < 0.1


# --- other libraries


def test_baselines_are_timed_where_they_have_the_option():
    torch = FakeTorch()
    names = ("eager", "math", "compile", "cupy")
    measure = harness(torch=torch, baselines=names)
    found = rows("forward", "flash", PLAIN, "causal", "softcap", "mask", measure=measure)
    everyone = ("cupyattn flash", "torch eager", "torch math", "torch compile", "cupy")
    assert [(row["option"], row["implementation"]) for row in found if "times" in row] == [
        *((option, name) for option in (PLAIN, "causal") for name in everyone),
        ("softcap", "cupyattn flash"), ("mask", "cupyattn flash"),
    ]  # fmt: skip
    refused = [row["unavailable"] for row in found if "unavailable" in row]
    assert refused == ["RuntimeError: no kernel"] * 3
    assert set(torch.backends) == {"math"} and set(torch.compiled) == {"default"}
    shapes = ((2, 4, 24, 16), (2, 4, 24, 8))  # (B, H, S, D), as PyTorch has them
    assert torch.asked[0] == (*shapes, False, 0.0, None)
    assert (*shapes, True, 0.0, None) in torch.asked
    assert torch.asked[-1][-1].shape == (1, 1, 24, 24) and torch.asked[-1][-1].dtype == np.bool_


def test_causal_calls_with_few_queries_have_no_baselines():
    """PyTorch aligns the first query, this library the last."""
    case = SelfAttentionProblem(2, 4, 24, 16, 8, "float16", causal=False, window=5, queries=3)
    measure = harness(torch=FakeTorch(), baselines=("eager", "cupy"))
    found = rows("forward", "flash", PLAIN, "causal", case=case, measure=measure)
    assert [(row["option"], row["implementation"]) for row in found if "times" in row] == [
        (PLAIN, "cupyattn flash"), (PLAIN, "torch eager"), (PLAIN, "cupy"),
        ("causal", "cupyattn flash"),
    ]  # fmt: skip


def test_gradients_of_baselines_are_those_of_q_k_and_v():
    torch = FakeTorch()
    measure = harness(torch=torch, baselines=("eager", "flash"))
    words = "flash --deterministic never"
    found = rows("backward", words, PLAIN, "softcap", measure=measure, tolerance=np.inf)
    assert [(row["option"], row["implementation"]) for row in found] == [
        (PLAIN, "cupyattn flash"), (PLAIN, "torch eager"), (PLAIN, "torch flash"),
        ("softcap", "cupyattn flash"),
    ]  # fmt: skip
    assert set(torch.differentiated) == {(3, (2, 4, 24, 8), (2, 4, 24, 8))}
    wrong = rows("backward", words, PLAIN, measure=measure)[1]  # of zeros
    assert "differs from cupyattn's by 1 of the largest" in wrong["unavailable"]


PACKED = varlen.PackedAttentionProblem(40, 10, 4, 2, 8, True, "float32")


def test_ways_of_packed_sequences_have_the_same_tokens():
    assert PACKED.lengths("equal").tolist() == [10] * 4
    ragged = PACKED.lengths("ragged")
    assert ragged.sum() == 40
    assert len(set(ragged.tolist())) > 1
    assert ragged.min() >= 0


def test_packed_sequences_of_equal_lengths_are_the_dense_call():
    source = Harness(np).arrays(2)
    arrays = [source.normal(*shape, dtype=PACKED.dtype) for shape in PACKED.shapes]

    def call(layout, direction):
        return varlen.call_of(PACKED, layout, direction, arrays, np)()

    out, lse = call("dense", "forward")
    packed, packed_lse = call("equal", "forward")
    assert np.array_equal(packed, out.reshape(packed.shape))
    assert np.array_equal(packed_lse, np.swapaxes(lse, 0, 1).reshape(packed_lse.shape))
    dense, equal = call("dense", "backward"), call("equal", "backward")
    for name in ("dq", "dk", "dv"):
        found = getattr(equal, name)
        assert np.array_equal(found, getattr(dense, name).reshape(found.shape))


def test_flops_of_packed_sequences():
    assert PACKED.flops("dense") == PACKED.flops("equal") == 4 * 4 * 8 * 4 * 100 / 2
    assert PACKED.flops("ragged") == 2 * 4 * 8 * (PACKED.lengths("ragged") ** 2).sum()
