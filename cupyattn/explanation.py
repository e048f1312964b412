"""Reports of the kernels that a call would launch: `explain`."""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.runtime import html
from cupyattn.runtime.arch import TURING, Arch, arch_override, tensor_cores_override
from cupyattn.runtime.arrays import ALIGNMENT, Array, dtype_of, exports_memory
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.compile import CompilationError, compile_cubin
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.runtime.device.recorder import Launch, LaunchRecorder
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.tuning import Explained
from cupyattn.turing import DisassemblerError, analyse

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on
_SMALL = 2**20
_MOST_BYTES = 2**44
"""Bytes of an array that is given as a shape. A process has addresses for 2**47."""
_MOST_COPIED = 2**20
"""Bytes. Smaller arrays of integers on a GPU are copied: their values may decide the launches."""


@dataclass(frozen=True)
class LaunchReport:
    """One launch of a call, as `explain` reports it.

    Attributes
    ----------
    kernel : str
        The entry function of the kernel.
    source : str
        Its file in ``cuda_src``.
    configuration : dict of str to int or str
        The macros with which it is compiled.
    reason : str
        Why this configuration was chosen; empty if there is no choice. "models 0.87" means that the
        model of a T4 predicts 87 % of the peak rate of the tensor cores, or of float32 arithmetic.
    ctas, threads : int
        The number of CTAs (CUDA's thread blocks) in the grid, and of threads in a CTA.
    shared_bytes : int
        Shared memory of a CTA.
    registers, spill_bytes : int or None
        Registers of a thread, and the bytes that it spills to memory. None without NVRTC.
    ctas_per_sm : int or None
        How many CTAs one multiprocessor holds at a time. None without NVRTC.
    limit : str
        The limit of its speed, by the model of a T4 in `cupyattn.turing`; empty for a kernel with
        instructions of sm_80.
    """

    kernel: str
    source: str
    configuration: dict[str, int | str]
    reason: str
    ctas: int
    threads: int
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    ctas_per_sm: int | None
    limit: str

    def _lines(self) -> dict[str, str]:
        chosen = {n: v for n, v in self.configuration.items() if v not in ("false", "void")}
        lines = {
            "why": re.sub(r"(models 0\.\d+)", r"\1 of the peak rate", self.reason),
            "configuration": " ".join(f"{name}={value}" for name, value in chosen.items()),
            "grid": f"{_ctas(self.ctas)} of {self.threads} threads",
            "on an SM": _resources(self),
            "limit": self.limit,
        }
        return {title: line for title, line in lines.items() if line}

    def __str__(self) -> str:
        printed = [f"  {title:14} {line}" for title, line in self._lines().items()]
        return "\n".join([f"{self.kernel}  ({self.source})", *printed])

    def _repr_html_(self) -> str:
        return html.section(f"{self.kernel} ({self.source})", html.facts(self._lines()))


def _ctas(count: int) -> str:
    return f"{count} CTA{'s' * (count != 1)}"


def _resources(launch: LaunchReport) -> str:
    shared = f"{launch.shared_bytes} bytes of shared memory a CTA"
    if launch.registers is None:
        return f"{shared}; registers are not known without NVRTC"
    spilled = f", {launch.spill_bytes} bytes spilled" if launch.spill_bytes else ""
    resident = _ctas(launch.ctas_per_sm or 0)
    return f"{resident} at a time: {launch.registers} registers a thread{spilled}, {shared}"


