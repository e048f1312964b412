"""The gates of a configuration: what they allow a specialisation on sm_75, and what it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import compile_cubin, nvrtc_version
from cupyattn.runtime.spec import GATES_NVRTC, Specialisation
from cupyattn.turing import DisassemblerError, analyse, disassembler_version

MODEL_TOLERANCE = 0.03
"""Changes of the modelled utilisation when a compiler orders instructions otherwise."""


class Limits(NamedTuple):
    """The limits of one specialisation."""

    models: float
    spills: int
    registers: int
    ctas: int


def require_gates_tools() -> None:
    """Skip a test of gates without the compiler that they hold for, or without a disassembler.

    In CI fail: there they have to hold.
    """
    missing = _missing_tools()
    if missing is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def _missing_tools() -> str | None:
    try:
        found = nvrtc_version()
        disassembler_version()
    except (RuntimeError, DisassemblerError) as missing:
        return f"gates need NVRTC and nvdisasm: {missing}"
    if found != GATES_NVRTC:
        gates, here = (".".join(map(str, version)) for version in (GATES_NVRTC, found))
        return f"gates hold for NVRTC {gates}, this is {here}"
    return None


def limits_of(specialisation: Specialisation) -> Limits:
    """Return what the gates of a configuration allow one of its specialisations."""
    gates, macros = specialisation.gates, dict(specialisation.macros)
    groups = _groups_of(specialisation.spec.entry, macros)
    models = [getattr(gates, group) for group in groups]
    spills = max(gates.spills, gates.most_spills) if groups else gates.spills
    shared = specialisation.shared_bytes + specialisation.static_shared_bytes
    registers = TURING.registers_per_thread if "MIN_CTAS" in macros else gates.registers
    fitting = TURING.resident_ctas(specialisation.threads, registers, shared)
    return Limits(
        min([gates.models, *(each for each in models if each is not None)]),
        spills,
        registers,
        int(macros.get("MIN_CTAS", fitting)),
    )


def _groups_of(entry: str, macros: Mapping[str, int | str]) -> set[str]:
    """Return which groups of `Gates` a specialisation belongs to."""
    on = {name for name, value in macros.items() if value not in ("void", "false", "Identity")}
    groups = {
        "scalar": macros.get("VEC") == 1,
        "items": on & {"BIAS", "MASK"},
        "options": on & _OPTIONS,
        "kernels": {*entry.split("_")} & {"paged", "varlen", "rotary", "split"},
    }
    return {name for name, belongs in groups.items() if belongs}


_OPTIONS = {
    *("SLOPES", "SOFTCAP", "SINKS", "DROPOUT", "MODIFIED"),
    *("ACTIVATION", "PAIRED", "GATED", "SPLIT"),
}


def exceeded(specialisation: Specialisation) -> list[str]:
    """Compile and model a specialisation; return which gates do not hold."""
    limits = limits_of(specialisation)
    found = compile_cubin(specialisation, TURING).resources
    assert found is not None
    shared = specialisation.shared_bytes + found.static_shared_bytes
    ctas = TURING.resident_ctas(specialisation.threads, found.registers, shared)
    spills = max(found.spill_store_bytes, found.stack_bytes)
    promised = limits.ctas
    if not specialisation.shared_bytes + specialisation.static_shared_bytes:
        # The source alone sizes its shared memory: the gate is on registers.
        fitting = TURING.resident_ctas(specialisation.threads, limits.registers, shared)
        promised = min(promised, fitting)
    failures = []
    if spills > limits.spills:
        failures.append(f"{spills} bytes spill, at most {limits.spills} may")
    if found.registers > limits.registers:
        failures.append(f"{found.registers} registers, at most {limits.registers} allowed")
    if ctas < promised:
        failures.append(f"{ctas} CTAs an SM, at least {promised} promised")
    if limits.models:
        loop = analyse(specialisation).main
        models = loop.utilisation.mean if loop and loop.utilisation else 0.0
        if models < limits.models - MODEL_TOLERANCE:
            failures.append(f"models {models:.3f}, chosen for {limits.models}")
    return [f"{specialisation.label}: {failure}" for failure in failures]
