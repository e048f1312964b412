"""Which pipe executes an instruction, for how many cycles, and how many bytes it moves."""

from __future__ import annotations

import re

from cupyattn.runtime.arch import WARP_SIZE
from cupyattn.turing.machine import Machine
from cupyattn.turing.sass import Instruction

MEMORY = ("LDSM", "LDS", "STS", "LDG", "STG", "LDL", "STL", "SHFL")
"""Instructions that the load/store unit of the SM serves: one pipe, but counted by kind."""

ARITHMETIC = ("tensor", "fp16", "fma", "alu", "xu", "uniform")
"""Pipes that each sub-partition has for itself."""

GLOBAL = ("LDG", "STG")
SPILLS = ("LDL", "STL")
"""Local memory: registers that did not suffice, or arrays that are indexed as the kernel runs."""

_PIPE_OF = {
    name: pipe
    for pipe, names in {
        "tensor": "HMMA IMMA BMMA",
        "fp16": "HFMA2 HADD2 HMUL2 HSETP2 HSET2 HMNMX2",
        "fma": "FFMA FADD FMUL IMAD IMUL FFMA32I FADD32I FMUL32I",
        "xu": "MUFU F2F I2F F2I FRND POPC FLO BREV",
        "LDSM": "LDSM",
        "LDS": "LDS",
        "STS": "STS ATOMS",
        "LDG": "LDG LD",
        "STG": "STG ST RED ATOMG ATOM",
        "LDL": "LDL",
        "STL": "STL",
        "SHFL": "SHFL",
        "barrier": "BAR DEPBAR MEMBAR ERRBAR",
        "control": "BRA BRX BSSY BSYNC BREAK EXIT WARPSYNC CALL RET NOP YIELD",
        "uniform": "R2UR S2UR",
    }.items()
    for name in names.split()
}
_WORD = 4  # bytes: the load/store unit serves a narrower access no faster
_THREADS = re.compile(r",\s*0x([0-9a-f]+)\s*$")  # of a BAR
_BYTES_OF_MODIFIER = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def pipe_of(instruction: Instruction) -> str:
    """Return the pipe of an instruction: one of ARITHMETIC or MEMORY, "barrier" or "control".

    What the table does not know is taken for an integer instruction, or if its name begins with U
    for one of the uniform datapath.
    """
    name = instruction.name
    return _PIPE_OF.get(name) or ("uniform" if name.startswith("U") else "alu")


def access_bytes(instruction: Instruction) -> int:
    """Return the bytes that each thread of a memory instruction moves.

    Examples
    --------
    An 8x8 matrix of float16 is 128 bytes, 4 of each thread:

    >>> [access_bytes(Instruction(0, opcode)) for opcode in ("LDSM.16.M88.4", "LDG.E.128.SYS")]
    [16, 16]
    """
    modifiers = instruction.modifiers
    if instruction.name == "LDSM":
        return _WORD * int(modifiers[-1]) if modifiers[-1] in ("2", "4") else _WORD
    sizes = [_BYTES_OF_MODIFIER[each] for each in modifiers if each in _BYTES_OF_MODIFIER]
    return max(sizes, default=_WORD)


def interval(instruction: Instruction, machine: Machine) -> int:
    """Return the cycles for which an instruction occupies its pipe of a sub-partition."""
    pipe = pipe_of(instruction)
    if pipe == "tensor":
        if instruction.name == "IMMA":
            return machine.imma
        return machine.hmma_f32 if "F32" in instruction.modifiers else machine.hmma_f16
    return {
        "fp16": machine.fp16,
        "fma": machine.fma,
        "alu": machine.alu,
        "xu": machine.xu,
        "uniform": machine.alu,
    }.get(pipe, 1)


def service(instruction: Instruction, machine: Machine) -> int:
    """Return the cycles of the SM's load/store unit, 0 for what it does not serve."""
    pipe = pipe_of(instruction)
    if pipe not in MEMORY:
        return 0
    if pipe == "SHFL":
        return machine.shuffle
    moved = WARP_SIZE * max(access_bytes(instruction), _WORD)
    return max(1, -int(-moved // machine.shared_rate))


def latency(instruction: Instruction, machine: Machine) -> int:
    """Return the cycles until the scoreboard is free that waits for an instruction's result.

    They count from the service of a memory instruction, and from the issue of any other.
    """
    pipe = pipe_of(instruction)
    if pipe in MEMORY:
        return {
            "LDSM": machine.shared_latency,
            "LDS": machine.shared_latency,
            "SHFL": machine.shared_latency,
            "LDL": machine.l1_latency,
            "LDG": machine.global_latency,
        }.get(pipe, machine.store_latency)
    return {"tensor": machine.hmma_latency, "xu": machine.xu_latency}.get(
        pipe, machine.other_latency
    )


def barrier_warps(instruction: Instruction, warps: int) -> int:
    """Return how many warps of a CTA of `warps` meet at an instruction; 0 if none wait there.

    A barrier of a part of the CTA says how many threads it joins; they are taken to be neighbours.
    """
    if instruction.name != "BAR" or "ARV" in instruction.modifiers:
        return 0
    threads = _THREADS.search(instruction.operands)
    return (int(threads[1], 16) // WARP_SIZE if threads else 0) or warps
