"""Transfers that run during the computation: a second stream of a GPU, and blocks on their way."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from cupyattn.distributed.group import Group
from cupyattn.runtime.arrays import Array, CudaArray
from cupyattn.runtime.cupy_library import load_cupy

Mark = Any
"""A point in the order of what computes: an event; None for NumPy arrays, which need none."""


class Lane:
    """The stream beside the current one of a call's device, on which its transfers go.

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
        # Memory of the call is used again in the order of its own stream.
        self.wait(self._mark(self._side))
        self._current.__exit__(kind, raised, trace)

    def mark(self) -> Mark:
        """Mark what has been asked to be computed so far."""
        return self._mark(self._compute)

    def wait(self, mark: Mark) -> None:
        """Hold what is computed next until a transfer is done."""
        if mark is not None:
            self._compute.wait_event(mark)

    def transfer(
        self, outgoing: Sequence[Array], incoming: Sequence[Array], hop: int, behind: Mark
    ) -> Mark:
        """Send arrays `hop` ranks on and receive others, behind a mark; return when it is done."""
        rank, size = self.group.rank, self.group.size
        if behind is not None:
            self._side.wait_event(behind)
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
    """Arrays that go round the ring: what is here now, and a buffer for what comes next.

    Two buffers take turns: what has been received in one is used, and sent on, while the other
    receives. The rank's own arrays are the first to be sent; they are a buffer themselves where
    `overwrites` says so. Buffers are made here, before the first mark: memory that a later call
    has freed may still be read by what it has started, and transfers wait for marks alone.
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

    def depart(self, hop: int, behind: Mark) -> None:
        """Start sending what is here and receiving what comes next.

        `behind` is a mark behind whatever filled what is here, and used the buffer that receives.
        """
        if hop % self._lane.group.size == 0:
            self._next = self.here
            return
        buffer = self._spare.pop()
        self._arrived = self._lane.transfer(self.here, buffer, hop, behind)
        self._next = buffer

    def arrive(self) -> tuple[Array, ...]:
        """Hold what is computed next until the block has come, and return it."""
        assert self._next is not None
        self._lane.wait(self._arrived)
        if self._next is not self.here:
            if self._own_is_spare:
                self._spare.append(self.here)
            self._own_is_spare = True  # from the second one on they are buffers
            self.here = self._next
        return self.here
