"""What a result was made on: host, device, code, versions, and the clocks while it ran."""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.kernels.target import arch_override
from cupyattn.turing import disassembler_version

_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


def this_host() -> dict[str, Any]:
    """Describe what every result was made on, whatever it is of.

    Returns
    -------
    dict
        ``version`` (of the library), ``commit`` (of the checkout it is imported from, with
        "-dirty" where files have changed; None of an installed one), ``date``, ``cpu``, ``os``,
        ``python``, ``numpy``.
    """
    return {
        "version": cupyattn.__version__,
        "commit": _commit(Path(cupyattn.__file__).parents[1]),
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def modelled_with() -> dict[str, Any]:
    """Describe what modelled figures follow from, beside the host: compiler and disassembler.

    Returns
    -------
    dict
        ``nvrtc``, ``nvdisasm``; None where one is not there.
    """
    versions: dict[str, Any] = {}
    for name, ask in (("nvrtc", _nvrtc), ("nvdisasm", disassembler_version)):
        try:
            versions[name] = ask()
        except RuntimeError:  # rows without times follow, and the table says why
            versions[name] = None
    return versions


def _nvrtc() -> str:
    return ".".join(map(str, nvrtc_version()))


def _commit(checkout: Path) -> str | None:
    """Return the commit of a checkout; a folder within one, such as an environment, is none."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    return _said_by([*command, "--exclude=*"])


@cache
def _cpu() -> str:
    """Return the name of the processor; of its architecture where that is all there is."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _said_by(command: list[str]) -> str | None:
    """Return what a program prints; None where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def measured_on(device: CudaDevice, torch: Any = None) -> dict[str, Any]:
    """Describe what the kernels that are loaded on a device ran on, and what they are compiled for.

    Returns
    -------
    dict
        What `this_host` says; ``device``, ``compute_capability``; ``code``: the targets that the
        loaded code itself names, such as "sm_90" for machine code or "compute_75" for PTX that the
        driver translated;
        ``arch_override``: CUPYATTN_ARCH; ``tensor_cores``: whether float16 ran on them;
        ``driver_version`` (None without nvidia-smi) and the version of CUDA that it has,
        ``cuda_driver``; ``cupy``, ``nvrtc`` and ``torch`` (None where nobody imported it).
    """
    cupy = load_cupy()

    override = arch_override()
    targets = {device.load(specialisation).target for specialisation in device.loaded}
    driver = cupy.cuda.runtime.driverGetVersion()
    return {
        **this_host(),
        "device": device.name,
        "compute_capability": f"{device.capability / 10:.1f}",
        "code": sorted(targets),
        "arch_override": override and str(override.number),
        "tensor_cores": device.tensor_cores,
        "driver_version": _said_by(_asking(device.ordinal, "driver_version")),
        "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": cupy.__version__,
        "nvrtc": _nvrtc(),
        "torch": None if torch is None else torch.__version__,
    }


@contextmanager
def watched(ordinal: int) -> Iterator[dict[str, float]]:
    """Watch the clocks of a GPU while something runs on it.

    Yields
    ------
    dict
        Empty until the end, then the medians of ``sm_mhz``, ``memory_mhz``, ``power_w`` and
        ``temperature_c`` of each second that nvidia-smi told; empty still where it tells nothing.
    """
    found: dict[str, float] = {}
    watcher = _watcher(ordinal)
    try:
        yield found
    finally:
        if watcher is not None:
            watcher.terminate()
            found.update(clocks_in(watcher.communicate()[0]))


def _watcher(ordinal: int) -> subprocess.Popen[str] | None:
    command = [*_asking(ordinal, *_CLOCKS.values()), "--loop=1"]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:  # there is none
        return None


def _asking(ordinal: int, *what: str) -> list[str]:
    """Return the command that asks nvidia-smi about a GPU."""
    bus = load_cupy().cuda.runtime.deviceGetPCIBusId(ordinal)
    if isinstance(bus, bytes):
        bus = bus.decode()
    asked = f"--query-gpu={','.join(what)}"
    return ["nvidia-smi", "-i", bus, asked, "--format=csv,noheader,nounits"]


def clocks_in(text: str) -> dict[str, float]:
    r"""Return the medians of what nvidia-smi told, of whole lines of numbers alone.

    Examples
    --------
    >>> clocks_in("1980, 2619, 500.5, 60\n1970, 2619, [N/A], 61\n19")
    {'sm_mhz': 1980.0, 'memory_mhz': 2619.0, 'power_w': 500.5, 'temperature_c': 60.0}
    """
    seconds = []
    for line in text.splitlines():
        try:
            numbers = [float(part) for part in line.split(",")]
        except ValueError:
            continue
        if len(numbers) == len(_CLOCKS):
            seconds.append(numbers)
    columns = zip(*seconds, strict=True)
    return {name: statistics.median(column) for name, column in zip(_CLOCKS, columns, strict=False)}
