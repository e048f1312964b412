"""``--compare``: which rows are matched, what is beyond noise, and what is printed."""

from __future__ import annotations

import json
import math
import re

import pytest

from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.frame.clock import Samples
from cupyattn.benchmark.frame.compare import compared, show_changes
from cupyattn.benchmark.frame.results import results_of, write_json


def row(seconds, std=0.0, **labels):
    times = {"p50_s": seconds, "std_s": std}
    return {"M": 8, "contender": "cupyattn", **labels, "times": times, "flops": seconds}


def result(*rows, command="linear"):
    return {"command": command, "rows": list(rows)}


@pytest.mark.parametrize(
    ("old", "new", "real"),
    [
        (row(1.0), row(1.029), False),
        (row(1.0), row(1.031), True),
        (row(1.0), row(0.96), True),
        (row(1.0, std=0.03), row(1.049, std=0.04), False),
        (row(1.0, std=0.03), row(1.051, std=0.04), True),
    ],
)
def test_what_is_beyond_noise(old, new, real):
    (change,) = compared([result(old)], [result(new)]).both
    assert change.real is real


def test_rows_are_matched_by_command_and_labels():
    """Figures are no labels."""
    old = [result(row(1.0), row(2.0, M=16), row(2.0, M=4)), result(row(3.0), command="layers")]
    left_out = {"M": 8, "contender": "cupyattn", "unavailable": "no kernel"}
    new = [result(row(4.0, M=16), row(5.0, contender="cublas"), left_out)]
    found = compared(old, new)
    assert [(each.labels["M"], each.old_s, each.new_s) for each in found.both] == [(16, 2.0, 4.0)]
    assert found.lost == [({"command": "linear", "M": 8, "contender": "cupyattn"}, "no kernel")]
    assert [labels["M"] for labels in found.gone] == [4]
    assert (found.not_run, found.only_new) == ({"layers": 1}, 1)
    assert not found.elsewhere
    assert not found.incomparable


H200 = {"device": "an H200", "code": ["compute_75"]}
ELSEWHERE = [
    ({"device": "an H100", "code": ["compute_75"]}, "an H100 running compute_75 code"),
    ({"device": "an H200", "code": ["sm_90"]}, "an H200 running sm_90 code"),
]


@pytest.mark.parametrize(("about", "where"), ELSEWHERE)
def test_another_gpu_or_code_is_said(about, where, tmp_path, capsys):
    old = [{**result(row(1.0)), **about}]
    show_changes([{**result(row(2.0)), **H200}], old, tmp_path / "old.json")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"linear was measured elsewhere: on {where}; now on an H200 running" in printed
    assert "1 of 1 rows changed" in printed
    show_changes([{**result(row(2.0)), **about}], old, tmp_path / "old.json")
    assert "elsewhere" not in capsys.readouterr().out


def test_what_is_measured_is_not_compared_with_a_model(tmp_path, capsys):
    """Of the model's rows, which are fewer, none counts as gone."""
    measured = {**result(row(1.0), row(1.0, M=16)), **H200}
    modelled = {**result(row(2.0)), "modelled": True, "machine": "T4"}
    for old, new in ((measured, modelled), (modelled, measured)):
        show_changes([new], [old], tmp_path / "old.json")
        printed = " ".join(capsys.readouterr().out.split())
        assert "linear is not compared: of the two one is measured" in printed
        assert "modelled: T4" in printed
        assert "0 of 0 rows changed" in printed
        assert "gone: 0" in printed
    assert len(compared([modelled], [modelled]).both) == 1


def test_what_is_not_there_any_more_is_listed(tmp_path, capsys):
    left_out = {"M": 8, "contender": "cupyattn", "unavailable": "MemoryError: no room"}
    old = [result(row(1.0), row(1.0, M=16)), result(row(1.0), command="layers")]
    show_changes([result(left_out)], old, tmp_path / "old.json")
    printed = " ".join(capsys.readouterr().out.split())
    assert "now unavailable: linear, M 8, cupyattn: MemoryError: no room" in printed
    assert "gone: linear, M 16, cupyattn" in printed
    assert "layers did not run: rows" in printed
    assert "Unavailable now: 1, gone: 1, new: 0" in printed


