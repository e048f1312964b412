"""What a measurement was made on: device, code, versions, and the clocks while it ran."""

from __future__ import annotations

import datetime
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import cupyattn
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.kernels.target import arch_override, target_of

_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


def measured_on(device: CudaDevice, torch: Any = None) -> dict[str, Any]:
    """Describe what the kernels that are loaded on a device ran on, and what they are compiled for.

    Returns
    -------
    dict
        ``device``, ``compute_capability``; ``code``: the targets that the loaded code itself names,
        such as "sm_90" for machine code or "compute_75" for PTX that the driver translated;
        ``arch_override``: CUPYATTN_ARCH; ``tensor_cores``: whether float16 ran on them;
        ``cuda_driver``, ``cupy``, ``nvrtc``, ``numpy``, ``torch`` (None where nobody imported it)
        and ``version`` (of the library); ``date``.
    """
    cupy = load_cupy()

    override = arch_override()
    loaded = [device.load(specialisation).code for specialisation in device.loaded]
    driver = cupy.cuda.runtime.driverGetVersion()
    return {
        "version": cupyattn.__version__,
        "date": datetime.date.today().isoformat(),
        "device": device.name,
        "compute_capability": f"{device.capability / 10:.1f}",
        "code": sorted({target_of(path.read_bytes()) for path in loaded}),
        "arch_override": override and str(override.number),
        "tensor_cores": device.tensor_cores,
        "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "numpy": np.__version__,
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
    bus = load_cupy().cuda.runtime.deviceGetPCIBusId(ordinal)
    if isinstance(bus, bytes):
        bus = bus.decode()
    asked = f"--query-gpu={','.join(_CLOCKS.values())}"
    command = ["nvidia-smi", "-i", bus, asked, "--format=csv,noheader,nounits", "--loop=1"]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:  # there is none
        return None


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
