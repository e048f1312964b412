"""Which lowering writes which instruction."""

from __future__ import annotations

from cupyattn.emulator.codegen import arithmetic, control, conversion, memory_access, warp_level
from cupyattn.emulator.codegen.generator import Generator, Lowering
from cupyattn.emulator.ptx.model import Instruction

__all__ = ["CONTROL", "lowering_of"]

# Instructions that end a basic block and say themselves where to go on.
CONTROL = frozenset(["bra", "brx", "ret", "exit", "bar", "barrier", "shfl", "vote", "match"])

_LOWERINGS: dict[str, Lowering] = {
    **control.LOWERINGS,
    **arithmetic.LOWERINGS,
    **conversion.LOWERINGS,
    **memory_access.LOWERINGS,
    **warp_level.LOWERINGS,
}


def lowering_of(generator: Generator, instruction: Instruction) -> Lowering:
    """Return the lowering for `instruction`.

    Raises
    ------
    UnsupportedPTXError
        There is none.
    """
    if instruction.root not in _LOWERINGS:
        raise generator.unsupported(instruction)
    return _LOWERINGS[instruction.root]
