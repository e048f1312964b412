"""What the library finds to run on."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import numpy as np

from cupyattn.registry import KERNELS
from cupyattn.runtime import tuning as choices
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.folders import cache_directory
from cupyattn.runtime.target import arch_override, tensor_cores_override


def device_info() -> dict[str, Any]:
    """Describe the GPUs, the compiler and the cache of compiled kernels.

    Returns
    -------
    dict
        ``devices``: for each GPU its ``name``, ``compute_capability``, ``memory_bytes``, the
        ``arch`` that kernels are compiled for, whether float16 runs on ``tensor_cores``, otherwise
        in float32 arithmetic, ``tensor_cores_because``, how that is known, and ``tuned``, how many
        rows of the tables ``python -m cupyattn tune`` chose for it, None where it did not run; or
        ``unusable_because``. ``cuda_driver`` and ``cuda_runtime`` (as CUDA numbers them, 12090 for
        12.9), ``cupy``, ``nvrtc``, ``numpy`` and ``python`` versions, None for what is not there;
        ``arch_override``: CUPYATTN_ARCH; ``tensor_cores_override``: CUPYATTN_TENSOR_CORES;
        ``uses_tuned``: whether CUPYATTN_TUNED has calls take the rows that were chosen;
        ``kernels``: the entries of the library; ``cache``: the ``folder``, None where compiled
        kernels are kept in memory alone, and how many ``files`` of how many ``bytes`` it holds.

    Raises
    ------
    ValueError
        If CUPYATTN_ARCH names no architecture that the library knows, or CUPYATTN_TENSOR_CORES or
        CUPYATTN_TUNED is neither 0 nor 1.
    RuntimeError
        If CuPy cannot be imported because CUPY_CACHE_DIR names what can be no folder.

    Notes
    -----
    GPUs of compute capability 7.5 need not have tensor cores (GTX 16xx, MX450, MX550, T400 to
    T1200, T2000). The product name tells; where it does not, a kernel of at most 0.1 ms times the
    mma instruction once, at the first call that asks, for which the host waits. A first call
    inside a CUDA graph capture cannot wait and takes the GPU to have them. CUPYATTN_TENSOR_CORES=0
    or 1 says it of every GPU, and of the emulator, which has them otherwise.

    Examples
    --------
    >>> import cupyattn
    >>> "attention_tiled" in cupyattn.device_info()["kernels"]
    True
    """
    override, tensor_cores = arch_override(), tensor_cores_override()
    info: dict[str, Any] = {
        "devices": [],
        "cuda_driver": None,
        "cuda_runtime": None,
        "cupy": None,
        "nvrtc": None,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "arch_override": override and str(override.number),
        "tensor_cores_override": None if tensor_cores is None else f"{tensor_cores:d}",
        "uses_tuned": choices.tuned_override(),
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
        "tensor_cores": None,
        "tensor_cores_because": None,
        "tuned": None,
        "unusable_because": None,
    }
    try:
        found = cuda_device(ordinal)
        info["arch"] = found.arch.number
        info["tensor_cores"], info["tensor_cores_because"] = found.find_tensor_cores()
        kept = choices.read(found.name, found.arch.real)
        info["tuned"] = None if kept is None else len(kept["chosen"])
    except (RuntimeError, ValueError) as failure:  # too old or new, or below CUPYATTN_ARCH
        info["unusable_because"] = str(failure)
    return info


def _cache() -> dict[str, Any]:
    folder = cache_directory()
    if folder is None:
        return {"folder": None, "files": 0, "bytes": 0}
    files = [path for path in folder.iterdir() if path.suffix in (".cubin", ".ptx")]
    return {
        "folder": str(folder),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
