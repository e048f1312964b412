"""The protocol of communicators: three methods, implemented with NCCL, MPI and threads."""

from __future__ import annotations

from typing import Any, Protocol

from cupyattn.runtime.arrays import Array


class Communicator(Protocol):
    """One rank's end of a communicator; any object with these members is one.

    `stream` is the CuPy stream whose order a method joins: what was enqueued there before is done
    first, what is enqueued behind may use the result. For NumPy arrays it is None, and a method
    returns when it is done. Arrays are contiguous in C order; the bytes count, the dtype does not.
    Methods are called on a thread of their own, one after another, so that a group's timeout holds
    for one that never returns.

    A communicator may have more:

    - ``together()``, a context manager: what is sent and received inside goes at once, in both
      directions, as between ncclGroupStart and ncclGroupEnd. Without it ranks send and receive by
      turns, which is right and takes twice as long.
    - ``device``, the CUDA ordinal that arrays have to be on.
    - ``abort()``, which ends what waits for another rank.
    - ``failures``, where threads or processes post that one has failed.
    - ``gathers_on_host``, whether all_gather takes NumPy arrays too where ranks have a GPU each.
      Then every call is compared among ranks, at no cost of a GPU, and not the first of its kind.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def send(self, array: Array, peer: int, stream: Any) -> None:
        """Send an array to a rank."""

    def receive(self, array: Array, peer: int, stream: Any) -> None:
        """Receive into an array what a rank sends."""

    def all_gather(self, array: Array, out: Array, stream: Any) -> None:
        """Fill out (size, ...) with the array (...) of each rank, in the order of ranks."""
