"""Which hardware pipe a PTX instruction keeps busy."""

from __future__ import annotations

from cupyattn.emulator.ptx.model import Statement

__all__ = ["pipe"]

_XU = frozenset(
    ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "popc", "brev", "bfind"]
)
_FMA = frozenset(["add", "sub", "mul", "fma", "mad", "div"])


def pipe(instruction: Statement) -> str:
    """Return the hardware pipe that a PTX instruction keeps busy, as far as PTX can tell.

    ``tensor`` (mma), ``fma`` (float32 arithmetic, integer multiplication), ``half``, ``double``,
    ``alu`` (integer and logic), ``xu`` (special functions, conversions), ``lds`` (shared loads and
    stores), ``ldsm`` (ldmatrix), ``ldg`` (global), ``local``, ``atomic``, ``shuffle``, ``control``,
    and ``move``, most of which the assembler removes.
    """
    root, parts = instruction.root, instruction.parts
    kind = parts[-1]
    if root == "mma":
        return "tensor"
    if root in ("ldmatrix", "movmatrix"):
        return "ldsm"
    if root in ("ld", "st", "ldu"):
        for space, name in (("shared", "lds"), ("local", "local"), ("param", "move")):
            if space in parts:
                return name
        return "ldg"
    if root in ("atom", "red"):
        return "atomic"
    if root in ("shfl", "vote", "match"):
        return "shuffle"
    if root in ("bra", "brx", "ret", "exit", "bar", "barrier", "membar", "fence", "trap"):
        return "control"
    if root in ("mov", "cvta", "activemask"):
        return "move"
    if kind == "f64":
        return "double"
    if root in _XU:
        return "xu"
    if root == "cvt" and parts[-2:] == ("f32", "f16"):
        return "half"  # the assembler makes an HADD2.F32 of it
    if root == "cvt":
        return "xu" if {"f16", "f32", "bf16"} & set(parts[-2:]) else "alu"
    if kind in ("f16", "f16x2"):
        return "half"
    if root in _FMA and (kind == "f32" or root in ("mul", "mad")):
        return "fma"
    return "alu"
