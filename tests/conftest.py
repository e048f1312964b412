"""How the suite runs: hypothesis profiles, what is skipped where, what the header says."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import bytecode, search  # bytecode first  # noqa: F401
from support.devices import KERNELS
from support.processes import worker_turn
from support.readme import ROOT
from support.recording_device import Recorder

from cupyattn.runtime import compile, folders
from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.arch import ARCH_VARIABLE
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.folders import cache_directory, temporary_directory
from cupyattn.runtime.source import Unit

COMPILED = ("cupyattn.runtime.backend.backend", "cupyattn.runtime.kernel.Kernel")
"""Doctests that compile a kernel."""
DEFAULT_ARCHITECTURE = ("cupyattn.explanation.explain",)
"""Doctests that print what a call launches on a T4."""
REQUIRE_NVRTC = "CUPYATTN_REQUIRE_NVRTC"
"""Variable of CI: a run fails instead of skipping the tests that compile kernels."""
MOST_WORKERS = 8  # each has its own compiled programs: about half a gigabyte


def pytest_addoption(parser: pytest.Parser) -> None:
    search.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let a run of the whole suite use every core, if pytest-xdist is there; -n 0 turns it off.

    Runs of named files stay in this process, and so do those on a GPU, which is one.
    """
    if not config.pluginmanager.has_plugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if config.option.numprocesses is None and search.whole_suite(config) and not device_count():
        config.option.numprocesses = "logical"
        config.option.maxprocesses = config.option.maxprocesses or MOST_WORKERS
    if config.option.numprocesses:
        if config.option.dist == "no":  # neighbours share kernels: whole stretches to a worker
            config.option.dist = "worksteal"
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers', which take the cores


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: it would take a quarter of that time
    config.pluginmanager.register(FilesWithDoctests())
    search.begin(config, reproducible="CI" in os.environ)


class FilesWithDoctests:
    """Collect doctests only from files that have some.

    pytest would import every file to look for them, helpers that need optional packages included.
    A hook of this file itself would not be called for the files of the package.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list, list]:
        collectors = yield
        if file_path.suffix == ".py" and b">>>" not in file_path.read_bytes():
            return [each for each in collectors if type(each) is pytest.Module]
        return collectors


def _missing_compiler() -> str | None:
    try:
        nvrtc_version()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why; long searches are not even named."""
    searches = [item for item in items if item.get_closest_marker("deep")]
    if searches and not config.getoption("--deep"):
        config.hook.pytest_deselected(items=searches)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
    reasons = {
        "gpu": None if device_count() else "no CUDA device: kernels cannot run here",
        "nvrtc": _missing_compiler(),
    }
    if reasons["nvrtc"] is not None and os.environ.get(REQUIRE_NVRTC):
        raise pytest.UsageError(f"{REQUIRE_NVRTC} is set, and {reasons['nvrtc']}")
    for item in items:
        if search.is_quick(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.quick)
        if item.name in COMPILED:
            item.add_marker(pytest.mark.nvrtc)
        if item.name in DEFAULT_ARCHITECTURE and os.environ.get(ARCH_VARIABLE, "75") != "75":
            item.add_marker(pytest.mark.skip(reason=f"prints kernels without {ARCH_VARIABLE}"))
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays: it took a tenth of the time.

    Modules, tests and translated kernels are hundreds of thousands of objects; few are garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
    gc.enable()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say where kernels run, and how long a run of everything takes."""
    duration = search.duration(config)
    expected = [] if duration is None else [f"cupyattn: expect {duration} on two cores"]
    return [_where_kernels_run(), *expected]


def _where_kernels_run() -> str:
    missing = _missing_compiler()
    compiler = "no NVRTC" if missing else f"NVRTC {'.'.join(map(str, nvrtc_version()))}"
    if not device_count():
        what = "are not compiled" if missing else "run on the emulator, with all checks"
        return f"cupyattn: no GPU: kernels {what} ({compiler})"
    device = cuda_device(0)
    override = os.environ.get(ARCH_VARIABLE)
    forced = f" ({ARCH_VARIABLE}={override})" if override else ""
    return (
        f"cupyattn: {device.name}, compute capability {device.capability / 10:.1f}, kernels for "
        f"{device.arch.real}{forced}, {compiler}"
    )


LOADED: Counter[str] = Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note which kernels ran on the GPU; a worker of pytest-xdist hands it to its controller."""
    if device_count():
        LOADED.update(each.spec.entry for each in cuda_device(0).loaded)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["loaded"] = dict(LOADED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LOADED.update(getattr(node, "workeroutput", {}).get("loaded", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which kernels ran on the GPU."""
    if device_count():
        listed = ", ".join(f"{entry} ({count} specialisations)" for entry, count in LOADED.items())
        terminalreporter.write_line(f"cupyattn: kernels loaded on the GPU: {listed or 'none'}")


MOST_KEPT_BYTES = 256 << 20
"""The most memory of a GPU that a worker keeps between its tests: others need it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let workers of pytest-xdist share a GPU: its memory, and its time where that is measured."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not device_count():
        return (yield)
    with worker_turn(alone=item.get_closest_marker("alone") is not None):
        done = yield
        import cupy

        pool = cupy.get_default_memory_pool()
        if pool.total_bytes() > MOST_KEPT_BYTES:
            pool.free_all_blocks()
        return done


@pytest.fixture(scope="module")
def kernels_run():
    """The public functions run the kernels: on the GPU, or otherwise the emulator."""
    with KERNELS.running():
        yield


@pytest.fixture
def default_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for the default architecture, whatever CUPYATTN_ARCH says of the other tests'."""
    monkeypatch.delenv(ARCH_VARIABLE, raising=False)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache of compiled kernels of the test's own, in this process and those it starts."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
    monkeypatch.setattr(folders, "_told", set())
    monkeypatch.setattr(cache, "_in_memory", {})
    for directory in (cache_directory, temporary_directory):
        directory.cache_clear()
    yield folder
    for directory in (cache_directory, temporary_directory):
        directory.cache_clear()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from the sdist."""
    pytest.importorskip("build", reason="needs build (pip install '.[test]')")
    pytest.importorskip("hatchling", reason="needs hatchling (pip install '.[test]')")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that NVRTC was given meanwhile."""
    given: list[Path] = []
    run = compile._run_nvrtc

    def counted(unit: Unit, *args: Any, **kwargs: Any) -> Any:
        given.append(unit.source)
        return run(unit, *args, **kwargs)

    monkeypatch.setattr(compile, "_run_nvrtc", counted)
    return given


@pytest.fixture
def side(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where arrays are, with calls running there: see devices.everywhere."""
    with request.param.running():
        yield request.param


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The device that the public functions take for the GPU."""
    recorder = Recorder()
    backend_module = sys.modules["cupyattn.runtime.backend"]  # the function has its name
    monkeypatch.setattr(backend_module, "cuda_device", lambda ordinal: recorder)
    return recorder
