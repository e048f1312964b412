"""Fusing ``mma``: chains over k and neighbours that share A become one batched product.

A tile product in a kernel is many small ``mma``; one NumPy matmul for all of them is much faster
than one each. An ``mma`` is therefore held back until something needs its result, overwrites its
inputs, or the block ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupyattn.emulator.codegen.stacking import Row, gather
from cupyattn.emulator.errors import UnsupportedPTXError
from cupyattn.emulator.ptx.data_types import register_dtype
from cupyattn.emulator.ptx.model import Instruction

if TYPE_CHECKING:
    from cupyattn.emulator.codegen.generator import Generator

__all__ = ["MMA_SHAPES", "MatrixFusion"]

MMA_SHAPES = ("m16n8k8", "m16n8k16")
_ACCEPTED = [(shape, "row", "col", "f32", "f16", "f16", "f32") for shape in MMA_SHAPES]


@dataclass
class _Chain:
    """Consecutive ``mma`` that accumulate: a and b fragments per k step, the ends of c and d."""

    a: list[tuple[str, str]]
    b: list[str]
    start: list[str]
    result: list[str]
    site: int


def _registers(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


class MatrixFusion:
    """Holds back the ``mma`` of one basic block."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.chains: list[_Chain] = []
        self.results: set[str] = set()
        self.sources: set[str] = set()
        self.written = 0

    def accepts(self, instruction: Instruction) -> bool:
        """Tell whether `instruction` is an unguarded ``mma`` with float32 accumulators."""
        if instruction.root != "mma" or instruction.guard:
            return False
        return instruction.parts[3:] in _ACCEPTED

    def take(self, instruction: Instruction) -> None:
        """Hold an accepted instruction back."""
        d, a, b, c = self._fragments(instruction)
        if self.results & {*a, *b}:
            self.flush()
        chain = self._continued(c, d)
        if chain is None:
            if self.results & {*c, *d}:
                self.flush()
            chain = _Chain([], [], c, d, instruction.site)
            self.chains.append(chain)
        chain.a += [(a[i], a[i + 1]) for i in range(0, len(a), 2)]
        chain.b += b
        self.results -= set(chain.result)
        chain.result = d
        self.results |= set(d)
        self.sources |= {*a, *b, *chain.start}

    def _fragments(self, instruction: Instruction) -> list[list[str]]:
        """Return what d, a, b and c consist of; refuse what is no fragment of this shape."""
        shape = instruction.parts[3]
        steps = 2 if shape == "m16n8k16" else 1
        fragments = [_registers(operand) for operand in instruction.operands]
        if [len(names) for names in fragments] != [4, 2 * steps, steps, 4]:
            raise UnsupportedPTXError(
                f"{shape} takes fragments of 4, {2 * steps}, {steps} and 4 registers"
            )
        for names, dtype in zip(fragments, ("f4", "u4", "u4", "f4"), strict=True):
            for name in names:
                self.generator.value(name, dtype)  # raises if it does not fit
        for name in fragments[0]:
            registers = self.generator.function.registers
            if name not in registers or register_dtype(registers[name]) not in ("f4", "u4"):
                raise UnsupportedPTXError(f"the target {name!r} is no register of 32 bits")
        return fragments

    def _continued(self, c: list[str], d: list[str]) -> _Chain | None:
        """Return the chain whose accumulators are `c`, if nothing else wants to see them."""
        for chain in self.chains:
            if chain.result == c:
                once = all(self.generator.flow.use_count[name] == 1 for name in c)
                fresh = not (set(d) - set(c)) & self.results
                return chain if (c == d or once) and fresh else None
        return None

    def before(self, written: list[str], read: list[str]) -> None:
        """Flush if another instruction depends on what is held back."""
        if self.chains and (self.results & {*written, *read} or self.sources & set(written)):
            self.flush()

    def flush(self) -> None:
        """Write the products."""
        generator = self.generator
        groups: dict[tuple[tuple[str, str], ...], list[_Chain]] = {}
        for chain in self.chains:
            groups.setdefault(tuple(chain.a), []).append(chain)
        guard, mask = generator.guard, generator.mask
        generator.guard, generator.mask = "", "mask"
        for number, (a, chains) in enumerate(groups.items()):
            left = self._stack([name for pair in a for name in pair], "u4")
            right = self._stack([name for chain in chains for name in chain.b], "u4")
            start = self._stack([name for chain in chains for name in chain.start], "f4")
            generator.line(
                f"_d{self.written + number} = matrix.multiply({left}, {right}, {start}, "
                f"{len(chains)}, {len(a)}, mask, {chains[0].site})"
            )
        for chains in groups.values():
            stack = f"_d{self.written}"
            self.written += 1
            for i, name in enumerate(name for chain in chains for name in chain.result):
                generator.place(name, Row(f"{stack}[{i}]", stack, i), "f4")
        generator.guard, generator.mask = guard, mask
        self.chains, self.results, self.sources = [], set(), set()

    def _stack(self, registers: list[str], dtype: str) -> str:
        return gather([self.generator.row(name, dtype) for name in registers], dtype)
