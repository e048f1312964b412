"""Atomic updates (``atom``, ``red``) of global and shared memory.

Lanes update in order of block and thread, which hardware does not promise; a kernel whose result
depends on the order is not deterministic on a GPU either.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyattn.emulator.machine.floating import flush
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask
from cupyattn.emulator.machine.memory import MemoryPiece, MemorySpace
from cupyattn.emulator.report import Report

_UFUNCS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


# Sums of float32 numbers of this magnitude or more, and of zeros, are never subnormal.
_NEVER_TINY = np.float32(2.0**-103)


def _step(operation: str, old: Array, operands: tuple[Array, ...]) -> Array:
    value = operands[0]
    if operation == "exch":
        return value
    if operation == "cas":
        return operands[1] if old == value else old
    if operation == "add_flushed":
        return flush(flush(old) + flush(value))
    if operation == "inc":
        return old.dtype.type(0) if old >= value else old + old.dtype.type(1)
    if operation == "dec":
        return value if old == 0 or old > value else old - old.dtype.type(1)
    return _UFUNCS[operation](old, value)


def _may_be_tiny(piece: MemoryPiece, values: np.ndarray) -> bool:
    """Tell whether float32 sums may be subnormal: ``add.f32`` in global memory flushes those."""
    numbers = (piece.elements.view(np.float32)[piece.index], values)
    return any(bool(((x != 0) & (np.abs(x) < _NEVER_TINY)).any()) for x in numbers)


class AtomicOperations:
    """Read-modify-write of a batch."""

    def __init__(self, lanes: Lanes, report: Report | None) -> None:
        self.shape = lanes.shape
        self.report = report

    def update(
        self,
        space: MemorySpace,
        operation: str,
        kind: str,
        address: Array,
        operands: tuple[Array, ...],
        mask: Mask,
        site: int,
        wants_old: bool,
    ) -> Array | None:
        """Apply `operation` at every lane's address.

        Parameters
        ----------
        kind : str
            dtype that the memory is viewed as: ``"f4"``, ``"i4"``, ``"u8"``; ``"2f2"`` for a pair
            of float16.
        wants_old : bool
            Whether the values from before are needed; without, most updates are vectorised.
        """
        pair = kind == "2f2"
        dtype = np.dtype("f2" if pair else kind)
        size = 4 if pair else dtype.itemsize
        shape = self.shape
        mask = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
        pieces = space.locate(address, size, mask, site, True)
        if pieces:
            space.before_update(pieces[0].index, size, mask, site)
        if self.report is not None:
            self.report.atomic_lanes(site, int(np.count_nonzero(mask)))
        values = tuple(
            np.ascontiguousarray(np.broadcast_to(v, shape)[mask]).reshape(-1, 1).view(dtype)
            for v in operands
        )
        old = np.zeros(values[0].shape, dtype)
        flushes = operation == "add" and kind == "f4" and space.flushes_sums
        for piece in pieces:
            what = "add_flushed" if flushes and _may_be_tiny(piece, values[0]) else operation
            self._apply(piece, what, dtype, values, old, wants_old)
        if not wants_old:
            return None
        result = np.zeros(shape, np.dtype(f"u{size}"))
        result[mask] = old.view(f"u{size}")[:, 0]
        return result

    @staticmethod
    def _apply(
        piece: MemoryPiece,
        operation: str,
        dtype: np.dtype,
        values: tuple[np.ndarray, ...],
        old: np.ndarray,
        wants_old: bool,
    ) -> None:
        memory = piece.elements.view(dtype).reshape(piece.elements.size, -1)
        lanes = np.arange(len(old)) if piece.lanes is None else np.flatnonzero(piece.lanes)
        index = piece.index
        if not wants_old and operation in _UFUNCS and memory.shape[1] == 1:
            # NumPy is fast at this for one axis alone
            flat = memory[:, 0]
            _UFUNCS[operation].at(flat, index, values[0][lanes, 0])  # type: ignore[attr-defined]
            return
        if not wants_old and operation in _UFUNCS:
            _UFUNCS[operation].at(memory, index, values[0][lanes])  # type: ignore[attr-defined]
            return
        distinct = len(np.unique(index)) == len(index)
        if distinct and operation in (*_UFUNCS, "exch", "add_flushed"):
            before = memory[index]
            old[lanes] = before
            memory[index] = _step(operation, before, tuple(v[lanes] for v in values))
            return
        for lane, i in zip(lanes, index, strict=True):
            for column in range(memory.shape[1]):
                before = memory[i, column]
                old[lane, column] = before
                memory[i, column] = _step(operation, before, tuple(v[lane, column] for v in values))
