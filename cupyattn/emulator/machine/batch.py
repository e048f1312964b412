"""A batch: some thread blocks of a launch, executed together, and all that their code calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.errors import KernelFault, KernelTrap
from cupyattn.emulator.machine.atomics import AtomicOperations
from cupyattn.emulator.machine.barriers import Barriers
from cupyattn.emulator.machine.block_memory import LocalMemory, ParameterMemory, SharedMemory
from cupyattn.emulator.machine.generic_memory import GenericMemory
from cupyattn.emulator.machine.global_memory import GlobalMemory
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.launch_state import LaunchState
from cupyattn.emulator.machine.matrix import MatrixOperations
from cupyattn.emulator.machine.positions import Positions
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.machine.scheduler import Scheduler
from cupyattn.emulator.machine.special_registers import special_registers
from cupyattn.emulator.machine.storage import Storage
from cupyattn.emulator.machine.warp_sync import WarpSync

__all__ = ["Batch"]

Array = Any


class Batch:
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
        shared = Storage(launch.shared_bytes, (blocks, 1), launch.shared_variables)
        tracker: SharedMemoryTracker | None = None
        if (checks.races or checks.uninitialized) and launch.shared_bytes:
            tracker = SharedMemoryTracker(lanes, checks, shared)
        positions = Positions(lanes)
        self.scheduler = Scheduler(
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
        self.matrix = MatrixOperations(lanes, checks, shared, tracker, report)

    def hang(self, block: int, mask: Array | None) -> KernelFault:
        """Return the error for a kernel that has run too many steps, the next one in `block`."""
        return self.lanes.fault(
            KernelFault,
            f"{self.checks.max_steps} basic blocks ran without an end: an endless loop, or a wait "
            "for a block that runs later (raise Checks.max_steps if not)",
            self.lanes.program.blocks[block].start,
            self.lanes.numbers(np.True_, mask),
        )

    def trap(self, mask: Array, site: int) -> None:
        """Fail if any lane executes ``trap``."""
        lanes = self.lanes.numbers(np.True_, mask)
        if len(lanes):
            raise self.lanes.fault(KernelTrap, "the kernel executed trap", site, lanes)
