"""A batch: some thread blocks of a launch, executed together.

Every thread of the batch is a lane. A register is one NumPy array over the lanes, of shape
(blocks, threads), or of a shape that broadcasts to it: (blocks, 1) for what is uniform in a block,
(1, threads) for what depends on the thread index alone, () for a constant. A block whose size is
no multiple of 32 is padded with lanes that have never been alive.
"""

from __future__ import annotations

import linecache
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.emulator.errors import KernelFault, KernelTrap
from cupyattn.emulator.machine.atomics import AtomicOperations
from cupyattn.emulator.machine.block_memory import LocalMemory, ParameterMemory, SharedMemory
from cupyattn.emulator.machine.generic_memory import GenericMemory
from cupyattn.emulator.machine.global_memory import GlobalMemory
from cupyattn.emulator.machine.matrix import MatrixOperations
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.machine.scheduler import Scheduler
from cupyattn.emulator.ptx.mangling import readable

if TYPE_CHECKING:
    from cupyattn.emulator.launch import LaunchState

__all__ = ["Batch"]

Array = Any  # np.ndarray or NumPy scalar: arithmetic on 0-d arrays returns scalars


class Batch:
    """Lanes, memories and scheduler of `blocks` thread blocks from `first_block` on."""

    def __init__(self, launch: LaunchState, first_block: int, blocks: int) -> None:
        self.launch = launch
        self.program = launch.program
        self.checks = launch.checks
        self.report = launch.report
        self.first_block = first_block
        self.blocks = blocks
        self.real_threads = launch.threads
        self.warps = -(-launch.threads // 32)
        self.threads = 32 * self.warps
        self.shape = (blocks, self.threads)
        self.special = self._special_registers()
        padded = self.threads != self.real_threads
        self.exists: np.ndarray | None = None
        if padded:
            self.exists = np.zeros(self.shape, bool)
            self.exists[:, : self.real_threads] = True
        self.tracker: SharedMemoryTracker | None = None
        if (self.checks.races or self.checks.uninitialized) and launch.shared_bytes:
            self.tracker = SharedMemoryTracker(self)
        self.scheduler = Scheduler(self)
        self.shared = SharedMemory(self)
        self.local = LocalMemory(self)
        self.parameters = ParameterMemory(self)
        self.global_ = GlobalMemory(self, launch.device_memory)
        self.generic = GenericMemory(self)
        self.atomics = AtomicOperations(self)
        self.matrix = MatrixOperations(self)

    def _special_registers(self) -> dict[str, Array]:
        launch = self.launch
        u4 = np.uint32
        grid = [np.asarray(n, u4) for n in launch.grid]
        block = [np.asarray(n, u4) for n in launch.block]
        thread = np.arange(self.threads, dtype=u4)[None]
        index = np.arange(self.first_block, self.first_block + self.blocks, dtype=u4)[:, None]
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
            "%nwarpid": np.asarray(self.warps, u4),
            "%lanemask_eq": one << lane,
            "%lanemask_lt": below,
            "%lanemask_le": below | (one << lane),
            "%lanemask_gt": ~(below | (one << lane)),
            "%lanemask_ge": ~below,
            "%dynamic_smem_size": np.asarray(launch.dynamic_shared_bytes, u4),
            "%total_smem_size": np.asarray(launch.shared_bytes, u4),
            "%smid": np.asarray(0, u4),
            "%nsmid": np.asarray(1, u4),
            "%gridid": np.asarray(0, np.uint64),
        }
        for axis, extent, count in zip("xyz", block, grid, strict=True):
            special[f"%ntid.{axis}"] = extent
            special[f"%nctaid.{axis}"] = count
        return special

    # ------------------------------------------------------------------ who and where
    def block_index(self, lane: int) -> tuple[int, int, int]:
        """Return the block index (x, y, z) of a lane, counted over the whole batch."""
        x, y, _ = self.launch.grid
        b = self.first_block + lane // self.threads
        return b % x, b // x % y, b // (x * y)

    def thread_index(self, lane: int) -> tuple[int, int, int]:
        """Return the thread index (x, y, z) of a lane, counted over the whole batch."""
        x, y, _ = self.launch.block
        t = lane % self.threads
        return t % x, t // x % y, t // (x * y)

    def lanes(self, bad: Array, mask: Array | None) -> np.ndarray:
        """Return the flat numbers of the lanes marked in `bad`.

        `bad` covers all lanes (broadcast) if `mask` is None, otherwise the lanes of the mask.
        """
        if mask is None:
            marked = np.broadcast_to(bad, self.shape)
            if self.exists is not None:
                marked = marked & self.exists
            return np.flatnonzero(marked)
        active = np.flatnonzero(np.broadcast_to(mask, self.shape))
        return active[np.broadcast_to(bad, active.shape)]

    def describe(self, site: int) -> str:
        """Return "file:line: source [instruction]" of an instruction."""
        instruction = self.program.instructions[site]
        file, line = instruction.location
        if not line:
            return f"[{instruction}]"
        if file in self.launch.sources:
            source = "".join(self.launch.sources[file].splitlines()[line - 1 : line]).strip()
        else:
            source = linecache.getline(file, line).strip() if os.path.isabs(file) else ""
        return f"{os.path.basename(file)}:{line}: {source} [{instruction}]"

    def fault(
        self, kind: type[KernelFault], text: str, site: int, lanes: np.ndarray | list[int]
    ) -> KernelFault:
        """Return the exception `kind`, its message completed with block, thread and line."""
        entry = readable(self.program.name)
        line = self.program.instructions[site].location[1]
        if not len(lanes):
            return kind(f"{text}; in {entry}, {self.describe(site)}", line=line)
        lane = int(lanes[0])
        block, thread = self.block_index(lane), self.thread_index(lane)
        more = f" (and {len(lanes) - 1} more threads)" if len(lanes) > 1 else ""
        return kind(
            f"{text}; block {block}, thread {thread}{more}; in {entry}, {self.describe(site)}",
            block=block,
            thread=thread,
            line=line,
        )

    def hang(self, block: int, mask: Array | None) -> KernelFault:
        """Return the error for a kernel that has run too many steps, the next one in `block`."""
        return self.fault(
            KernelFault,
            f"{self.checks.max_steps} basic blocks ran without an end: an endless loop, or a wait "
            "for a block that runs later (raise Checks.max_steps if not)",
            self.program.blocks[block].start,
            self.lanes(np.True_, mask),
        )

    def trap(self, mask: Array, site: int) -> None:
        """Fail if any lane executes ``trap``."""
        lanes = self.lanes(np.True_, mask)
        if len(lanes):
            raise self.fault(KernelTrap, "the kernel executed trap", site, lanes)
