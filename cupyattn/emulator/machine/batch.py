"""A batch: thread blocks of a launch that run at the same time, and everything that they call.

The scheduler decides which lanes run which basic block next. While all lanes agree ("converged"),
the current block is a Python int in the generated code and nothing here is touched. Otherwise
`pick` runs the lanes at the lowest position (`Positions`).

Generated code carries two masks: `mask`, the lanes that run (None: all), and `merge`, which is the
same mask while lanes are diverged and None otherwise; only then must registers keep the values of
lanes that do not run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import KernelFault, KernelTrap
from cupyattn.emulator.machine.async_copies import AsyncCopies
from cupyattn.emulator.machine.atomics import AtomicOperations
from cupyattn.emulator.machine.barriers import Barriers
from cupyattn.emulator.machine.block_memory import (
    GenericMemory,
    LocalMemory,
    ParameterMemory,
    SharedMemory,
)
from cupyattn.emulator.machine.global_memory import DeviceMemory, GlobalMemory, Region
from cupyattn.emulator.machine.lanes import EXITED, WAITING, Array, Lanes, Mask, Positions, Step
from cupyattn.emulator.machine.matrix import MatrixOperations
from cupyattn.emulator.machine.memory import SlicedBuffer
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.machine.warp_sync import WarpSync
from cupyattn.emulator.program import Program
from cupyattn.emulator.report import Report


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
    unit = lanes.program.layout.shared_unit
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
        "%total_smem_size": np.asarray(-(-shared_bytes // unit) * unit, u4),
        "%smid": np.asarray(0, u4),
        "%nsmid": np.asarray(1, u4),
        "%gridid": np.asarray(0, np.uint64),
    }
    for axis, extent, count in zip("xyz", block, grid, strict=True):
        special[f"%ntid.{axis}"] = extent
        special[f"%nctaid.{axis}"] = count
    return special


class LaneScheduler:
    """The scheduler of a batch's lanes: branches, barriers and warp synchronisation."""

    def __init__(self, positions: Positions, barriers: Barriers, warp_sync: WarpSync) -> None:
        self.positions = positions
        self.barriers = barriers
        self.warp_sync = warp_sync

    def start(self) -> Step:
        """Return the first step: block 0, all threads that exist."""
        return 0, self.positions.alive, None

    def branch(
        self, predicate: Array, target: int, otherwise: int, mask: Mask, merge: Array
    ) -> Step:
        """Send the lanes with a true predicate to `target`, the others to `otherwise`."""
        if merge is not None:
            np.copyto(self.positions.each, np.where(predicate, target, otherwise), where=mask)
            return self.pick()
        if mask is None:
            taken = np.count_nonzero(predicate)
            if taken == predicate.size:
                return self.goto(target, None, None)
            if taken == 0:
                return self.goto(otherwise, None, None)
        else:
            if (predicate | ~mask).all():
                return self.goto(target, mask, None)
            if not (predicate & mask).any():
                return self.goto(otherwise, mask, None)
        self.positions.diverge(np.where(predicate, target, otherwise), mask)
        return self.pick()

    def branch_table(self, index: Array, table: Array, mask: Mask, merge: Array) -> Step:
        """Send every lane to the block that `table` holds at its index (``brx.idx``)."""
        target = table.take(np.asarray(index).astype(np.int64), mode="clip")
        if merge is None:
            if target.ndim == 0:
                return int(target), mask, None
            self.positions.diverge(target, mask)
        else:
            np.copyto(self.positions.each, target, where=mask)
        return self.pick()

    def goto(self, target: int, mask: Mask, merge: Array) -> Step:
        """Send the running lanes to `target`."""
        if merge is None:
            return (target, mask, None) if target != EXITED else (-1, None, None)
        self.positions.each[mask] = target
        return self.pick()

    def exit(self, mask: Mask, merge: Array) -> Step:
        """End the running lanes."""
        if merge is None:
            return -1, None, None
        self.positions.each[mask] = EXITED
        return self.pick()

    def pick(self) -> Step:
        """Return the next step: the lowest block that a lane is at."""
        each = self.positions.each
        number = int(each.min())
        while number == WAITING:
            if not (self.warp_sync.release() or self.barriers.release()):
                raise self.warp_sync.stuck(self.barriers.site_of) or self.barriers.stuck()
            number = int(each.min())
        return (-1, None, None) if number == EXITED else self.positions.step(number)


@dataclass
class LaunchState:
    """State that all batches of one launch share."""

    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    parameter_bytes: bytes
    device_memory: DeviceMemory
    symbols: dict[str, np.ndarray]
    checks: Checks
    report: Report | None
    recent_region: list[Region | None]
    sources: dict[str, str]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def shared_variables(self) -> list[tuple[str, int, int]]:
        """(name, offset, size) of the shared variables."""
        dynamic = self.program.layout.dynamic_shared_offset
        return [
            (name, start, size or self.shared_bytes - dynamic)
            for name, start, size in self.program.layout.shared_variables
        ]

    def symbol_address(self, name: str) -> Array:
        """Return the address of a module variable."""
        return np.asarray(self.device_memory.address(self.symbols[name]), np.uint64)


class BlockBatch:
    """Lanes, memories and scheduler of `blocks` thread blocks from `first_block` on."""

    def __init__(self, launch: LaunchState, first_block: int, blocks: int) -> None:
        program, checks, report = launch.program, launch.checks, launch.report
        self.launch = launch
        self.checks = checks
        self.report = report
        self.lanes = lanes = Lanes(
            program, launch.sources, launch.grid, launch.block, first_block, blocks
        )
        self.special = special_registers(lanes, launch.shared_bytes, launch.dynamic_shared_bytes)
        shared = SlicedBuffer(launch.shared_bytes, (blocks, 1), launch.shared_variables)
        tracker: SharedMemoryTracker | None = None
        if (checks.races or checks.uninitialized) and launch.shared_bytes:
            tracker = SharedMemoryTracker(lanes, checks, shared)
        positions = Positions(lanes)
        self.scheduler = LaneScheduler(
            positions,
            Barriers(lanes, checks, positions, tracker),
            WarpSync(lanes, checks, positions, tracker),
        )
        self.shared = SharedMemory(lanes, checks, shared, tracker, report)
        self.local = LocalMemory(lanes, checks, program.local_bytes)
        self.parameters = ParameterMemory(lanes, checks, launch.parameter_bytes)
        self.global_ = GlobalMemory(
            lanes, checks, launch.device_memory, launch.recent_region, report
        )
        self.atomics = AtomicOperations(lanes, report)
        self.generic = GenericMemory(lanes, self.shared, self.local, self.global_, self.atomics)
        self.copies = AsyncCopies(lanes, self.shared, self.global_)
        self.matrix = MatrixOperations(lanes, checks, shared, tracker, report)

    def hang(self, block: int, mask: Mask | None) -> KernelFault:
        """Return the error for a kernel that has run too many steps, the next one in `block`."""
        return self.lanes.fault(
            KernelFault,
            f"{self.checks.max_steps} basic blocks ran without an end: an endless loop, or a wait "
            "for a block that runs later (raise Checks.max_steps if not)",
            self.lanes.program.blocks[block].start,
            self.lanes.numbers(np.True_, mask),
        )

    def trap(self, mask: Mask, site: int) -> None:
        """Fail if any lane executes ``trap``."""
        lanes = self.lanes.numbers(np.True_, mask)
        if len(lanes):
            raise self.lanes.fault(KernelTrap, "the kernel executed trap", site, lanes)
