"""``python -m cupyattn tune``: what it asks, times, chooses, keeps and prints."""

from __future__ import annotations

import argparse
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
from support.fake_gpu import HEADER
from support.processes import run

from cupyattn.__main__ import main
from cupyattn.arrays import adopt
from cupyattn.benchmark import command as driver
from cupyattn.benchmark import tune
from cupyattn.benchmark.cases import Harness
from cupyattn.benchmark.linear import LARGE, Inputs, Product
from cupyattn.benchmark.tune import TunedCall, tuned_calls
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.functional.linear.weights import weight_arrays
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.choices import USUAL
from cupyattn.ops.attention.checks import forward_problem
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.options import AttentionOptions
from cupyattn.ops.linear.backward import linear_backward
from cupyattn.ops.linear.checks import backward_problem
from cupyattn.ops.linear.checks import forward_problem as linear_problem
from cupyattn.ops.linear.forward import linear_forward

HERE = Harness(np, cold=False)


def attention_of(device, head_dim, length=512):
    arrays = {name: np.zeros((2, length, 40, head_dim), np.float16) for name in "qkv"}
    operands = adopt(arrays)
    problem = forward_problem(operands, AttentionOptions())
    return lambda: attention_forward(device, problem, operands, seed=0, return_lse=False)


def linear_of(device, m, n, k):
    operands = adopt({"x": np.zeros((m, k), np.float16), "w": np.zeros((n, k), np.float16).T})
    problem = linear_problem(operands, None, False)
    return lambda: linear_forward(device, problem, operands)


def backward_of(device, m, n, k):
    arrays = {"dout": (m, n), "x": (m, k), "w": (k, n)}
    operands = adopt({name: np.zeros(shape, np.float16) for name, shape in arrays.items()})
    problem = backward_problem(operands, None, False)
    return lambda: linear_backward(device, problem, operands)


def quantised_of(device, m, n, k, *, transposed=False):
    case = Product("large", m, n, k, "float16", "nk", None, "nf4")
    w = Inputs(case, HERE).arrays.weights[0].T
    arrays, weight = weight_arrays(w.T if transposed else w)
    operands = adopt({"x": np.zeros((m, n if transposed else k), np.float16), **arrays})
    problem = linear_problem(operands, None, False, weight)
    return lambda: linear_forward(device, problem, operands)


@pytest.fixture
def device():
    return LaunchRecorder(TURING)


def tuned(device, subject, seconds_of):
    """Tune one call; what takes how long is said of the macros of its launches."""

    def clock(calls):
        device.launches.clear()
        for call in calls:
            call()
        return seconds_of([dict(launch.specialisation.macros) for launch in device.launches])

    return tune.tune(device, [TunedCall("a call", lambda: [subject])], clock)


def test_the_fastest_admissible_row_is_chosen(device):
    (row,) = tuned(device, attention_of(device, 64), lambda launches: launches[0]["TILE_K"])
    assert row["question"] == "attention_forward 64 64"
    assert row["usual"] == "64"
    assert row["seconds"] == {
        "64": 64,
        "80": 48,
        "96": 32,
        "128": 16,
        "160": 48,
        "192": 32,
        "256": 16,
    }
    assert row["chosen"] == "128"  # the first of the fastest
    assert device.choices is USUAL


def test_what_noise_can_do_is_not_chosen(device):
    def nearly(launches):
        return 1.0 if launches[0]["TILE_K"] == 64 else 0.985

    (row,) = tuned(device, attention_of(device, 64), nearly)
    assert row["chosen"] == "64"


def test_a_row_that_does_not_run_is_passed_over(device):
    def refuses(launches):
        if launches[0]["TILE_K"] == 16:
            raise RuntimeError("too many resources requested for launch")
        return launches[0]["TILE_K"]

    (row,) = tuned(device, attention_of(device, 64), refuses)
    assert row["chosen"] == "96"
    assert "128" not in row["seconds"]
    with pytest.raises(RuntimeError, match="too many"):
        tuned(device, attention_of(device, 128), refuses)
    assert device.choices is USUAL


def test_products_choose_their_tiles(device):
    def narrow_is_fastest(launches):
        return (
            1.0 if launches[0]["TILE_COLUMNS"] == 128 and launches[0]["TILE_ROWS"] == 256 else 2.0
        )

    (row,) = tuned(device, linear_of(device, 4096, 4096, 1024), narrow_is_fastest)
    assert row["question"].startswith("linear_forward 4096 4096 1024 ")
    assert (row["usual"], row["chosen"]) == ("wide/1", "narrow/1")


@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_a_quantised_weight_choose_their_tiles(device, transposed):
    def small_is_fastest(launches):
        return 1.0 if launches[0]["TILE_ROWS"] == 128 and len(launches) == 1 else 2.0

    call = quantised_of(device, 1024, 2048, 1024, transposed=transposed)
    (row,) = tuned(device, call, small_is_fastest)
    kernel = "linear_product_quantised" if transposed else "linear_forward_quantised"
    assert row["question"].startswith(f"{kernel} 1024 ")
    assert " nf4" in row["question"]
    assert (row["usual"], row["chosen"]) == ("narrow/1", "small/1")


