"""Matrix products with float32 accumulators: ``mma`` that share A become one batched product.

A tile product in a kernel is many small ``mma``; one NumPy matmul for all of them is much faster
than one each. Those that accumulate one after the other are one product over a longer k, and those
with the same A are one product with a wider B.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from cupyattn.emulator.codegen.generator import Generator
from cupyattn.emulator.codegen.rows import Row, gather
from cupyattn.emulator.ptx.data_types import register_dtype
from cupyattn.emulator.ptx.model import Instruction

__all__ = ["ACCUMULATORS", "MMA_STEPS", "Product", "fragments", "product_of"]

MMA_STEPS = {"m16n8k8": 1, "m16n8k16": 2}  # steps of k = 8
ACCUMULATORS = 4  # registers of a lane that hold its part of C and D
_TYPES = ("row", "col", "f32", "f16", "f16", "f32")
_STEP = 3  # operands of a step: the low and the high rows of A, and B


class Product:
    """A chain of ``mma``. Its operands: the accumulators to start from, then A, A, B a step."""

    def __init__(self, site: int, steps: int) -> None:
        self.site = site
        self.steps = steps
        self.operands = ("f4",) * ACCUMULATORS + ("u4",) * (_STEP * steps)
        self.result = "f4"

    def followed_by(self, other: Product) -> Product:
        """Return this product and one that goes on from its sums as one."""
        return Product(self.site, self.steps + other.steps)

    def key(self, operands: Sequence[Row]) -> Hashable:
        """Return what chains that can be one product have in common: A."""
        steps = operands[ACCUMULATORS:]
        return (Product, *steps[0::_STEP], *steps[1::_STEP])

    def write(
        self, gen: Generator, operands: Sequence[Sequence[Row]], results: Sequence[Sequence[Row]]
    ) -> None:
        """Write the products of chains with the same key."""
        chains = [rows[ACCUMULATORS:] for rows in operands]
        left = [a for i in range(0, len(chains[0]), _STEP) for a in chains[0][i : i + 2]]
        right = [b for steps in chains for b in steps[2::_STEP]]
        start = [row for rows in operands for row in rows[:ACCUMULATORS]]
        name = gen.temporary()
        gen.line(
            f"{name} = matrix.multiply({gather(left, 'u4')}, {gather(right, 'u4')}, "
            f"{gather(start, 'f4')}, {len(chains)}, {self.steps}, mask, {self.site})"
        )
        for index, row in enumerate(row for rows in results for row in rows):
            row.expression, row.stack, row.index = f"{name}[{index}]", name, index


def fragments(x: Instruction) -> list[list[str]]:
    """Return the registers of D, A, B and C."""
    return [[name.strip() for name in o.strip("{} ").split(",")] for o in x.operands]


def product_of(gen: Generator, x: Instruction) -> tuple[Product, list[str], list[str]] | None:
    """Return an ``mma`` as a chain of one, its operands and its targets; None if it is no such."""
    shape = x.parts[3] if len(x.parts) > 3 else ""
    if x.root != "mma" or x.guard or shape not in MMA_STEPS or x.parts[4:] != _TYPES:
        return None
    steps = MMA_STEPS[shape]
    found = fragments(x)
    if [len(names) for names in found] != [ACCUMULATORS, 2 * steps, steps, ACCUMULATORS]:
        return None
    d, a, b, c = found
    operands = [*c]
    for step in range(steps):
        operands += [a[2 * step], a[2 * step + 1], b[step]]
    product = Product(x.site, steps)
    registers = gen.function.registers
    wanted = zip([*d, *operands], ("f4",) * len(d) + product.operands, strict=True)
    if (
        len({*d}) < len(d)
        or any(name not in registers for name in d)
        or any(
            register_dtype(registers[name]) != dtype for name, dtype in wanted if name in registers
        )
    ):
        return None
    return product, operands, d
