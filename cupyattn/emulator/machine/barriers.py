"""Barriers of a block: ``bar.sync``, ``bar.arrive`` and ``bar.red``.

A barrier with a thread count opens as soon as the last lane arrives. A ``bar.sync`` for the whole
block opens when no lane can run on, since only then it is known that no other thread is still on
its way; in straight-line code all lanes are there and it costs nothing. (``bar.warp.sync`` is in
`machine.warp_sync`.)
"""

from __future__ import annotations

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import BarrierError
from cupyattn.emulator.machine.lanes import EXITED, Array, Lanes, Positions, Step
from cupyattn.emulator.machine.races import SharedMemoryTracker

_IDS = 16  # hardware barriers of a block


class Barriers:
    """The waiting lanes. The arrays exist from the first time that a lane has to wait."""

    def __init__(
        self,
        lanes: Lanes,
        checks: Checks,
        positions: Positions,
        tracker: SharedMemoryTracker | None,
    ) -> None:
        self.lanes = lanes
        self.check_threads = checks.barriers
        self.positions = positions
        self.tracker = tracker
        self.allocated = False
        self.result: Array = np.zeros((), np.uint32)

    def _allocate(self) -> None:
        if self.allocated:
            return
        shape, blocks = self.lanes.shape, self.lanes.blocks
        self.allocated = True
        self.resume = np.zeros(shape, np.int32)  # block to run after the barrier
        self.barrier = np.full(shape, -1, np.int8)  # barrier id, -1: not waiting at one
        self.site = np.zeros(shape, np.int32)  # instruction at which the lane waits
        self.vote = np.zeros(shape, bool)  # predicate of bar.red
        self.reduction = ""
        self.expected = np.zeros((blocks, _IDS), np.int64)  # thread count, 0: the whole block
        self.arrived = np.zeros((blocks, _IDS), np.int64)  # lanes of bar.arrive
        self.arrival_site = np.zeros((blocks, _IDS), np.int32)  # instruction of the last ones,
        self.arrival_lane = np.zeros((blocks, _IDS), np.int64)  # and the first lane of them

    # ------------------------------------------------------------------ arriving
    def check(self, identifier: Array, count: Array | None, mask: Array, site: int) -> None:
        """Refuse operands that hardware barriers do not have."""
        bad = np.asarray(identifier) >= _IDS
        if count is not None:
            bad = bad | (np.asarray(count) % 32 != 0) | (np.asarray(count) == 0)
        if not bad.any():
            return
        bad = np.broadcast_to(bad, self.lanes.shape)
        lanes = np.flatnonzero(bad if mask is None else bad & mask)
        if len(lanes):
            operands = [identifier] if count is None else [identifier, count]
            values = [np.broadcast_to(v, self.lanes.shape).flat[lanes[0]] for v in operands]
            raise self.lanes.fault(BarrierError, barrier_fault(*map(int, values)), site, lanes)

    def sync(
        self,
        identifier: Array,
        count: Array | None,
        target: int,
        mask: Array,
        merge: Array,
        site: int,
        reduction: str = "",
        predicate: Array | None = None,
    ) -> Step | None:
        """Wait at barrier `identifier` until all (or `count`) threads of the block are there.

        Returns
        -------
        Step or None
            How the running lanes go on, None if another step must be picked.
        """
        if merge is None and self._opens_at_once(identifier, count, mask, site):
            if reduction:
                here = np.ones(self.lanes.shape, bool) if mask is None else mask
                self._reduce(reduction, predicate, identifier, here)
            return target, mask, None
        self._allocate()
        here = np.ones(self.lanes.shape, bool) if mask is None else mask
        self.positions.wait(here, mask)
        self.resume[here] = target
        self.site[here] = site
        ids = np.broadcast_to(np.asarray(identifier), self.lanes.shape).astype(np.int64)
        self.barrier[here] = ids[here]
        if reduction:
            self.reduction = reduction
            self.vote[here] = np.broadcast_to(np.asarray(predicate), self.lanes.shape)[here]
        self._expect(ids, count, here)
        if count is not None:
            self._release_counted()
        return None

    def arrive(
        self, identifier: Array, count: Array, target: int, mask: Array, merge: Array, site: int
    ) -> Step | None:
        """Count the running lanes at a barrier without waiting (``bar.arrive``); as `sync`."""
        self._allocate()
        here = np.ones(self.lanes.shape, bool) if mask is None else mask
        ids = np.broadcast_to(np.asarray(identifier), self.lanes.shape).astype(np.int64)
        self._expect(ids, count, here)
        barriers = _IDS * np.nonzero(here)[0] + ids[here]
        barriers, first, counts = np.unique(barriers, return_index=True, return_counts=True)
        self.arrived.flat[barriers] += counts
        self.arrival_site.flat[barriers] = site
        self.arrival_lane.flat[barriers] = np.flatnonzero(here)[first]
        if self.tracker:
            self.tracker.clocks.arrive(here, ids)
        if self.positions.position is not None:
            self.positions.position[here] = target
        self._release_counted()
        return (target, mask, merge) if self.positions.position is None else None

    def _expect(self, ids: Array, count: Array | None, here: np.ndarray) -> None:
        blocks = np.nonzero(here)[0]
        counts = 0 if count is None else np.broadcast_to(np.asarray(count), here.shape)[here]
        self.expected[blocks, ids[here]] = counts

    def _opens_at_once(
        self, identifier: Array, count: Array | None, mask: Array, site: int
    ) -> bool:
        """Tell whether the converged lanes complete the barrier by themselves."""
        lanes = self.lanes
        if count is None or (np.ndim(count) == 0 and int(count) == lanes.real_threads):
            if mask is not None and self.check_threads:
                exists = lanes.exists if lanes.exists is not None else True
                gone = mask.any(1, keepdims=True) & exists & ~mask
                if gone.any():
                    raise self._exited(site, gone)
            if count is None or (np.ndim(identifier) == 0 and mask is None):
                if self.tracker:
                    self.tracker.history.sync_blocks(None)
                return True
        if self.allocated and self.arrived.any():
            return False
        here = np.ones(lanes.shape, bool) if mask is None else mask
        key = np.broadcast_to(np.asarray(identifier), lanes.shape).astype(np.int64)
        key = key + _IDS * np.arange(lanes.blocks)[:, None]
        arrived = np.bincount(key[here], minlength=_IDS * lanes.blocks)
        wanted = np.broadcast_to(np.asarray(count), lanes.shape)[here]
        if (arrived[key[here]] != wanted).any():
            return False
        if self.tracker:
            self.tracker.clocks.sync_groups(here, key % _IDS)
        return True

    def _reduce(
        self, reduction: str, predicate: Array, identifier: Array, here: np.ndarray
    ) -> None:
        """Give the lanes of `here` the combined votes of all that share their barrier."""
        result = np.zeros(self.lanes.shape, np.uint32)
        result[...] = self.result
        votes = np.broadcast_to(predicate, self.lanes.shape)
        ids = np.broadcast_to(np.asarray(identifier), self.lanes.shape)
        for number in np.unique(ids[here]):
            group = here & (ids == number)
            np.copyto(result, _reduced(reduction, votes, group), where=group)
        self.result = result

    def _exited(self, site: int, gone: np.ndarray) -> Exception:
        return self.lanes.fault(
            BarrierError,
            "a barrier that some threads of the block miss: they ended (returned) without reaching "
            "it, while the others wait",
            site,
            np.flatnonzero(gone),
        )

    # ------------------------------------------------------------------ opening
    def _open(self, lanes: np.ndarray) -> None:
        self.positions.each[lanes] = self.resume[lanes]
        self.barrier[lanes] = -1

    def _release_counted(self) -> bool:
        waiting = self.barrier >= 0
        rows, columns = np.nonzero(waiting)
        ids = self.barrier[rows, columns].astype(np.int64)
        present = self.arrived.copy()
        np.add.at(present, (rows, ids), 1)
        full = (self.expected > 0) & (present == self.expected)
        alone = full & (self.arrived == self.expected)  # completed, and nobody waits
        if self.tracker and alone.any():
            self.tracker.clocks.forget_arrivals(alone)
        self.arrived[full] = 0
        opened = np.zeros_like(waiting)
        opened[rows, columns] = full[rows, ids]
        if not opened.any():
            return False
        if self.tracker:
            self.tracker.clocks.sync_groups(opened, self.barrier.astype(np.int64))
        self._finish(opened)
        return True

    def _release_blocks(self) -> bool:
        """Open the whole-block barriers at which every live thread of a block waits."""
        waiting = self.barrier >= 0
        ids = np.where(waiting, self.barrier, -1).max(1)
        whole = np.take_along_axis(self.expected, np.maximum(ids, 0)[:, None].astype(int), 1) == 0
        same = waiting & (self.barrier == ids[:, None]) & whole
        alive = self.positions.each != EXITED
        ready = same.any(1) & (same | ~alive).all(1)
        if not ready.any():
            return False
        opened = same & ready[:, None]
        if self.check_threads:
            self._check_whole_blocks(opened, ready, alive)
        if self.tracker:
            self.tracker.history.sync_blocks(ready)
        self._finish(opened)
        return True

    def _check_whole_blocks(self, opened: Array, ready: Array, alive: Array) -> None:
        exists = True if self.lanes.exists is None else self.lanes.exists
        gone = ready[:, None] & exists & ~alive
        if gone.any():
            raise self._exited(int(self.site[opened].flat[0]), gone)
        first = np.where(opened, self.site, 1 << 30).min(1)
        other = opened & (self.site != first[:, None])
        if other.any():
            lanes = np.flatnonzero(other)
            block = int(lanes[0]) // self.lanes.threads
            raise self.lanes.fault(
                BarrierError,
                "divergent barrier: threads of one block wait at different bar.sync; the others "
                f"wait at {self.lanes.describe(int(first[block]))}",
                int(self.site.flat[lanes[0]]),
                lanes,
            )

    def _finish(self, opened: np.ndarray) -> None:
        if self.reduction:
            self._reduce(self.reduction, self.vote, self.barrier, opened)
        self._open(opened)

    def release(self) -> bool:
        """Open the barriers that can open now that no lane can run; tell whether there was one."""
        return self.allocated and (self._release_counted() or self._release_blocks())

    def check_completed(self) -> None:
        """Refuse a kernel that has ended with a barrier at which lanes arrived in vain."""
        if not (self.allocated and self.check_threads and self.arrived.any()):
            return
        at = tuple(np.argwhere(self.arrived)[0])
        raise self.lanes.fault(
            BarrierError,
            f"barrier {at[1]} is never completed: {self.arrived[at]} threads arrived at it "
            f"(bar.arrive), it needs {self.expected[at]}, and the block has ended",
            int(self.arrival_site[at]),
            self.arrival_lane[at][None],
        )

    def site_of(self, lane: int) -> int:
        """Return the instruction at which a lane waits."""
        return int(self.site.flat[lane])

    def stuck(self) -> Exception:
        """Return the error for lanes that wait for others which never come."""
        lanes = np.flatnonzero(self.barrier >= 0)
        site = int(self.site.flat[lanes[0]])
        elsewhere = sorted({int(s) for s in self.site.flat[lanes]} - {site})
        others = "; others wait at " + self.lanes.describe(elsewhere[0]) if elsewhere else ""
        return self.lanes.fault(
            BarrierError,
            f"deadlock: the threads that this barrier waits for never arrive{others}",
            site,
            lanes,
        )


def barrier_fault(identifier: int, count: int = 32) -> str:
    """Describe what is wrong with the operands of a barrier; an empty string if they are right."""
    if not 0 <= identifier < _IDS:
        return f"barrier {identifier}; a block has the barriers 0 to {_IDS - 1}"
    if count <= 0 or count % 32:
        return f"a barrier of {count} threads; allowed: a positive multiple of 32, whole warps"
    return ""


def _reduced(reduction: str, votes: np.ndarray, here: np.ndarray) -> np.ndarray:
    if reduction == "popc":
        return (votes & here).sum(1, keepdims=True).astype(np.uint32)
    if reduction == "and":
        return (votes | ~here).all(1, keepdims=True).astype(np.uint32)
    return (votes & here).any(1, keepdims=True).astype(np.uint32)
