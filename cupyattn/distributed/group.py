"""A group of ranks: its communicator, its device, and its failures.

Ranks compare descriptions of their calls, so that all get an error if calls differ, before anything
else is sent. Where the host can gather (`gathers_on_host`) this is cheap, and every call does it.
Otherwise the host has to wait for the GPU, and only the first call of a kind is compared. A digest
is sent first; descriptions follow only if digests differ.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, cast

import numpy as np

from cupyattn.distributed.communicators import Carrier, communicator_of
from cupyattn.distributed.failures import Failures, FolderFailures, SharedFailures, seconds_of
from cupyattn.distributed.mailbox import ThreadCommunicator
from cupyattn.distributed.watch import Watch
from cupyattn.runtime.annotations import Stream
from cupyattn.runtime.arrays import Array, CudaArray
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.value_checks import on_host

TIMEOUT = 300.0
_NAMED = 8  # ranks in an error


class Group:
    """One rank of several that exchange arrays.

    Parameters
    ----------
    communicator : object
        Transfers the bytes: a `Communicator` of your own with three methods, or one of
        cupy.cuda.nccl, cupyx.distributed, nccl4py or mpi4py. `run` and `nccl_group` make groups
        without any of these.
    size : int, optional
        The expected number of ranks.
    folder : path, optional
        A folder that all ranks see, new for each run, in which they post failures. All ranks then
        name a rank that does not come in time, even if it is stopped. Without a folder, ranks of
        another library's communicator or of your own only see the timeout, not which rank it was.
    timeout : float
        Seconds that a transfer may take once it may begin. Then the communicator is aborted (if it
        can be), and this call or the next one of this group raises `RankFailedError`. With a
        folder, ranks are asked before, for at most 2 s, which of them has not come. A method of
        your own that still waits continues on its thread.

    Raises
    ------
    TypeError
        For an object that is not a communicator, or one whose rank or size is not an integer.
    ValueError
        For a communicator of another size, or a timeout that is not a positive number.

    Notes
    -----
    An error in a transfer ends the group: its later calls raise `RankFailedError`.

    As a context manager it reports an exception that leaves the block to the other ranks, where it
    can (`run`, `nccl_group`, a folder), and raises for another rank's failure at the end.

    It duplicates an MPI communicator with its first transfer. MPI itself ends when all ranks have:
    start with ``mpiexec -n 2 python -m mpi4py program.py``, so that an exception of one rank,
    including `RankFailedError`, ends all.

    You have to end the NCCLBackend of cupyx.distributed: unless rank 0 calls its ``stop()``, the
    process of its store keeps the program from ending.
    """

    def __init__(
        self,
        communicator: object,
        *,
        size: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        timeout = seconds_of(timeout)
        self._communicator = communicator_of(communicator, self.check)
        self.rank = int(self._communicator.rank)
        self.size = int(self._communicator.size)
        if (size is not None and size != self.size) or not 0 <= self.rank < self.size:
            raise error(
                ValueError,
                f"a communicator of {self.size} ranks, this one rank {self.rank}"
                + ("" if size is None else f", for {shown(size)} ranks"),
                "its ranks count from 0 to size - 1",
                "make a communicator of the participating ranks",
            )
        self.device: int | None = getattr(self._communicator, "device", None)
        self.transport = type(self._communicator).__name__
        self._failures = self._channel(folder)
        self._can_ask = folder is not None or hasattr(self._communicator, "failures")
        self._watch = Watch(self.rank, timeout, self._failures, self._abort)
        self._aborting = threading.Lock()
        self._aborted = False
        self._busy = threading.Lock()
        self._closed = False
        self._carrier = Carrier(self._communicator, self.check)
        self.agreed: set[tuple[str, ...]] = set()
        """Descriptions of calls that all ranks have agreed on: each is compared once."""
        self.gathers_on_host = bool(getattr(self._communicator, "gathers_on_host", False))
        self._streams: dict[int, Stream] = {}

    def _channel(self, folder: str | os.PathLike[str] | None) -> Failures:
        """Return the `Failures` of this group; without any, one of this rank alone."""
        given: Failures | None = getattr(self._communicator, "failures", None)
        if folder is None:
            return given or SharedFailures()
        if given is not None:
            raise error(
                ValueError,
                f"folder = {shown(folder)} with a {self.transport}",
                "a folder is for a communicator whose ranks cannot post a failure otherwise",
                "leave it out",
            )
        return FolderFailures(Path(folder) / "cupyattn-ranks", self.rank, self.size)

    def exchange(
        self,
        outgoing: Sequence[Array],
        to: int,
        incoming: Sequence[Array],
        source: int,
        stream: Stream = None,
    ) -> None:
        """Send arrays to one rank, and receive the same number from another.

        Parameters
        ----------
        outgoing, incoming : sequences of arrays
            Contiguous; `incoming` are written.
        to, source : int
            Ranks; each rank sends as far as every other one, ``to - rank`` modulo size.
        stream : cupy.cuda.Stream, optional
            Whose order this joins; None for NumPy arrays.

        Raises
        ------
        RankFailedError
            If a rank has failed, or did not come in time.
        TypeError
            For what is no array of NumPy or CuPy.
        ValueError
            For a rank that is none, ranks that are not as far away, another number of arrays to
            receive than to send, or arrays elsewhere than on the device of this rank, if it has
            one.
        """
        for name, peer in (("to", to), ("source", source)):
            if not (isinstance(peer, int | np.integer) and 0 <= peer < self.size):
                raise error(
                    ValueError,
                    f"{name} = {shown(peer)} in a group of {self.size} ranks",
                    "ranks count from 0",
                    "take it modulo group.size",
                )
        if (to - self.rank) % self.size != (self.rank - source) % self.size:
            raise error(
                ValueError,
                f"rank {self.rank} sends to rank {to} and receives from rank {source}",
                "all ranks send as far: to - rank is rank - source, modulo size",
                f"receive from rank {(2 * self.rank - to) % self.size}",
            )
        for array in (*outgoing, *incoming):
            self._carrier.require_here(array)
        if len(outgoing) != len(incoming):
            raise error(
                ValueError,
                f"{len(outgoing)} arrays to send, and {len(incoming)} to receive",
                "a rank receives the same number of arrays that it sends",
                "pass the same number of both, empty arrays if needed",
            )
        if to == self.rank:
            self.check()
            with nullcontext() if stream is None else stream:
                for own, into in zip(outgoing, incoming, strict=True):
                    into[...] = own
            return
        waits_for = f"rank {source} to send and rank {to} to receive"
        with self._transfer(stream, source, waits_for):
            self._carrier.exchange(outgoing, to, incoming, source, stream)

    def all_gather(self, array: Array, /) -> list[Array]:
        """Gather an array of each rank, in the order of ranks.

        Parameters
        ----------
        array : array
            Of one shape and dtype on all ranks.

        Returns
        -------
        list of arrays
            Those of all ranks, this one's too, on the device of the array given.

        Raises
        ------
        RankFailedError
            If a rank has failed, or did not come in time.
        TypeError
            For what is no array of NumPy or CuPy.
        ValueError
            For one elsewhere than on the device of this rank, if it has one.
        """
        self._carrier.require_here(array, or_on_host=self.gathers_on_host)
        on_host = isinstance(array, np.ndarray)
        xp = np if on_host else load_cupy()
        with self.on_device(None if on_host else cast("CudaArray", array).device.id):
            stream = None if on_host else xp.cuda.get_current_stream()
            peer = (self.rank + 1) % self.size
            own = xp.ascontiguousarray(array)
            out = xp.empty((self.size, *own.shape), own.dtype)
            with self._transfer(stream, peer, self._others()):
                self._carrier.all_gather(own, out, stream)
        return [row.reshape(array.shape) for row in out]

    def _others(self) -> str:
        """Name the ranks that this one waits for; any of them may be missing."""
        ranks = [str(rank) for rank in range(self.size) if rank != self.rank]
        if len(ranks) < 2:
            return f"rank {''.join(ranks)}"
        listed = ranks if len(ranks) <= _NAMED else [*ranks[: _NAMED - 1], "another"]
        hint = "" if self._can_ask else " (pass folder= to Group, and it finds out for which)"
        return f"rank {', '.join(listed[:-1])} or {listed[-1]}{hint}"

    @contextmanager
    def _transfer(self, stream: object, peer: int, waits_for: str) -> Iterator[None]:
        """Watch the transfers inside; an error ends the group.

        Otherwise a later call could receive the bytes of this one.
        """
        self.check()
        if not self._busy.acquire(blocking=False):
            raise error(
                RuntimeError,
                f"two threads use the group of rank {self.rank} at once",
                "a rank's transfers have one order, the same on all ranks",
                "make a group for each thread, on a separate communicator",
            )
        waits_in_time = stream is None and isinstance(self._communicator, ThreadCommunicator)
        watched = nullcontext() if waits_in_time else self._watch.over(stream, peer, waits_for)
        try:
            with watched:
                yield
        except BaseException as raised:
            failure = self._failures.first()
            self.fail(raised)
            if failure is not None and isinstance(raised, Exception):
                raise failure from None  # instead of the error of the aborted communicator
            raise
        finally:
            self._busy.release()

    def side_stream(self, device: int) -> Any:
        """Return the stream for transfers of a device, of high priority."""
        if device not in self._streams:
            cupy = load_cupy()
            with cupy.cuda.Device(device):
                self._streams[device] = cupy.cuda.Stream(non_blocking=True, priority=-1)
        return self._streams[device]

    def check(self) -> None:
        """Raise RankFailedError if a rank is known to have failed, RuntimeError after the end."""
        failure = self._failures.first()
        if failure is not None:
            raise failure
        if self._closed:
            raise error(
                RuntimeError,
                f"the group of rank {self.rank} has ended",
                "it is valid inside the function of run, or its with block",
                "make the call there, or make another group",
            )

    def fail(self, reason: BaseException | str) -> None:
        """Post that this rank has failed, if other ranks can read it."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        self._failures.post(self.rank, f"rank {self.rank} failed: {text}")
        self._abort()

    def close(self) -> None:
        """Leave the group, and free its resources."""
        if self._closed:
            return
        self._closed = True
        self._watch.stop()
        self._failures.leave(self.rank)
        if self._failures.first() is not None:
            self._abort()  # not all ranks will close
        if (close := getattr(self._communicator, "close", None)) is not None:
            close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if raised is not None:
            self.fail(raised)  # the first failure is kept
            self._watch.stop()
            return
        self._watch.drain()
        failure = self._failures.first()
        self.close()
        if failure is not None:
            raise failure

    def _abort(self) -> None:
        abort = getattr(self._communicator, "abort", None)
        with self._aborting:
            if abort is not None and not self._aborted:
                self._aborted = True
                abort()

    def on_device(self, device: int | None) -> AbstractContextManager[object]:
        """Make a device the current one, if it is a GPU."""
        return nullcontext() if device is None else load_cupy().cuda.Device(device)


