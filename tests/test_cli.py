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
from cupyattn.cli import INTERRUPTED, attention_runs, demo, main
from cupyattn.cli.compiled_kernel import compiled_kernel
from cupyattn.cli.recorder import attention_launch
from cupyattn.cli.terminal import Terminal
from cupyattn.emulator import SharedMemoryRaceError
from cupyattn.functional.device_info import device_count
from cupyattn.kernels import configs
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.cache import cache_directory
from cupyattn.kernels.compile import CompilationError, nvrtc_version
from cupyattn.ops.attention_options import AttentionOptions


def missing_compiler() -> bool:
    try:
        nvrtc_version()
    except RuntimeError:
        return True
    return False


NO_GPU = pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")
SMALL_DEMO = ("demo", "--seqlen", "40")

# --- demo


def test_demo_says_what_ran_and_that_it_is_right():
    result = run(*SMALL_DEMO)
    assert result.returncode == 0, result.stderr
    assert "every element is within its bound" in result.stdout
    if device_count():
        assert "ran on" in result.stdout
        assert "attention_tiled" in result.stdout
        assert "attention_naive" in result.stdout
    elif not missing_compiler():
        assert "no GPU here: EMULATED ON THE CPU, the kernels' PTX for sm_75" in result.stdout
        assert "attention_tiled for sm_75" in result.stdout
        assert "no check found a fault: bounds, alignment, const_writes" in result.stdout


def test_demo_json(capsys):
    assert main([*SMALL_DEMO, "--head-dim", "24", "--dtype", "float32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "demo"
    assert result["version"] == cupyattn.__version__
    without = "numpy" if missing_compiler() else "emulator"
    assert result["ran_on"] == ("gpu" if device_count() else without)
    assert result["problem"]["seqlen"] == 40
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
    runs = {ran["implementation"]: ran for ran in json.loads(capsys.readouterr().out)["runs"]}
    # 2 sequences of 8 heads: 40 rows in tiles of 32, or one at a time.
    assert runs["tiled"]["launch"]["kernel"] == "attention_tiled"
    assert runs["tiled"]["launch"]["grid"] == [2 * 8 * 2, 1, 1]
    assert runs["naive"]["launch"]["kernel"] == "attention_naive"
    assert runs["naive"]["launch"]["grid"] == [2 * 8 * 40, 1, 1]


@pytest.mark.nvrtc
@NO_GPU
def test_demo_without_a_gpu_runs_the_kernels_on_the_emulator(capsys):
    assert main([*SMALL_DEMO, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ran_on"] == "emulator"
    assert {"bounds", "races", "uninitialized"} <= set(result["checks"])
    runs = {ran["implementation"]: ran for ran in result["runs"]}
    tiled = runs["tiled"]
    assert tiled["launch"]["kernel"] == "attention_tiled"
    assert tiled["launch"]["arch"] == "sm_75"
    assert tiled["launch"]["grid"] == [2 * 8 * 2, 1, 1]
    assert tiled["launch"]["ctas_per_sm"] >= 1
    assert tiled["warp_instructions"] > 10_000  # what the kernel executed, not the reference


@pytest.mark.nvrtc
@NO_GPU
def test_demo_runs_every_kernel_that_there_is(capsys):
    for dtype, kernels in (
        ("float16", ["attention_forward", "attention_tiled"]),
        ("float32", ["attention_forward_f32", "attention_tiled"]),
    ):
        assert main([*SMALL_DEMO, "--dtype", dtype, "--json"]) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        assert [ran["launch"]["kernel"] for ran in runs] == kernels


@pytest.mark.nvrtc
@NO_GPU
def test_demo_fails_for_a_fault(monkeypatch, capsys):
    def faulty(*_, **__):
        raise SharedMemoryRaceError("planted", line=76)

    monkeypatch.setattr(cupyattn, "attention", faulty)
    assert main([*SMALL_DEMO, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "planted"


@NO_GPU
def test_demo_without_a_compiler_runs_numpy_and_says_so(monkeypatch, capsys):
    def absent(*_):
        raise RuntimeError("NVRTC is not here")

    monkeypatch.setattr(attention_runs, "compiled_kernel", absent)
    assert main([*SMALL_DEMO]) == 0
    printed = capsys.readouterr().out
    assert "no GPU here: ran in NumPy" in printed
    assert "No kernel was compiled, so none ran emulated: NVRTC is not here" in printed
    assert main([*SMALL_DEMO, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ran_on"] == "numpy"


@pytest.mark.nvrtc
@NO_GPU
def test_demo_does_not_hide_a_kernel_that_does_not_compile(monkeypatch, capsys):
    def rejected(*_):
        raise CompilationError("NVRTC rejected tiled.cu")

    monkeypatch.setattr(attention_runs, "compiled_kernel", rejected)
    assert main([*SMALL_DEMO]) == 1
    assert "NVRTC rejected tiled.cu" in capsys.readouterr().err


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
    [("-m", "cupyattn", "demo"), ("-m", "cupyattn.benchmark", "host")],
)
def test_an_architecture_that_the_device_cannot_run(launcher):
    result = run("--json", launcher=launcher, env={"CUPYATTN_ARCH": "999"})
    assert result.returncode == 1
    assert "CUPYATTN_ARCH" in json.loads(result.stdout)["error"]
    assert "Traceback" not in result.stderr


@pytest.mark.gpu
def test_info_says_why_a_device_cannot_be_used():
    result = run("--json", launcher=("-m", "cupyattn", "info"), env={"CUPYATTN_ARCH": "999"})
    (device, *_) = json.loads(result.stdout)["devices"]
    assert "CUPYATTN_ARCH='999'" in device["unusable_because"]
    assert device["arch"] is None


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
    assert launch.specialisation == configs.attention_teaching.tiled("float16", 64, 64, vec)
    assert launch.grid == (2 * 4 * 2, 1, 1)
    assert launch.arguments[0] is packed
