"""What a measurement says that it was made on."""

from __future__ import annotations

import sys
import time
import types

from support.fake_gpu import HEADER

from cupyattn.benchmark.frame import machine


def test_the_header_names_the_target_in_the_code(monkeypatch, tmp_path):
    """Here the code is of another architecture than the device and what is asked of it."""
    code = tmp_path / "kernel.ptx"
    code.write_text(".version 8.8\n.target sm_80\n")
    runtime = types.SimpleNamespace(driverGetVersion=lambda: 13020)
    cupy = types.SimpleNamespace(__version__="14.2", cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(machine, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    device = types.SimpleNamespace(
        name="A GPU", capability=90, loaded=("a", "b"), tensor_cores=False,
        load=lambda specialisation: types.SimpleNamespace(code=code),
    )  # fmt: skip
    header = machine.measured_on(device, types.SimpleNamespace(__version__="2.11"))
    assert set(header) == set(HEADER)
    assert header["code"] == ["compute_80"]
    assert (header["compute_capability"], header["cuda_driver"]) == ("9.0", "13.2")
    assert (header["arch_override"], header["torch"]) == ("75", "2.11")
    assert header["tensor_cores"] is False
    assert machine.measured_on(device)["torch"] is None


def watched(monkeypatch, tmp_path, script):
    """What is told of clocks by an nvidia-smi that is a script."""
    runtime = types.SimpleNamespace(deviceGetPCIBusId=lambda ordinal: b"0000:01:00.0")
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
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
