"""Stacking: instructions that do the same to other registers become one operation.

A tile in registers is many equal instructions that do not depend on each other, or in chains side
by side. They are held back until something needs a result, and then written together with whatever
else is held back and does the same: one operation on a stack (`machine.stacks`), level by level of
what depends on what. The rows of a stack are what the registers hold; where a stack feeds another
operation, it does so as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cupyattn.emulator.codegen.stack_operations import Operation, operation_of
from cupyattn.emulator.ptx.model import Instruction

if TYPE_CHECKING:
    from cupyattn.emulator.codegen.generator import Generator

__all__ = ["Row", "Stacking", "gather"]

_MOST_HELD = 512
_FEWEST_STACKED = 4


@dataclass(eq=False)
class Row:
    """What a register or a constant holds: an expression, perhaps a row of a stack."""

    expression: str = ""
    stack: str = ""
    index: int = 0


@dataclass(eq=False)
class _Node(Row):
    """An instruction held back: it becomes a row when it is written."""

    operation: Operation = field(kw_only=True)
    operands: list[Row] = field(kw_only=True)

    @property
    def waits(self) -> list[_Node]:
        """The operands that are themselves held back."""
        return [o for o in self.operands if isinstance(o, _Node) and not o.expression]


def gather(rows: Sequence[Row], dtype: str) -> str:
    """Return an expression for the stack of `rows`, or for the one row that they all are."""
    distinct = {row.expression: row for row in rows}
    if len(distinct) == 1:
        return rows[0].expression
    if len({row.stack for row in rows}) == 1 and rows[0].stack:
        found = _runs(rows)
        if len(found) == 1:
            return found[0]
        return f"pick({rows[0].stack}, {[row.index for row in rows]})"
    if 2 * len(distinct) <= len(rows):
        order = {expression: i for i, expression in enumerate(distinct)}
        every = gather(list(distinct.values()), dtype)
        return f"pick({every}, {[order[row.expression] for row in rows]})"
    return f"pile(({', '.join(_runs(rows))},), {len(rows)}, shape, {dtype})"


def _runs(rows: Sequence[Row]) -> list[str]:
    """Return expressions for `rows`: slices of stacks where several follow each other."""
    found = []
    start = 0
    while start < len(rows):
        first = rows[start]
        end, step = start + 1, 0
        while end < len(rows) and first.stack and rows[end].stack == first.stack:
            ahead = rows[end].index - rows[end - 1].index
            if ahead < 1 or step not in (0, ahead):
                break
            step = ahead
            end += 1
        if end - start > 1:
            stop = rows[end - 1].index + 1
            found.append(f"{first.stack}[{first.index}:{stop}{f':{step}' if step > 1 else ''}]")
        else:
            found.append(first.expression)
        start = end
    return found


class Stacking:
    """Holds back instructions of one basic block."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.held: list[_Node] = []
        self.pending: dict[str, _Node] = {}  # by register, what it is to hold
        self.sources: dict[str, Row] = {}  # registers that will be read, as they are now
        self.written = 0

    def take(self, instruction: Instruction) -> None:
        """Hold back an instruction that can be stacked."""
        found = operation_of(self.generator, instruction)
        assert found is not None
        operation, operands = found
        if len(self.held) >= _MOST_HELD:
            self._write(self.held)
        node = _Node(operation=operation, operands=[])
        for operand, dtype in zip(operands, operation.operands, strict=True):
            node.operands.append(self._operand(operand, dtype))
        self.pending[instruction.operands[0]] = node
        self.held.append(node)

    def _operand(self, operand: str, dtype: str) -> Row:
        if operand in self.pending:
            return self.pending[operand]
        if operand not in self.sources:
            row = self.generator.row(operand, dtype)
            if not self.generator.is_register(operand):
                return row
            self.sources[operand] = row
        return self.sources[operand]

    def before(self, written: list[str], read: list[str]) -> None:
        """Write what another instruction depends on, and keep what it overwrites."""
        self._write([self.pending[r] for r in (*read, *written) if r in self.pending])
        for register in written:
            self._keep(register)

    def _keep(self, register: str) -> None:
        """Put what a register holds aside before it changes, if something held back reads it."""
        row = self.sources.pop(register, None)
        if row is not None and not row.stack and any(row in n.operands for n in self.held):
            kept = self._new_name()
            self.generator.line(f"{kept} = {row.expression}")
            row.expression = kept

    def flush(self) -> None:
        """Write what other blocks may read; the rest nobody has asked for."""
        flow, block = self.generator.flow, self.generator.block
        self._write([n for r, n in self.pending.items() if not flow.is_local(r, block)])

    def _write(self, needed: Iterable[_Node]) -> None:
        """Write some nodes, what they depend on, and all that can be computed along with it."""
        todo = [node for node in needed if not node.expression]
        if not todo:
            return
        wanted: set[_Node] = set()
        while todo:
            node = todo.pop()
            if node not in wanted:
                wanted.add(node)
                todo += node.waits
        level: dict[_Node, int] = {}
        groups: dict[tuple[int, Operation], list[_Node]] = {}
        for node in self.held:  # in program order: operands come first
            level[node] = 1 + max((level[o] for o in node.waits), default=-1)
            groups.setdefault((level[node], node.operation), []).append(node)
        chosen = {(level[node], node.operation) for node in wanted}
        for key in sorted(groups, key=lambda key: key[0]):
            if key in chosen:
                self._write_group(key[1], [n for n in groups[key] if not n.waits])
        self.held = [node for node in self.held if not node.expression]
        for register, node in list(self.pending.items()):
            if node.expression:
                del self.pending[register]
                self._keep(register)
                self.generator.place(register, node, node.operation.result)

    def _write_group(self, operation: Operation, nodes: list[_Node]) -> None:
        gen = self.generator
        columns = list(zip(*(node.operands for node in nodes), strict=True))
        common = [len({row.expression for row in column}) == 1 for column in columns]
        if len(nodes) < _FEWEST_STACKED or all(common):
            for node in nodes:
                self._write_single(operation, node)
            return
        operands, flushed = [], []
        for i, column in enumerate(columns):
            dtype = "f8" if operation.widened[i] else operation.operands[i]
            operand = gather(column, dtype)
            once = common[i] and operation.flushed[i]
            operands.append(f"flush({operand})" if once else operand)
            flushed.append(operation.flushed[i] and not once)
        name = self._new_name()
        ending = f", {tuple(flushed)}, {operation.flushes}"
        gen.line(
            f"{name} = stacked({operation.function}, {len(nodes)}, shape, {operation.result}, "
            f"({', '.join(operands)},){ending if any(flushed) or operation.flushes else ''})"
        )
        for index, node in enumerate(nodes):
            node.expression, node.stack, node.index = f"{name}[{index}]", name, index

    def _write_single(self, operation: Operation, node: _Node) -> None:
        operands = [
            f"flush({row.expression})" if flushed else row.expression
            for row, flushed in zip(node.operands, operation.flushed, strict=True)
        ]
        text = f"{operation.called}({', '.join(operands)})"
        node.expression = self._new_name()
        self.generator.line(
            f"{node.expression} = {f'flush({text})' if operation.flushes else text}"
        )

    def _new_name(self) -> str:
        self.written += 1
        return f"_s{self.written}"
