"""The figures of a kernel on Turing: compiled, disassembled, counted, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.compile import compile_cubin
from cupyattn.runtime.spec import Specialisation
from cupyattn.turing.counts import LoopFigures, loop_figures
from cupyattn.turing.disassembler import disassemble
from cupyattn.turing.loops import MATRIX, steady_path, working_loops
from cupyattn.turing.machine import T4, Machine
from cupyattn.turing.sass import Instruction, parse_listing
from cupyattn.turing.simulation import utilisation


@dataclass(frozen=True)
class KernelFigures:
    """Resources of a Turing SM that a kernel takes, and the utilisation that its loops reach.

    Attributes
    ----------
    registers : int
        Of a thread.
    shared_bytes : int
        Of a CTA, static and dynamic.
    ctas_per_sm : int
        How many are resident.
    loops : tuple of LoopFigures
        The innermost loops that do the work, in the order of the code.
    """

    registers: int
    shared_bytes: int
    ctas_per_sm: int
    loops: tuple[LoopFigures, ...]

    @property
    def main(self) -> LoopFigures | None:
        """The loop with the most work; None for a kernel without products.

        Of several with as much, as over masked and over full tiles, the one with the fewest
        instructions: masks are for the few tiles at the edges.
        """
        return max(self.loops, key=_importance, default=None)


def _importance(loop: LoopFigures) -> tuple[int, int]:
    return loop.work, -loop.instructions


def analyse(
    specialisation: Specialisation, *, simulate: bool = True, machine: Machine = T4
) -> KernelFigures:
    """Compile a kernel for sm_75, and tell what it will do there.

    Parameters
    ----------
    specialisation : Specialisation
        One of the library's (`row`), or that of a `cupyattn.Kernel`.
    simulate : bool
        Simulate the main loop too: some tenths of a second.
    machine : Machine
        What to simulate: ``Machine(shared_rate=128)`` tells what a newer GPU would make of the
        same code, ``Machine(hmma_f32=16)`` is a GeForce card.

    Raises
    ------
    RuntimeError
        If NVRTC is missing, or (DisassemblerError) nvdisasm.
    """
    artifact = compile_cubin(specialisation, TURING)
    assert artifact.resources is not None  # machine code always has them
    code = _code(artifact.code, specialisation.spec.entry)
    shared_bytes = specialisation.shared_bytes + artifact.resources.static_shared_bytes
    ctas = TURING.resident_ctas(specialisation.threads, artifact.resources.registers, shared_bytes)
    return KernelFigures(
        registers=artifact.resources.registers,
        shared_bytes=shared_bytes,
        ctas_per_sm=ctas,
        loops=code_figures(code, specialisation.threads, ctas, simulate=simulate, machine=machine),
    )


@lru_cache(maxsize=1)  # for a row on one card after the other: to list it takes as long as to play
def _code(cubin: bytes, entry: str) -> Sequence[Instruction]:
    return parse_listing(disassemble(cubin))[entry]


def code_figures(
    code: Sequence[Instruction],
    threads: int,
    ctas: int,
    *,
    simulate: bool = True,
    machine: Machine = T4,
) -> tuple[LoopFigures, ...]:
    """Count each working loop; with `simulate`, play the main one on an SM that holds `ctas`.

    Products on tensor cores that the card lacks are not played: they bind, whatever else there is.
    """
    warps = -(-threads // WARP_SIZE)
    work, bodies = working_loops(code)
    figures = [loop_figures(body, work, warps, ctas, machine) for body in bodies]
    main = max(range(len(figures)), key=lambda number: _importance(figures[number]), default=None)
    simulate = simulate and (machine.tensor_cores or work is not MATRIX)
    if simulate and ctas and main is not None:
        path = steady_path(bodies[main], work)
        played = utilisation(path, work, warps, ctas, machine)
        figures[main] = replace(figures[main], utilisation=played)
    return tuple(figures)
