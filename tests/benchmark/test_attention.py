"""What ``python -m cupyattn.benchmark attention`` times, and how it counts."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from support.dtypes import DTYPES, dtype_of
from support.fake_gpu import FakeTimer, FakeTorch
from support.search import wider

import cupyattn
from cupyattn.benchmark import torch_peer
from cupyattn.benchmark.attention import cases as attention_cases
from cupyattn.benchmark.attention.cases import OPTIONS, PLAIN, Case, Pool, arguments_of
from cupyattn.benchmark.attention.times import time_cases
from cupyattn.benchmark.contenders import forward_contenders
from cupyattn.functional.device_info import device_count

FEW = ("bias", "window")  # what a plain run compiles of OPTIONS
CASE = Case(2, 4, 24, 16, 8, "float16", causal=False, window=5)


def kept_scores(case: Case, option: str) -> int:
    """Counted one by one."""
    i, j = np.indices((case.seqlen, case.seqlen))
    keep = np.abs(i - j) <= case.window if option == "window" else np.ones_like(i, bool)
    return int((keep & (j <= i) if case.causal else keep).sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 5, 23, 100])
def test_scores_of_a_window(causal, window):
    case = Case(1, 1, 24, 8, 8, "float16", causal, window)
    assert case.scores("window") == kept_scores(case, "window")


def test_flops_count_both_products():
    """Multiplications and additions of q k and p v; causal calls count half of the scores."""
    assert CASE.flops(PLAIN) == 2 * 2 * 4 * 24**2 * (16 + 8)
    assert CASE.flops("causal") == CASE.flops(PLAIN) / 2
    assert CASE.flops("softcap") == CASE.flops(PLAIN)
    causal = Case(2, 4, 24, 16, 8, "float16", causal=True, window=5)
    assert causal.flops(PLAIN) == CASE.flops(PLAIN) / 2
    assert causal.flops("bias") == CASE.flops(PLAIN) / 2


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "shape"), [(24, 80, (2, 24, 3, 80)), (99, 256, (1, 99, 1, 256))]
)
def test_sizes_follow_from_tokens_and_width(seqlen, head_dim, shape):
    case = Case.of_size(
        50, 250, seqlen=seqlen, head_dim=head_dim, head_dim_v=None, dtype="float16",
        causal=False, window=5,
    )  # fmt: skip
    assert case.q_shape == case.v_shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_a_case(dtype):
    small = Case(1, 2, 8, 4, 16, dtype, causal=False, window=5)
    pool = Pool(attention_cases.items(CASE), dtype, np)
    for case in (small, CASE):
        q, k, v, dout, out, lse = pool.arrays(case)
        assert q.shape == k.shape == case.q_shape
        assert v.shape == dout.shape == out.shape == case.v_shape
        assert {array.dtype for array in (q, k, v, dout, out)} == {dtype_of(dtype)}
        assert (lse.shape, lse.dtype) == ((case.batch, case.heads, case.seqlen), np.float32)
        assert not np.array_equal(q, k) and not np.array_equal(v, dout)


def test_rows():
    timer = FakeTimer(0.004, 0.002, 0.001, 0.005)
    rows = time_cases(
        [CASE], forward_contenders(["flash"]), ["causal", "window", "softcap"], np, timer
    )
    assert [row["option"] for row in rows] == [PLAIN, "causal", "window", "softcap"]
    assert [row["seconds"] for row in rows] == [0.004, 0.002, 0.001, 0.005]
    assert [row["time_ratio"] for row in rows] == [1.0, 0.5, 0.25, 1.25]
    assert rows[0]["fastest_s"] == 0.002
    assert rows[0]["tflops"] == pytest.approx(CASE.flops(PLAIN) / 0.004 / 1e12)
    assert rows[1]["tflops"] == pytest.approx(rows[0]["tflops"])
    assert (rows[0]["batch"], rows[0]["heads"], rows[0]["head_dim_v"]) == (2, 4, 8)
    plain, causal, window, softcap = timer.results
    for other in (causal, window, softcap):
        assert not np.array_equal(plain, other), "the option reached the call"


def test_the_plain_call_of_each_implementation_is_its_own_measure():
    timer = FakeTimer(0.004, 0.04, 0.006, 0.02)
    rows = time_cases([CASE], forward_contenders(["flash", "tiled"]), ["causal"], np, timer)
    assert [(row["implementation"], row["time_ratio"]) for row in rows] == [
        ("flash", 1.0), ("tiled", 1.0), ("flash", 1.5), ("tiled", 0.5),
    ]  # fmt: skip


def test_causal_is_no_option_where_every_call_is():
    case = Case(2, 4, 24, 16, 8, "float16", causal=True, window=5)
    timer = FakeTimer(0.004, 0.002)
    rows = time_cases([case], forward_contenders(["flash"]), ["causal", "window"], np, timer)
    assert [row["option"] for row in rows] == [PLAIN, "window"]
    q, k, v = Pool(attention_cases.items(case), "float16", np).arrays(case)[:3]
    assert np.array_equal(timer.results[0], cupyattn.attention(q, k, v, causal=True))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_of_options_are_taken(option, dtype):
    case = Case(2, 4, 24, 16, 8, dtype, causal=False, window=5)
    q, k, v, _, out, _ = Pool(attention_cases.items(case), dtype, np).arrays(case)
    arguments = arguments_of(option, case, np)
    cupyattn.attention(q, k, v, out=out, **arguments)
    assert np.isfinite(out.astype(np.float32)).all()
    if "bias" in arguments:
        assert arguments["bias"].shape == (1, 4, 24, 24)
        assert arguments["bias"].dtype == dtype_of(dtype)


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
def test_the_kernel_has_every_option():
    case = Case(1, 2, 16, 64, 64, "float16", causal=False, window=3)
    options = wider(FEW, [option for option in OPTIONS if option not in FEW])
    timer = FakeTimer(*[0.001] * (1 + len(options)))
    with cupyattn.backend("emulator"):
        rows = time_cases([case], forward_contenders(["flash"]), options, np, timer)
    assert not [row["unavailable"] for row in rows if "unavailable" in row]


def without_kernels(q, k, v, *, out, implementation, **options):
    if implementation == "tiled" and "softcap" in options:
        raise NotImplementedError("no softcap here")
    return out


def test_what_a_kernel_does_not_have_is_a_row(monkeypatch):
    monkeypatch.setattr(cupyattn, "attention", without_kernels)
    timer = FakeTimer(0.004, 0.04, 0.006)
    rows = time_cases([CASE], forward_contenders(["flash", "tiled"]), ["softcap"], np, timer)
    assert [row.get("seconds") for row in rows] == [0.004, 0.04, 0.006, None]
    assert rows[-1]["unavailable"] == "NotImplementedError: no softcap here"
    assert rows[-1]["time_ratio"] is None


def test_what_has_no_room_is_a_row(monkeypatch):
    def full(*_):
        raise MemoryError("64 GB asked for")

    monkeypatch.setattr(attention_cases, "_bias", full)
    rows = time_cases(
        [CASE], forward_contenders(["flash"]), ["bias", "causal"], np, FakeTimer(0.004, 0.002)
    )
    assert [row.get("unavailable") for row in rows] == [None, "MemoryError: 64 GB asked for", None]


def test_a_fault_in_a_kernel_is_no_row(monkeypatch):
    def faulty(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cupyattn, "attention", faulty)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        time_cases([CASE], forward_contenders(["flash"]), [], np, FakeTimer(1.0))


def test_the_peer_is_timed_where_it_has_the_option():
    torch = FakeTorch()
    timer = FakeTimer(0.004, 0.008, 0.002, 0.006, 0.005, 0.003)
    rows = time_cases(
        [CASE], forward_contenders(["flash"], torch), ["causal", "softcap", "mask"], np, timer
    )
    assert [(row["option"], row["implementation"]) for row in rows] == [
        (PLAIN, "flash"), (PLAIN, "torch"), ("causal", "flash"), ("causal", "torch"),
        ("softcap", "flash"), ("mask", "flash"), ("mask", "torch"),
    ]  # fmt: skip
    assert rows[3]["time_ratio"] == 0.75
    assert rows[-1]["unavailable"] == "RuntimeError: no kernel"
    shapes = ((2, 4, 24, 16), (2, 4, 24, 8))  # (B, H, S, D), as PyTorch has them
    assert torch.asked[0] == (*shapes, False, 0.0, None)
    assert torch.asked[1] == (*shapes, True, 0.0, None)
    assert torch.asked[2][-1].shape == (1, 1, 24, 24) and torch.asked[2][-1].dtype == np.bool_


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"without PyTorch; .*; pip install torch"):
        torch_peer.load_torch()


def test_torch_without_a_gpu(monkeypatch):
    cpu = types.SimpleNamespace(is_available=lambda: False)
    torch = types.SimpleNamespace(__version__="2.11.0+cpu", cuda=cpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError, match=r"2\.11\.0\+cpu sees no GPU"):
        torch_peer.load_torch()
