"""What the library finds to run on."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import numpy as np

from cupyattn.cupy_library import load_cupy
from cupyattn.folders import cache_directory
from cupyattn.kernels.compile import nvrtc_version
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.kernels.registry import KERNELS
from cupyattn.kernels.target import arch_override


def device_info() -> dict[str, Any]:
    """Describe the GPUs, the compiler and the cache of compiled kernels.

    Returns
    -------
    dict
        ``devices``: for each GPU its ``name``, ``compute_capability``, ``memory_bytes`` and the
        ``arch`` that kernels are compiled for, or ``unusable_because``; ``cuda_driver`` and
        ``cuda_runtime`` (as CUDA numbers them, 12090 for 12.9), ``cupy``, ``nvrtc``, ``numpy`` and
        ``python`` versions, None for what is not there; ``arch_override``: CUPYATTN_ARCH;
        ``kernels``: the entries of the library; ``cache``: the folder, and how many ``files`` of
        how many ``bytes`` it holds.

    Raises
    ------
    ValueError
        If CUPYATTN_ARCH names no architecture that the library knows.
    RuntimeError
        If CuPy cannot be imported because CUPY_CACHE_DIR names what can be no folder.

    Examples
    --------
    >>> import cupyattn
    >>> "attention_tiled" in cupyattn.device_info()["kernels"]
    True
    """
    override = arch_override()
    info: dict[str, Any] = {
        "devices": [],
        "cuda_driver": None,
        "cuda_runtime": None,
        "cupy": None,
        "nvrtc": None,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "arch_override": override and str(override.number),
        "kernels": list(KERNELS),
        "cache": _cache(),
    }
    with contextlib.suppress(RuntimeError):
        info["nvrtc"] = ".".join(map(str, nvrtc_version()))
    try:
        cupy = load_cupy()
    except ImportError:
        return info
    info["cupy"] = cupy.__version__
    for ordinal in range(device_count()):
        info["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
        info["cuda_runtime"] = cupy.cuda.runtime.runtimeGetVersion()
        info["devices"].append(_device(ordinal))
    return info


def _device(ordinal: int) -> dict[str, Any]:
    cupy = load_cupy()
    device = cupy.cuda.Device(ordinal)
    info = {
        "name": cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode(),
        "compute_capability": f"{int(device.compute_capability) / 10:.1f}",
        "memory_bytes": device.mem_info[1],
        "arch": None,
        "unusable_because": None,
    }
    try:
        info["arch"] = cuda_device(ordinal).arch.number
    except (RuntimeError, ValueError) as failure:  # too old or new, or below CUPYATTN_ARCH
        info["unusable_because"] = str(failure)
    return info


def device_count() -> int:
    """Return how many CUDA devices there are: 0 without a driver, or without CuPy.

    Raises
    ------
    RuntimeError
        If CuPy cannot be imported because CUPY_CACHE_DIR names what can be no folder.
    """
    try:
        cupy = load_cupy()
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def _cache() -> dict[str, Any]:
    folder = cache_directory()
    files = [path for path in folder.iterdir() if path.suffix in (".cubin", ".ptx")]
    return {
        "folder": str(folder),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
