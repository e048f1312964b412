"""``python -m cupyattn info``: what it finds, as text and as JSON."""

from __future__ import annotations

import json

import pytest
from support.processes import run

import cupyattn
from cupyattn.cli import main
from cupyattn.cli.compiled_kernel import compiled_kernel
from cupyattn.folders import cache_directory
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.layers import softmax
from cupyattn.kernels.device.cuda import cuda_device


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
    compiled_kernel(softmax.FORWARD.specialise(75, "float32", 100, 1), TURING)
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


def test_info_says_where_nothing_is_kept(empty_cache, monkeypatch, capsys):
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(empty_cache / "file" / "below"))
    empty_cache.mkdir()
    (empty_cache / "file").touch()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert main(["info"]) == 0
    assert "cache: none, compiled kernels stay in memory" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launcher", [("-m", "cupyattn", "demo"), ("-m", "cupyattn.benchmark", "host")]
)
def test_an_architecture_that_the_device_cannot_run(launcher):
    result = run(launcher=launcher, env={"CUPYATTN_ARCH": "121"})
    assert result.returncode == 1
    assert "CUPYATTN_ARCH" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.gpu
def test_info_says_why_a_device_cannot_be_used():
    if cuda_device(0).capability >= 121:
        pytest.skip("no known architecture is above this device's")
    result = run("--json", launcher=("-m", "cupyattn", "info"), env={"CUPYATTN_ARCH": "121"})
    (device, *_) = json.loads(result.stdout)["devices"]
    assert "CUPYATTN_ARCH=121 on a device" in device["unusable_because"]
    assert device["arch"] is None
