"""Translated kernels as bytes: to translate one takes a tenth of a second, to read it a hundredth.

A translation holds for the Python that wrote it, this emulator and the PTX that it was made of;
`translation_key` is made of all three. What is kept is a code object, as ``__pycache__`` has them:
read it from nowhere that others may write to.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import zlib
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cupyattn.emulator.codegen.compile import executable
from cupyattn.emulator.codegen.layout import MemoryLayout
from cupyattn.emulator.program import Program
from cupyattn.emulator.ptx.model import Function, Statement, Variable

__all__ = ["Translation", "Translations", "translation_key"]


class Translations(Protocol):
    """Where translated kernels are kept from process to process."""

    def find(self, key: str) -> bytes | None:
        """Return what is kept under a key, None if that is nothing, or damaged."""

    def keep(self, key: str, translation: bytes) -> None:
        """Keep a translation."""


@lru_cache(maxsize=1)
def _emulator_digest() -> bytes:
    """Hash the emulator's own sources, and what tells one Python's code objects from another's."""
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def translation_key(ptx_digest: bytes, entry: str) -> str:
    """Return a name for the translation of a kernel: letters, digits and what its own name has."""
    text = b"\0".join((_emulator_digest(), ptx_digest, entry.encode()))
    return f"{entry}-{hashlib.sha256(text).hexdigest()[:32]}"


@dataclass
class Translation:
    """A kernel's program, and the variables of its module that its functions declare."""

    program: Program
    variables: list[Variable]

    def to_bytes(self) -> bytes:
        """Return all but what the PTX says of the entry itself."""
        program = self.program
        locations = list(dict.fromkeys(x.location for x in program.instructions))
        place = {location: i for i, location in enumerate(locations)}
        parts: tuple[Any, ...] = (
            program.code,
            [(name, x.dtype.str, x.tobytes()) for name, x in program.constants.items()],
            locations,
            [(x.opcode, str(x), place[x.location]) for x in program.instructions],
            program.packed_source,
            [(block.start, block.stop) for block in program.blocks],
            vars(program.layout),
            program.shared_granule,
            program.partial_warp_barriers,
            [astuple(variable) for variable in self.variables],
        )
        return zlib.compress(marshal.dumps(parts), 1)

    @staticmethod
    def from_bytes(data: bytes, header: Function) -> Translation:
        """Read what `to_bytes` has written.

        Raises
        ------
        ValueError, TypeError, EOFError
            The bytes are something else.
        """
        try:
            (code, constants, locations, instructions, packed_source, blocks, layout, granule,
             partial, variables) = marshal.loads(zlib.decompress(data))  # fmt: skip
        except zlib.error as error:
            raise ValueError(f"this is no translation: {error}") from error
        values = {name: np.frombuffer(b, dtype).reshape(()) for name, dtype, b in constants}
        program = Program(
            header,
            [Statement(opcode, text, locations[at]) for opcode, text, at in instructions],
            executable(code, values),
            code,
            values,
            packed_source,
            [range(first, last) for first, last in blocks],
            MemoryLayout.restored(layout),
            granule,
            partial,
        )
        return Translation(program, [Variable(*each) for each in variables])
