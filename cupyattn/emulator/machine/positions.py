"""Where the lanes stand: at which basic block, waiting, or at the end.

While all lanes agree ("converged") there is nothing to keep. When a branch splits them, `position`
holds one block number per lane, and the lanes at the lowest number run until all have met again.
Block numbers are in weak topological order (see `codegen.control_flow`), so the lowest number first
reconverges as hardware.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.machine.lanes import Lanes

__all__ = ["EXITED", "WAITING", "Positions", "Step"]

Array = Any
Step = tuple[int, "np.ndarray | None", "np.ndarray | None"]  # block to run, mask, merge

# Positions of lanes that stand at no basic block; above every block number.
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

    def diverge(self, position: Array, mask: np.ndarray | None) -> np.ndarray:
        """Leave the converged state: every lane gets a position of its own."""
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
