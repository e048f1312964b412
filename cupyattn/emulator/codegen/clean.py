"""Which float32 registers can never hold a subnormal number.

``.ftz`` instructions treat subnormal inputs as zeros. An input that another ``.ftz`` instruction
made is known to be flushed already, which saves most of the work.
"""

import re

from cupyattn.emulator.ptx.model import Function, Instruction

__all__ = ["clean_registers"]

_HEX_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}")
_COPIES = {"mov": (1,), "selp": (1, 2), "max": (1, 2), "min": (1, 2), "neg": (1,), "abs": (1,)}


def _is_clean_literal(operand: str) -> bool:
    if not _HEX_FLOAT.fullmatch(operand):
        return False
    bits = int(operand[2:], 16) & 0x7FFFFFFF
    return bits == 0 or bits >= 0x00800000


def _sources_that_matter(x: Instruction) -> tuple[int, ...] | None:
    """Return which operands must be clean for the result to be, () for none, None if it is not."""
    if x.root == "cvt":
        from_type = x.parts[-1]
        if "f32" not in x.parts[-2:-1]:
            return None
        if from_type == "f16" or from_type[0] in "us" or "ftz" in x.parts:
            return ()
        return None
    if x.parts[-1] != "f32":
        return None
    if "ftz" in x.parts and x.root not in ("setp", "set"):
        return ()
    copied = _COPIES.get(x.root)
    if copied and copied[-1] >= len(x.operands):
        return None  # what is wrong with it is the lowering's business
    return copied


def clean_registers(function: Function) -> set[str]:
    """Return the float32 registers whose every definition flushes subnormals, as a fixed point."""
    clean = {r for r, kind in function.registers.items() if kind == "f32"}
    definitions = []
    for x in function.instructions:
        if not x.operands:
            continue
        target = x.operands[0]
        matter = _sources_that_matter(x)
        if x.root in ("st", "red"):
            continue
        for register in target.strip("{}").replace("|", ",").split(","):
            register = register.strip()
            if register in clean:
                definitions.append((register, x, matter))
    changed = True
    while changed:
        changed = False
        for register, x, matter in definitions:
            if register in clean and (
                matter is None
                or not all(
                    x.operands[i] in clean or _is_clean_literal(x.operands[i]) for i in matter
                )
            ):
                clean.discard(register)
                changed = True
    return clean
