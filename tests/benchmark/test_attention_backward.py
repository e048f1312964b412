"""``python -m cupyattn.benchmark attention_backward``: what it times, how it counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import HEADER, FakeTorch, harness
from support.processes import run
from support.search import deep, wider

import cupyattn
from cupyattn.benchmark import attention
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention import OPTIONS, PLAIN, Inputs, Problem, arguments_of
from cupyattn.benchmark.cases import Case, Harness, rows_of
from cupyattn.functional.device_info import device_count

CASE = Problem(2, 4, 24, 16, 8, "float16", causal=False, window=5)
BOTH, ONLY, NEVER = "both", "only", "never"
FEW = ("bias", "window")  # what a plain run compiles of OPTIONS


def own(names, mode, inputs):
    _, arguments = attention.BACKWARD.parse("--implementation", *names, "--deterministic", mode)
    return attention.implementations("backward", arguments, inputs)


def rows(names, mode, *options, case=CASE, measure=None, tolerance=np.inf):
    """Every row of a case."""
    measure = harness() if measure is None else measure
    found = []
    for option in options:
        made = own(names, mode, Inputs(case, option, measure))
        flops = case.flops("backward", option)
        found += rows_of(Case({"option": option}, made, flops=flops, tolerance=tolerance), measure)
    return found


def test_flops_count_five_products():
    """Multiplications and additions of q k, ds k and ds q over D, of dout v and p dout over Dv."""
    assert CASE.flops("backward", PLAIN) == 2 * 2 * 4 * 24**2 * (3 * 16 + 2 * 8)
    assert CASE.flops("backward", "causal") == CASE.flops("backward", PLAIN) / 2
    equal = Problem(2, 4, 24, 16, 16, "float16", causal=False, window=5)
    for option in (PLAIN, "causal", "window"):
        assert equal.flops("backward", option) == 2.5 * equal.flops("forward", option)


def test_rows():
    measure = harness(0.010, 0.015, 0.005, 0.0075)
    found = rows(["flash"], BOTH, PLAIN, "causal", measure=measure, tolerance=0.05)
    names = ["cupyattn flash", "cupyattn flash deterministic"]
    assert [row["implementation"] for row in found] == names * 2
    assert found[1]["tflops"] == pytest.approx(CASE.flops("backward", PLAIN) / 0.015 / 1e12)
    assert found[2]["tflops"] == pytest.approx(found[0]["tflops"]), "half the work, half the time"


@pytest.mark.parametrize("option", [PLAIN, *OPTIONS])
def test_gradients_are_those_of_the_option(option):
    measure = harness()
    rows(["flash"], NEVER, option, measure=measure)
    q, k, v, dout, _, _ = Inputs(CASE, PLAIN, Harness(np)).arrays
    arguments = arguments_of(option, CASE, np)
    out, lse = cupyattn.attention(q, k, v, return_lse=True, **arguments)
    expected = cupyattn.attention_backward(dout, q, k, v, out, lse, **arguments)
    for name, gradient in measure.times.results[-1]._asdict().items():
        np.testing.assert_array_equal(gradient, getattr(expected, name), err_msg=name)
        assert (gradient is None) == (name in ("dbias", "dsinks") and name[1:] not in arguments)


@pytest.mark.parametrize(
    ("implementation", "modes", "timed"),
    [
        ("flash", BOTH, ["cupyattn flash", "cupyattn flash deterministic"]),
        ("flash", ONLY, ["cupyattn flash deterministic"]),
        ("naive", BOTH, ["cupyattn naive"]),
    ],
)
def test_what_does_the_same_either_way_is_timed_once(implementation, modes, timed):
    implementations = own([implementation], modes, Inputs(CASE, PLAIN, harness()))
    assert [implementation.name for implementation in implementations] == timed


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
@pytest.mark.parametrize("mode", [NEVER, *deep(ONLY)])
def test_the_kernels_take_every_option(mode):
    """Two sequences, so that the bias broadcasts."""
    case = Problem(2, 2, 16, 64, 64, "float16", causal=False, window=3)
    options = wider(FEW, [option for option in OPTIONS if option not in FEW])
    measure = harness()
    with cupyattn.backend("emulator"):
        found = rows(["flash"], mode, PLAIN, *options, case=case, measure=measure)
    assert not [row["unavailable"] for row in found if "unavailable" in row]
    for result in measure.times.results:
        assert all(
            np.isfinite(grad.astype(np.float32)).all() for grad in result if grad is not None
        )


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="the same runs on the GPU, below")
def test_other_kernels_agree():
    case = Problem(1, 2, 16, 64, 64, "float32", causal=False, window=3)
    with cupyattn.backend("emulator"):
        found = rows(["flash", "naive"], NEVER, PLAIN, case=case, tolerance=1e-3)
    assert all("times" in row for row in found)


def test_peers_are_timed_where_they_have_the_option():
    torch = FakeTorch()
    measure = harness(torch=torch, baselines=("eager", "flash"))
    found = rows(["flash"], NEVER, PLAIN, "softcap", "bias", measure=measure)
    assert [(row["option"], row["implementation"]) for row in found if "times" in row] == [
        (PLAIN, "cupyattn flash"), (PLAIN, "torch eager"), (PLAIN, "torch flash"),
        ("softcap", "cupyattn flash"), ("bias", "cupyattn flash"),
    ]  # fmt: skip
    assert found[-1]["unavailable"] == "RuntimeError: no kernel"
    assert torch.backends == ["flash"] * 2
    assert set(torch.differentiated) == {(3, (2, 4, 24, 8), (2, 4, 24, 8))}, "q, k and v"


def test_wrong_gradients_of_a_peer_are_found():
    measure = harness(torch=FakeTorch(), baselines=("eager",))  # its gradients are zeros
    found = rows(["flash"], NEVER, PLAIN, measure=measure, tolerance=0.05)
    assert "differs from cupyattn's by 1 of the largest" in found[1]["unavailable"]


SMALL = ("attention_backward", "--tokens", "32", "--width", "128", "--seqlen", "16",
         "--head-dim", "64", "--dtype", "float16", "--implementation", "flash")  # fmt: skip


def test_text(a_gpu, capsys):
    a_gpu.times.seconds += [0.004, 0.006, 0.002, 0.003]
    assert main([*SMALL, "--options", "causal"]) == 0
    printed = capsys.readouterr().out
    assert "Attention backward on A GPU, 2026-11-20" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    starts = (
        "plain cupyattn flash 4.000 ms", "plain cupyattn flash deterministic 6.000 ms",
        "causal cupyattn flash 2.000 ms", "causal cupyattn flash deterministic 3.000 ms",
    )  # fmt: skip
    found = [line for line in lines if line.startswith(("plain", "causal"))]
    assert all(line.startswith(start) for line, start in zip(found, starts, strict=True))
    assert found[1].endswith("5.0 MB 1.50")
    assert found[3].endswith("5.0 MB 1.50 0.50")


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
    assert ["deterministic" in row["implementation"] for row in result["rows"]] == modes


def test_an_implementation_without_backward(capsys):
    with pytest.raises(SystemExit):
        main(["attention_backward", "--implementation", "tiled"])
    assert "invalid choice: 'tiled'" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Every option once, one-pass and deterministic, and the naive kernels plain and causal."""
    file = tmp_path / "backward.json"
    sizes = ("--tokens", "512", "--width", "128", "--seqlen", "256", "--head-dim", "64")
    kernels = ("--implementation", "flash", "naive", "--dtype", "float16", "--options", "all")
    arguments = (*sizes, *kernels, "--calls", "3", "--warm-up", "1", "--json", str(file))
    result = run("attention_backward", *arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert len(report["rows"]) == 2 * (1 + len(OPTIONS)) + 2
    assert all(row["times"]["p50_s"] > 0 for row in report["rows"])
    assert report["code"]