_DIGEST = 32
_NUMBER = 8
_BETWEEN = "\n"
_SHOWN = 180  # characters of a rank: errors have room for two


def agree(
    group: Group,
    description: Sequence[str],
    xp: ModuleType,
    *,
    allowed: str,
    fix: str,
    number: int = 0,
) -> list[int]:
    """Return the number of each rank, if all ranks pass the same description.

    Arrays of `xp` carry both. `allowed` and `fix` are parts of the error.

    Raises ValueError if descriptions differ, on every rank, with the differences; RankFailedError
    if a rank has failed, or did not come in time.
    """
    if group.size == 1:
        return [number]
    text = _BETWEEN.join(description).encode()
    digest = hashlib.sha256(text).digest()
    own = digest + number.to_bytes(_NUMBER, "little", signed=True)
    heads = _gather(group, own + len(text).to_bytes(_NUMBER, "little"), xp)
    other = next((rank for rank, head in enumerate(heads) if head[:_DIGEST] != digest), None)
    if other is not None:  # which every rank sees
        longest = max(int.from_bytes(head[_DIGEST + _NUMBER :], "little") for head in heads)
        texts = _gather(group, text.ljust(longest, b"\0"), xp)
        theirs = texts[other].rstrip(b"\0").decode().split(_BETWEEN)
        raise error(
            ValueError,
            f"rank {group.rank} called with {_without(description, theirs)}, "
            f"rank {other} with {_without(theirs, description)}",
            allowed,
            fix,
        )
    return [
        int.from_bytes(head[_DIGEST : _DIGEST + _NUMBER], "little", signed=True) for head in heads
    ]


def _gather(group: Group, own: bytes, xp: ModuleType) -> list[bytes]:
    answers = group.all_gather(xp.asarray(np.frombuffer(own, np.uint8)))
    gathered = [on_host(x).tobytes() for x in answers]
    group.check()  # an aborted transfer has received nothing
    return gathered


def _without(parts: Sequence[str], others: Sequence[str]) -> str:
    """Return the parts that only one rank has."""
    text = ", ".join(part for part in parts if part not in others) or "none of it"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def fingerprint(*arrays: Array | bytes) -> str:
    """Return eight digits of a digest of arrays on the host."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:8]
