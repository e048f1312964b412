"""What a measurement says that it was made on."""

from __future__ import annotations

import datetime
import platform
import sys
import types

from support.fake_gpu import HEADER

from cupyattn.benchmark import machine
from cupyattn.turing import DisassemblerError


def test_the_header_names_the_target_in_the_code(monkeypatch, tmp_path):
    """Here the code is of another architecture than the device and what is asked of it."""
    runtime = types.SimpleNamespace(driverGetVersion=lambda: 13020)
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


def test_what_is_modelled_names_compiler_and_disassembler(monkeypatch):
    def missing():
        raise DisassemblerError("none")

    monkeypatch.setattr(machine, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(machine, "disassembler_version", lambda: "13.5.37")
    assert machine.modelled_with() == {"nvrtc": "12.9", "nvdisasm": "13.5.37"}
    monkeypatch.setattr(machine, "disassembler_version", missing)
    assert machine.modelled_with() == {"nvrtc": "12.9", "nvdisasm": None}
