"""What a measurement says that it was made on."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
import time
import types

import pytest
from support.fake_gpu import HEADER

import cupyattn
from cupyattn.benchmark.frame import machine
from cupyattn.turing import DisassemblerError


def test_the_header_names_the_target_in_the_code(monkeypatch, tmp_path):
    """Here the code is of another architecture than the device and what is asked of it."""
    runtime = types.SimpleNamespace(
        driverGetVersion=lambda: 13020, deviceGetPCIBusId=lambda ordinal: "0000:01:00.0"
    )
    a_program(tmp_path, "nvidia-smi", '[ "$3" = --query-gpu=driver_version ] && echo 580.95.05')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cupy = types.SimpleNamespace(__version__="14.2", cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(machine, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    device = types.SimpleNamespace(
        name="A GPU", ordinal=0, capability=90, loaded=("a", "b"), tensor_cores=False,
        load=lambda specialisation: types.SimpleNamespace(target="compute_80"),
    )  # fmt: skip
    header = machine.measured_on(device, types.SimpleNamespace(__version__="2.11"))
    assert set(header) == set(HEADER)
    assert header["code"] == ["compute_80"]
    assert (header["compute_capability"], header["cuda_driver"]) == ("9.0", "13.2")
    assert (header["arch_override"], header["torch"]) == ("75", "2.11")
    assert header["tensor_cores"] is False
    assert header["driver_version"] == "580.95.05"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    header = machine.measured_on(device)
    assert (header["torch"], header["driver_version"]) == (None, None)


def a_program(folder, name, script):
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_every_result_says_where_and_of_what_it_is():
    host = machine.this_host()
    assert set(host) < set(HEADER)
    assert host["python"] == platform.python_version()
    assert host["cpu"] and host["os"]
    assert datetime.date.fromisoformat(host["date"]) <= datetime.date.today()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    """Of no other repository that the library lies in, as an environment may."""
    for name, value in (("GIT_CONFIG_GLOBAL", os.devnull), ("GIT_CONFIG_SYSTEM", os.devnull)):
        monkeypatch.setenv(name, value)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    library = tmp_path / "env" / "cupyattn"
    library.mkdir(parents=True)
    monkeypatch.setattr(cupyattn, "__file__", str(tmp_path / "cupyattn" / "__init__.py"))
    assert machine.this_host()["commit"] is None, "no repository"
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "A commit"],
                  ["tag", "v1"]):  # fmt: skip
        subprocess.run([*git, *words], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert machine.this_host()["commit"] == head
    (tmp_path / "file").write_text("new")
    subprocess.run([*git, "add", "file"], check=True)
    assert machine.this_host()["commit"] == f"{head}-dirty"
    monkeypatch.setattr(cupyattn, "__file__", str(library / "__init__.py"))
    assert machine.this_host()["commit"] is None


def test_what_is_modelled_names_compiler_and_disassembler(monkeypatch):
    def missing():
        raise DisassemblerError("none")

    monkeypatch.setattr(machine, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(machine, "disassembler_version", lambda: "13.5.37")
    assert machine.modelled_with() == {"nvrtc": "12.9", "nvdisasm": "13.5.37"}
    monkeypatch.setattr(machine, "disassembler_version", missing)
    assert machine.modelled_with() == {"nvrtc": "12.9", "nvdisasm": None}


def watched(monkeypatch, tmp_path, script):
    """What is told of clocks by an nvidia-smi that is a script."""
    runtime = types.SimpleNamespace(deviceGetPCIBusId=lambda ordinal: b"0000:01:00.0")
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    if script is not None:
        a_program(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    with machine.watched(0) as clocks:
        for _ in range(100):
            if script is None or (tmp_path / "told").exists():
                break
            time.sleep(0.05)
    return clocks


def test_clocks_are_those_while_it_ran(monkeypatch, tmp_path):
    whole = f'echo "$2" > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/told'
    said = f'echo "1000, 2619, 300, 50"; {whole}; exec sleep 30'
    found = watched(monkeypatch, tmp_path, said)
    assert found == {"sm_mhz": 1000, "memory_mhz": 2619, "power_w": 300, "temperature_c": 50}
    assert (tmp_path / "told").read_text() == "0000:01:00.0\n"


def test_without_nvidia_smi_there_are_none(monkeypatch, tmp_path):
    assert watched(monkeypatch, tmp_path, None) == {}
