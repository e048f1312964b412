"""``python -m cupyattn.benchmark attention_backward``: what it times, how it counts and prints."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from support.fake_gpu import HEADER, FakeTimer, FakeTorch
from support.processes import run
from support.search import deep, wider

import cupyattn
from cupyattn.benchmark import gpu_command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention import backward as attention_backward
from cupyattn.benchmark.attention.arguments import cases_of
from cupyattn.benchmark.attention.cases import OPTIONS, PLAIN, Case, Pool, arguments_of, items
from cupyattn.benchmark.attention.times import time_cases
from cupyattn.benchmark.contenders import backward_contenders, workspace_bytes
from cupyattn.functional.device_info import device_count

CASE = Case(2, 4, 24, 16, 8, "float16", causal=False, window=5)
BOTH = (False, True)
FEW = ("bias", "window")  # what a plain run compiles of OPTIONS


def test_flops_count_five_products():
    """Multiplications and additions of q k, ds k and ds q over D, of dout v and p dout over Dv."""
    assert CASE.backward_flops(PLAIN) == 2 * 2 * 4 * 24**2 * (3 * 16 + 2 * 8)
    assert CASE.backward_flops("causal") == CASE.backward_flops(PLAIN) / 2
    equal = Case(2, 4, 24, 16, 16, "float16", causal=False, window=5)
    for option in (PLAIN, "causal", "window"):
        assert equal.backward_flops(option) == 2.5 * equal.flops(option)


def test_rows():
    timer = FakeTimer(0.010, 0.015, 0.005, 0.0075)
    rows = time_cases([CASE], backward_contenders(["flash"], BOTH), ["causal"], np, timer)
    assert [(row["option"], row["implementation"], row["deterministic"]) for row in rows] == [
        (PLAIN, "flash", False), (PLAIN, "flash", True),
        ("causal", "flash", False), ("causal", "flash", True),
    ]  # fmt: skip
    assert [row["time_ratio"] for row in rows] == [1.0, 1.0, 0.5, 0.5], "each over its own"
    assert rows[1]["tflops"] == pytest.approx(CASE.backward_flops(PLAIN) / 0.015 / 1e12)
    assert rows[2]["tflops"] == pytest.approx(rows[0]["tflops"]), "half the work in half the time"


@pytest.mark.parametrize("option", [PLAIN, *OPTIONS])
def test_gradients_are_those_of_the_option(option):
    timer = FakeTimer(0.001, 0.001)
    contenders = backward_contenders(["flash"], [False])
    time_cases([CASE], contenders, [option] if option != PLAIN else [], np, timer)
    q, k, v, dout, _, _ = Pool(items(CASE), "float16", np).arrays(CASE)
    arguments = arguments_of(option, CASE, np)
    out, lse = cupyattn.attention(q, k, v, return_lse=True, **arguments)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, **arguments)
    for name, gradient in timer.results[-1]._asdict().items():
        np.testing.assert_array_equal(gradient, getattr(expected, name), err_msg=name)
        assert (gradient is None) == (name in ("dbias", "dsinks") and name[1:] not in arguments)


@pytest.mark.parametrize(
    ("implementation", "modes", "timed"),
    [
        ("flash", BOTH, [False, True]),
        ("flash", (True,), [True]),
        ("naive", BOTH, [False]),
    ],
)
def test_what_does_the_same_either_way_is_timed_once(implementation, modes, timed):
    contenders = backward_contenders([implementation], modes)
    assert [contender.labels["deterministic"] for contender in contenders] == timed


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
@pytest.mark.parametrize("mode", [BOTH[0], *deep(BOTH[1])])
def test_the_kernels_take_every_option_and_need_the_whole_workspace(monkeypatch, mode):
    """Two sequences, so that the bias broadcasts."""
    case = Case(2, 2, 16, 64, 64, "float16", causal=False, window=3)
    given = []
    backward = cupyattn.attention_backward

    def recorded(*arrays, workspace, **options):
        given.append(workspace.nbytes)
        with pytest.raises(ValueError, match="this call needs") as refused:
            backward(*arrays, workspace=workspace[:-256], **options)
        assert f"this call needs {workspace.nbytes}," in str(refused.value)
        return backward(*arrays, workspace=workspace, **options)

    monkeypatch.setattr(cupyattn, "attention_backward", recorded)
    contenders = backward_contenders(["flash"], [mode])
    options = wider(FEW, [option for option in OPTIONS if option not in FEW])
    timer = FakeTimer(*[0.001] * (1 + len(options)))
    with cupyattn.backend("emulator"):
        rows = time_cases([case], contenders, options, np, timer)
    assert not [row["unavailable"] for row in rows if "unavailable" in row]
    for result in timer.results:
        assert all(
            np.isfinite(grad.astype(np.float32)).all() for grad in result if grad is not None
        )
    assert len(set(given)) == 1 + len({"bias", "rotary"} & {*options}), "they take more"


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
def test_other_kernels_once():
    case = Case(1, 2, 16, 32, 32, "float32", causal=False, window=3)
    timer = FakeTimer(0.001, 0.002)
    with cupyattn.backend("emulator"):
        contenders = backward_contenders(["flash", "naive"], [False])
        rows = time_cases([case], contenders, [], np, timer)
    assert [row.get("seconds") for row in rows] == [0.001, 0.002]
    for one, other in zip(*(result[:3] for result in timer.results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_workspace_of_other_dtypes():
    case = Case(2, 3, 24, 16, 16, "float32", causal=False, window=3)
    assert workspace_bytes(case, deterministic=False) == 4 * 2 * 3 * 24


def test_the_peer_is_timed_where_it_has_the_option():
    torch = FakeTorch()
    contenders = backward_contenders(["flash"], [False], torch)
    timer = FakeTimer(0.004, 0.008, 0.002, 0.006, 0.005, 0.003)
    rows = time_cases([CASE], contenders, ["causal", "softcap", "mask"], np, timer)
    assert [(row["option"], row["implementation"], row["deterministic"]) for row in rows] == [
        (PLAIN, "flash", False), (PLAIN, "torch", None), ("causal", "flash", False),
        ("causal", "torch", None), ("softcap", "flash", False), ("mask", "flash", False),
        ("mask", "torch", None),
    ]  # fmt: skip
    assert rows[1]["tflops"] == pytest.approx(CASE.backward_flops(PLAIN) / 0.008 / 1e12)
    assert rows[-1]["unavailable"] == "RuntimeError: no kernel"
    assert [asked[2] for asked in torch.asked] == [False, True, False]
    assert torch.differentiated == [(3, (2, 4, 24, 16), (2, 4, 24, 8))] * 2, "q, k and v"


# --- the command


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels, their times and what they ran on."""
    timer = FakeTimer(*[0.004, 0.006, 0.002, 0.003] * 4)
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments: argparse.Namespace):
        contenders = attention_backward.contenders_of(arguments, None)
        rows = time_cases(cases_of(arguments), contenders, arguments.options, np, timer)
        more = {"torch": None, "calls": arguments.calls, "warm_up": arguments.warm_up}
        return {"command": "attention_backward", **HEADER, **more, "rows": rows}

    monkeypatch.setattr(attention_backward, "measure", measure)


