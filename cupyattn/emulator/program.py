"""A kernel ready to run."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from cupyattn.emulator.codegen.layout import MemoryLayout
from cupyattn.emulator.ptx.model import Function, Statement

__all__ = ["Program"]


@dataclass
class Program:
    """A kernel ready to run: what is left of its PTX behind code generation.

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
    run: Callable[[Any], None]
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
