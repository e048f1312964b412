"""``python -m cupyattn tune``: what it asks, times, chooses, keeps and prints."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.fake_gpu import HEADER
from support.processes import run

import cupyattn
from cupyattn.__main__ import main
from cupyattn.benchmark import command as driver
from cupyattn.benchmark import tune
from cupyattn.benchmark.cases import Harness
from cupyattn.benchmark.linear import LARGE, LinearInputs, WeightProduct
from cupyattn.benchmark.tune import TunedCall, tuned_calls
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.device.recorder import LaunchRecorder
from cupyattn.runtime.tuning import USUAL

HERE = Harness(np, cold=False)


def on(device, prepare):
    """Return a call that the device records, on arrays without contents."""
    with running_on(device):
        (call,) = prepare()

    def run_on_device():
        with running_on(device):
            call()

    return run_on_device


def attention_of(device, head_dim):
    q, k, v = (np.empty((2, 512, 40, head_dim), np.float16) for _ in range(3))
    return on(device, lambda: [partial(cupyattn.attention, q, k, v)])


def product_of(device, kind, *size, weights=None):
    product = WeightProduct(kind, *size, "float16", "nk", None, weights)
    return on(device, LinearInputs(product, Harness(np, cold=False, filled=False)).own_calls)


@pytest.fixture
def device():
    return LaunchRecorder(TURING)


def tuned(device, subject, seconds_of):
    """Tune one call; times are given by the macros of its launches."""

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


def tiles(rows, columns):
    def fastest(launches):
        found = launches[0]["TILE_ROWS"], launches[0]["TILE_COLUMNS"]
        return 1.0 if len(launches) == 1 and found == (rows, columns) else 2.0

    return fastest


@pytest.mark.parametrize(
    ("kind", "weights", "size", "seconds", "question", "names"),
    [
        ("large", None, (4096, 4096, 1024), tiles(256, 128), "linear_forward 4096 4096 1024 ",
         ("wide/1", "narrow/1")),
        ("large", "nf4", (1024, 2048, 1024), tiles(128, 128), "linear_forward_quantised 1024 ",
         ("narrow/1", "small/1")),
        ("dx", "nf4", (1024, 2048, 1024), tiles(128, 128), "linear_product_quantised 1024 ",
         ("narrow/1", "small/1")),
        ("thin", None, (1, 2048, 2048), lambda launches: float(launches[0]["K_WARPS"]), "linear_",
         ("2048", "None")),
    ],
)  # fmt: skip
def test_products_choose_their_tiles(device, kind, weights, size, seconds, question, names):
    (row,) = tuned(device, product_of(device, kind, *size, weights=weights), seconds)
    assert row["question"].startswith(question)
    assert (row["usual"], row["chosen"]) == names


def test_products_in_int8_choose_their_tiles(device):
    product = WeightProduct("large", 8192, 8192, 4096, "float16", "nk", None, "int8", "int8")
    inputs = LinearInputs(product, Harness(np, cold=False, filled=False))

    def fastest(launches):  # codes are made by a launch of its own
        return float(launches[-1]["TILE_ROWS"] * launches[-1]["TILE_COLUMNS"] != 128 * 128)

    (row,) = tuned(device, on(device, inputs.own_calls), fastest)
    assert row["question"].startswith("linear_forward_int8 8192 ")
    assert (row["usual"], row["chosen"]) == ("wide/1", "small/1")


def test_few_results_and_a_long_sum_may_be_cut_into_parts(device):
    call = product_of(device, "large", 512, 2048, 4096)
    (row,) = tuned(device, call, lambda launches: 1.0 if len(launches) > 1 else 2.0)
    assert not row["chosen"].endswith("/1")
    assert any(name.endswith("/1") for name in row["seconds"])


def test_a_backward_asks_for_each_product(device):
    def first_is_fastest(launches):
        return float(sum(each["TILE_ROWS"] for each in launches if "TILE_ROWS" in each))

    rows = tuned(device, product_of(device, "backward", 4096, 2048, 1024), first_is_fastest)
    assert [row["question"].rpartition(" ")[2] for row in rows] == ["whole", "parts"]
    assert all(row["question"].startswith("linear_product ") for row in rows)


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


@pytest.mark.parametrize("kind", ["linear", "backward", "thin", "quantised", "int8", "matmul"])
def test_products_are_called(kind):
    for subject in tuned_calls(parsed("--kind", kind, "--size", "3", "16", "128"), HERE):
        subject.calls()[0]()


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


@pytest.mark.alone
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
