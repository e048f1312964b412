"""A kernel ready to run, and where its variables and parameters are in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

import numpy as np

from cupyattn.emulator.ptx.architecture import shared_start, shared_unit
from cupyattn.emulator.ptx.model import SIZE, Function, Statement, Variable, readable


class MemoryLayout:
    """Offsets of the names that a kernel uses as addresses.

    Attributes
    ----------
    offsets : dict
        Name -> address in its state space (shared, local or parameters).
    shared_start : int
        The address of the block's first byte of shared memory.
    shared_unit : int
        The bytes in which a GPU allocates shared memory.
    shared_variables : list of (name, offset, size)
        By their C++ names, for messages. Offsets count from `shared_start`. Dynamic shared memory
        (``extern __shared__``) has size 0.
    static_shared_bytes, local_bytes : int
    module_symbols : set of str
        Global and const variables of the module; their addresses are known at launch.
    used_symbols : set of str
        Those that the kernel mentions.
    """

    def __init__(
        self, function: Function, module_variables: dict[str, Variable], target: int
    ) -> None:
        self.offsets: dict[str, int] = {p.name: p.offset for p in function.parameters}
        self.shared_variables: list[tuple[str, int, int]] = []
        self.used_symbols: set[str] = set()
        variables = [*function.variables.values(), *module_variables.values()]
        self.module_symbols = {v.name for v in variables if v.space in ("global", "const")}
        shared = [v for v in variables if v.space == "shared"]
        static = [v for v in shared if v.size]
        self.static_shared_bytes = self._place(static)
        dynamic = [v for v in shared if not v.size]
        alignment = max((v.alignment for v in dynamic), default=1)
        self.dynamic_shared_offset = -(-self.static_shared_bytes // alignment) * alignment
        for variable in dynamic:
            self.offsets[variable.name] = self.dynamic_shared_offset
        if dynamic:
            names = ", ".join(readable(v.name) for v in dynamic)
            self.shared_variables.append((names, self.dynamic_shared_offset, 0))
        self.shared_variables += [(readable(v.name), self.offsets[v.name], v.size) for v in static]
        self.shared_start = shared_start(target)
        self.shared_unit = shared_unit(target)
        for variable in shared:
            self.offsets[variable.name] += self.shared_start
        self.local_bytes = self._place([v for v in variables if v.space == "local"])

    @classmethod
    def restored(cls, attributes: dict[str, object]) -> MemoryLayout:
        """Return the layout that has these attributes."""
        layout = cls.__new__(cls)
        vars(layout).update(attributes)
        return layout

    def _place(self, variables: list[Variable]) -> int:
        offset = 0
        for variable in variables:
            offset = -(-offset // variable.alignment) * variable.alignment
            self.offsets[variable.name] = offset
            offset += variable.size
        return offset


def shared_granule(function: Function) -> int:
    """Return the size of the smallest access that may go to shared memory, at most 8."""
    smallest = 8
    for x in function.instructions:
        if x.root == "cp" and len(x.operands) > 2:  # cp.async: 4, 8 or 16
            smallest = min(smallest, int(x.operands[2]))
        if x.root not in ("ld", "st", "atom", "red"):
            continue
        if {"global", "local", "param", "const"} & set(x.parts):
            continue
        count = 2 if "v2" in x.parts else 4 if "v4" in x.parts else 1
        smallest = min(smallest, count * SIZE.get(x.parts[-1], 1))
    return smallest


@dataclass
class Program:
    """A kernel ready to run: what is kept of its PTX after code generation.

    Attributes
    ----------
    header : Function
        The entry without its body.
    run : callable
        Takes a `Batch` and runs all its blocks to the end.
    code : CodeType
        What makes `run` of the names of the runtime and of `constants`.
    constants : dict of str to array
    packed_source : bytes
        The generated Python, compressed: hundreds of kilobytes that only people read.
    blocks : list of range
        The instructions of each basic block.
    shared_granule : int
        Smallest access to shared memory in bytes, at most 8.
    partial_warp_barriers : bool
        Whether a ``bar.warp.sync`` may name only some lanes of a warp.
    """

    header: Function
    instructions: list[Statement]
    run: Callable[[object], None]
    code: CodeType
    constants: dict[str, np.ndarray]
    packed_source: bytes
    blocks: list[range]
    layout: MemoryLayout
    shared_granule: int
    partial_warp_barriers: bool

    @property
    def name(self) -> str:
        """The name of the entry, as in the PTX."""
        return self.header.name

    @property
    def source(self) -> str:
        """The generated Python."""
        return zlib.decompress(self.packed_source).decode()

    @property
    def local_bytes(self) -> int:
        """Local memory of a thread."""
        return self.layout.local_bytes
