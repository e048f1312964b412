"""Shuffles, votes, matches and matrix products."""

from __future__ import annotations

from cupyattn.emulator.codegen.control import meet
from cupyattn.emulator.codegen.generator import Generator, Lowering
from cupyattn.emulator.codegen.products import ACCUMULATORS, MMA_STEPS, fragments
from cupyattn.emulator.ptx.data_types import SIZE, unsigned
from cupyattn.emulator.ptx.model import Instruction

__all__ = ["LOWERINGS"]


def _shuffle(gen: Generator, x: Instruction) -> None:
    if x.parts[1] != "sync":
        raise gen.unsupported(x, "shfl without .sync")
    meet(gen, x, [gen.value(o, "u4") for o in x.operands[1:4]], x.operands[4])


def _vote(gen: Generator, x: Instruction) -> None:
    if x.parts[1] != "sync":
        raise gen.unsupported(x, "vote without .sync")
    meet(gen, x, [gen.value(x.operands[1], "b1")], x.operands[2])


def _match(gen: Generator, x: Instruction) -> None:
    meet(gen, x, [gen.value(x.operands[1], unsigned(SIZE[x.parts[-1]]))], x.operands[2])


def _receive(gen: Generator, x: Instruction) -> None:
    """Write what the lanes got from the ``shfl``, ``vote`` or ``match`` before: value|predicate."""
    targets = [name.strip() for name in x.operands[0].split("|")]
    if x.parts[1] == "vote" and x.parts[-1] == "pred":
        targets.insert(0, "_")
    gen.assign(targets[0], "warp_sync.value", "u4")
    if len(targets) > 1 and (targets[1] not in gen.names or gen.flow.use_count[targets[1]]):
        gen.assign(targets[1], "warp_sync.flag", "b1")


def _active_mask(gen: Generator, x: Instruction) -> None:
    gen.assign(x.operands[0], f"active_mask({gen.mask}, shape)", "u4")


def _move_matrix(gen: Generator, x: Instruction) -> None:
    value = gen.value(x.operands[1], "u4")
    gen.assign(x.operands[0], f"matrix.transpose({value}, {gen.mask}, {x.site})", "u4")


def _multiply(gen: Generator, x: Instruction) -> None:
    """One product by itself; those with float32 accumulators are mostly fused (`products`)."""
    types = x.parts[-4:]
    accumulator = types[0]
    if (
        x.parts[3] not in MMA_STEPS
        or x.parts[-6:-4] != ("row", "col")
        or types not in (("f16",) * 4, ("f32", "f16", "f16", "f32"))
    ):
        raise gen.unsupported(
            x, "mma.m16n8k8 and m16n8k16 .row.col of f16 with f16 or f32 accumulators only"
        )
    steps, sums = MMA_STEPS[x.parts[3]], ACCUMULATORS // (1 + (accumulator == "f16"))
    found = fragments(x)
    if [len(names) for names in found] != [sums, 2 * steps, steps, sums]:
        raise gen.unsupported(
            x, f"{x.parts[3]} takes fragments of {sums}, {2 * steps}, {steps} and {sums} registers"
        )
    d, a, b, c = found
    left = ", ".join(gen.value(name, "u4") for name in a)
    right = ", ".join(gen.value(name, "u4") for name in b)
    dtype = "u4" if accumulator == "f16" else "f4"
    start = ", ".join(gen.value(name, dtype) for name in c)
    if accumulator == "f16":
        gen.line(f"_v = matrix.multiply_half([{left}], [{right}], [{start}], {gen.mask}, {x.site})")
    else:
        gen.line(
            f"_v = matrix.multiply([{left}], [{right}], [{start}], 1, {len(b)}, {gen.mask}, "
            f"{x.site})"
        )
    for i, name in enumerate(d):
        gen.assign(name, f"_v[{i}]", dtype)


LOWERINGS: dict[str, Lowering] = {
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "sync_result": _receive,
    "activemask": _active_mask,
    "movmatrix": _move_matrix,
    "mma": _multiply,
}
