"""State that all batches of one launch share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.machine.global_memory import DeviceMemory, Region
from cupyattn.emulator.program import Program
from cupyattn.emulator.report import Report

__all__ = ["LaunchState"]


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

    def symbol_address(self, name: str) -> Any:
        """Return the address of a module variable."""
        return np.asarray(self.device_memory.address(self.symbols[name]), np.uint64)
