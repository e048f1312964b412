"""What a result was measured on: host, device, code, versions."""

from __future__ import annotations

import datetime
import platform
import subprocess
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


def this_host() -> dict[str, Any]:
    """Describe the host of every result.

    Returns
    -------
    dict
        ``version`` (of the library), ``date``, ``cpu``, ``os``, ``python``, ``numpy``.
    """
    return {
        "version": cupyattn.__version__,
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def modelled_with() -> dict[str, Any]:
    """Return the versions that modelled figures depend on, ``nvrtc`` and ``nvdisasm``, or None."""
    versions: dict[str, Any] = {}
    for name, ask in (("nvrtc", _nvrtc), ("nvdisasm", disassembler_version)):
        try:
            versions[name] = ask()
        except RuntimeError:  # the rows have no times then, and the table says why
            versions[name] = None
    return versions


def _nvrtc() -> str:
    return ".".join(map(str, nvrtc_version()))


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """Return what nvidia-smi prints; None if it is missing or fails."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def measured_on(device: CudaDevice, torch: Any = None) -> dict[str, Any]:
    """Describe what the loaded kernels of a device ran on, and what they are compiled for.

    Returns
    -------
    dict
        The keys of `this_host`; ``device``, ``compute_capability``; ``code``, the targets named in
        the loaded code itself, such as "sm_90" for machine code or "compute_75" for PTX;
        ``arch_override``: CUPYATTN_ARCH; ``tensor_cores``: whether float16 ran on them;
        ``driver_version`` (None without nvidia-smi) and its CUDA version ``cuda_driver``; ``cupy``,
        ``nvrtc`` and ``torch`` (None if it was not imported).
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
        "driver_version": _driver_version(),
        "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": cupy.__version__,
        "nvrtc": _nvrtc(),
        "torch": None if torch is None else torch.__version__,
    }
