"""How a communicator is asked to move bytes: together or by turns, here or on a thread aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyattn.distributed.communicators.adapters import may_keep_the_host
from cupyattn.distributed.communicators.aside import aside
from cupyattn.distributed.communicators.protocol import Communicator
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error


class Carrier:
    """One rank's way to the others; `look` raises when it is no use to wait any longer."""

    def __init__(self, communicator: Communicator, look: Callable[[], None]) -> None:
        self._communicator = communicator
        self._look = look

    def require_here(self, array: Any, *, or_on_host: bool = False) -> None:
        """Raise unless an array lies where the communicator can reach it.

        Raises
        ------
        TypeError
            For what is no array of NumPy or CuPy.
        ValueError
            For one elsewhere than on the communicator's device, if it has one.
        """
        communicator, device = self._communicator, None
        if not isinstance(array, np.ndarray):
            device = getattr(getattr(array, "device", None), "id", None)
            if device is None:
                raise error(
                    TypeError,
                    f"a {type(array).__name__} where an array belongs",
                    "arrays of NumPy and CuPy have bytes to send",
                    "pass numpy.asarray of it, or cupy.asarray",
                )
        elif or_on_host:
            return
        allowed = getattr(communicator, "device", None)
        if allowed is not None and device != allowed:
            where = "NumPy's" if device is None else f"on device {device}"
            raise error(
                ValueError,
                f"an array that is {where}, of rank {communicator.rank} on device {allowed}",
                "a rank's arrays are on the device of its communicator",
                f"make it inside 'with cupy.cuda.Device({allowed})'",
            )

    def exchange(
        self,
        outgoing: Sequence[Array],
        to: int,
        incoming: Sequence[Array],
        source: int,
        stream: Any,
    ) -> None:
        """Send arrays to one rank and receive others from another, as far away as all ranks do."""
        self._carry(lambda: self._exchange(outgoing, to, incoming, source, stream), stream)

    def all_gather(self, array: Array, out: Array, stream: Any) -> None:
        """Fill out with the array of each rank."""
        self._carry(lambda: self._communicator.all_gather(array, out, stream), stream)

    def _exchange(
        self,
        outgoing: Sequence[Array],
        to: int,
        incoming: Sequence[Array],
        source: int,
        stream: Any,
    ) -> None:
        communicator = self._communicator
        together = getattr(communicator, "together", None)
        if together is not None:
            with together():
                for array in outgoing:
                    communicator.send(array, to, stream)
                for array in incoming:
                    communicator.receive(array, source, stream)
            return
        rank, size = communicator.rank, communicator.size
        hop = min((to - rank) % size, (rank - to) % size)
        turns = [(communicator.send, outgoing, to), (communicator.receive, incoming, source)]
        # Every circle of senders has neighbours that differ in this, so someone receives.
        for act, arrays, peer in turns if rank // hop % 2 == 0 else turns[::-1]:
            for array in arrays:
                act(array, peer, stream)

    def _carry(self, move: Callable[[], None], stream: Any) -> None:
        if not may_keep_the_host(self._communicator):
            move()
            return
        if stream is None:
            aside(move, self._look)
            return
        device = load_cupy().cuda.Device()

        def there() -> None:
            with device, stream:
                move()

        aside(there, self._look)