def test_what_changed_is_printed(tmp_path, capsys):
    old = tmp_path / "old.json"
    old.write_text(json.dumps([result(row(1e-3), row(2e-3, M=16))]))
    show_changes([result(row(1e-3), row(1e-3, M=16))], results_of(old), old)
    printed = " ".join(capsys.readouterr().out.split())
    assert "linear, M 16, cupyattn 2.000 ms 1.000 ms 0.50 3%" in printed
    assert "M 8" not in printed
    assert "1 of 2 rows changed: rows are matched by their labels" in printed


def test_a_command_compares_itself(a_gpu, tmp_path, capsys):
    old = tmp_path / "old.json"
    words = ["kv_cache", "--tokens", "20", "--cache", "float", "--heads", "4", "--kv-heads", "2",
             "--head-dim", "8"]  # fmt: skip
    took = iter([1e-6, 2e-6, 3e-6, 1e-6, 2e-6, 4e-6])
    object.__setattr__(a_gpu, "times", lambda calls, torch: Samples([next(took)]))
    assert main([*words, "--json", str(old)]) == 0
    assert main([*words, "--compare", str(old)]) == 0
    assert "1 of 3 rows changed" in " ".join(capsys.readouterr().out.split())


def test_calls_that_the_clock_was_too_coarse_for_are_not_compared():
    found = compared([result(row(0.0))], [result(row(1.0))])
    assert (found.both, found.gone, found.only_new) == ([], [], 1)


def wrong(**more):
    return json.dumps({"command": "linear", "rows": [{**row(1.0), **more}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON file"),
        ("[" * 100_000, "is no JSON file"),
        ('{"rows": []}', "command is None"),
        ("[1]", "holds something else: 1;"),
        ('{"command": "../linear", "rows": []}', "command is '../linear'"),
        ('{"command": "linear", "rows": {}}', "rows is {}"),
        ('{"command": "linear", "rows": [], "code": "sm_75"}', "code is 'sm_75'"),
        ('{"command": "linear", "rows": [], "code": [75]}', "code is [75]"),
        ('{"command": "linear", "rows": [], "cpu": {}}', "cpu is {}"),
        ('{"command": "linear", "rows": [], "machine": ["T4"]}', "machine is ['T4']"),
        ('{"command": "linear", "rows": [], "ceilings": {"mma_tflops": NaN}}', "mma_tflops is nan"),
        ('{"command": "linear", "rows": [null]}', "a row None"),
        (wrong(times=[1.0]), "a row {'M': 8,"),
        (wrong(times={"mean_s": 1.0}), "times are {'mean_s': 1.0}"),
        (wrong(times={"p50_s": 1.0, "std_s": None}), "times are {'p50_s': 1.0, 'std_s': None}"),
        (wrong(times={"p50_s": math.nan}), "p50_s is nan"),
        (wrong(times={"p50_s": -1.0}), "p50_s is -1.0"),
        (wrong(tflops="many"), "tflops is 'many'"),
        (wrong(contender=""), "a contender ''"),
        (wrong(M=[8]), "M is [8]"),
    ],
)
def test_files_that_are_no_results(content, message, tmp_path, capsys):
    old = tmp_path / "old.json"
    old.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        results_of(old)
    assert main(["kv_cache", "--compare", str(old)]) == 1
    assert f"kv_cache: {old} " in capsys.readouterr().err
    assert main(["kv_cache", "--compare", str(tmp_path / "none.json")]) == 1


def test_files_that_are_results(tmp_path):
    """Those of commands with another form, and figures that nobody draws, are left as they are."""
    profile = {"command": "profiles", "rows": [{"kernel": "rope", "pipes": {"fma": 0.5}}]}
    modelled = result(
        {**row(0.0), "counts": {"kernels": ["rope"]}, "flops": None}, command="layers"
    )
    file = tmp_path / "results.json"
    write_json([profile, modelled], file)
    assert results_of(file) == [profile, modelled]
