"""``python -m cupyattn demo``: what ran, how right it is, and when it fails."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from support.search import deep

import cupyattn
from cupyattn.cli import demo, main
from cupyattn.cli.configurations import attention_launch
from cupyattn.emulator import SharedMemoryRaceError
from cupyattn.ops.attention.options import AttentionOptions
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import CompilationError, nvrtc_version
from cupyattn.runtime.device.cuda import device_count

NO_GPU = pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")
SMALL_DEMO = ("demo", "--seqlen", "40")


def missing_compiler() -> bool:
    try:
        nvrtc_version()
    except RuntimeError:
        return True
    return False


def test_demo_says_what_ran_and_that_it_is_right(capsys):
    assert main(SMALL_DEMO) == 0
    printed = capsys.readouterr().out
    assert "every element is within its bound" in printed
    if device_count():
        assert "ran on" in printed
        assert "attention_tiled" in printed
        assert "attention_naive" in printed
    elif not missing_compiler():
        assert "no GPU here: EMULATED ON THE CPU, the kernels' PTX for sm_75" in printed
        assert "attention_tiled for sm_75" in printed
        assert "no check found a fault: bounds, alignment, const_writes" in printed


def test_demo_json(capsys):
    assert main([*SMALL_DEMO, "--head-dim", "64", "--dtype", "float16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "demo"
    assert result["version"] == cupyattn.__version__
    without = "numpy" if missing_compiler() else "emulator"
    assert result["ran_on"] == ("gpu" if device_count() else without)
    assert result["problem"]["seqlen"] == 40
    assert result["problem"]["head_dim"] == 64
    if without == "emulator" and not device_count():
        kernels = [ran["launch"]["kernel"] for ran in result["runs"]]
        assert kernels == ["attention_forward", "attention_tiled"]
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
    assert_rounding_is_a_good_part_of_the_bound(result, "float16")


@pytest.mark.nvrtc
@NO_GPU
def test_demo_shows_its_stages_on_stderr(capsys):
    assert main(["demo", "--seqlen", "8"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("compiling attention_forward for sm_75")
    assert "running attention_tiled on the emulator, with every check" in lines
    assert main(["demo", "--seqlen", "8", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.nvrtc
@NO_GPU
@pytest.mark.parametrize("dtype", deep("float32", "bfloat16"))
def test_demo_runs_every_kernel_of_a_dtype(dtype, capsys):
    assert main(["demo", "--seqlen", "8", "--dtype", dtype, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [ran["launch"]["kernel"] for ran in runs] == ["attention_forward_f32", "attention_tiled"]
    assert all(ran["launch"]["macros"].get("DTYPE", dtype) == dtype for ran in runs)


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
        raise RuntimeError("NVRTC is not here; advice")

    monkeypatch.setattr(demo, "nvrtc_version", absent)
    assert main([*SMALL_DEMO]) == 0
    printed, stages = capsys.readouterr()
    assert "compiling" not in stages
    assert re.search(r"^  NumPy +out", printed, re.MULTILINE)
    assert "compared with the bounds for kernels" in " ".join(printed.split())
    assert "no GPU here: ran in NumPy" in printed
    assert "No kernel ran: NVRTC is not here." in printed
    assert re.search(r"pip install 'cupyattn\[cuda12\]'\n +for an NVIDIA GPU", printed)
    assert re.search(r"pip install 'cupyattn\[emulator\]'\n +without a GPU", printed)
    assert main([*SMALL_DEMO, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ran_on"] == "numpy"


@pytest.mark.nvrtc
@NO_GPU
def test_demo_does_not_hide_a_kernel_that_does_not_compile(monkeypatch, capsys):
    def rejected(*_):
        raise CompilationError("NVRTC rejected tiled.cu", "")

    monkeypatch.setattr(demo, "compiled_kernel", rejected)
    assert main([*SMALL_DEMO]) == 1
    assert "NVRTC rejected tiled.cu" in capsys.readouterr().err


@pytest.mark.deep
def test_error_bound_is_that_of_bfloat16(capsys):
    assert main([*SMALL_DEMO, "--dtype", "bfloat16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert_rounding_is_a_good_part_of_the_bound(result, "bfloat16")


def assert_rounding_is_a_good_part_of_the_bound(result, dtype):
    """The largest error is the rounding of the result."""
    out = result["runs"][0]["errors"]["out"]
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert unit / 4 < out["max_error"] <= out["bound"] < 8 * unit


def without_causal_order(attention, q, k, v, **options):
    return attention(q, k, v, **options | {"causal": False})


def one_percent_off(attention, q, k, v, **options):
    out, lse = attention(q, k, v, **options)
    return out * out.dtype.type(1.01), lse


def one_nan(attention, q, k, v, **options):
    out, lse = attention(q, k, v, **options)
    lse[-1, -1, -1] = np.nan
    return out, lse


@pytest.mark.parametrize("wrong", [one_percent_off, one_nan, *deep(without_causal_order)])
def test_demo_fails_for_a_wrong_result(wrong, monkeypatch, capsys):
    attention = cupyattn.attention
    monkeypatch.setattr(cupyattn, "attention", lambda *a, **o: wrong(attention, *a, **o))
    small = ["demo", "--seqlen", "8"]
    assert main([*small, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)  # JSON has no NaN: it must still parse
    assert result["within_bound"] is False
    assert main(small) == 1
    assert "OUTSIDE THE BOUND" in capsys.readouterr().out


@pytest.mark.parametrize(("first", "vec"), [(0, 8), (1, 1)])
def test_recorded_launch_is_the_operations_own(first, vec):
    """Rows that are not 16-byte aligned take the specialisation of scalar loads."""
    packed = np.zeros((2, 33, 4, 72), np.float16)[..., first : first + 64]
    launch = attention_launch(TURING, packed, packed, packed, AttentionOptions(causal=True))
    assert launch.specialisation.spec.entry == "attention_forward"
    assert dict(launch.specialisation.macros)["VEC"] == vec
    assert launch.grid == (2 * 4, 1, 1)
    assert launch.arguments[0] is packed
