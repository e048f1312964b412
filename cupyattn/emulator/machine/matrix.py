"""Tensor-core instructions: ``mma``, ``ldmatrix``, ``movmatrix``.

Fragment layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k8": with g = lane // 4
and t = lane % 4, an 8x8 matrix of 16-bit elements in one register holds row g, columns 2t and 2t +
1. So the registers of a warp, in lane order, are the matrix in row-major order: an 8x8 view of the
bytes. A (16x8) is two of them, rows 0-7 and 8-15; B (8x8) is one, transposed (row = column n).

The same holds for integers ("Matrix fragments for mma.m8n8k16", "... mma.m8n8k32"): a row g of A
(8x16 or 8x32) and a column g of B are 16 bytes, the registers of the lanes with that g, lowest item
first. m16n8k16 and m16n8k32 of 8-bit integers are made of m8n8k16: A is rows 0-7, then 8-15, of
each 16 columns, C and D are rows 0-7, then 8-15.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import MisalignedAccessError, OutOfBoundsError, WarpSyncError
from cupyattn.emulator.machine.floating import HALF_TO_FLOAT
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask, over_lanes
from cupyattn.emulator.machine.memory import SHARED_WINDOW, WINDOW_BYTES, SlicedBuffer
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.report import Report

_INTEGERS = {  # by PTX type: the dtype of the bytes, items of a byte, the largest magnitude
    "s8": (np.int8, 1, 128),
    "u8": (np.uint8, 1, 255),
    "s4": (np.int8, 2, 8),
    "u4": (np.uint8, 2, 15),
}
_ROW = np.dtype(np.complex128)  # 16 bytes, which NumPy moves at once
_EXACT = 1 << 24  # integers up to here are float32 numbers


_WARPS_AT_ONCE = 16  # of integer products: their matrices should stay in the cache


def _numbers(rows: np.ndarray, kind: str, dtype: np.dtype) -> np.ndarray:
    """Return (warps, 8 count, k) numbers from (warps, count, ..., steps) rows of integers."""
    of_bytes, items, _ = _INTEGERS[kind]
    warps, steps = rows.shape[0], rows.shape[-1]
    packed = np.ascontiguousarray(rows).view(of_bytes).reshape(warps, -1, _ROW.itemsize * steps)
    if items == 1:
        return packed.astype(dtype)
    numbers = np.empty((*packed.shape, items), dtype)
    numbers[..., 0] = (packed << 4) >> 4  # the sign too, if there is one
    numbers[..., 1] = packed >> 4
    return numbers.reshape(warps, packed.shape[1], -1)


class MatrixOperations:
    """Matrix instructions of a batch; they need whole warps."""

    def __init__(
        self,
        lanes: Lanes,
        checks: Checks,
        shared: SlicedBuffer,
        tracker: SharedMemoryTracker | None,
        report: Report | None,
    ) -> None:
        self.lanes = lanes
        self.checks = checks
        self.shared = shared
        self.tracker = tracker
        self.report = report
        self._start = lanes.program.layout.shared_start
        self.shape = lanes.shape
        self.warps = lanes.blocks * lanes.warps

    def _converged(self, mask: Mask, site: int, what: str) -> None:
        """Refuse an ``.aligned`` instruction that only some lanes of a warp execute."""
        if mask is None:
            return
        active = mask.reshape(-1, 32)
        partial: Any = active.any(1) & ~active.all(1)
        if partial.any():
            raise self.lanes.fault(
                WarpSyncError,
                f"{what} needs all 32 lanes of the warp, but only some are here (divergence, or "
                "threads that returned)",
                site,
                np.flatnonzero(active & partial[:, None]),
            )

    def _packed(self, registers: Array | list[Array], count: int) -> np.ndarray:
        """Return uint32 (count, blocks, threads) from a stack of registers."""
        if isinstance(registers, np.ndarray) and registers.shape == (count, *self.shape):
            return np.ascontiguousarray(registers)
        packed = np.empty((count, *self.shape), np.uint32)
        if isinstance(registers, list):
            for i, register in enumerate(registers):
                packed[i] = register
        else:
            packed[...] = registers
        return packed

    def _fragments(self, registers: Array | list[Array], count: int, kind: str) -> np.ndarray:
        """Return float32 (count, warps, 8, 8) from a stack of registers of packed pairs."""
        packed = self._packed(registers, count)
        if kind == "bf16":
            numbers = np.empty((*packed.shape, 2), np.uint32)
            np.left_shift(packed, 16, out=numbers[..., 0])
            np.bitwise_and(packed, 0xFFFF0000, out=numbers[..., 1])
            return numbers.view(np.float32).reshape(count, self.warps, 8, 8)
        halves = HALF_TO_FLOAT.take(packed.view(np.uint16))
        return halves.reshape(count, self.warps, 8, 8)

    def multiply(
        self,
        a: Array | list[Array],
        b: Array | list[Array],
        c: Array | list[Array],
        chains: int,
        steps: int,
        kind: str,
        mask: Mask,
        site: int,
    ) -> np.ndarray:
        """Multiply chains of ``mma.m16n8k8`` with float32 accumulators at once.

        Stacks are arrays, lists of registers, or one register for all rows.

        Parameters
        ----------
        a : stack
            The A fragments of all steps, common to all chains: low and high rows of each.
        b : stack
            The B fragments, chain after chain.
        c : stack
            The accumulators that the chains start from, 4 of each.
        chains, steps : int
        kind : str
            "f16" or "bf16".

        Returns
        -------
        (4 chains, blocks, threads) float32 array
            The accumulators. Sums are float32; hardware may round in another order.
        """
        self._converged(mask, site, "mma.sync.aligned")
        warps = self.warps
        left = self._fragments(a, 2 * steps, kind)
        left = left.reshape(steps, 2, warps, 8, 8).transpose(2, 1, 3, 0, 4)
        right = self._fragments(b, steps * chains, kind)
        right = right.reshape(chains, steps, warps, 8, 8).transpose(2, 1, 4, 0, 3)
        product = left.reshape(warps, 16, 8 * steps) @ right.reshape(warps, 8 * steps, 8 * chains)
        # (warp, half, g, chain, t, pair) -> (chain, half, pair, warp, g, t)
        product = product.reshape(warps, 2, 8, chains, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        result = np.ascontiguousarray(product).reshape(4 * chains, *self.shape)
        if isinstance(c, list):
            for i, start in enumerate(c):
                result[i] += start
        else:
            result += c
        return result

    def multiply_integers(
        self,
        a: Array | list[Array],
        b: Array | list[Array],
        c: Array | list[Array],
        rows: int,
        columns: int,
        steps: int,
        a_type: str,
        b_type: str,
        saturates: bool,
        mask: Mask,
        site: int,
    ) -> np.ndarray:
        """Multiply chains of ``mma.m8n8k16`` or ``mma.m8n8k32`` of integers at once, exactly.

        Stacks are as in `multiply`. The chains are all pairs of an A and a B.

        Parameters
        ----------
        a, b : stack
            The fragments of all steps of each A, and of each B.
        c : stack
            The accumulators that the chains start from, 2 of each, A after A.
        rows, columns, steps : int
            How many A and B there are, and the fragments of each.
        a_type, b_type : str
            "s8", "u8", "s4" or "u4".
        saturates : bool
            Limit the sums to the range of int32 instead of wrapping them around.

        Returns
        -------
        (2 rows columns, blocks, threads) uint32 array
            The accumulators, int32 bit patterns.
        """
        self._converged(mask, site, "mma.sync.aligned")
        (_, items, most_a), (_, _, most_b) = _INTEGERS[a_type], _INTEGERS[b_type]
        exact = 16 * items * steps * most_a * most_b <= _EXACT  # in float32, whatever the order
        dtype = np.dtype(np.float32 if exact else np.float64)
        left = self._packed(a, rows * steps).view(_ROW).reshape(rows, steps, self.warps, 8)
        right = self._packed(b, columns * steps).view(_ROW)
        right = right.reshape(columns, steps, self.warps, 4, 2)  # column n = 2 t + pair of each
        quads = np.empty((rows, columns, 2, self.warps, 8), _ROW)  # of sums: those of the four t
        for first in range(0, self.warps, _WARPS_AT_ONCE):
            some = slice(first, first + _WARPS_AT_ONCE)
            x = _numbers(left[:, :, some].transpose(2, 0, 3, 1), a_type, dtype)
            y = _numbers(right[:, :, some].transpose(2, 0, 4, 3, 1), b_type, dtype)
            product = x @ y.swapaxes(1, 2)
            whole = product.astype(np.int32 if exact else np.int64).astype(np.int32, copy=False)
            whole = whole.view(_ROW).reshape(-1, rows, 8, columns, 2)
            quads[:, :, :, some] = whole.transpose(1, 3, 4, 0, 2)
        sums = quads.view(np.int32).reshape(2 * rows * columns, *self.shape)
        if saturates:
            limits = np.iinfo(np.int32)
            start = self._packed(c, len(sums)).view(np.int32)
            total = (sums + start.astype(np.int64)).clip(limits.min, limits.max)
            return total.astype(np.uint32)
        result = sums.view(np.uint32)
        if isinstance(c, list):
            for i, start in enumerate(c):
                result[i] += start
        else:
            result += c
        return result

    def multiply_half(
        self,
        a: list[Array],
        b: list[Array],
        c: list[Array],
        mask: Mask,
        site: int,
    ) -> tuple[Array, Array]:
        """Multiply one ``mma`` with float16 accumulators; the sum is rounded once, at the end."""
        start = [half for register in c for half in self._halves(register)]
        sums = self.multiply(a, b, start, 1, len(b), "f16", mask, site)
        low = self._pack(sums[0], sums[1])
        high = self._pack(sums[2], sums[3])
        return low, high

    def _halves(self, register: Array) -> tuple[Array, Array]:
        bits = np.ascontiguousarray(np.broadcast_to(register, self.shape))
        pair = HALF_TO_FLOAT.take(bits.view(np.uint16).reshape(*self.shape, 2))
        return pair[..., 0], pair[..., 1]

    @staticmethod
    def _pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        pair = np.stack([low, high], axis=-1).astype(np.float16)
        return pair.view(np.uint32)[..., 0]

    def transpose(self, register: Array, mask: Mask, site: int) -> Array:
        """Transpose an 8x8 matrix of 16-bit elements (``movmatrix.trans``)."""
        self._converged(mask, site, "movmatrix.sync.aligned")
        bits = np.ascontiguousarray(np.broadcast_to(register, self.shape))
        matrix = bits.view(np.uint16).reshape(self.warps, 8, 8)
        turned = np.ascontiguousarray(matrix.swapaxes(1, 2))
        return turned.reshape(self.warps, -1).view(np.uint32).reshape(self.shape)

    def load(self, address: Array, count: int, transposed: bool, mask: Mask, site: int) -> Array:
        """Load `count` 8x8 matrices of 16-bit elements (``ldmatrix``).

        Lane 8 i + r gives the address of row r of matrix i. On sm_75 the addresses of the other
        lanes must be aligned too.
        """
        blocks, warps = self.lanes.blocks, self.lanes.warps
        self._converged(mask, site, "ldmatrix.sync.aligned")
        uniform = np.ndim(address) < 2 or np.shape(address)[0] == 1
        if address.dtype.itemsize == 8:
            generic = (address - np.uint64(SHARED_WINDOW)) < np.uint64(WINDOW_BYTES)
            address = np.where(generic, address - np.uint64(SHARED_WINDOW), address)
        if self._start:
            address = address - address.dtype.type(self._start)
        address = over_lanes(address, self.shape)
        rows = address.reshape(blocks, warps, 32).astype(np.int64)
        active = None
        if mask is not None:
            active = mask.reshape(blocks, warps, 32)
            rows = np.where(active, rows, 0)
        self._check(rows, count, site)
        rows = rows[:, :, : 8 * count]
        if self.report is not None:
            alike = active is None and uniform  # every block
            self.report.matrix_load(
                site, rows[:1] if alike else rows, active, blocks if alike else 1
            )
        index = (rows >> 4) + self.shared.base[16][:, :, None]
        if self.tracker is not None:
            lanes = np.arange(blocks * warps * 32).reshape(blocks, warps, 32)[:, :, : 8 * count]
            if active is not None:
                used = active[:, :, : 8 * count]
                self.tracker.read_rows(index[used], lanes[used], mask, site)
            else:
                self.tracker.read_rows(index.ravel(), lanes.ravel(), mask, site)
        matrices = self.shared.views[16].take(index).reshape(self.warps, count, 8, 1)
        if transposed:
            halves = matrices.view(np.uint16).swapaxes(2, 3)
            matrices = np.ascontiguousarray(halves)
        words = matrices.view(np.uint32).reshape(self.warps, count, 32)
        return np.ascontiguousarray(words.swapaxes(0, 1)).reshape(count, *self.shape)

    def _check(self, rows: np.ndarray, count: int, site: int) -> None:
        bitwise_or: Any = np.bitwise_or  # NumPy's stubs differ on axis=None from version to version
        every_bit = bitwise_or.reduce(rows, axis=None)
        if self.checks.alignment and int(every_bit) & 15:
            bad = (rows & 15) != 0
            lanes = np.flatnonzero(bad)
            unused = (
                ""
                if bad[:, :, : 8 * count].any()
                else (f" (a lane that .x{count} does not use, but sm_75 wants all 32 aligned)")
            )
            raise self.lanes.fault(
                MisalignedAccessError,
                f"misaligned ldmatrix row at shared offset {int(rows.flat[lanes[0]]):#x}, "
                f"not a multiple of 16{unused}",
                site,
                lanes,
            )
        used = rows[:, :, : 8 * count]
        size = self.shared.size if self.checks.bounds else self.shared.stride
        unsigned: np.ndarray = used.view(np.uint64)  # negative offsets are large ones
        if unsigned.max() > size - 16:
            bad = np.zeros(rows.shape, bool)
            bad[:, :, : 8 * count] = (used > size - 16) | (used < 0)
            offset = int(rows[bad][0])
            raise self.lanes.fault(
                OutOfBoundsError,
                f"out-of-bounds ldmatrix row at shared offset {offset} of {self.shared.size} bytes"
                f"{self.shared.nearest(offset)}",
                site,
                np.flatnonzero(bad),
            )
