"""The loops of a kernel that do its work, and the path that an iteration takes through one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cupyattn.runtime.arch import WARP_SIZE
from cupyattn.turing.pipes import pipe_of
from cupyattn.turing.sass import Instruction


class Work(NamedTuple):
    """The main work of a kernel: instructions of one pipe, which its other work must not delay."""

    pipe: str
    does: Callable[[Instruction], bool]
    flop: int
    """Floating-point operations of one of them, of a warp."""


MATRIX = Work("tensor", lambda instruction: pipe_of(instruction) == "tensor", 2 * 16 * 8 * 8)
"""Products on tensor cores."""

FFMA = Work("fma", lambda instruction: instruction.name in ("FFMA", "FFMA32I"), 2 * WARP_SIZE)
"""Products in float32; the pipe's other instructions are not the work."""

# A forward branch over any of these is taken to fall through: `if (more) load the next tile`.
# Over others, such as rescaling and masking, it is taken to jump: they are rare.
_STEADY = ("LDG", "STG", "LDS", "STS", "LDSM", "barrier")


def working_loops(
    code: Sequence[Instruction],
) -> tuple[Work, list[Sequence[Instruction]]]:
    """Return what the kernel's work is, and its innermost loops that do any of it.

    Tensor-core products, or in a kernel without them float32 products.
    """
    for work in (MATRIX, FFMA):
        found = [code[start : end + 1] for start, end in _innermost(code, work)]
        if found:
            break
    return work, found


def _innermost(code: Sequence[Instruction], work: Work) -> list[tuple[int, int]]:
    """First and last index of each loop, from its backward branch and that branch's target."""
    index = {instruction.address: k for k, instruction in enumerate(code)}
    loops = {
        (index[instruction.target], k)
        for k, instruction in enumerate(code)
        if instruction.target in index and index[instruction.target] < k
    }
    # What begins inside a loop and ends behind it is a rare block that jumps back: no loop.
    loops = {
        (start, end)
        for start, end in loops
        if not any(first < start <= last < end for first, last in loops)
    }
    loops = {(start, end) for start, end in loops if any(map(work.does, code[start : end + 1]))}
    return sorted(
        (start, end)
        for start, end in loops
        if not any(
            start <= first and last <= end and (start, end) != (first, last)
            for first, last in loops
        )
    )


def steady_path(body: Sequence[Instruction], work: Work) -> list[Instruction]:
    """Return the instructions of a loop that an iteration in steady state executes.

    Predicated instructions count as executed. A forward branch within the loop is taken if it is
    unconditional, or if it skips no product, no barrier and no access to shared or global memory.
    """
    return list(_walk(body, work))


def _walk(body: Sequence[Instruction], work: Work) -> Iterator[Instruction]:
    index = {instruction.address: k for k, instruction in enumerate(body)}
    k = 0
    while k < len(body):
        instruction = body[k]
        yield instruction
        target = -1 if instruction.target is None else index.get(instruction.target, -1)
        skipped = body[k + 1 : max(target, k + 1)]
        is_steady = any(work.does(each) or pipe_of(each) in _STEADY for each in skipped)
        diverges = "DIV" in instruction.modifiers  # taken only by a warp that is not together
        if target > k and not diverges and (instruction.is_unconditional or not is_steady):
            k = target
        else:
            k += 1
