"""Exact counts of an iteration's work for each pipe of an SM, and limits that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cupyattn.runtime.arch import SUB_PARTITIONS
from cupyattn.turing.machine import (
    ARITHMETIC,
    GLOBAL,
    MEMORY,
    SPILLS,
    T4,
    Machine,
    access_bytes,
    interval,
    pipe_of,
    service,
)
from cupyattn.turing.power import Sustained, energy, sustained
from cupyattn.turing.sass import SassInstruction
from cupyattn.turing.simulation import LoopWork, Utilisation, steady_path

_WIDEST = 16  # bytes of one access of a thread


@dataclass(frozen=True)
class LoopFigures:
    """A loop on Turing; counts are instructions of one warp in one iteration.

    Attributes
    ----------
    start, end : int
        Addresses of its first and last instruction.
    work_pipe : str
        The pipe that does the work: "tensor", or "fma" for float32 products.
    work : int
        Its instructions that are the work: products.
    instructions, skipped : int
        On the steady path, and in branches that are taken to be rare.
    counts : dict
        Instructions of each pipe; those of the load/store unit by kind.
    narrow_global : int
        Loads and stores of global memory of less than 16 bytes a thread.
    spill_bytes : int
        That each thread loads from and stores to local memory.
    cycles : dict
        Cycles for which all resident warps keep each pipe of the SM busy; "lsu" is the load/store
        unit, "issue" the sub-partitions' schedulers.
    work_cycles : float
        The work's share of those of its pipe.
    work_flop : float
        The operations of that work, of all resident warps.
    utilisation : Utilisation or None
        Simulated, for the main loop of a kernel.
    of_integers : bool
        Whether all of the work are products of integers on tensor cores.
    picojoules : float
        The energy of all resident warps, at the lowest voltage.
    """

    start: int
    end: int
    work_pipe: str
    work: int
    instructions: int
    skipped: int
    counts: dict[str, int]
    narrow_global: int
    spill_bytes: int
    cycles: dict[str, float]
    work_cycles: float
    work_flop: float
    utilisation: Utilisation | None = None
    of_integers: bool = False
    picojoules: float = 0.0

    @property
    def flop_per_cycle(self) -> float | None:
        """Operations in a cycle of an SM, at the simulated utilisation; None without one."""
        if self.utilisation is None:
            return None
        return self.work_flop / self.work_cycles * self.utilisation.mean

    def sustained(self, machine: Machine) -> Sustained | None:
        """Return the clock that a GPU holds under its power limit; None without utilisation."""
        if self.utilisation is None:
            return None
        cycles = self.work_cycles / self.utilisation.mean
        return sustained(self.picojoules / cycles, machine)

    @property
    def lsu_ratio(self) -> float | None:
        """Cycles of the load/store unit for each cycle of the work: above 1 it is the limit.

        None where no CTA fits on an SM.
        """
        return self.cycles["lsu"] / self.work_cycles if self.work_cycles else None

    @property
    def binding_pipe(self) -> str:
        """The pipe with the most cycles."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def bound(self) -> float | None:
        """The utilisation that no schedule can exceed; None where no CTA fits on an SM."""
        busiest = self.cycles[self.binding_pipe]
        return self.work_cycles / busiest if busiest else None


def loop_figures(
    body: Sequence[SassInstruction], work: LoopWork, warps: int, ctas: int, machine: Machine = T4
) -> LoopFigures:
    """Count a loop of a kernel of which an SM holds `ctas` CTAs of `warps` warps."""
    path = steady_path(body, work)
    products = [each for each in path if work.does(each)]
    resident = warps * ctas

    def busy(instructions: Iterable[SassInstruction]) -> float:
        return sum(interval(each, machine) for each in instructions) * resident / SUB_PARTITIONS

    by_pipe = {
        pipe: [each for each in path if pipe_of(each) == pipe] for pipe in (*ARITHMETIC, *MEMORY)
    }
    return LoopFigures(
        start=body[0].address,
        end=body[-1].address,
        work_pipe=work.pipe,
        work=len(products),
        instructions=len(path),
        skipped=len(body) - len(path),
        counts=dict(Counter(map(pipe_of, path))),
        narrow_global=sum(
            access_bytes(each) < _WIDEST for kind in GLOBAL for each in by_pipe[kind]
        ),
        spill_bytes=sum(access_bytes(each) for kind in SPILLS for each in by_pipe[kind]),
        cycles={
            **{pipe: busy(by_pipe[pipe]) for pipe in ARITHMETIC if by_pipe[pipe]},
            "lsu": float(sum(service(each, machine) for each in path) * resident),
            "issue": len(path) * resident / SUB_PARTITIONS,
        },
        work_cycles=busy(products),
        work_flop=float(sum(map(work.flop, products)) * resident),
        of_integers=all(each.name == "IMMA" for each in products),
        picojoules=energy(path) * resident,
    )
