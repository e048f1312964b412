"""A process for each rank, started by mpiexec or anything else that tells each its number."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from cupyattn.cupy_library import load_cupy
from cupyattn.distributed.communicators.nccl import ID_BYTES, load_nccl, new_id, of_id
from cupyattn.distributed.failures import FolderFailures
from cupyattn.distributed.group import TIMEOUT, Group
from cupyattn.distributed.placement import require_rank
from cupyattn.errors import error, shown

_RANK_AND_SIZE = (
    ("CUPYATTN_RANK", "CUPYATTN_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
)
_ID = "id"
_SECONDS_BETWEEN_LOOKS = 0.02


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
        Seconds that a transfer may take once it is its turn.

    Returns
    -------
    Group
        Use it as a context manager, so that other ranks hear of an exception.

    Raises
    ------
    ValueError
        For a rank that is none, or an id that is no 128 bytes.
    RuntimeError
        If NCCL is not installed.

    Notes
    -----
    Waits until all ranks have come.
    """
    require_rank(rank, size)
    if not isinstance(unique_id, bytes) or len(unique_id) != ID_BYTES:
        raise error(
            ValueError,
            f"unique_id = {shown(unique_id)}",
            f"it is {ID_BYTES} bytes",
            "pass what one rank has from distributed.unique_id()",
        )
    load_nccl()  # before anything is left in a folder
    name = f"cupyattn-{hashlib.sha256(unique_id).hexdigest()[:16]}"
    place = Path(folder if folder is not None else tempfile.gettempdir()) / name
    failures = FolderFailures(place, rank, size)
    return Group(of_id(rank, size, unique_id, failures), size=size, timeout=timeout)


def launched_group(
    folder: str | os.PathLike[str], *, device: int | None = None, timeout: float = TIMEOUT
) -> Group:
    """Join the ranks that a launcher started with this process, each its own GPU.

    Rank and size come from what mpiexec, srun and torchrun leave in the environment, or from
    CUPYATTN_RANK and CUPYATTN_SIZE; NCCL's id goes through a file.

    Parameters
    ----------
    folder : path
        One that all ranks see, and that no other run uses: a new one for each.
    device : int, optional
        CUDA ordinal of this rank; by default the rank modulo the number of devices.
    timeout : float
        As for `nccl_group`; so long it waits for the other ranks, too.

    Returns
    -------
    Group

    Raises
    ------
    RuntimeError
        If the environment does not say which rank this is; if NCCL is not installed.
    TimeoutError
        If rank 0 does not come in time.
    """
    rank, size = rank_and_size()
    cupy = load_cupy()
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount() if device is None else device).use()
    return nccl_group(
        rank, size, shared_id(Path(folder), rank, timeout), folder=folder, timeout=timeout
    )


def rank_and_size(environment: Any = os.environ) -> tuple[int, int]:
    """Read which rank this process is, of how many, from what launchers leave in the environment.

    Raises
    ------
    RuntimeError
        If nothing there says so.

    Examples
    --------
    >>> rank_and_size({"PMI_RANK": "1", "PMI_SIZE": "4"})
    (1, 4)
    """
    for rank, size in _RANK_AND_SIZE:
        if rank in environment and size in environment:
            found = int(environment[rank]), int(environment[size])
            require_rank(*found)
            return found
    raise error(
        RuntimeError,
        "nothing in the environment says which rank this process is",
        f"launchers set {', '.join(rank for rank, _ in _RANK_AND_SIZE)}",
        "start with mpiexec -n 2 python ..., or set CUPYATTN_RANK and CUPYATTN_SIZE",
    )


def shared_id(folder: Path, rank: int, timeout: float) -> bytes:
    """Make NCCL's id on rank 0, and read it on the others.

    Raises
    ------
    TimeoutError
        If rank 0 does not come in time.
    """
    path = folder / _ID
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        made = new_id()
        partial = path.with_suffix(".partial")
        partial.write_bytes(made)
        os.replace(partial, path)
        return made
    until = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > until:
            raise error(
                TimeoutError,
                f"rank {rank} waited {timeout:g} s for rank 0, which left no id in {folder}",
                "rank 0 makes NCCL's id there",
                "look whether rank 0 runs, and sees the same folder",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return path.read_bytes()
