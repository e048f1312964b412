"""Which float32 registers can never hold a subnormal number.

``.ftz`` instructions treat subnormal inputs as zeros. An input that another ``.ftz`` instruction
made is known to be flushed already, which saves most of the work.
"""

import re
from functools import lru_cache

from cupyattn.emulator.ptx.model import Function

__all__ = ["clean_registers"]

_HEX_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}")
_COPIES = {"mov": (1,), "selp": (1, 2), "max": (1, 2), "min": (1, 2), "neg": (1,), "abs": (1,)}


def _is_clean_literal(operand: str) -> bool:
    if not _HEX_FLOAT.fullmatch(operand):
        return False
    bits = int(operand[2:], 16) & 0x7FFFFFFF
    return bits == 0 or bits >= 0x00800000


@lru_cache(maxsize=4096)
def _sources_that_matter(parts: tuple[str, ...], operands: int) -> tuple[int, ...] | None:
    """Return which operands must be clean for the result to be, () for none, None if it is not."""
    root = parts[0]
    if root == "cvt":
        from_type = parts[-1]
        if "f32" not in parts[-2:-1]:
            return None
        if from_type == "f16" or from_type[0] in "us" or "ftz" in parts:
            return ()
        return None
    if parts[-1] != "f32":
        return None
    if "ftz" in parts and root not in ("setp", "set"):
        return ()
    copied = _COPIES.get(root)
    if copied and copied[-1] >= operands:
        return None  # what is wrong with it is the lowering's business
    return copied


def clean_registers(function: Function) -> set[str]:
    """Return the float32 registers whose every definition flushes subnormals, as a fixed point."""
    clean = {r for r, kind in function.registers.items() if kind == "f32"}
    copies = []  # registers, and what they are copied of
    for x in function.instructions:
        if not x.operands or x.root in ("st", "red"):
            continue
        matter = _sources_that_matter(x.parts, len(x.operands))
        if matter == ():
            continue
        for register in x.operands[0].strip("{}").replace("|", ",").split(","):
            register = register.strip()
            if matter is None:
                clean.discard(register)
            elif register in clean:
                sources = [x.operands[i] for i in matter if not _is_clean_literal(x.operands[i])]
                copies.append((register, sources))
    changed = True
    while changed:
        changed = False
        for register, sources in copies:
            if register in clean and not clean.issuperset(sources):
                clean.discard(register)
                changed = True
    return clean
