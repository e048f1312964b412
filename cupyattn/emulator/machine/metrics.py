"""Costs of memory accesses on the hardware: shared-memory wavefronts, global-memory sectors."""

from typing import Any

import numpy as np

__all__ = ["SECTOR_BYTES", "bank_wavefronts", "sector_counts"]

Array = Any

SECTOR_BYTES = 32
_BANK_ROW = 128  # 32 banks of 4 bytes


def bank_wavefronts(
    offsets: np.ndarray, size: int, active: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Count the passes that shared memory needs for accesses of whole warps.

    Wide accesses go in phases of 32, 16 or 8 lanes (4, 8, 16 bytes each), 128 bytes a phase. In a
    phase, different words in one bank need a pass each; lanes that want the same word share it.

    Parameters
    ----------
    offsets : (..., lanes) array
        Byte offsets, the lanes of a warp (or of one ldmatrix) along the last axis.
    size : int
        Bytes per lane.
    active : array of bool or None
        Lanes that take part, None for all.

    Returns
    -------
    (wavefronts, phases) : per warp
        Without bank conflicts the two are equal.
    """
    unit = max(size, 4)
    banks = _BANK_ROW // unit
    lanes = offsets.shape[-1]
    rows = offsets.reshape(-1, min(banks, lanes)).astype(np.int64)
    word = rows // unit
    key = ((np.arange(len(rows))[:, None] * banks + word % banks) << 20) + word // banks
    if active is not None:
        key = key[np.broadcast_to(active, offsets.shape).reshape(rows.shape)]
    distinct = np.unique(key)
    ways = np.bincount(distinct >> 20, minlength=len(rows) * banks).reshape(-1, banks).max(1)
    per_warp = ways.reshape(-1, max(1, lanes // banks))
    return per_warp.sum(1), (per_warp > 0).sum(1)


def sector_counts(
    addresses: np.ndarray, size: int, active: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Count the 32-byte sectors that each warp touches, and the fewest that could hold its data.

    Parameters
    ----------
    addresses : (warps, 32) array
    size : int
        Bytes per lane.
    active : (warps, 32) array of bool or None

    Returns
    -------
    (sectors, ideal) : (warps,) arrays
        0 for warps without an active lane.
    """
    address = addresses.astype(np.int64)
    if active is not None:
        address = np.where(active, address, -1)
    ordered = np.sort(address, axis=1)
    valid = ordered >= 0

    def distinct(values: np.ndarray) -> np.ndarray:
        new = np.ones(values.shape, bool)
        new[:, 1:] = values[:, 1:] != values[:, :-1]
        return (new & valid).sum(1)

    ideal = -(-distinct(ordered) * size // SECTOR_BYTES)
    return distinct(ordered // SECTOR_BYTES), ideal
