"""How a communicator is asked to move bytes: together or by turns, here or on a thread aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupyattn.arrays import Array
from cupyattn.cupy_library import load_cupy
from cupyattn.distributed.communicators.adapters import may_keep_the_host
from cupyattn.distributed.communicators.aside import aside
from cupyattn.distributed.communicators.protocol import Communicator


class Carrier:
    """One rank's way to the others; `look` raises when it is no use to wait any longer."""

    def __init__(self, communicator: Communicator, look: Callable[[], None]) -> None:
        self._communicator = communicator
        self._look = look

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
