"""A model of memory-bound calls on Turing: from their bytes, sectors and instructions.

The emulator counts what a call's kernels do; here the counts become times on a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cupyattn.emulator import Report
from cupyattn.runtime.arch import SUB_PARTITIONS
from cupyattn.turing.machine import T4, Machine

_SECTOR_BYTES = 32
_WAVEFRONT_BYTES = 128
_REMOVED = "move"
"""Instructions that the assembler mostly removes."""


@dataclass(frozen=True)
class MemoryFigures:
    """A call on Turing: what it has to move, what it asks for, what it keeps busy.

    Attributes
    ----------
    least_bytes : int
        Of the arrays that it cannot do without, each read or written once.
    sector_bytes : int
        Of the 32-byte sectors that its warps touch, each access on its own: what L1 and L2 deliver
        and take, with what a row of weights costs in every CTA.
    instructions : dict
        Warp instructions by the pipe that they occupy (`cupyattn.emulator.Report`): those of the
        PTX, of which the assembler fuses some.
    wavefronts : int
        Passes of shared memory, bank conflicts included.
    """

    least_bytes: int
    sector_bytes: int
    instructions: Mapping[str, int]
    wavefronts: int

    @property
    def sector_ratio(self) -> float:
        """Bytes of touched sectors for each that has to move: 1 is the best."""
        return self.sector_bytes / self.least_bytes

    def cycles(self, machine: Machine = T4) -> dict[str, float]:
        """Return for how many cycles of one SM the call keeps each pipe busy; "issue" too."""
        counts = Counter(self.instructions)
        of_a_partition = {
            "fma": counts["fma"] * machine.fma,
            "alu": counts["alu"] * machine.alu,
            "fp16": counts["half"] * machine.fp16,
            "xu": counts["xu"] * machine.xu,
            "tensor": counts["tensor"] * machine.hmma_f32,
            "issue": sum(counts.values()) - counts[_REMOVED],
        }
        passes = self.wavefronts * _WAVEFRONT_BYTES + self.sector_bytes
        return {
            **{pipe: cycles / SUB_PARTITIONS for pipe, cycles in of_a_partition.items()},
            "lsu": passes / machine.shared_rate + counts["shuffle"] * machine.shuffle,
        }

    def seconds(self, machine: Machine = T4) -> dict[str, float]:
        """Return how long the call keeps each pipe of all SMs busy, and the "memory"."""
        clock = machine.multiprocessors * machine.clock_mhz * 1e6
        busy = {pipe: cycles / clock for pipe, cycles in self.cycles(machine).items()}
        return {"memory": self.least_bytes / (machine.memory_gb_s * 1e9), **busy}

    def bound(self, machine: Machine = T4) -> str:
        """Return what is busy for the longest."""
        seconds = self.seconds(machine)
        return max(seconds, key=seconds.__getitem__)

    def bandwidth_share(self, machine: Machine = T4) -> float | None:
        """Return the share of the card's bandwidth that no schedule of these kernels exceeds.

        None for products on tensor cores of a card that has none: other kernels run there.
        """
        if self.instructions.get("tensor") and not machine.tensor_cores:
            return None
        seconds = self.seconds(machine)
        return seconds["memory"] / max(seconds.values())


def memory_figures(report: Report, least_bytes: int) -> MemoryFigures:
    """Return what a call asks of a Turing card, of what the emulator counted.

    Parameters
    ----------
    report : cupyattn.emulator.Report
        Of one call, all its kernels or one of them (`Report.kernels`).
    least_bytes : int
        What it has to move: the arrays that it cannot do without, each once.

    Examples
    --------
    >>> figures = MemoryFigures(320_000, 320_000, {"ldg": 2500, "fma": 5000}, wavefronts=0)
    >>> figures.bound(), figures.sector_ratio, figures.bandwidth_share()
    ('memory', 1.0, 1.0)
    """
    accesses = report.accesses
    return MemoryFigures(
        least_bytes=least_bytes,
        sector_bytes=_SECTOR_BYTES * sum(access.sectors for access in accesses),
        instructions=report.instruction_mix,
        wavefronts=sum(access.wavefronts for access in accesses),
    )
