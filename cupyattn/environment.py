"""The devices and libraries that are available: `device_info`."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import numpy as np

from cupyattn.registry import KERNELS
from cupyattn.runtime import html
from cupyattn.runtime import tuning as choices
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import arch_override, tensor_cores_override
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.errors import size_text
from cupyattn.runtime.folders import cache_directory


class DeviceInfo(dict[str, Any]):
    """The dict that `device_info` returns; a notebook shows it as tables, print as lines."""

    def _facts(self) -> dict[str, object]:
        cache, tuned = self["cache"], self["uses_tuned"]
        return {
            "CuPy": self["cupy"] or "not installed",
            "CUDA driver, runtime": _versions(self["cuda_driver"], self["cuda_runtime"]),
            "NVRTC": self["nvrtc"] or "not installed: it compiles the kernels",
            "NumPy, Python": f"{self['numpy']}, {self['python']}",
            "CUPYATTN_ARCH": self["arch_override"],
            "CUPYATTN_TENSOR_CORES": self["tensor_cores_override"],
            "CUPYATTN_TUNED": "1" if tuned else None,
            "kernels": len(self["kernels"]),
            "compiled": f"{cache['files']:,} files, {size_text(cache['bytes'])}, in "
            f"{cache['folder'] or 'memory'}",
        }

    def _devices(self) -> list[tuple[object, ...]]:
        return [
            (
                each["name"],
                each["compute_capability"],
                size_text(each["memory_bytes"]),
                each["unusable_because"] or f"sm_{each['arch']}",
                {None: "", True: "yes", False: "no"}[each["tensor_cores"]]
                + (", for bfloat16 too" if each["native"] else ""),
            )
            for each in self["devices"]
        ]

    def __str__(self) -> str:
        devices = [", ".join(map(str, row[:4])) for row in self._devices()]
        for index, each in enumerate(self["devices"]):
            devices[index] += ", bfloat16 on tensor cores" if each["native"] else ""
        lines = [("GPU", each) for each in devices or ["none: NumPy arrays run on the CPU"]]
        lines += [(name, str(value)) for name, value in self._facts().items() if value is not None]
        wide = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{wide}}  {value}" for name, value in lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("DeviceInfo(...)" if cycle else str(self))

    def _repr_html_(self) -> str:
        columns = ("GPU", "compute capability", "memory", "kernels compiled for", "tensor cores")
        devices = self._devices()
        return html.section(
            "cupyattn on this computer",
            html.table(columns, devices)
            if devices
            else html.paragraph("no GPU: NumPy arrays run on the CPU"),
            html.facts(self._facts()),
        )


def _versions(*numbers: int | None) -> str:
    """Write 12090 as 12.9."""
    known = (f"{each // 1000}.{each % 1000 // 10}" for each in numbers if each is not None)
    return ", ".join(known) or "not found"


def device_info() -> DeviceInfo:
    """Describe the GPUs, the compiler and the cache of compiled kernels.

    Returns
    -------
    DeviceInfo
        A dict:

        ``devices`` : list of dict
            For each GPU its ``name``, ``compute_capability`` and ``memory_bytes``; ``arch``, for
            which kernels are compiled; ``tensor_cores``, whether float16 uses them instead of
            float32 arithmetic; ``tensor_cores_because``, how that is known; ``native``, whether
            attention and products use the instructions of sm_80 and later, and tensor cores for
            bfloat16 too;
            ``tuned``, the number of configurations that ``python -m cupyattn tune`` chose, None if
            it has not run; and ``unusable_because``, None for a GPU that can be used.
        ``cuda_driver``, ``cuda_runtime`` : int or None
            Versions in CUDA's encoding: 12090 means 12.9.
        ``cupy``, ``nvrtc``, ``numpy``, ``python`` : str or None
            Versions; None if not installed.
        ``arch_override``, ``tensor_cores_override`` : str or None
            CUPYATTN_ARCH and CUPYATTN_TENSOR_CORES.
        ``uses_tuned`` : bool
            Whether CUPYATTN_TUNED enables the tuned configurations.
        ``kernels`` : list of str
            The entries of the library's kernels.
        ``cache`` : dict
            The ``folder`` of compiled kernels, None if they stay in memory, and the number of its
            ``files`` and their ``bytes``.

    Raises
    ------
    ValueError
        If CUPYATTN_ARCH is no architecture that the library knows, or CUPYATTN_TENSOR_CORES or
        CUPYATTN_TUNED is neither 0 nor 1.
    RuntimeError
        If CuPy cannot be imported because CUPY_CACHE_DIR is no usable folder.

    Notes
    -----
    Some GPUs of compute capability 7.5 have no tensor cores (GTX 16xx, MX450, MX550, T400 to T1200,
    T2000). The product name decides. For an unknown name, the first call that needs to know times
    the mma instruction with a kernel of at most 0.1 ms, and the host waits for it. A first call
    inside a CUDA graph capture cannot wait and assumes tensor cores. CUPYATTN_TENSOR_CORES=0 or 1
    decides for every GPU and for the emulator, which otherwise has tensor cores.

    Examples
    --------
    >>> import cupyattn
    >>> "attention_tiled" in cupyattn.device_info()["kernels"]
    True
    """
    override, tensor_cores = arch_override(), tensor_cores_override()
    info = DeviceInfo(
        {
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
    )
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


def _device(ordinal: int) -> Json:
    cupy = load_cupy()
    device = cupy.cuda.Device(ordinal)
    info = {
        "name": cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode(),
        "compute_capability": f"{int(device.compute_capability) / 10:.1f}",
        "memory_bytes": device.mem_info[1],
        "arch": None,
        "tensor_cores": None,
        "tensor_cores_because": None,
        "native": None,
        "tuned": None,
        "unusable_because": None,
    }
    try:
        found = cuda_device(ordinal)
        info["arch"] = found.arch.number
        info["tensor_cores"], info["tensor_cores_because"] = found.find_tensor_cores()
        info["native"] = found.traits.native
        kept = choices.read(found.name, found.arch.real)
        info["tuned"] = None if kept is None else len(kept["chosen"])
    except (RuntimeError, ValueError) as failure:  # too old or new, or below CUPYATTN_ARCH
        info["unusable_because"] = str(failure)
    return info


def _cache() -> Json:
    folder = cache_directory()
    if folder is None:
        return {"folder": None, "files": 0, "bytes": 0}
    files = [path for path in folder.iterdir() if path.suffix in (".cubin", ".ptx")]
    return {
        "folder": str(folder),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
