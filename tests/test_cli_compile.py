"""``python -m cupyattn compile``: what it builds, what it reports, when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import WITHOUT_RICH, environment, run, run_in_terminal

from cupyattn.cli import INTERRUPTED, compile, main
from cupyattn.cli.compiled_kernel import compiled_kernel
from cupyattn.kernels import configs
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.spec import KernelSpec


@pytest.mark.nvrtc
def test_compile_all_for_turing():
    result = run("compile", "--arch", "75", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["arch"] == "sm_75"
    assert report["failures"] == []
    listed = [(kernel["kernel"], tuple(kernel["macros"].items())) for kernel in report["kernels"]]
    assert listed == [(each.spec.entry, each.macros) for each in configs.catalogue()]
    for kernel in report["kernels"]:
        assert 0 < kernel["registers"] <= TURING.registers_per_thread
        assert kernel["shared_bytes"] <= TURING.shared_bytes_per_cta
        assert kernel["ctas_per_sm"] >= 1


@pytest.mark.nvrtc
def test_compile_finds_what_it_compiled(empty_cache, monkeypatch, capsys):
    rows = [configs.softmax.forward("float32", length, 1) for length in (100, 1000)]
    monkeypatch.setattr(compile, "catalogue", lambda: iter(rows))
    assert main(["compile", "--jobs", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [kernel["cached"] for kernel in first["kernels"]] == [False, False]
    assert len(list(empty_cache.glob("*.cubin"))) == 2
    assert main(["compile", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert [kernel["cached"] for kernel in second["kernels"]] == [True, True]
    assert main(["compile"]) == 0
    printed = capsys.readouterr().out
    assert "2 of them were in the cache" in printed
    assert "every kernel compiles and fits" in printed


def kernel_of(source: str, folder: Path, shared_bytes: int = 0):
    path = folder / "kernel.cu"
    path.write_text(source)
    return KernelSpec("kernel", str(path), (), ()).specialise(threads=32, shared_bytes=shared_bytes)


@pytest.mark.nvrtc
def test_compile_fails_for_a_kernel_that_does_not_compile(
    empty_cache, tmp_path, monkeypatch, capsys
):
    rows = [kernel_of("#error out of order\n", tmp_path)]
    monkeypatch.setattr(compile, "catalogue", lambda: iter(rows))
    assert main(["compile", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["kernels"] == []
    assert "out of order" in report["failures"][0]["error"]
    assert main(["compile"]) == 1
    assert "did not compile: kernel" in capsys.readouterr().out


@pytest.mark.nvrtc
@pytest.mark.parametrize(("shared_bytes", "code"), [(65_536, 0), (65_537, 1)])
def test_compile_fails_for_a_kernel_that_does_not_fit(
    empty_cache, tmp_path, monkeypatch, capsys, shared_bytes, code
):
    source = 'extern "C" __global__ void kernel() {}\n'
    rows = [kernel_of(source, tmp_path, shared_bytes)]
    monkeypatch.setattr(compile, "catalogue", lambda: iter(rows))
    assert main(["compile"]) == code
    assert ("does not fit on an SM" in capsys.readouterr().out) == bool(code)


@pytest.mark.nvrtc
def test_compile_marks_spills_without_failing(monkeypatch, capsys):
    def spilling(specialisation, arch):
        return compiled_kernel(specialisation, arch) | {"spill_store_bytes": 12}

    rows = [configs.softmax.forward("float32", 100, 1)]
    monkeypatch.setattr(compile, "catalogue", lambda: iter(rows))
    monkeypatch.setattr(compile, "compiled_kernel", spilling)
    assert main(["compile"]) == 0
    assert "1 of them spill registers to memory" in capsys.readouterr().out


def test_compile_without_a_compiler(monkeypatch, capsys):
    def absent():
        raise RuntimeError("NVRTC is not here")

    monkeypatch.setattr(compile, "nvrtc_version", absent)
    assert main(["compile", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "command": "compile",
        "ok": False,
        "error": "NVRTC is not here",
    }
    assert "NVRTC is not here" in printed.err


@pytest.mark.nvrtc
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_compile_stops_at_ctrl_c(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyattn", "compile", "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"CUPYATTN_CACHE_DIR": str(tmp_path)},
    )
    with process:
        give_up = time.monotonic() + 60
        while not list(tmp_path.glob("*.cubin")) and process.poll() is None:
            assert time.monotonic() < give_up, "nothing was compiled"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert errors.strip() == "interrupted"
    assert len(list(tmp_path.glob("*.cubin"))) < len(list(configs.catalogue())) // 2


@pytest.mark.nvrtc
def test_compile_counts_on_a_terminal_without_rich():
    total = len(list(configs.catalogue()))
    shown = run_in_terminal("compile", launcher=("-c", WITHOUT_RICH))
    assert f"\rcompiling for sm_75 {total}/{total}" in shown
