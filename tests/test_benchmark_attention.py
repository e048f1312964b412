"""``python -m cupyattn.benchmark attention``: what it times, how it counts, what it prints."""

from __future__ import annotations

import json
import os
import sys
import types

import numpy as np
import pytest
from fake_gpu import HEADER, FakeTimer, FakeTorch
from processes import run
from strategies import dtype_of

import cupyattn
from cupyattn.benchmark import (
    attention,
    attention_arguments,
    attention_cases,
    cuda_events,
    gpu_command,
    torch_peer,
)
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention_arguments import cases_of
from cupyattn.benchmark.attention_cases import OPTIONS, PLAIN, Case, Pool, arguments_of
from cupyattn.benchmark.attention_times import time_cases
from cupyattn.benchmark.contenders import forward_contenders
from cupyattn.benchmark.cuda_events import event_timer
from cupyattn.functional.device_info import device_count

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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
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
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
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
    timer = FakeTimer(*[0.001] * (1 + len(OPTIONS)))
    with cupyattn.backend("emulator"):
        rows = time_cases([case], forward_contenders(["flash"]), OPTIONS, np, timer)
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


# --- the peer


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


# --- events and the header


class FakeCupy:
    """A stream on which a call takes 2 ms, and what of CuPy is used to time it."""

    __version__ = "14.2.0"

    def __init__(self):
        self.log = []
        self.now = 0.0
        runtime = types.SimpleNamespace(driverGetVersion=lambda: 13020)
        self.cuda = types.SimpleNamespace(
            Event=lambda: FakeEvent(self),
            get_current_stream=lambda: self,
            get_elapsed_time=lambda start, stop: stop.time - start.time,
            runtime=runtime,
        )

    def synchronize(self):
        self.log.append("wait")

    def call(self):
        self.log.append("call")
        self.now += 2.0


class FakeEvent:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.log.append("event")
        self.time = self.stream.now


def test_calls_are_queued_with_events_between_them(monkeypatch):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert event_timer(calls=3, warm_up=2)(cupy.call) == [0.002] * 3
    timed = ["event", *["call", "event"] * 3]
    assert cupy.log == ["call", "call", "wait", *timed, "wait"]


def test_the_header_names_the_target_in_the_code(monkeypatch, tmp_path):
    """Here the code is of another architecture than the device and what is asked of it."""
    code = tmp_path / "kernel.ptx"
    code.write_text(".version 8.8\n.target sm_80\n")
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(cuda_events, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    device = types.SimpleNamespace(
        name="A GPU", capability=90, loaded=("a", "b"),
        load=lambda specialisation: types.SimpleNamespace(code=code),
    )  # fmt: skip
    header = cuda_events.measured_on(device)
    assert set(header) == set(HEADER)
    assert header["code"] == ["compute_80"]
    assert (header["compute_capability"], header["cuda_driver"]) == ("9.0", "13.2")
    assert header["arch_override"] == "75"


# --- the command


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