SMALL = ("attention_backward", "--tokens", "32", "--width", "128", "--seqlen", "16",
         "--head-dim", "64")  # fmt: skip


def test_text(a_gpu, capsys):
    assert main([*SMALL, "--options", "causal"]) == 0
    printed = capsys.readouterr().out
    assert "Attention backward on A GPU, 2026-11-20" in printed
    assert "compute_75 PTX, translated by the driver" in printed
    assert "D 64, 2 x 16 tokens, 2 heads, float16" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    first = lines.index("plain flash 4.000 ms 0.0")
    assert lines[first + 1 : first + 4] == [
        "plain flash deterministic 6.000 ms 0.0",
        "causal flash 2.000 ms 0.0 2.00 x faster",
        "causal flash deterministic 3.000 ms 0.0 2.00 x faster",
    ]


@pytest.mark.parametrize(
    ("arguments", "modes"),
    [
        ((), [False, True]),
        (("--deterministic",), [True]),
        (("--deterministic", "never"), [False]),
        (("--dtype", "float32"), [False, True]),
        (("--dtype", "bfloat16"), [False, True]),
    ],
)
def test_json(a_gpu, tmp_path, arguments, modes):
    file = tmp_path / "backward.json"
    assert main([*SMALL, "--options", "none", "--json", str(file), *arguments]) == 0
    result = json.loads(file.read_text())
    assert {name: result[name] for name in HEADER} == HEADER
    assert [row["deterministic"] for row in result["rows"]] == modes


def test_an_implementation_without_backward(capsys):
    with pytest.raises(SystemExit):
        main(["attention_backward", "--implementation", "tiled"])
    assert "invalid choice: 'tiled'" in capsys.readouterr().err


@pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")
def test_needs_a_gpu():
    result = run("attention_backward", launcher=("-m", "cupyattn.benchmark"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("attention_backward: there is no CUDA device")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Every option once, one-pass and deterministic, and the naive kernels."""
    file = tmp_path / "backward.json"
    sizes = ("--tokens", "512", "--width", "128", "--seqlen", "256", "--head-dim", "64")
    kernels = ("--implementation", "flash", "naive", "--options", "all")
    arguments = (*sizes, *kernels, "--calls", "3", "--warm-up", "1", "--json", str(file))
    result = run("attention_backward", *arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert len(report["rows"]) == 3 * (1 + len(OPTIONS))
    assert all(0 < row["fastest_s"] <= row["seconds"] for row in report["rows"])
    assert report["code"]
