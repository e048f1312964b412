"""Branches, returns, barriers, and instructions of a warp: shuffles, votes, matches, products."""

from __future__ import annotations

from cupyattn.emulator.codegen.generator import CodeGenerator, Lowering
from cupyattn.emulator.codegen.operations import MMA_FORMS, fragments, mma_form
from cupyattn.emulator.machine.barriers import barrier_fault
from cupyattn.emulator.ptx.model import SIZE, Instruction, unsigned

_STEP = "block, mask, merge = "
_ANOTHER = "schedule.pick()"  # step, if the lanes that run have to wait


def _predicate(gen: CodeGenerator, x: Instruction) -> str:
    assert x.guard is not None
    return f"{'~' if x.guard[1] else ''}{gen.value(x.guard[0], 'b1')}"


def _branch(gen: CodeGenerator, x: Instruction) -> None:
    target = gen.flow.target.get(x.operands[0])
    if target is None:  # the label is at the end of the kernel
        _exit(gen, x)
        return
    if not x.guard:
        gen.jump(target)
        return
    gen.line(
        f"{_STEP}schedule.branch({_predicate(gen, x)}, {target}, {_next_block(gen)}, mask, merge)"
    )


def _branch_table(gen: CodeGenerator, x: Instruction) -> None:
    if x.guard:
        raise gen.unsupported(x, "a guarded brx.idx")
    targets = [gen.flow.target[label] for label in gen.function.branch_tables[x.operands[1]]]
    index = gen.value(x.operands[0], "u4")
    gen.line(f"{_STEP}schedule.branch_table({index}, np.array({targets}, i4), mask, merge)")


def _exit(gen: CodeGenerator, x: Instruction) -> None:
    if not x.guard:
        gen.jump(None)
        return
    after = gen.flow.blocks[gen.block].next
    if after is None:
        gen.jump(None)
        return
    gen.line(f"{_STEP}schedule.branch({_predicate(gen, x)}, EXITED, {after}, mask, merge)")


def _next_block(gen: CodeGenerator) -> str:
    """Return the number of the next block in program order, as generated code has it."""
    after = gen.flow.blocks[gen.block].next
    return "EXITED" if after is None else str(after)


def meet(gen: CodeGenerator, x: Instruction, operands: list[str], named: str) -> None:
    """Write the meeting of the lanes that the operand `named` lists, who exchange `operands`."""
    values = "".join(f"{operand}, " for operand in operands)
    gen.line(
        f"{_STEP}warp_sync.meet({x.opcode!r}, ({values}), {gen.value(named, 'u4')}, "
        f"{_next_block(gen)}, mask, merge, {x.site}) or {_ANOTHER}"
    )


def _barrier(gen: CodeGenerator, x: Instruction) -> None:
    parts = [p for p in x.parts if p not in ("cta", "aligned")]
    if parts[1] == "warp":
        meet(gen, x, [], x.operands[0])
        return
    end = f"{_next_block(gen)}, mask, merge, {x.site}"
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


def _barrier_result(gen: CodeGenerator, x: Instruction) -> None:
    if x.parts[-1] == "pred":
        gen.assign(x.operands[0], "(barriers.result != 0)", "b1")
    else:
        gen.assign(x.operands[0], "barriers.result", "u4")


def _trap(gen: CodeGenerator, x: Instruction) -> None:
    gen.line(f"batch.trap({gen.mask}, {x.site})")


def _nothing(gen: CodeGenerator, x: Instruction) -> None:
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


def _shuffle(gen: CodeGenerator, x: Instruction) -> None:
    if x.parts[1] != "sync":
        raise gen.unsupported(x, "shfl without .sync")
    meet(gen, x, [gen.value(o, "u4") for o in x.operands[1:4]], x.operands[4])


def _vote(gen: CodeGenerator, x: Instruction) -> None:
    if x.parts[1] != "sync":
        raise gen.unsupported(x, "vote without .sync")
    meet(gen, x, [gen.value(x.operands[1], "b1")], x.operands[2])


def _match(gen: CodeGenerator, x: Instruction) -> None:
    meet(gen, x, [gen.value(x.operands[1], unsigned(SIZE[x.parts[-1]]))], x.operands[2])


def _receive(gen: CodeGenerator, x: Instruction) -> None:
    """Write what the lanes got from the ``shfl``, ``vote`` or ``match`` before: value|predicate."""
    targets = [name.strip() for name in x.operands[0].split("|")]
    if x.parts[1] == "vote" and x.parts[-1] == "pred":
        targets.insert(0, "_")
    gen.assign(targets[0], "warp_sync.value", "u4")
    if len(targets) > 1 and (targets[1] not in gen.names or gen.flow.use_count[targets[1]]):
        gen.assign(targets[1], "warp_sync.flag", "b1")


def _active_mask(gen: CodeGenerator, x: Instruction) -> None:
    gen.assign(x.operands[0], f"active_mask({gen.mask}, shape)", "u4")


def _move_matrix(gen: CodeGenerator, x: Instruction) -> None:
    value = gen.value(x.operands[1], "u4")
    gen.assign(x.operands[0], f"matrix.transpose({value}, {gen.mask}, {x.site})", "u4")


def _multiply(gen: CodeGenerator, x: Instruction) -> None:
    """One product by itself: float16 accumulators, and whatever `products` does not fuse."""
    form = mma_form(x)
    if form is None:
        raise gen.unsupported(x, f"{MMA_FORMS} only")
    found = fragments(x)
    if tuple(map(len, found)) != form.registers:
        wanted = "{}, {}, {} and {}".format(*form.registers)
        raise gen.unsupported(x, f"{form.shape} takes fragments of {wanted} registers")
    d, a, b, c = found
    if form.is_integer:  # all steps of rows 0-7, then those of rows 8-15
        a = [name for half in range(form.a_registers) for name in a[half :: form.a_registers]]
    left = ", ".join(gen.value(name, "u4") for name in a)
    right = ", ".join(gen.value(name, "u4") for name in b)
    start = ", ".join(gen.value(name, form.dtype) for name in c)
    method, numbers = "multiply", f"1, {form.steps}, {form.a!r}, "
    if form.is_integer:
        method = "multiply_integers"
        numbers = f"{form.a_registers}, 1, {form.steps}, {form.a!r}, {form.b!r}, {form.saturates}, "
    elif form.accumulator == "f16":
        method, numbers = "multiply_half", ""
    gen.line(f"_v = matrix.{method}([{left}], [{right}], [{start}], {numbers}{gen.mask}, {x.site})")
    for i, name in enumerate(d):
        gen.assign(name, f"_v[{i}]", form.dtype)


WARP_LOWERINGS: dict[str, Lowering] = {
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "sync_result": _receive,
    "activemask": _active_mask,
    "movmatrix": _move_matrix,
    "mma": _multiply,
}
