"""Fusing ``mma``: chains over k and neighbours that share A become one batched product.

A tile product in a kernel is many small ``mma``; one NumPy matmul for all of them is much faster
than one each. An ``mma`` is therefore held back until something needs its result, overwrites its
inputs, or the block ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupyattn.emulator.ptx.model import Instruction

if TYPE_CHECKING:
    from cupyattn.emulator.codegen.generator import Generator

__all__ = ["MMA_SHAPES", "MatrixFusion"]

MMA_SHAPES = ("m16n8k8", "m16n8k16")


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

    def accepts(self, instruction: Instruction) -> bool:
        """Tell whether `instruction` is an unguarded ``mma`` with float32 accumulators."""
        parts = instruction.parts
        if instruction.root != "mma" or instruction.guard or parts[3] not in MMA_SHAPES:
            return False
        return parts[-6:] == ("row", "col", "f32", "f16", "f16", "f32")

    def take(self, instruction: Instruction) -> None:
        """Hold an accepted instruction back."""
        d, a, b, c = (_registers(operand) for operand in instruction.operands)
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
            value = generator.value
            left = ", ".join(f"({value(low, 'u4')}, {value(high, 'u4')})" for low, high in a)
            right = ", ".join(
                "[" + ", ".join(value(name, "u4") for name in chain.b) + "]" for chain in chains
            )
            start = ", ".join(
                "(" + ", ".join(value(name, "f4") for name in chain.start) + ")" for chain in chains
            )
            generator.line(
                f"_d{number} = matrix.multiply([{left}], [{right}], [{start}], mask, "
                f"{chains[0].site})"
            )
        for number, chains in enumerate(groups.values()):
            for j, chain in enumerate(chains):
                for i, name in enumerate(chain.result):
                    generator.assign(name, f"_d{number}[{j}, {i}]", "f4")
        generator.guard, generator.mask = guard, mask
        self.chains, self.results, self.sources = [], set(), set()
