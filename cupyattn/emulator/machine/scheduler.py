"""Which lanes run which basic block next: branches, divergence and waiting.

While all lanes agree ("converged"), the current block is a Python int in the generated code and
nothing here is touched. When a branch splits them, `position` holds one block number per lane and
`pick` runs the lanes at the lowest number until all have met again. Block numbers are in weak
topological order (see `codegen.control_flow`), so the lowest number first reconverges as hardware.

Generated code carries two masks: `mask`, the lanes that run (None: all), and `merge`, which is the
same mask while lanes are diverged and None otherwise; only then must registers keep the values of
lanes that do not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.emulator.errors import BarrierError
from cupyattn.emulator.machine.barriers import Barriers
from cupyattn.emulator.machine.positions import EXITED, WAITING
from cupyattn.emulator.machine.warp_sync import WarpSync

if TYPE_CHECKING:
    from cupyattn.emulator.machine.batch import Batch

__all__ = ["Scheduler", "Step"]

# Diverged steps between looks at whether some warps keep the others waiting.
_PATIENCE = 256

Array = Any
Step = tuple[int, "np.ndarray | None", "np.ndarray | None"]  # block to run, mask, merge


class Scheduler:
    """Positions of the lanes of a batch.

    Attributes
    ----------
    position : (blocks, threads) int32 array or None
        Block number per lane, `WAITING` or `EXITED`; None while converged.
    diverged_steps : int
        How many basic blocks ran with only some of the lanes.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.position: np.ndarray | None = None
        self.alive: np.ndarray | None = batch.exists
        self.diverged_steps = 0
        self.barriers = Barriers(batch, self)
        self.warp_sync = WarpSync(batch, self)

    def start(self) -> Step:
        """Return the first step: block 0, all threads that exist."""
        return 0, self.alive, None

    def alive_lanes(self) -> np.ndarray | None:
        """Return the mask of the lanes that have not exited, None for all."""
        if self.position is None:
            return self.alive
        return self.position != EXITED

    def diverge(self, position: Array, mask: np.ndarray | None) -> np.ndarray:
        """Leave the converged state: every lane gets a position of its own."""
        self.position = np.empty(self.batch.shape, np.int32)
        self.position[...] = position
        if mask is not None:
            self.position[~mask] = EXITED
        return self.position

    def branch(
        self, predicate: Array, target: int, otherwise: int, mask: Array, merge: Array
    ) -> Step:
        """Send the lanes with a true predicate to `target`, the others to `otherwise`."""
        if merge is not None:
            assert self.position is not None
            np.copyto(self.position, np.where(predicate, target, otherwise), where=mask)
            return self.pick()
        if mask is None:
            taken = np.count_nonzero(predicate)
            if taken == predicate.size:
                return self.goto(target, None, None)
            if taken == 0:
                return self.goto(otherwise, None, None)
        else:
            if (predicate | ~mask).all():
                return self.goto(target, mask, None)
            if not (predicate & mask).any():
                return self.goto(otherwise, mask, None)
        self.diverge(np.where(predicate, target, otherwise), mask)
        return self.pick()

    def branch_table(self, index: Array, table: Array, mask: Array, merge: Array) -> Step:
        """Send every lane to the block that `table` holds at its index (``brx.idx``)."""
        target = table.take(np.asarray(index).astype(np.int64), mode="clip")
        if merge is None:
            if target.ndim == 0:
                return int(target), mask, None
            self.diverge(target, mask)
        else:
            assert self.position is not None
            np.copyto(self.position, target, where=mask)
        return self.pick()

    def goto(self, target: int, mask: Array, merge: Array) -> Step:
        """Send the running lanes to `target`."""
        if merge is None:
            return (target, mask, None) if target != EXITED else (-1, None, None)
        assert self.position is not None
        self.position[mask] = target
        return self.pick()

    def exit(self, mask: Array, merge: Array) -> Step:
        """End the running lanes."""
        if merge is None:
            return -1, None, None
        assert self.position is not None
        self.position[mask] = EXITED
        return self.pick()

    def pick(self) -> Step:
        """Return the next step: the lowest block at which any lane stands."""
        position = self.position
        assert position is not None
        number = int(position.min())
        while number == WAITING:
            if not (self.warp_sync.release() or self.barriers.release()):
                raise self.warp_sync.stuck() or self.barriers.stuck()
            number = int(position.min())
        if number == EXITED:
            return -1, None, None
        here = position == number
        count = np.count_nonzero(here)
        if count == here.size:
            self.position = self.alive = None
            return number, None, None
        if count + np.count_nonzero(position == EXITED) == here.size:
            self.position, self.alive = None, here
            return number, here, None
        self.diverged_steps += 1
        if self.diverged_steps % _PATIENCE == 0:
            number, here = self._relieve(number, here)
        return number, here, here

    def _relieve(self, number: int, here: np.ndarray) -> tuple[int, np.ndarray]:
        """Return a step of warps that have no lane in block `number`, if there are any.

        The lanes there may be spinning until another warp does something.
        """
        assert self.position is not None
        busy = np.repeat(here.reshape(-1, 32).any(1), 32).reshape(here.shape)
        others = np.where(busy, EXITED, self.position)
        lowest = int(others.min())
        if lowest >= WAITING:
            return number, here
        return lowest, others == lowest

    def missed(self, text: str, site: int, lanes: Array) -> BarrierError:
        """Return a `BarrierError` that names the first of `lanes`."""
        error = self.batch.fault(BarrierError, text, site, lanes)
        assert isinstance(error, BarrierError)
        return error
