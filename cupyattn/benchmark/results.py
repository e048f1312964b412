"""The host and device of a result, and its JSON: written and read."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

import cupyattn
from cupyattn.cli.terminal import Result
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import arch_override
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import CudaDevice
from cupyattn.runtime.errors import error, shown


def this_host() -> Json:
    """Describe the host of a result, with the versions of the library, Python and NumPy."""
    return {
        "version": cupyattn.__version__,
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def queried(*fields: str, gpu: str = "0") -> list[str] | None:
    """Return what nvidia-smi prints about a GPU; None if it is missing or fails."""
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", "-i", gpu, *query]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [value.strip() for value in done.stdout.strip().split(",")]
    return found if done.returncode == 0 and len(found) == len(fields) else None


def _driver_version() -> str | None:
    found = queried("driver_version")
    return found[0] or None if found else None


def measured_on(device: CudaDevice, torch: ModuleType | None = None) -> Json:
    """Describe the host, the device, and the targets that its loaded kernels were compiled for.

    ``code`` are the targets named in the loaded code itself: "sm_90" for machine code, "compute_75"
    for PTX. ``driver_version`` is None without nvidia-smi, ``torch`` if it was not imported.
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
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "torch": None if torch is None else torch.__version__,
    }


def device_of(result: Json) -> str:
    """Return the device that was measured or modelled."""
    if result.get("modelled"):
        return f"modelled: {result.get('machine', 'a Turing GPU')}"
    return result.get("device") or result.get("cpu") or "this computer's CPU"


def place_of(result: Json) -> str:
    """Return device and code of a result."""
    codes = result.get("code") or ()
    return device_of(result) + (f" running {', '.join(codes)} code" if codes else "")


def require_writable(file: Path) -> None:
    """Raise OSError if a file cannot be written: before hours of measuring, not after them."""
    there = file.exists()
    file.open("a").close()
    if not there:
        file.unlink()


def write_json(result: object, file: Path) -> None:
    """Write a result, or a list of them."""
    file.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def results_of(file: Path) -> list[Result]:
    """Read what --json wrote, one result or a list of them; raise ValueError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        wrong = ""
    except (ValueError, RecursionError) as failure:
        found, wrong = [], f"is not a JSON file ({failure})"
    results = found if isinstance(found, list) else [found]
    for result in results:
        if not _is_result(result):
            wrong = f"contains something else: {shown(result)}"
    if wrong:
        raise error(
            ValueError,
            f"{file} {wrong}",
            "results are what a benchmark writes with --json, or a list of that",
            "write some with python -m cupyattn.benchmark all --json FILE",
        )
    return results


def _is_result(found: object) -> bool:
    """Tell whether an object has a command and rows."""
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        return False
    command = found.get("command")
    rows_are_objects = all(isinstance(row, dict) for row in found["rows"])
    return isinstance(command, str) and command.isidentifier() and rows_are_objects
