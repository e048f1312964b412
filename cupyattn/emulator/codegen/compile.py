"""One kernel -> the source of one Python function -> a `Program`.

The function keeps every register in a local variable and runs basic blocks in a loop::

    def kernel(batch):
        block, mask, merge = schedule.start()
        while block >= 0:
            if block < 2:
                if block < 1:            # block 0
                    v_r1 = s_tid_x
                    block, mask, merge = schedule.branch(v_p1, 2, 1, mask, merge)
                ...

Blocks are found through a binary tree of comparisons. Where lanes may have to wait at the end of a
block, the next block comes right after it and is not looked up if they need not wait.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from cupyattn.emulator.codegen import arithmetic, control, conversion, memory_access
from cupyattn.emulator.codegen.generator import RUNTIME_NAMES, CodeGenerator, Lowering
from cupyattn.emulator.codegen.reordering import Reordering
from cupyattn.emulator.program import Program, shared_granule
from cupyattn.emulator.ptx.architecture import needed_target
from cupyattn.emulator.ptx.model import Function, Instruction, Variable

# Instructions that end a basic block and say themselves where to go on.
CONTROL = frozenset(["bra", "brx", "ret", "exit", "bar", "barrier", "shfl", "vote", "match"])

_LOWERINGS: dict[str, Lowering] = {
    **control.LOWERINGS,
    **arithmetic.LOWERINGS,
    **conversion.LOWERINGS,
    **memory_access.LOWERINGS,
    **control.WARP_LOWERINGS,
}


def lowering_of(generator: CodeGenerator, instruction: Instruction) -> Lowering:
    """Return the lowering for `instruction`.

    Raises
    ------
    UnsupportedPTXError
        There is none.
    """
    if instruction.root not in _LOWERINGS:
        raise generator.unsupported(instruction)
    return _LOWERINGS[instruction.root]


_ALL_LANES = ("-1", "0xffffffff", "4294967295")


def _may_be_partial(x: Instruction) -> bool:
    """Tell whether `x` is a ``bar.warp.sync`` whose mask is not known to name all lanes."""
    return x.opcode == "bar.warp.sync" and x.operands[0].lower() not in _ALL_LANES


def _write_block(gen: CodeGenerator, number: int) -> list[str]:
    """Return the statements of basic block `number`."""
    gen.start_block(number)
    if gen.flow.continues(number):  # otherwise the loop has reported it
        gen.line(f"if report is not None and entered != {number}:")
        gen.line(f" report.enter({number}, mask, positions)")
    order = Reordering(gen, number)
    ended = False
    for fixed in order.fixed:
        instruction = fixed.instruction
        lowering = lowering_of(gen, instruction)
        gen.guard, gen.mask = "", "mask"
        order.before(fixed)
        if instruction.root in CONTROL:
            order.finish()
            ended = True
        elif instruction.guard:
            predicate, negated = instruction.guard
            if predicate not in gen.names:
                raise gen.unsupported(instruction, f"the guard {predicate!r} is no register")
            with gen.placing(instruction):
                name = f"{'~' if negated else ''}{gen.value(predicate, 'b1')}"
            gen.line(f"guard = guarded({name}, mask, shape)")
            gen.guard = gen.mask = "guard"
        with gen.placing(instruction):
            lowering(gen, instruction)
        order.after(fixed)
    gen.guard, gen.mask = "", "mask"
    if not ended:
        order.finish()
        gen.jump(gen.flow.blocks[number].next)
    return gen.out


def _assemble(gen: CodeGenerator, bodies: list[list[str]]) -> str:
    out = ["def kernel(batch):"]
    out += [f" {line}" for line in RUNTIME_NAMES.prologue]
    out += [f" {name} = {text}" for name, text in gen.prologue.items()]
    unwritten: defaultdict[str, list[str]] = defaultdict(list)
    for register in dict.fromkeys([*gen.flow.written_in, *gen.flow.use_count]):
        blocks = gen.flow.written_in.get(register, set())
        if not blocks or not all(gen.flow.is_local(register, number) for number in blocks):
            unwritten[gen.stored[register]].append(gen.names[register])
    out += [f" {' = '.join(names)} = UNWRITTEN_{dtype}" for dtype, names in unwritten.items()]
    out += [
        " block, mask, merge = schedule.start()",
        " steps = batch.checks.max_steps",
        " while block >= 0:",
        "  steps -= 1",
        "  if steps < 0: raise batch.hang(block, mask)",
        "  entered = block",
        "  if report is not None: report.enter(block, mask, positions)",
    ]

    leaves: list[list[int]] = []
    for number in range(len(bodies)):
        if gen.flow.continues(number):
            leaves[-1].append(number)
        else:
            leaves.append([number])

    def tree(low: int, high: int, indent: int) -> None:
        space = " " * indent
        if high - low == 1:
            for number in leaves[low]:
                if len(leaves[low]) > 1:
                    out.append(f"{space}if block == {number}:")
                inner = " " * (indent + (len(leaves[low]) > 1))
                out.extend(inner + line for line in bodies[number])
            return
        middle = (low + high) // 2
        out.append(f"{space}if block < {leaves[middle][0]}:")
        tree(low, middle, indent + 1)
        out.append(f"{space}else:")
        tree(middle, high, indent + 1)

    tree(0, len(leaves), 2)
    return "\n".join(out) + "\n"


def executable(code: CodeType, constants: dict[str, np.ndarray]) -> Callable[[object], None]:
    """Return the function of a kernel."""
    namespace: dict[str, Any] = {**RUNTIME_NAMES.namespace, **constants}
    exec(code, namespace)
    function: Callable[[object], None] = namespace["kernel"]
    return function


def compile_kernel(function: Function, variables: dict[str, Variable], target: int) -> Program:
    """Generate and compile the Python function of a kernel.

    Parameters
    ----------
    function : Function
        The entry, with its calls expanded.
    variables : dict
        The variables of its module.
    target : int
        What the PTX says it is for, 75 for sm_75.

    Raises
    ------
    UnsupportedPTXError
        The kernel has an instruction that the emulator does not run, or that the target lacks.
    """
    gen = CodeGenerator(function, variables, target)
    for instruction in function.instructions:
        needed = needed_target(instruction.opcode)
        if needed > target:
            raise gen.unsupported(
                instruction,
                f"it needs sm_{needed}, and the PTX is for sm_{target} (.target): use what "
                f"sm_{target} has, or compile with -arch=compute_{needed}",
            )
    bodies = [_write_block(gen, number) for number in range(len(gen.flow.blocks))]
    source = _assemble(gen, bodies)
    code = compile(source, f"<emulated {function.name}>", "exec")
    constants = dict(gen.constants.values())
    return Program(
        function.header,
        [x.statement for x in function.instructions],
        executable(code, constants),
        code,
        constants,
        zlib.compress(source.encode(), 1),
        [range(b.first, b.last) for b in gen.flow.blocks],
        gen.layout,
        shared_granule(function),
        any(_may_be_partial(x) for x in function.instructions),
    )
