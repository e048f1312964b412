"""Transfers during the computation: a second stream of a GPU, and the blocks that it carries."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from cupyattn.distributed.group import Group
from cupyattn.runtime.arrays import Array, CudaArray
from cupyattn.runtime.cupy_library import load_cupy

Mark = Any
"""An event on the stream that computes; None for NumPy arrays."""


class Lane:
    """A second stream of a call's device, for its transfers.

    For NumPy arrays there is none: a transfer is done when it returns.
    """

    def __init__(self, group: Group, array: Array) -> None:
        self.group = group
        self._device = None
        if not isinstance(array, np.ndarray):
            self._device = int(cast("CudaArray", array).device.id)
        self.xp = np if self._device is None else load_cupy()

    def __enter__(self) -> Lane:
        self._current = self.group.on_device(self._device)
        self._current.__enter__()
        if self._device is None:
            self._compute: Any = None
            self._side: Any = None
        else:
            self._compute = self.xp.cuda.get_current_stream()
            self._side = self.group.side_stream(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The call's memory is reused in the order of its own stream.
        self.wait(self._mark(self._side))
        self._current.__exit__(kind, raised, trace)

    def mark(self) -> Mark:
        """Mark the work that has been queued so far."""
        return self._mark(self._compute)

    def wait(self, mark: Mark) -> None:
        """Make later work wait for a transfer."""
        if mark is not None:
            self._compute.wait_event(mark)

    def transfer(
        self, outgoing: Sequence[Array], incoming: Sequence[Array], hop: int, after: Mark
    ) -> Mark:
        """Send arrays `hop` ranks on and receive others, after a mark; return a mark of the end."""
        rank, size = self.group.rank, self.group.size
        if after is not None:
            self._side.wait_event(after)
        self.group.exchange(
            outgoing, (rank + hop) % size, incoming, (rank - hop) % size, self._side
        )
        return self._mark(self._side)

    def _mark(self, stream: object) -> Mark:
        if stream is None:
            return None
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


class RingBlocks:
    """Arrays that travel around the ring: the current block, and a buffer for the next one.

    Two buffers alternate: one is used and sent on while the other receives. The rank's own arrays
    are sent first; with `overwrites` they are a buffer too. Buffers are allocated here, before the
    first mark: transfers only wait for marks, and memory that a later call frees may still be read.
    """

    def __init__(
        self, lane: Lane, own: Sequence[Array], hops: int, *, overwrites: bool = False
    ) -> None:
        self._lane = lane
        self.here = tuple(own)
        self._own_is_spare = overwrites
        buffers = min(hops, 1 if overwrites else 2)
        self._spare = [
            tuple(lane.xp.empty(array.shape, array.dtype) for array in own) for _ in range(buffers)
        ]
        self._arrived: Mark = None
        self._next: tuple[Array, ...] | None = None

    def depart(self, hop: int, after: Mark) -> None:
        """Start sending the current block and receiving the next one.

        `after` is a mark after the work that filled the block and that used the receiving buffer.
        """
        if hop % self._lane.group.size == 0:
            self._next = self.here
            return
        buffer = self._spare.pop()
        self._arrived = self._lane.transfer(self.here, buffer, hop, after)
        self._next = buffer

    def arrive(self) -> tuple[Array, ...]:
        """Make later work wait for the next block, and return it."""
        assert self._next is not None
        self._lane.wait(self._arrived)
        if self._next is not self.here:
            if self._own_is_spare:
                self._spare.append(self.here)
            self._own_is_spare = True  # from the second one on they are buffers
            self.here = self._next
        return self.here