@dataclass(frozen=True)
class Explanation:
    """The launches of a call, in order. Print it to read it, or end a notebook's cell with it.

    Attributes
    ----------
    function : str
        The name of the function.
    device : str
        The device of the call.
    launches : tuple of LaunchReport
    reasons : tuple of str
        Why the call runs these kernels and no others; empty where there is no choice.
    """

    function: str
    device: str
    launches: tuple[LaunchReport, ...]
    reasons: tuple[str, ...] = ()

    @property
    def _title(self) -> str:
        count = len(self.launches)
        return f"{self.function} on {self.device}: {count or 'no'} launch{'es' * (count != 1)}"

    def __str__(self) -> str:
        reasons = [f"  {reason}" for reason in self.reasons]
        return "\n".join([self._title, *reasons, *map(str, self.launches)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (number, each.kernel, each.ctas, each.threads, each.registers, each.shared_bytes)
            for number, each in enumerate(self.launches[:_MOST_SHOWN], 1)
        ]
        columns = ("", "kernel", "CTAs", "threads", "registers", "shared bytes")
        parts = [html.table(columns, rows)] if len(rows) > 1 else []
        parts += [launch._repr_html_() for launch in self.launches[:_MOST_SHOWN]]
        if len(self.launches) > _MOST_SHOWN:
            parts.append(html.paragraph(f"and {len(self.launches) - _MOST_SHOWN} more: print it"))
        return html.section(self._title, *map(html.paragraph, self.reasons), *parts)


_MOST_SHOWN = 6
"""Launches in a notebook."""


def explain(function: Callable[..., Any], /, *arrays: object, **options: object) -> Explanation:
    """Report which kernels a call would launch, in which configuration, and why.

    Nothing is launched, and no array is written. The kernels are compiled to find their number of
    registers.

    Parameters
    ----------
    function : callable
        A function of this library, for example `attention`.
    *arrays
        Its arrays. Instead of an array you can pass ``(shape, dtype)``, for example
        ``((1, 4096, 32, 128), "float16")``. It means an array in C order, which is not allocated.
        Arrays in a dictionary can be shapes too.
    **options
        Its options. Arrays among them can be shapes too.

    Returns
    -------
    Explanation
        With CuPy arrays it is for their GPU, otherwise for a T4, or for the architecture of
        CUPYATTN_ARCH.

    Raises
    ------
    TypeError
        If `function` cannot be called, for a shape without a dtype, or if the function raises it.
    ValueError, NotImplementedError
        If the function itself raises it for these arrays and options.

    Notes
    -----
    The values of integer arrays, such as lengths, can decide the launches: pass these as arrays.
    The limit is from a model of a T4 (see `cupyattn.turing`), whatever the device. Kernels that a
    T4 cannot run have none.

    Examples
    --------
    >>> import cupyattn
    >>> q = ((1, 4096, 32, 128), "float16")
    >>> report = cupyattn.explain(cupyattn.attention, q, q, q, causal=True)
    >>> [launch.kernel for launch in report.launches]
    ['attention_forward']
    >>> report.launches[0].ctas
    1024
    """
    if not callable(function):
        raise error(
            TypeError,
            f"function has type {type(function).__name__}",
            "it must be a function of this library",
            "pass for example cupyattn.attention, then the arrays and options of the call",
        )
    for i, each in enumerate(arrays):
        if isinstance(each, tuple) and each and all(isinstance(item, int) for item in each):
            raise error(
                TypeError,
                f"argument {i} is {each}, a shape without a dtype",
                "arrays are given as such, or as (shape, dtype)",
                f'pass for example ({each}, "float16")',
            )
    devices: set[int] = set()
    given = [_stand_in(each, devices) for each in arrays]
    named = {name: _stand_in(each, devices) for name, each in options.items()}
    if devices:
        device = cuda_device(min(devices))
        recorder, title = _Recorder.like(device), device.name
    else:
        arch = arch_override() or TURING
        recorder = _Recorder(arch, tensor_cores=tensor_cores_override() is not False)
        title = "a T4 (sm_75)" if arch is TURING else f"a GPU of the size of a T4 ({arch.real})"
    recorder.choices = choices = Explained(recorder.choices.chosen)
    with running_on(recorder):
        function(*given, **named)
    launches = tuple(_report(launch, recorder.arch) for launch in recorder.launches)
    name = getattr(function, "__name__", repr(function))
    return Explanation(name, title, launches, tuple(choices.reasons))


def _stand_in(value: Any, devices: set[int]) -> object:
    """Replace arrays on a GPU, and shapes, in an argument by NumPy arrays; collect the devices."""
    if isinstance(value, np.ndarray):
        return value
    if _is_shape(value):
        return _of_shape(*value)
    if isinstance(value, tuple):
        items = [_stand_in(each, devices) for each in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if type(value) is dict:
        return {key: _stand_in(each, devices) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        changed = {name: _stand_in(each, devices) for name, each in fields.items()}
        same = all(changed[name] is fields[name] for name in fields)
        return value if same else dataclasses.replace(value, **changed)
    if hasattr(value, "data") and hasattr(value.data, "device_id") and exports_memory(value):
        devices.add(value.data.device_id)
        if value.dtype.kind in "iub" and value.nbytes <= _MOST_COPIED:
            return value.get()
        return _like(value)
    return value


def _is_shape(value: object) -> bool:
    return (
        type(value) is tuple
        and len(value) == 2
        and isinstance(value[0], tuple | list)
        and all(isinstance(extent, int | np.integer) for extent in value[0])
        and isinstance(value[1], str | type | np.dtype)
    )


def _of_shape(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array of this shape and dtype that uses no memory; raise if there can be none."""
    extents = tuple(int(extent) for extent in shape)
    try:
        found = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.hasobject:
        raise error(
            TypeError,
            f"dtype = {shown(dtype)} with the shape {extents}",
            "it is a NumPy dtype without Python objects, or 'bfloat16'",
            "pass for example 'float16'",
        )
    if min(extents, default=0) < 0 or math.prod(extents) * found.itemsize > _MOST_BYTES:
        raise error(
            ValueError,
            f"the shape {extents} of {found.name}",
            "its extents are 0 or more, and it has at most 2**44 bytes",
            "pass a smaller shape",
        )
    return _unallocated(extents, found)


class _Recorder(LaunchRecorder):
    """A recorder whose results use no memory."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return _unallocated(shape, dtype)

    def zero(self, array: Array) -> None:
        """Do nothing: no kernel reads the array."""


def _unallocated(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros that use no memory until they are read, because pages are mapped on demand."""
    size = math.prod(shape) * dtype.itemsize
    return _memory(size)[:size].view(dtype).reshape(shape)


def _memory(size: int) -> np.ndarray:
    if size < _SMALL or sys.platform != "linux":
        return np.zeros(size, np.uint8)
    # Without a reserve: otherwise the system refuses an array larger than its memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


def _like(array: Array) -> np.ndarray:
    """Return a NumPy array of zeros with the strides and alignment of an array on a GPU."""
    if 0 in array.shape:
        return np.zeros(array.shape, array.dtype)
    steps = zip(array.shape, array.strides, strict=True)
    reach = [(extent - 1) * stride for extent, stride in steps]
    before = -sum(each for each in reach if each < 0)
    after = sum(each for each in reach if each > 0) + array.dtype.itemsize
    memory = _memory(before + after + ALIGNMENT)
    offset = before + (array.data.ptr - memory.ctypes.data - before) % ALIGNMENT
    return np.ndarray(array.shape, array.dtype, memory, offset, array.strides)


def _report(launch: Launch, arch: Arch) -> LaunchReport:
    specialisation = launch.specialisation
    try:
        resources = compile_cubin(specialisation, arch).resources
    except RuntimeError:  # no compiler
        resources = None
    shared = specialisation.shared_bytes + specialisation.static_shared_bytes
    registers = spills = resident = None
    if resources is not None:
        registers, spills = resources.registers, resources.spill_store_bytes
        shared = specialisation.shared_bytes + resources.static_shared_bytes
        resident = arch.resident_ctas(specialisation.threads, registers, shared)
    return LaunchReport(
        kernel=specialisation.spec.entry,
        source=specialisation.spec.source,
        configuration=dict(specialisation.macros),
        reason=specialisation.reason,
        ctas=math.prod(launch.grid),
        threads=specialisation.threads,
        shared_bytes=shared,
        registers=registers,
        spill_bytes=spills,
        ctas_per_sm=resident,
        limit=_limit(launch),
    )


def _limit(launch: Launch) -> str:
    """Return the limit of a kernel on a T4: the busiest pipe of its main loop, or memory.

    Kernels that are bound by their products have a modelled utilisation among their gates.
    """
    try:
        loop = analyse(launch.specialisation).main
    except CompilationError:
        return ""
    except DisassemblerError:
        return "not known without nvdisasm: pip install 'cupyattn[turing]'"
    except RuntimeError:
        return "not known without NVRTC: pip install 'cupyattn[emulator]'"
    if loop is None or loop.bound is None or not launch.specialisation.gates.models:
        return "memory bandwidth: products take little of its time"
    units = "tensor cores" if loop.work_pipe == "tensor" else "float32 units"
    reached = f", {loop.utilisation.mean:.2f} simulated" if loop.utilisation else ""
    pipe = {"lsu": "load/store unit", "tensor": "tensor cores", "fma": "float32 units"}
    binding = pipe.get(loop.binding_pipe, loop.binding_pipe)
    return f"{units} busy at most {loop.bound:.2f} of the time, bound by the {binding}{reached}"
