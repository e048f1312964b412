"""The lanes of a batch: their threads and blocks, their positions, and errors that name them.

A batch is some thread blocks of a launch, executed together, and every thread of it is a lane. A
register is one NumPy array over the lanes, of shape (blocks, threads), or of a shape that
broadcasts to it: (blocks, 1) for what is uniform in a block, (1, threads) for what depends on the
thread index alone, () for a constant. A block whose size is no multiple of 32 is padded with lanes
that have never been alive.

`Positions` has the basic block of each lane, or `WAITING` or `EXITED`. While all lanes agree
("converged") there is nothing to keep. When a branch splits them, `position` holds one block number
per lane, and the lanes at the lowest number run until all have met again. Block numbers are in weak
topological order (see `codegen.control_flow`), so the lowest number first reconverges as hardware.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from cupyattn.emulator.errors import KernelFault
from cupyattn.emulator.program import Program
from cupyattn.emulator.ptx.model import readable

Array = np.ndarray  # or a NumPy scalar: arithmetic on 0-d arrays returns scalars
Mask = np.ndarray | None  # which lanes an operation is for; None: all


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

    def numbers(self, bad: Array | np.bool_, mask: Mask) -> np.ndarray:
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
        """Return "file:line: source [instruction]", and the lines that call an inlined function."""
        instruction = self.program.instructions[site]
        file, line = instruction.location
        if not line:
            return f"[{instruction}]"
        if file in self._sources:
            source = "".join(self._sources[file].splitlines()[line - 1 : line]).strip()
        else:
            source = linecache.getline(file, line).strip() if os.path.isabs(file) else ""
        callers = [f"{os.path.basename(name)}:{number}" for name, number in instruction.callers]
        called = f", called at {', '.join(callers)}" if callers else ""
        return f"{os.path.basename(file)}:{line}: {source} [{instruction}]{called}"

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


Step = tuple[int, "np.ndarray | None", "np.ndarray | None"]  # block to run, mask, merge

# Positions of lanes that are at no basic block; above every block number.
EXITED = 1 << 30
WAITING = 1 << 29  # at a barrier, or for lanes of the warp

# Diverged steps between looks at whether some warps keep the others waiting.
_PATIENCE = 256


class Positions:
    """Positions of the lanes of a batch.

    Attributes
    ----------
    position : (blocks, threads) int32 array or None
        Block number per lane, `WAITING` or `EXITED`; None while converged.
    diverged_steps : int
        How many basic blocks ran with only some of the lanes.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.position: np.ndarray | None = None
        self.diverged_steps = 0
        self._alive: np.ndarray | None = lanes.exists  # while converged

    @property
    def alive(self) -> np.ndarray | None:
        """The mask of the lanes that have not exited, None for all."""
        return self._alive if self.position is None else self.position != EXITED

    @property
    def each(self) -> np.ndarray:
        """The position of each lane, while diverged."""
        assert self.position is not None
        return self.position

    def diverge(self, position: Array | int, mask: Mask) -> np.ndarray:
        """Leave the converged state: give every lane its position."""
        self.position = np.empty(self.lanes.shape, np.int32)
        self.position[...] = position
        if mask is not None:
            self.position[~mask] = EXITED
        return self.position

    def wait(self, here: np.ndarray, mask: np.ndarray | None) -> None:
        """Let the lanes of `here` wait; `mask` says who runs, if all lanes are still converged."""
        if self.position is None:
            self.diverge(WAITING, mask)
        self.each[here] = WAITING

    def step(self, number: int) -> Step:
        """Return the step that runs the lanes at block `number`, the lowest one."""
        position = self.each
        here = position == number
        count = np.count_nonzero(here)
        if count == here.size:
            self.position = self._alive = None
            return number, None, None
        if count + np.count_nonzero(position == EXITED) == here.size:
            self.position, self._alive = None, here
            return number, here, None
        self.diverged_steps += 1
        if self.diverged_steps % _PATIENCE == 0:
            number, here = self._relieve(number, here)
        return number, here, here

    def _relieve(self, number: int, here: np.ndarray) -> tuple[int, np.ndarray]:
        """Return a step of warps that have no lane in block `number`, if there are any.

        The lanes there may be spinning until another warp does something.
        """
        busy = np.repeat(here.reshape(-1, 32).any(1), 32).reshape(here.shape)
        others = np.where(busy, EXITED, self.each)
        lowest = int(others.min())
        if lowest >= WAITING:
            return number, here
        return lowest, others == lowest
