"""Golden vectors of instructions that work on the registers of one thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support.golden.case import Case, make_case

from cupyattn.runtime.arch import TURING, Arch

_THREADS = 128

# Of a PTX type: the constraint letter of its register in inline PTX, and its C type.
REGISTERS = {
    "b16": ("h", "uint16"),
    "f16": ("h", "uint16"),
    "b32": ("r", "uint32"),
    "bf16": ("h", "uint16"),
    "f16x2": ("r", "uint32"),
    "bf16x2": ("r", "uint32"),
    "b64": ("l", "uint64"),
    "f32": ("f", "float"),
    "f64": ("d", "double"),
}
BITS = {"h": np.uint16, "r": np.uint32, "l": np.uint64, "f": np.float32, "d": np.float64}


@dataclass(frozen=True)
class Instruction:
    """One form of a PTX instruction.

    Attributes
    ----------
    opcode : str
        With everything up to the operands, as ``cvt.rn.f16.f32``.
    result : str
        Type of the result: ``f16``, ``f16x2``, ``bf16``, ``bf16x2``, ``f32``, ``f64``, or ``b16``,
        ``b32``, ``b64``.
    tail : str
        Operands after the registers, as ``, 0x96`` of ``lop3.b32``.
    text : str
        The PTX, where it is more than the opcode and its operands.
    """

    opcode: str
    result: str
    tail: str = ""
    text: str = ""

    def ptx(self, operands: int) -> str:
        """Return the PTX: the result is %0, the operands are those after it."""
        if self.text:
            return self.text
        registers = ", ".join(f"%{i}" for i in range(operands + 1))
        return f"{self.opcode} {registers}{self.tail};"

    @property
    def name(self) -> str:
        """Its name in messages and in the file of vectors."""
        return self.opcode + self.tail


def comparison(opcode: str) -> Instruction:
    """Return a ``setp`` whose predicate becomes 0 or 1."""
    text = f"{{.reg .pred p; {opcode} p, %1, %2; selp.u32 %0, 1, 0, p;}}"
    return Instruction(opcode, "b32", text=text)


def paired_comparison(opcode: str) -> Instruction:
    """Return a ``setp`` of two predicates, which become bits 0 and 1."""
    text = (
        f"{{.reg .pred p, q; .reg .b32 r; {opcode} p|q, %1, %2; "
        "selp.u32 %0, 1, 0, p; selp.u32 r, 2, 0, q; or.b32 %0, %0, r;}"
    )
    return Instruction(opcode, "b32", text=text)


def widened(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 as float32: of uint16, or packed pairs in uint32 as (items, 2)."""
    halves = bits if bits.itemsize == 2 else bits.view(np.uint16).reshape(-1, 2)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Table:
    """Instructions of the same operands; a kernel runs them all.

    Attributes
    ----------
    name : str
        Of the case that it becomes.
    types : tuple of str
        PTX types of the operands, up to four.
    operands : tuple of array
        Their values.
    instructions : tuple of Instruction
        Each is one row of the results.
    arch : Arch
        What the kernel is compiled to PTX for.
    """

    name: str
    types: tuple[str, ...]
    operands: tuple[np.ndarray, ...]
    instructions: tuple[Instruction, ...]
    arch: Arch = TURING

    def __post_init__(self) -> None:
        sizes = [BITS[REGISTERS[kind][0]]().itemsize for kind in self.types]
        given = [(values.itemsize, len(values)) for values in self.operands]
        if given != [(size, len(self.operands[0])) for size in sizes]:
            raise ValueError(f"{self.name}: operands of {self.types} have (bytes, items) {given}")

    @property
    def case(self) -> Case:
        """Return the launch: an item per thread."""
        registers = [REGISTERS[kind] for kind in self.types]
        given = ", ".join(
            f'"{letter}"({name})' for (letter, _), name in zip(registers, "abcd", strict=False)
        )
        operations = []
        for instruction in self.instructions:
            letter, result = REGISTERS[instruction.result]
            text = instruction.ptx(len(self.types))
            operations.append(f'RUN("{text}", "={letter}", {result}, {given})')
        inputs: dict[str, np.ndarray | None] = dict.fromkeys("abcd")
        for name, values, (letter, _) in zip("abcd", self.operands, registers, strict=False):
            inputs[name] = np.ascontiguousarray(values).view(BITS[letter])
        count = len(self.operands[0])
        c_types = [c_type for _, c_type in registers]
        return make_case(
            self.name,
            "elementwise",
            -(-count // _THREADS),
            inputs,
            {"results": np.zeros((len(self.instructions), count), np.uint64)},
            macros={
                "OPERATIONS": " ".join(operations),
                "COUNT": count,
                **{
                    f"TYPE_{name.upper()}": c_types[i] if i < len(c_types) else "uint32"
                    for i, name in enumerate("abcd")
                },
            },
            threads=_THREADS,
            arch=self.arch,
        )

    def results(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the results of each instruction in a dtype of its own: floats as floats.

        bfloat16 is returned as float32, which has the same bits and more.
        """
        dtypes = {
            "b16": "u2", "b32": "u4", "b64": "u8", "f16": "f2", "f16x2": "u4", "f32": "f4",
            "f64": "f8", "bf16": "u2", "bf16x2": "u4",
        }  # fmt: skip
        arrays = []
        for instruction, row in zip(self.instructions, rows.astype(np.uint64), strict=True):
            dtype = np.dtype(dtypes[instruction.result])
            array = row.astype(f"u{dtype.itemsize}").view(dtype)
            if instruction.result == "f16x2":
                array = array.view(np.float16).reshape(-1, 2)
            elif instruction.result in ("bf16", "bf16x2"):
                array = widened(array)
            arrays.append(array)
        return arrays
