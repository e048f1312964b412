"""The order in which a basic block is written: late, and equal instructions in one operation.

A tile in registers is many equal instructions that do not depend on each other, or in chains side
by side; a compiler spreads them between loads and stores. Computed together they are one operation
on a stack (`machine.stacks`), or one matrix product.

The instructions of a block are of two kinds. A *free* one is a function of what its registers hold
and of nothing else: arithmetic of lanes (`operations`) and matrix products (`products`, which also
check that whole warps are there: that is the same all through a block). All others are *fixed*:
they touch memory, wait, branch, are guarded, or are not worth it. What keeps the meaning of the
block:

1. Fixed instructions are written in the order of the program.
2. What an instruction reads is a *value*: what one instruction wrote to a register, or what the
   register held when the block began. Which value that is, the order of the program says
   (`_read_program`); registers do not matter from there on. So a free instruction may be written
   anywhere after those that make its values.
3. A fixed instruction reads registers. Before it is written, each register that it reads is made to
   hold its value (`before`), and at the end of the block each that other blocks read (`finish`).
4. The variable of a register may be the only place of a value. Before it is written again, the
   value moves aside if a free instruction still waits to read it (`_keep`).

So free instructions may be written late: when rule 3 asks for their result, with all that they wait
for (`_write`). Whatever else could be written at that moment and has the same key is written along
(`_write_group`), be it next or hundreds of instructions ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from cupyattn.emulator.codegen.generator import CodeGenerator
from cupyattn.emulator.codegen.operations import (
    LaneOperation,
    MmaChain,
    Row,
    operation_of,
    product_of,
)
from cupyattn.emulator.ptx.model import Instruction

_MOST_TOGETHER = 512  # rows of a stack, all of which stay in memory


@dataclass(eq=False, slots=True)
class _Value(Row):
    """The content of a register between two writes; it has no expression until it is written.

    Attributes
    ----------
    maker : _Free or None
        The free instruction that makes it.
    readers : list
        The free instructions that read it, one entry an operand.
    wanted : bool
        Whether a fixed instruction or another block reads it.
    placed : bool
        Whether its register has been made to hold it.
    """

    maker: _Free | None = None
    readers: list[_Free] = field(default_factory=list)
    wanted: bool = False
    placed: bool = False


@dataclass(eq=False, slots=True)
class _Free:
    """A free instruction; `missing` of its operands are not written yet."""

    number: int
    operation: LaneOperation | MmaChain
    operands: list[_Value]
    results: list[_Value] = field(default_factory=list)
    missing: int = 0

    @property
    def written(self) -> bool:
        return bool(self.results[0].expression)

    @property
    def useful(self) -> bool:
        """Whether anything reads a result. Products are written anyway: they check the warp."""
        used = any(value.wanted or value.readers for value in self.results)
        return used or isinstance(self.operation, MmaChain)


@dataclass(slots=True)
class _Fixed:
    """A fixed instruction, and the values that it reads and writes, by register."""

    instruction: Instruction
    reads: dict[str, _Value]
    writes: dict[str, _Value]


class Reordering:
    """The instructions of basic block `number`: fixed ones to go through, free ones in between.

    For each of `fixed`, in order: `before`, its lowering, `after`. Then `finish`; where the last
    one branches, it comes between `before` and the lowering.
    """

    def __init__(self, gen: CodeGenerator, number: int) -> None:
        self.gen = gen
        self.block = number
        self.fixed: list[_Fixed] = []
        self._free: list[_Free] = []
        self._now: dict[str, _Value] = {}  # by register, at the end of what has been read
        self._left: dict[str, _Value] = {}  # and what other blocks read of it
        self._ready: dict[Hashable, list[_Free]] = defaultdict(list)  # by key: nothing is missing
        self._variables: dict[str, _Value] = {}  # by register, the value that lives there alone
        self._read_program()
        self._join_products()
        self._drop_unread()
        for free in self._free:
            free.missing = sum(not value.expression for value in free.operands)
            self._offer(free)

    # ------------------------------------------------------------------ the graph
    def _read_program(self) -> None:
        """Find out what is free, and the values that everything reads and writes (rule 2)."""
        flow = self.gen.flow
        block = flow.blocks[self.block]
        for x in self.gen.function.instructions[block.first : block.last]:
            written, read = flow.accesses[x.site]
            found = self._free_instruction(x, read)
            if found is not None:
                with self.gen.placing(x):
                    self._add(*found)
                continue
            reads = {register: self._value(register) for register in read}
            for value in reads.values():
                value.wanted = True
            writes = {register: _Value() for register in written}
            self._now.update(writes)
            self.fixed.append(_Fixed(x, reads, writes))
        for register in flow.read_after(self._now, self.block):
            self._left[register] = self._now[register]
            self._left[register].wanted = True

    def _add(
        self, operation: LaneOperation | MmaChain, operands: list[str], targets: list[str]
    ) -> None:
        free = _Free(len(self._free), operation, [])
        for operand, dtype in zip(operands, operation.operands, strict=True):
            value = self._value(operand, dtype)
            value.readers.append(free)
            free.operands.append(value)
        free.results = [_Value(maker=free) for _ in targets]
        self._now.update(zip(targets, free.results, strict=True))
        self._free.append(free)

    def _free_instruction(
        self, x: Instruction, read: list[str]
    ) -> tuple[LaneOperation | MmaChain, list[str], list[str]] | None:
        """Return how to compute a free instruction, of what and to where; None if it is fixed.

        Integer instructions count only if they go on from others that do: addresses and counters
        are mostly the same in many lanes, and cheaper as they are.
        """
        product = product_of(self.gen, x)
        if product is not None:
            return product
        found = operation_of(self.gen, x)
        if found is None or not set(read) <= set(found[1]):
            return None
        operation, operands = found
        follows = any(r in self._now and self._now[r].maker is not None for r in read)
        return (operation, operands, x.operands[:1]) if operation.of_floats or follows else None

    def _value(self, operand: str, dtype: str = "") -> _Value:
        """Return the value of an operand where `_read_program` is."""
        if not self.gen.is_register(operand):
            return _Value(self.gen.value(operand, dtype))
        if operand not in self._now:  # as the block before left it
            self._now[operand] = self._variables[operand] = _Value(self.gen.names[operand])
        return self._now[operand]

    def _join_products(self) -> None:
        """Make one of two products where the second alone reads the sums of the first.

        Nothing else can then depend on the first, so the second may wait for all operands of both.
        """
        joined: dict[_Free, _Free] = {}  # first products, and the second of each
        for free in self._free:
            before = free.operands[0].maker if free.operands else None
            if (
                not isinstance(free.operation, MmaChain)
                or before is None
                or not isinstance(before.operation, MmaChain)
                or free.operands[: len(before.results)] != before.results
                or any(len(v.readers) > 1 or v.wanted for v in before.results)
            ):
                continue
            both = before.operation.followed_by(free.operation)
            if both is not None:
                free.operation = both
                free.operands[: len(before.results)] = before.operands
                joined[before] = free
        if not joined:
            return
        last: dict[_Free, _Free] = {}  # by product, that which it has become a part of
        for free in reversed(self._free):
            last[free] = last[joined[free]] if free in joined else free
        self._free = [free for free in self._free if free not in joined]
        for value in dict.fromkeys(v for free in {last[f] for f in joined} for v in free.operands):
            value.readers = [last[reader] for reader in value.readers]

    def _drop_unread(self) -> None:
        """Forget free instructions that nothing reads, not even through others."""
        kept = []
        for free in reversed(self._free):
            if free.useful:
                kept.append(free)
            else:
                for value in free.operands:
                    value.readers.remove(free)
        self._free = kept[::-1]

    # ------------------------------------------------------------------ the order
    def before(self, fixed: _Fixed) -> None:
        """Write what `fixed` reads, and keep what it overwrites (rules 3 and 4)."""
        self._write(fixed.reads.values())
        for register, value in fixed.reads.items():
            self._place(register, value)
        for register in fixed.writes:
            self._keep(register)

    def after(self, fixed: _Fixed) -> None:
        """Note what `fixed` has written."""
        for register, value in fixed.writes.items():
            value.expression = self.gen.names[register]
            self._variables[register] = value
            self._available(value)

    def finish(self) -> None:
        """Write what other blocks read, and all products."""
        products = [f.results[0] for f in self._free if isinstance(f.operation, MmaChain)]
        self._write([*self._left.values(), *products])
        for register, value in self._left.items():
            self._place(register, value)

    def _place(self, register: str, value: _Value) -> None:
        """Make a register hold a value that is written (rule 3)."""
        if value.maker is None or value.placed:  # or a fixed instruction has put it there
            return
        value.placed = True
        if not self.gen.flow.is_local(register, self.block):
            self._keep(register)
        self.gen.hold(register, value.expression)

    def _keep(self, register: str) -> None:
        """Move what only the variable of a register holds aside, if it will be read (rule 4)."""
        value = self._variables.pop(register, None)
        if value is not None and any(not reader.written for reader in value.readers):
            kept = self.gen.temporary()
            self.gen.line(f"{kept} = {value.expression}")
            value.expression = kept

    def _write(self, values: Iterable[_Value]) -> None:
        """Write the free instructions that make `values`, those that they wait for first."""
        todo = [value.maker for value in values if value.maker and not value.expression]
        needed: set[_Free] = set()
        while todo:
            free = todo.pop()
            if free not in needed:
                needed.add(free)
                todo += [v.maker for v in free.operands if v.maker and not v.expression]
        depth: dict[_Free, int] = {}  # of what it waits for: equal depths are mostly alike
        for free in sorted(needed, key=lambda free: free.number):
            waits = [depth[v.maker] for v in free.operands if v.maker in depth]
            depth[free] = 1 + max(waits, default=-1)
        for free in sorted(needed, key=lambda free: (depth[free], free.number)):
            if not free.written:
                self._write_group(free)

    def _write_group(self, free: _Free) -> None:
        """Write an instruction of which nothing is missing, and others like it."""
        key = free.operation.key(free.operands)
        others = [other for other in self._ready.pop(key) if other is not free]
        self._ready[key] = others[_MOST_TOGETHER - 1 :]
        group = sorted((free, *others[: _MOST_TOGETHER - 1]), key=lambda free: free.number)
        group[0].operation.write(
            self.gen, [other.operands for other in group], [other.results for other in group]
        )
        for other in group:
            for value in other.results:
                self._available(value)

    def _available(self, value: _Value) -> None:
        for reader in value.readers:
            reader.missing -= 1
            self._offer(reader)

    def _offer(self, free: _Free) -> None:
        if free.missing == 0 and not free.written:
            self._ready[free.operation.key(free.operands)].append(free)
