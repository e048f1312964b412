"""How the suite runs: hypothesis profiles, what is skipped where, what the header says."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices import KERNELS
from hypothesis import settings
from planted_bugs import Bug, PlantedDevice, plant
from recording_device import Recorder

from cupyattn.cli.recorder import Launch
from cupyattn.emulator import Checks
from cupyattn.functional.device_info import device_count
from cupyattn.kernels.cache import cache_directory
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.cuda_device import ARCH_VARIABLE, cuda_device
from cupyattn.kernels.launch import launch

# A first example compiles kernels, so no example has a deadline.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)

EXAMPLES = os.environ.get("CUPYATTN_EXAMPLES")
if EXAMPLES:  # a long search, for runs on a GPU
    settings.register_profile("long", deadline=None, max_examples=int(EXAMPLES), print_blob=True)
    settings.load_profile("long")
else:
    settings.load_profile("ci" if os.environ.get("CI") else "default")


def _missing_compiler() -> str | None:
    try:
        nvrtc_version()
    except RuntimeError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    reasons = {
        "gpu": None if device_count() else "no CUDA device: kernels cannot run here",
        "nvrtc": _missing_compiler(),
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> list[str]:
    """Say where kernels run."""
    missing = _missing_compiler()
    compiler = "no NVRTC" if missing else f"NVRTC {'.'.join(map(str, nvrtc_version()))}"
    if not device_count():
        what = "are not compiled" if missing else "run on the emulator, with all checks"
        return [f"cupyattn: no GPU: kernels {what} ({compiler})"]
    device = cuda_device(0)
    override = os.environ.get(ARCH_VARIABLE)
    forced = f" ({ARCH_VARIABLE}={override})" if override else ""
    return [
        f"cupyattn: {device.name}, compute capability {device.capability / 10:.1f}, kernels for "
        f"{device.arch.real}{forced}, {compiler}"
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which kernels ran on the GPU."""
    if device_count():
        ran = Counter(specialisation.spec.entry for specialisation in cuda_device(0).loaded)
        listed = ", ".join(f"{entry} ({count} specialisations)" for entry, count in ran.items())
        terminalreporter.write_line(f"cupyattn: kernels loaded on the GPU: {listed or 'none'}")


@pytest.fixture(scope="module")
def kernels_run():
    """The public functions run the kernels: on the GPU, or else on the emulator."""
    with KERNELS.running():
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache of compiled kernels of the test's own, in this process and those it starts."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
    cache_directory.cache_clear()
    yield folder
    cache_directory.cache_clear()


@pytest.fixture
def side(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where arrays are, with calls running there: see devices.everywhere."""
    with request.param.running():
        yield request.param


@pytest.fixture
def start_with(tmp_path: Path):
    """Run a recorded launch on the emulator, all checks on, from sources with bugs in them."""

    def start(recorded: Launch, *bugs: Bug, checks: Checks | None = None) -> None:
        plant(tmp_path / "cuda_src", *bugs)
        device = PlantedDevice(tmp_path / "cuda_src", checks or Checks.all())
        launch(device, recorded.specialisation, recorded.grid[0], recorded.arguments)

    return start


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What the public functions take for the GPU."""
    recorder = Recorder()
    backend_module = sys.modules["cupyattn.functional.backend"]  # the function has its name
    monkeypatch.setattr(backend_module, "cuda_device", lambda ordinal: recorder)
    return recorder
