"""Fusing float32 ``fma``: many of them become few operations on stacked registers.

A NumPy operation on the lanes of a small launch costs more in overhead than in arithmetic, and an
exact fma takes a dozen. The fmas of a register tile are independent, or chained through the addend;
they are held back, like ``mma`` (see `codegen.matrix_fusion`), and written level by level. Chunks
that would outgrow the cache are cut at run time (`machine.floating.fma_batch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupyattn.emulator.codegen.float_arithmetic import float_operand
from cupyattn.emulator.ptx.model import Instruction

if TYPE_CHECKING:
    from cupyattn.emulator.codegen.generator import Generator

__all__ = ["MultiplyAddFusion"]

_MOST_HELD = 256
_FEWEST_STACKED = 4


@dataclass
class _Node:
    """One fma held back: expressions of its factors, and its addend: an expression or a node."""

    a: str
    b: str
    c: str | tuple[int, int]
    level: int
    place: int


class MultiplyAddFusion:
    """Holds back the ``fma.rn.f32`` of one basic block."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._clear()

    def _clear(self) -> None:
        self.levels: list[list[_Node]] = []
        self.result: dict[str, _Node] = {}  # by register: the last fma that writes it
        self.sources: set[str] = set()
        self.held = 0
        self.flushes = False

    def accepts(self, instruction: Instruction) -> bool:
        """Tell whether `instruction` is an unguarded fma to nearest of float32."""
        return instruction.opcode in ("fma.rn.f32", "fma.rn.ftz.f32") and not instruction.guard

    def take(self, instruction: Instruction) -> None:
        """Hold an accepted instruction back."""
        gen = self.generator
        target, a, b, c = instruction.operands
        flushes = "ftz" in instruction.parts
        if (
            self.result.keys() & {a, b}
            or (self.held and flushes != self.flushes)
            or self.held >= _MOST_HELD
        ):
            self.flush()
        self.flushes = flushes
        left, right = (float_operand(gen, instruction, o, "f32") for o in (a, b))
        before = self.result.get(c)
        if before is None:
            node = _Node(left, right, float_operand(gen, instruction, c, "f32"), 0, 0)
            self.sources.add(c)
        else:
            node = _Node(left, right, (before.level, before.place), before.level + 1, 0)
        if node.level == len(self.levels):
            self.levels.append([])
        node.place = len(self.levels[node.level])
        self.levels[node.level].append(node)
        self.sources |= {a, b}
        self.result[target] = node
        self.held += 1

    def before(self, written: list[str], read: list[str]) -> None:
        """Flush if another instruction depends on what is held back."""
        if self.held and (self.result.keys() & {*written, *read} or self.sources & set(written)):
            self.flush()

    def flush(self) -> None:
        """Write the fmas."""
        gen = self.generator
        guard, gen.guard = gen.guard, ""
        for number, nodes in enumerate(self.levels):
            if len(nodes) < _FEWEST_STACKED:
                self._write_single(number, nodes)
            else:
                self._write_stacked(number, nodes)
        for register, node in self.result.items():
            gen.assign(register, f"_m{node.level}[{node.place}]", "f4")
        gen.guard = guard
        self._clear()

    def _addend(self, node: _Node) -> str:
        return node.c if isinstance(node.c, str) else f"_m{node.c[0]}[{node.c[1]}]"

    def _write_single(self, number: int, nodes: list[_Node]) -> None:
        name = "fma_single_ftz" if self.flushes else "fma_single"
        calls = ", ".join(
            f"{name}({n.a}.astype(f8), {n.b}.astype(f8), {self._addend(n)})" for n in nodes
        )
        self.generator.line(f"_m{number} = ({calls},)")

    def _write_stacked(self, number: int, nodes: list[_Node]) -> None:
        factors = list(dict.fromkeys(name for n in nodes for name in (n.a, n.b)))
        index = {name: i for i, name in enumerate(factors)}
        left, right = [index[n.a] for n in nodes], [index[n.b] for n in nodes]
        levels = {n.c[0] for n in nodes if not isinstance(n.c, str)}
        chained = [n.c[1] for n in nodes if not isinstance(n.c, str)]
        whole = len(levels) == 1 and len(self.levels[min(levels)]) >= _FEWEST_STACKED
        if (
            whole
            and chained == list(range(len(self.levels[min(levels)])))
            and (len(chained) == len(nodes))
        ):
            addends = f"_m{min(levels)}"  # the level before, in the same order
        else:
            addends = f"({', '.join(self._addend(n) for n in nodes)})"
        self.generator.line(
            f"_m{number} = fma_batch(({', '.join(factors)},), {left}, {right}, {addends}, shape, "
            f"{self.flushes})"
        )
