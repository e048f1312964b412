"""The lanes of a batch: how many, which threads of which blocks, and what to say when one fails.

A batch is some thread blocks of a launch, executed together, and every thread of it is a lane. A
register is one NumPy array over the lanes, of shape (blocks, threads), or of a shape that
broadcasts to it: (blocks, 1) for what is uniform in a block, (1, threads) for what depends on the
thread index alone, () for a constant. A block whose size is no multiple of 32 is padded with lanes
that have never been alive.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from cupyattn.emulator.errors import KernelFault
from cupyattn.emulator.program import Program
from cupyattn.emulator.ptx.mangling import readable

__all__ = ["Lanes", "over_lanes"]

Array = Any  # np.ndarray or NumPy scalar: arithmetic on 0-d arrays returns scalars
Fault = TypeVar("Fault", bound=KernelFault)


def over_lanes(value: Array, shape: tuple[int, int]) -> Array:
    """Return `value` with one element per lane: itself, or a read-only view.

    Most values have that shape already, and `numpy.broadcast_to` costs 2 µs even then: as much as
    half a dozen operations on the lanes of a small launch.
    """
    return value if value.shape == shape else np.broadcast_to(value, shape)


class Lanes:
    """The threads of `blocks` thread blocks from `first_block` on.

    Attributes
    ----------
    shape : (int, int)
        Blocks and threads of a block, padded to whole warps.
    real_threads : int
        Threads of a block without the padding.
    exists : (blocks, threads) array of bool or None
        Which lanes are no padding, None for all.
    """

    def __init__(
        self,
        program: Program,
        sources: Mapping[str, str],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        first_block: int,
        blocks: int,
    ) -> None:
        self.program = program
        self.grid = grid
        self.block = block
        self.first_block = first_block
        self.blocks = blocks
        self.real_threads = block[0] * block[1] * block[2]
        self.warps = -(-self.real_threads // 32)
        self.threads = 32 * self.warps
        self.shape = (blocks, self.threads)
        self.exists: np.ndarray | None = None
        if self.threads != self.real_threads:
            self.exists = np.zeros(self.shape, bool)
            self.exists[:, : self.real_threads] = True
        self._sources = sources

    def block_index(self, lane: int) -> tuple[int, int, int]:
        """Return the block index (x, y, z) of a lane, counted over the whole batch."""
        x, y, _ = self.grid
        b = self.first_block + lane // self.threads
        return b % x, b // x % y, b // (x * y)

    def thread_index(self, lane: int) -> tuple[int, int, int]:
        """Return the thread index (x, y, z) of a lane, counted over the whole batch."""
        x, y, _ = self.block
        t = lane % self.threads
        return t % x, t // x % y, t // (x * y)

    def numbers(self, bad: Array, mask: Array | None) -> np.ndarray:
        """Return the flat numbers of the lanes marked in `bad`.

        `bad` covers all lanes (broadcast) if `mask` is None, otherwise the lanes of the mask.
        """
        if mask is None:
            marked = np.broadcast_to(bad, self.shape)
            if self.exists is not None:
                marked = marked & self.exists
            return np.flatnonzero(marked)
        active = np.flatnonzero(np.broadcast_to(mask, self.shape))
        return active[np.broadcast_to(bad, active.shape)]

    def describe(self, site: int) -> str:
        """Return "file:line: source [instruction]" of an instruction."""
        instruction = self.program.instructions[site]
        file, line = instruction.location
        if not line:
            return f"[{instruction}]"
        if file in self._sources:
            source = "".join(self._sources[file].splitlines()[line - 1 : line]).strip()
        else:
            source = linecache.getline(file, line).strip() if os.path.isabs(file) else ""
        return f"{os.path.basename(file)}:{line}: {source} [{instruction}]"

    def fault(
        self, kind: type[Fault], text: str, site: int, lanes: np.ndarray | list[int]
    ) -> Fault:
        """Return the exception `kind`, its message completed with block, thread and line."""
        entry = readable(self.program.name)
        line = self.program.instructions[site].location[1]
        if not len(lanes):
            return kind(f"{text}; in {entry}, {self.describe(site)}", line=line)
        lane = int(lanes[0])
        block, thread = self.block_index(lane), self.thread_index(lane)
        more = f" (and {len(lanes) - 1} more threads)" if len(lanes) > 1 else ""
        return kind(
            f"{text}; block {block}, thread {thread}{more}; in {entry}, {self.describe(site)}",
            block=block,
            thread=thread,
            line=line,
        )
