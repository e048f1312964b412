"""``%tid``, ``%ctaid``, ``%laneid`` and the other registers that the hardware sets."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.machine.lanes import Lanes

__all__ = ["special_registers"]

Array = Any


def special_registers(
    lanes: Lanes, shared_bytes: int, dynamic_shared_bytes: int
) -> dict[str, Array]:
    """Return what the special registers hold, by name."""
    u4 = np.uint32
    grid = [np.asarray(n, u4) for n in lanes.grid]
    block = [np.asarray(n, u4) for n in lanes.block]
    thread = np.arange(lanes.threads, dtype=u4)[None]
    index = np.arange(lanes.first_block, lanes.first_block + lanes.blocks, dtype=u4)[:, None]
    lane = thread % u4(32)
    one = u4(1)
    below = (one << lane) - one
    special = {
        "%tid.x": thread % block[0],
        "%tid.y": thread // block[0] % block[1],
        "%tid.z": thread // (block[0] * block[1]),
        "%ctaid.x": index % grid[0],
        "%ctaid.y": index // grid[0] % grid[1],
        "%ctaid.z": index // (grid[0] * grid[1]),
        "%laneid": lane,
        "%warpid": thread // u4(32),
        "%nwarpid": np.asarray(lanes.warps, u4),
        "%lanemask_eq": one << lane,
        "%lanemask_lt": below,
        "%lanemask_le": below | (one << lane),
        "%lanemask_gt": ~(below | (one << lane)),
        "%lanemask_ge": ~below,
        "%dynamic_smem_size": np.asarray(dynamic_shared_bytes, u4),
        "%total_smem_size": np.asarray(shared_bytes, u4),
        "%smid": np.asarray(0, u4),
        "%nsmid": np.asarray(1, u4),
        "%gridid": np.asarray(0, np.uint64),
    }
    for axis, extent, count in zip("xyz", block, grid, strict=True):
        special[f"%ntid.{axis}"] = extent
        special[f"%nctaid.{axis}"] = count
    return special
