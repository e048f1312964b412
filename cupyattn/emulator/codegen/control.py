"""Branches, returns, barriers, and what does nothing on an emulator."""

from __future__ import annotations

from cupyattn.emulator.codegen.generator import Generator, Lowering
from cupyattn.emulator.machine.barriers import barrier_fault
from cupyattn.emulator.ptx.model import Instruction

__all__ = ["LOWERINGS", "meet"]

_STEP = "block, mask, merge = "
_ANOTHER = "schedule.pick()"  # step, if the lanes that run have to wait


def _predicate(gen: Generator, x: Instruction) -> str:
    assert x.guard is not None
    return f"{'~' if x.guard[1] else ''}{gen.value(x.guard[0], 'b1')}"


def _branch(gen: Generator, x: Instruction) -> None:
    target = gen.flow.target.get(x.operands[0])
    if target is None:  # the label stands at the end of the kernel
        _exit(gen, x)
        return
    if not x.guard:
        gen.jump(target)
        return
    gen.line(f"{_STEP}schedule.branch({_predicate(gen, x)}, {target}, {_behind(gen)}, mask, merge)")


def _branch_table(gen: Generator, x: Instruction) -> None:
    if x.guard:
        raise gen.unsupported(x, "a guarded brx.idx")
    targets = [gen.flow.target[label] for label in gen.function.branch_tables[x.operands[1]]]
    index = gen.value(x.operands[0], "u4")
    gen.line(f"{_STEP}schedule.branch_table({index}, np.array({targets}, i4), mask, merge)")


def _exit(gen: Generator, x: Instruction) -> None:
    if not x.guard:
        gen.jump(None)
        return
    after = gen.flow.blocks[gen.block].next
    if after is None:
        gen.jump(None)
        return
    gen.line(f"{_STEP}schedule.branch({_predicate(gen, x)}, EXITED, {after}, mask, merge)")


def _behind(gen: Generator) -> str:
    """Return the block behind the one that ends here."""
    after = gen.flow.blocks[gen.block].next
    return "EXITED" if after is None else str(after)


def meet(gen: Generator, x: Instruction, operands: list[str], named: str) -> None:
    """Write the meeting of the lanes that the operand `named` lists, who exchange `operands`."""
    values = "".join(f"{operand}, " for operand in operands)
    gen.line(
        f"{_STEP}warp_sync.meet({x.opcode!r}, ({values}), {gen.value(named, 'u4')}, "
        f"{_behind(gen)}, mask, merge, {x.site}) or {_ANOTHER}"
    )


def _barrier(gen: Generator, x: Instruction) -> None:
    parts = [p for p in x.parts if p not in ("cta", "aligned")]
    if parts[1] == "warp":
        meet(gen, x, [], x.operands[0])
        return
    end = f"{_behind(gen)}, mask, merge, {x.site}"
    if parts[1] == "cluster" or parts[1] not in ("sync", "arrive", "red"):
        raise gen.unsupported(x)
    operands = list(x.operands)
    reduction = ""
    if parts[1] == "red":
        operands.pop(0)  # written by bar_result
        predicate = gen.value(operands.pop(), "b1")
        reduction = f", {parts[2]!r}, {predicate}"
    identifier = gen.value(operands[0], "u4")
    count = gen.value(operands[1], "u4") if len(operands) > 1 else "None"
    if parts[1] == "arrive" and count == "None":
        raise gen.unsupported(x, "bar.arrive needs a number of threads")
    if any(gen.is_register(operand) for operand in operands):
        gen.line(f"barriers.check({identifier}, {count}, mask, {x.site})")
    elif fault := barrier_fault(*(int(operand, 0) for operand in operands)):
        raise gen.unsupported(x, fault)
    method = "arrive" if parts[1] == "arrive" else "sync"
    gen.line(
        f"{_STEP}barriers.{method}({identifier}, {count}, {end}{reduction}) or schedule.pick()"
    )


def _barrier_result(gen: Generator, x: Instruction) -> None:
    if x.parts[-1] == "pred":
        gen.assign(x.operands[0], "(barriers.result != 0)", "b1")
    else:
        gen.assign(x.operands[0], "barriers.result", "u4")


def _trap(gen: Generator, x: Instruction) -> None:
    gen.line(f"batch.trap({gen.mask}, {x.site})")


def _nothing(gen: Generator, x: Instruction) -> None:
    """Memory is coherent and in order here; caches and sleeping have no effect."""
    gen.line("pass")


LOWERINGS: dict[str, Lowering] = {
    "bra": _branch,
    "brx": _branch_table,
    "ret": _exit,
    "exit": _exit,
    "bar": _barrier,
    "barrier": _barrier,
    "bar_result": _barrier_result,
    "trap": _trap,
    **dict.fromkeys(
        ("membar", "fence", "nanosleep", "prefetch", "prefetchu", "discard", "pmevent"), _nothing
    ),
}
