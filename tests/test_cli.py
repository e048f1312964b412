"""The command line: what it prints, as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from processes import WITHOUT_RICH, environment, run, run_in_terminal

import cupyattn
from cupyattn.cli import INTERRUPTED, demo, main
from cupyattn.cli.compiled_kernel import compiled_kernel
from cupyattn.cli.recorder import attention_launch
from cupyattn.cli.terminal import Terminal
from cupyattn.functional.device_info import device_count
from cupyattn.kernels import configs
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.cache import cache_directory
from cupyattn.ops.attention_problem import AttentionOptions

SMALL_DEMO = ("demo", "--seqlen", "100")

# --- demo


def test_demo_says_what_ran_and_that_it_is_right():
    result = run(*SMALL_DEMO)
    assert result.returncode == 0
    assert "every element is within its bound" in result.stdout
    if device_count():
        assert "ran on" in result.stdout
        assert "attention_tiled" in result.stdout
        assert "attention_naive" in result.stdout
    else:
        assert "no GPU here: ran in NumPy" in result.stdout


def test_demo_json(capsys):
    assert main([*SMALL_DEMO, "--head-dim", "24", "--dtype", "float32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "demo"
    assert result["version"] == cupyattn.__version__
    assert result["ran_on"] == ("gpu" if device_count() else "cpu")
    assert result["problem"]["seqlen"] == 100
    assert result["problem"]["head_dim"] == 24
    for ran in result["runs"]:
        assert ran["seconds"] > 0
        for error in ran["errors"].values():
            assert error["within_bound"] is True
            assert 0 < error["max_error"] <= error["bound"]
            assert 0 < error["max_ratio"] <= 1


@pytest.mark.gpu
def test_demo_on_a_gpu_reports_the_launches_that_ran(capsys):
    assert main([*SMALL_DEMO, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [ran["launch"]["kernel"] for ran in runs] == ["attention_tiled", "attention_naive"]
    # 2 sequences of 8 heads: 100 rows in tiles of 32, or one at a time.
    assert [ran["launch"]["grid"] for ran in runs] == [[2 * 8 * 4, 1, 1], [2 * 8 * 100, 1, 1]]


@pytest.mark.nvrtc
@pytest.mark.skipif(device_count() > 0, reason="shown where there is no GPU")
def test_demo_without_a_gpu_shows_what_turing_would_run(capsys):
    assert main([*SMALL_DEMO, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    tiled, naive = result["compiled_but_not_run"]
    assert (tiled["kernel"], naive["kernel"]) == ("attention_tiled", "attention_naive")
    assert tiled["arch"] == "sm_75"
    assert tiled["grid"] == [2 * 8 * 4, 1, 1]
    assert tiled["ctas_per_sm"] >= 1
    assert result["runs"][0]["launch"] is None


@pytest.mark.skipif(device_count() > 0, reason="a GPU cannot run without a compiler")
def test_demo_without_a_compiler_says_so(monkeypatch, capsys):
    def absent(*_):
        raise RuntimeError("NVRTC is not here")

    monkeypatch.setattr(demo, "compiled_kernel", absent)
    assert main([*SMALL_DEMO]) == 0
    assert "no kernel was compiled: NVRTC is not here" in capsys.readouterr().out


def off_by_one(attention, q, k, v, **options):
    """A causal mask that lets a query see one key too many."""
    return attention(q, k, v, **options | {"q_offset": 1})


def one_percent_off(attention, q, k, v, **options):
    out, lse = attention(q, k, v, **options)
    return out * out.dtype.type(1.01), lse


def one_nan(attention, q, k, v, **options):
    out, lse = attention(q, k, v, **options)
    lse[-1, -1, -1] = np.nan
    return out, lse


@pytest.mark.parametrize("wrong", [off_by_one, one_percent_off, one_nan])
def test_demo_fails_for_a_wrong_result(wrong, monkeypatch, capsys):
    attention = cupyattn.attention
    monkeypatch.setattr(cupyattn, "attention", lambda *a, **o: wrong(attention, *a, **o))
    assert main([*SMALL_DEMO, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)  # JSON has no NaN: it must still parse
    assert result["within_bound"] is False
    assert main(list(SMALL_DEMO)) == 1
    assert "OUTSIDE THE BOUND" in capsys.readouterr().out


# --- info


def test_info_json_is_device_info():
    result = run("info", "--json")
    assert result.returncode == 0
    assert result.stderr == ""
    info = json.loads(result.stdout)
    expected = cupyattn.device_info()
    assert set(info) == {"command", *expected} | {"version"}
    assert set(info["kernels"]) == set(expected["kernels"])
    same = set(expected) - {"kernels", "cache"}  # the cache may grow beside this test
    assert {name: info[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.nvrtc
def test_info_counts_compiled_kernels(empty_cache, capsys):
    assert main(["info", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["kernels"].values()) == {0}
    compiled_kernel(configs.softmax.forward("float32", 100, 1), TURING)
    assert main(["info", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert kernels["softmax_forward"] == 1
    assert sum(kernels.values()) == 1


def test_info_text(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"cupyattn {cupyattn.__version__}" in printed
    assert "attention_tiled" in printed
    assert str(cache_directory()) in printed
    if not device_count():
        assert "no GPU" in printed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launcher",
    [("-m", "cupyattn", "info"), ("-m", "cupyattn", "demo"), ("-m", "cupyattn.benchmark", "host")],
)
def test_an_architecture_that_the_device_cannot_run(launcher):
    result = run("--json", launcher=launcher, env={"CUPYATTN_ARCH": "999"})
    assert result.returncode == 1
    assert "CUPYATTN_ARCH" in json.loads(result.stdout)["error"]
    assert "Traceback" not in result.stderr


# --- arguments, terminals


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "required: COMMAND"),
        (("profle",), "invalid choice: 'profle'"),
        (("demo", "--seqlen", "0"), "0 is not 1 or more"),
        (("demo", "--head-dim", "257"), "257 is not 1 to 256"),
        (("demo", "--head-dim", "x"), "'x' is not an integer"),
        (("demo", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("compile", "--arch", "70"), "choose from 75, "),
        (("compile", "--jobs", "-1"), "-1 is not 1 or more"),
        (("info", "more"), "unrecognized arguments: more"),
    ],
)
def test_wrong_arguments(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert complaint in capsys.readouterr().err.replace("'75'", "75")


def test_interrupted(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert main(["demo"]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="broken pipes are POSIX")
def test_a_reader_that_stops_early_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    result = subprocess.run(
        [sys.executable, "-m", "cupyattn", "info"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(theirs)
    assert result.returncode == 1
    assert result.stderr == b""


def test_output_is_plain_without_rich(empty_cache):
    without = run("info", launcher=("-c", WITHOUT_RICH))
    assert without.returncode == 0, without.stderr
    assert without.stdout == run("info").stdout
    assert "\x1b" not in run_in_terminal("info", launcher=("-c", WITHOUT_RICH))


def test_rich_on_a_terminal():
    pytest.importorskip("rich")
    shown = run_in_terminal("info")
    assert "\x1b[1m" in shown  # bold headings
    assert "attention_tiled" in shown


def test_plain_table(capsys):
    Terminal().table(("name", "bytes"), [("[a]", 5), ("bb", 1234)])
    assert capsys.readouterr().out == (
        "  name  bytes\n"
        "  [a]       5\n"
        "  bb     1234\n"
    )  # fmt: skip


# --- the recorded launch


@pytest.mark.parametrize(("first", "vec"), [(0, 8), (1, 1)])
def test_recorded_launch_is_the_operations_own(first, vec):
    """Rows that are not 16-byte aligned take the specialisation of scalar loads."""
    packed = np.zeros((2, 33, 4, 72), np.float16)[..., first : first + 64]
    launch = attention_launch(
        TURING, packed, packed, packed, AttentionOptions(causal=True, implementation="tiled")
    )
    assert launch.specialisation == configs.attention.tiled("float16", 64, 64, vec)
    assert launch.grid == (2 * 4 * 2, 1, 1)
    assert launch.arguments[0] is packed