def test_few_results_and_a_long_sum_may_be_cut_into_parts(device):
    def parts_are_fastest(launches):
        return 1.0 if len(launches) > 1 else 2.0

    (row,) = tuned(device, linear_of(device, 512, 2048, 4096), parts_are_fastest)
    assert not row["chosen"].endswith("/1")
    assert any(name.endswith("/1") for name in row["seconds"])


def test_a_backward_asks_for_each_product(device):
    def first_is_fastest(launches):
        return float(sum(each["TILE_ROWS"] for each in launches if "TILE_ROWS" in each))

    rows = tuned(device, backward_of(device, 4096, 2048, 1024), first_is_fastest)
    assert [row["question"].rpartition(" ")[2] for row in rows] == ["whole", "parts"]
    assert all(row["question"].startswith("linear_product ") for row in rows)


def test_few_rows_choose_a_configuration(device):
    def fewest_threads(launches):
        return float(launches[0]["K_WARPS"])

    rows = tuned(device, linear_of(device, 1, 2048, 2048), fewest_threads)
    assert [(row["usual"], row["chosen"]) for row in rows] == [("2048", "None")]
    assert tuned(device, linear_of(device, 8, 2048, 2048), fewest_threads) == []  # one row


def test_a_question_is_answered_once(device):
    call = attention_of(device, 64)
    once = TunedCall("a call", lambda: [call])
    assert len(tune.tune(device, [once, once], lambda calls: 1.0)) == 1


def test_arrays_of_a_call_are_freed_before_the_next_is_prepared(device):
    made = []

    def tuned_call():
        held = []

        def calls():
            assert all(each() is None for each in made)
            held.append(np.zeros(1))
            made.append(weakref.ref(held[0]))
            return [attention_of(device, 64)]

        return TunedCall("a call", calls)

    tune.tune(device, (tuned_call() for _ in range(3)), lambda calls: 1.0)
    assert len(made) == 3


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_parser(parser.add_subparsers())
    return parser.parse_args(["tune", *words])


def test_the_subjects_are_those_of_the_command_line():
    names = [each.name for each in tuned_calls(parsed(), HERE)]
    assert "attention D=64" in names
    assert f"linear {' x '.join(map(str, LARGE[0]))}" in names
    words = ("--kind", "attention", "thin", "--head-dim", "72", "--size", "4", "64", "96")
    assert [each.name for each in tuned_calls(parsed(*words), HERE)] == [
        "attention D=72",
        "thin 4 x 64 x 96",
    ]


@pytest.mark.parametrize("kind", ["linear", "backward", "thin", "quantised"])
def test_products_are_called(kind):
    for subject in tuned_calls(parsed("--kind", kind, "--size", "3", "16", "128"), HERE):
        subject.calls()[0]()


def test_each_format_is_tuned_both_ways():
    names = [
        each.name
        for each in tuned_calls(parsed("--kind", "quantised", "--size", "8", "16", "128"), HERE)
    ]
    assert names[:2] == ["quantised 8 x 16 x 128 nf4", "quantised 8 x 16 x 128 nf4, dx"]
    assert len(names) == 6


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels, their times and what they ran on."""
    rows = [
        {"subject": "attention D=64", "question": "attention_forward 64 64", "usual": "64",
         "chosen": "80", "seconds": {"64": 3e-3, "80": 2e-3}},
        {"subject": "attention D=40", "question": "attention_forward 40 40", "usual": "40",
         "chosen": "40", "seconds": {"40": 1e-3}},
    ]  # fmt: skip
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    result = {"command": "tune", **HEADER, "file": "FILE", "calls": 3, "warm_up": 1, "rows": rows}
    monkeypatch.setattr(tune, "measure", lambda arguments: result)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "tune.json"
    assert main(["tune", "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "attention D=64 (attention_forward) 64 3000.0 us 80 2000.0 us 2 1.50" in printed
    assert "attention D=40 (attention_forward) 40 1000.0 us the same 1" in printed
    assert "Kept in FILE; set CUPYATTN_TUNED=1" in printed
    assert len(json.loads(file.read_text("utf-8"))["rows"]) == 2


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path))
    file = tmp_path / "tune.json"
    words = ("--head-dim", "64", "--size", "64", "256", "512", "--calls", "3", "--json", str(file))
    result = run("tune", *words)
    assert result.returncode == 0, result.stderr
    kept = json.loads(file.read_text("utf-8"))
    assert {row["subject"].partition(" ")[0] for row in kept["rows"]} >= {"attention", "linear"}
    assert json.loads(Path(kept["file"]).read_text("utf-8"))["chosen"]
