"""The order in which a basic block is written: what can be stacked, as early as it can stand.

A compiler puts the store of each result behind its computation; equal computations then never wait
together for `codegen.stacking`. Arithmetic on registers cannot fail, so it may run ahead of what
the program does before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.emulator.codegen.control_flow import registers_of
from cupyattn.emulator.codegen.stack_operations import operation_of
from cupyattn.emulator.ptx.model import Instruction

if TYPE_CHECKING:
    from cupyattn.emulator.codegen.generator import Generator

__all__ = ["early_arithmetic"]


def early_arithmetic(
    gen: Generator, instructions: list[Instruction]
) -> list[tuple[Instruction, bool]]:
    """Return the instructions of a block in the order to write them, and which can be stacked.

    Those that can be go up to the last other instruction that gives them an operand, or that reads
    or writes their target; the others keep their order. Integer instructions count only if they go
    on from others that do: addresses and counters are mostly the same in many lanes, and cheaper
    as they are.
    """
    written_at: dict[str, int] = {}  # by register: behind how many of the others it is written
    read_at: dict[str, int] = {}
    stacked: set[str] = set()  # registers written by what can be stacked
    placed = []
    others = 0
    for position, instruction in enumerate(instructions):
        written, read = registers_of(instruction, gen.function.registers)
        found = operation_of(gen, instruction)
        early = found is not None and (found[0].of_floats or not stacked.isdisjoint(read))
        if early:
            at = max(
                *(written_at.get(register, 0) for register in (*read, *written)),
                *(read_at.get(register, 0) for register in written),
            )
            stacked.update(written)
        else:
            others += 1
            at = others
            stacked.difference_update(written)
        for register in written:
            written_at[register] = at
        for register in read:
            read_at[register] = max(at, read_at.get(register, 0))
        placed.append((at, position, instruction, early))
    placed.sort(key=lambda place: place[:2])
    return [(instruction, early) for _, _, instruction, early in placed]
