"""A process for each rank, started by mpiexec or anything else that tells each its number."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from cupyattn.distributed.communicators.nccl import ID_BYTES, load_nccl, new_id, of_id
from cupyattn.distributed.failures import FolderFailures, seconds_of
from cupyattn.distributed.group import TIMEOUT, Group
from cupyattn.distributed.launchers import launched
from cupyattn.distributed.placement import require_rank
from cupyattn.distributed.rendezvous import shared_id
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown


def unique_id() -> bytes:
    """Make the 128 bytes by which NCCL's ranks find one another.

    One rank makes them and passes them on, by whatever it has: an MPI broadcast, a file, a socket.

    Raises
    ------
    RuntimeError
        If NCCL is not installed: the extra distributed brings it.
    """
    return new_id()


def nccl_group(
    rank: int,
    size: int,
    unique_id: bytes,
    *,
    folder: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
) -> Group:
    """Join, with this process and its current device, the ranks that have the same id.

    Parameters
    ----------
    rank, size : int
        Which rank this is, of how many.
    unique_id : bytes
        What one rank has from `unique_id`.
    folder : path, optional
        One that all ranks see, for telling one another that one has failed. By default a temporary
        one of this host, which serves the ranks of one host; ranks elsewhere find out by the
        timeout.
    timeout : float
        Seconds that this waits for the other ranks to join, and that a transfer may take once it
        is its turn.

    Returns
    -------
    Group
        Use it as a context manager, so that other ranks hear of an exception.

    Raises
    ------
    ValueError
        For a rank that is none, an id that is no 128 bytes, or a timeout that is no number above 0.
    RuntimeError
        If NCCL is not installed.
    TimeoutError
        If not all ranks join in time.
    RankFailedError
        If one that was there has failed before all had joined.
    """
    rank, size = require_rank(rank, size)
    if not isinstance(unique_id, bytes) or len(unique_id) != ID_BYTES:
        raise error(
            ValueError,
            f"unique_id = {shown(unique_id)}",
            f"it is {ID_BYTES} bytes",
            "pass what one rank has from distributed.unique_id()",
        )
    timeout = seconds_of(timeout)
    load_nccl()  # before anything is left in a folder
    name = f"cupyattn-{hashlib.sha256(unique_id).hexdigest()[:16]}"
    place = Path(folder if folder is not None else tempfile.gettempdir()) / name
    failures = FolderFailures(place, rank, size)
    return Group(of_id(rank, size, unique_id, failures, timeout), size=size, timeout=timeout)


def launched_group(
    folder: str | os.PathLike[str], *, device: int | None = None, timeout: float = TIMEOUT
) -> Group:
    """Join the ranks that a launcher started with this process, each its own GPU.

    Rank and size come from what mpiexec, srun and torchrun leave in the environment, or from
    CUPYATTN_RANK and CUPYATTN_SIZE (and CUPYATTN_LOCAL_RANK, its number on its host); NCCL's id
    goes through a file.

    Parameters
    ----------
    folder : path
        One that all ranks see, and that no other run uses at the same time.
    device : int, optional
        CUDA ordinal of this rank; by default its number on its host, as the launcher says it,
        modulo the number of devices.
    timeout : float
        As for `nccl_group`; as long it waits before for all ranks to come to the folder.

    Returns
    -------
    Group

    Raises
    ------
    RuntimeError
        If the environment does not say which rank this is, or launchers in it disagree; if NCCL is
        not installed.
    ValueError
        For numbers in the environment that are none, or a timeout that is none above 0.
    TimeoutError
        If a rank does not come in time.
    RankFailedError
        As for `nccl_group`.
    """
    timeout = seconds_of(timeout)
    rank, size, local_rank = launched()
    cuda = load_cupy().cuda
    cuda.Device(local_rank % cuda.runtime.getDeviceCount() if device is None else device).use()
    load_nccl()  # before anything is left in a folder
    identity = shared_id(Path(folder), rank, size, timeout)
    return nccl_group(rank, size, identity, folder=folder, timeout=timeout)
