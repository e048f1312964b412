"""A plugin of pytest: the library compiles from another folder; what each test loads is noted.

MUTATION_SOURCES names the folder; MUTATION_NOTES the file for what was loaded or compiled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

NOTES: dict[str, dict[str, Any]] = {}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Nothing is shrunk: the first failure is enough."""
    current = settings.get_profile(settings.get_current_profile_name())
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutation", current, phases=phases, derandomize=True, database=None)
    settings.load_profile("mutation")
    if folder := os.environ.get("MUTATION_SOURCES"):
        compile_from(Path(folder))
    if "MUTATION_NOTES" in os.environ:
        note_loads()


def compile_from(folder: Path) -> None:
    """Let every module that asks for the folder of sources get this one."""
    from cupyattn.runtime.source import source_root

    for module in list(sys.modules.values()):
        if getattr(module, "source_root", None) is source_root:
            module.source_root = lambda: folder


def note_loads() -> None:
    """Note under the running test each kernel that it compiles, or loads compiled."""
    from cupyattn.runtime import compile
    from cupyattn.runtime.device.cuda import CudaDevice
    from cupyattn.runtime.device.emulated import EmulatedDevice

    for owner, name in ((CudaDevice, "load"), (EmulatedDevice, "load"), (compile, "_compile")):
        setattr(owner, name, noting(getattr(owner, name)))


def noting(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that notes the specialisation among its arguments, and calls the given one."""
    from cupyattn.runtime.spec import Specialisation

    def noted(*arguments: Any) -> Any:
        test = NOTES.get(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
        (specialisation,) = (each for each in arguments if isinstance(each, Specialisation))
        spec = specialisation.spec
        kernel = [spec.entry, spec.source, sorted(specialisation.defines.items()), spec.headers]
        if test and not Path(spec.source).is_absolute() and kernel not in test["kernels"]:
            test["kernels"].append(kernel)
        return call(*arguments)

    return noted


def pytest_runtest_setup(item: pytest.Item) -> None:
    draws = hasattr(getattr(item, "function", None), "hypothesis")
    NOTES[item.nodeid] = {"seconds": 0.0, "draws": draws, "failed": False, "kernels": []}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid in NOTES:
        NOTES[report.nodeid]["seconds"] += report.duration
        NOTES[report.nodeid]["failed"] |= report.failed


def pytest_sessionfinish() -> None:
    if file := os.environ.get("MUTATION_NOTES"):
        loaded = {test: notes for test, notes in NOTES.items() if notes["kernels"]}
        Path(file).write_text(json.dumps(loaded))
