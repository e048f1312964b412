"""The names that generated code may use, and what they mean."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn.emulator.machine import convert, floating, integer, stacks
from cupyattn.emulator.machine.positions import EXITED
from cupyattn.emulator.machine.warp import warp_bits

__all__ = ["RUNTIME_NAMES"]

_AXES = "xyz"

# What a register holds before it is written: a NaN as a float of any size, a large odd number as an
# integer. That spoils a result that needs it, where a zero may be right by chance. To refuse such
# reads is no way: 60 of 297 right kernels have them on some path, and nothing comes of them.
_UNWRITTEN = b"\xff\x7f" * 4


def _guarded(predicate: Any, mask: Any, shape: tuple[int, int]) -> Any:
    """Return the mask of the lanes that run and whose predicate is true."""
    if mask is None:
        return np.broadcast_to(predicate, shape)
    return mask & predicate


def _merged(merge: Any, value: Any, before: Any) -> Any:
    """Return a value for the lanes that run, for others what was there before.

    A function: written out in each statement, a kernel would be a fifth longer to compile.
    """
    return value if merge is None else np.where(merge, value, before)


def _pack(parts: tuple[Any, ...], dtype: Any, width: int) -> Any:
    """Return the concatenation of `parts`, `width` bits each, the first one lowest."""
    result = np.asarray(parts[0]).astype(dtype)
    for i, part in enumerate(parts[1:], 1):
        result = result | (np.asarray(part).astype(dtype) << dtype.type(width * i))
    return result


def _active_mask(mask: Any, shape: tuple[int, int]) -> Any:
    """Return the lanes that run, one uint32 per warp (``activemask``)."""
    return np.repeat(warp_bits(True if mask is None else mask, shape), 32).reshape(shape)


def _namespace() -> dict[str, Any]:
    names: dict[str, Any] = {"np": np, "where": np.where, "guarded": _guarded, "pack": _pack}
    names.update(active_mask=_active_mask, merged=_merged)
    for module in (convert, floating, integer, stacks):
        names.update({name: getattr(module, name) for name in module.__all__})
    for dtype in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
        names[dtype] = np.dtype(dtype)
        names[f"UNWRITTEN_{dtype}"] = np.frombuffer(_UNWRITTEN, dtype, 1).reshape(())
    names["EXITED"] = EXITED
    names["b1"] = np.dtype(bool)
    names["UNWRITTEN_b1"] = np.asarray(True)
    return names


@dataclass(frozen=True)
class _RuntimeNames:
    namespace: dict[str, Any] = field(default_factory=_namespace)
    special_registers: frozenset[str] = frozenset(
        [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in _AXES]
        + [f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")]
        + ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid"]
        + ["%dynamic_smem_size", "%total_smem_size"]
    )
    prologue: tuple[str, ...] = (
        "shape = batch.lanes.shape",
        "report = batch.report",
        "schedule = batch.scheduler",
        "positions = schedule.positions",
        "barriers = schedule.barriers",
        "global_memory = batch.global_",
        "shared_memory = batch.shared",
        "local_memory = batch.local",
        "parameters = batch.parameters",
        "generic_memory = batch.generic",
        "atomics = batch.atomics",
        "warp_sync = schedule.warp_sync",
        "matrix = batch.matrix",
    )


RUNTIME_NAMES = _RuntimeNames()
