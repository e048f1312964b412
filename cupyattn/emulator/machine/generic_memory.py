"""Accesses without a state space (``ld``, ``st``, ``atom`` by generic address)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.machine.atomics import AtomicOperations
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.memory import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    WINDOW_BYTES,
    MemorySpace,
)
from cupyattn.emulator.machine.storage import ELEMENT

__all__ = ["GenericMemory"]

Array = Any


class GenericMemory:
    """Accesses without a state space: each lane goes where its address points."""

    def __init__(
        self,
        lanes: Lanes,
        shared: MemorySpace,
        local: MemorySpace,
        global_: MemorySpace,
        atomics: AtomicOperations,
    ) -> None:
        self.shape = lanes.shape
        self.shared = shared
        self.local = local
        self.global_ = global_
        self.atomics = atomics

    def _spaces(self, address: Array, mask: Array) -> list[tuple[MemorySpace, Array, Array]]:
        """Return (space, address in it, mask) for every space that a running lane addresses."""
        address = np.asarray(address)
        shared = (address - np.uint64(SHARED_WINDOW)) < np.uint64(WINDOW_BYTES)
        local = (address - np.uint64(LOCAL_WINDOW)) < np.uint64(WINDOW_BYTES)
        low = address & np.uint64(WINDOW_BYTES - 1)
        found: list[tuple[MemorySpace, Array, Array]] = []
        for space, here, inside in (
            (self.shared, shared, low),
            (self.local, local, low),
            (self.global_, ~(shared | local), address),
        ):
            running = here if mask is None else here & mask
            if not running.any():
                continue
            if running.all():
                return [(space, inside, mask)]
            if mask is not None and np.array_equal(np.broadcast_to(running, mask.shape), mask):
                return [(space, inside, mask)]
            found.append((space, inside, np.broadcast_to(running, self.shape)))
        return found

    def load(self, address: Array, size: int, count: int, mask: Array, site: int) -> Array:
        """Load as `MemorySpace.load`."""
        spaces = self._spaces(address, mask)
        if len(spaces) == 1:
            space, inside, lanes = spaces[0]
            return space.load(inside, size, count, lanes, site)
        shape = self.shape if count == 1 else (count, *self.shape)
        values = np.zeros(shape, ELEMENT[size])
        for space, inside, lanes in spaces:
            part = space.load(inside, size, count, lanes, site)
            np.copyto(values, part, where=lanes)
        return values

    def store(
        self, address: Array, size: int, values: tuple[Array, ...], mask: Array, site: int
    ) -> None:
        """Store as `MemorySpace.store`."""
        for space, inside, lanes in self._spaces(address, mask):
            space.store(inside, size, values, lanes, site)

    def atomic(
        self,
        operation: str,
        kind: str,
        address: Array,
        values: tuple[Array, ...],
        mask: Array,
        site: int,
        wants_old: bool,
    ) -> Array:
        """Update atomically as `AtomicOperations.update`."""
        old: Array = None
        for space, inside, lanes in self._spaces(address, mask):
            part = self.atomics.update(
                space, operation, kind, inside, values, lanes, site, wants_old
            )
            if wants_old:
                old = part if old is None else np.where(lanes, part, old)
        return old
