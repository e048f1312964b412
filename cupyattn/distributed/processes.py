"""A process for each rank, started by mpiexec or any other launcher.

Launchers set a process's rank in its environment. Processes that share a folder exchange NCCL's id
there, once all have come.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cupyattn.distributed.failures import FolderFailures, leave_in, seconds_of
from cupyattn.distributed.group import TIMEOUT, Group
from cupyattn.distributed.nccl import ID_BYTES, load_nccl, new_id, of_id
from cupyattn.distributed.placement import require_rank
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_bytes

_ID, _GO = "id", "go"
_MOST_BYTES = 1 << 20
"""The limit of a file of the folder, which has an id and 33 bytes for each rank."""
_TOKEN = re.compile(rb"[0-9a-f]{32}")
_SECONDS_BETWEEN_LOOKS = 0.02


def shared_id(folder: Path, rank: int, size: int, timeout: float) -> bytes:
    """Return the id of NCCL that rank 0 makes, once all ranks have come.

    Each rank writes a random token. Rank 0 writes the id with the tokens that it finds; a rank that
    finds its own token there signs this, and all continue when all have signed. Files of an earlier
    run have neither token nor signature of this one.

    Raises TimeoutError if a rank does not come in time, which it names.
    """
    token = secrets.token_hex(16).encode()
    leave_in(folder, _token_file(folder, rank).name, token)
    made = new_id() if rank == 0 else b""
    until = time.monotonic() + timeout
    invitation = signature = b""
    while True:
        if rank == 0:
            cards = _tokens(folder, size)
            if all(cards):
                seen = made + b" ".join(card[0] for card in cards)
                if seen != invitation:  # of a rank that comes now, an earlier run's was there
                    invitation, signature = seen, _sign(seen)
                    leave_in(folder, _ID, invitation)
                if all(card[1:] == [signature] for card in cards[1:]):
                    leave_in(folder, _GO, signature)
                    return made
        else:
            seen = _read(folder / _ID)
            if seen != invitation and token in seen[ID_BYTES:].split():
                invitation, signature = seen, _sign(seen)
                leave_in(folder, _token_file(folder, rank).name, token + b" " + signature)
            if signature and _read(folder / _GO) == signature:
                return invitation[:ID_BYTES]
        if time.monotonic() > until:
            missing = ", ".join(map(str, _missing(_tokens(folder, size), signature)))
            raise error(
                TimeoutError,
                f"rank {rank} waited {timeout:g} s in {folder} for rank {missing} of {size}",
                "all ranks come there before any continues",
                "check that this rank runs and sees the same folder, or pass a longer timeout",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _token_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _tokens(folder: Path, size: int) -> list[list[bytes]]:
    """Return each rank's token and signature, as far as they are there."""
    cards = [_read(_token_file(folder, rank)).split() for rank in range(size)]
    return [card if card and _TOKEN.fullmatch(card[0]) else [] for card in cards]


def _missing(cards: list[list[bytes]], signature: bytes) -> list[int]:
    """Return the ranks without a token; otherwise those that have not signed; otherwise rank 0."""
    absent = [rank for rank, card in enumerate(cards) if not card]
    unsigned = [rank for rank, card in enumerate(cards) if rank and card[1:] != [signature]]
    return absent or (unsigned if signature else []) or [0]


def _sign(invitation: bytes) -> bytes:
    return hashlib.sha256(invitation).hexdigest().encode()


def _read(path: Path) -> bytes:
    """Return a file's content: nothing if it is absent, or no rank can have written it."""
    try:
        return read_bytes(path, _MOST_BYTES, _garbage)
    except (FileNotFoundError, ValueError):
        return b""


def _garbage(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


_OUR_OWN = ("CUPYATTN_RANK", "CUPYATTN_SIZE", "CUPYATTN_LOCAL_RANK")
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
)
_BATCH_SYSTEM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_FIX = "set CUPYATTN_RANK and CUPYATTN_SIZE, which come before all others"


class Launched(NamedTuple):
    """A process among those that a launcher started."""

    rank: int
    size: int
    local_rank: int
    """The number of the process on its host; the rank if the environment has none."""


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Read which rank this process is, of how many.

    The variables of a Slurm batch job are in the environment of everything that is started in it,
    so those of any other launcher come first.

    Raises RuntimeError if the environment has no rank, or launchers disagree; ValueError for values
    that are not numbers.

    Examples
    --------
    >>> launched({"PMI_RANK": "1", "PMI_SIZE": "4"})
    Launched(rank=1, size=4, local_rank=1)
    """
    for names in ((_OUR_OWN,), _LAUNCHERS, (_BATCH_SYSTEM,)):
        found = {
            rank: _launched_by(environment, rank, size, local)
            for rank, size, local in names
            if rank in environment and size in environment
        }
        if len({(place.rank, place.size) for place in found.values()}) > 1:
            raise error(
                RuntimeError,
                ", ".join(f"{name} has {at.rank} of {at.size}" for name, at in found.items()),
                "a process is one rank, but launchers may be nested",
                _FIX,
            )
        if found:
            return next(iter(found.values()))
    raise error(
        RuntimeError,
        "the environment has no rank of this process",
        f"launchers set {', '.join(rank for rank, *_ in (*_LAUNCHERS, _BATCH_SYSTEM))}",
        f"start with mpiexec -n 2 python ..., or {_FIX}",
    )


def _launched_by(environment: Mapping[str, str], rank: str, size: str, local: str) -> Launched:
    names = [name for name in (rank, size, local) if name in environment]
    try:
        numbers = [int(environment[name]) for name in names]
    except ValueError:
        raise error(
            ValueError,
            ", ".join(f"{name} = {shown(environment[name])}" for name in names),
            "they are integers",
            _FIX,
        ) from None
    require_rank(*numbers[:2])
    return Launched(numbers[0], numbers[1], numbers[-1] if local in environment else numbers[0])


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
        may begin.

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
        CUDA ordinal of this rank; by default its number on its host, as the launcher sets it,
        modulo the number of devices.
    timeout : float
        As for `nccl_group`; as long it waits before for all ranks to come to the folder.

    Returns
    -------
    Group

    Raises
    ------
    RuntimeError
        If the environment has no rank of this process, or launchers in it disagree; if NCCL is
        not installed.
    ValueError
        For values in the environment that are not numbers, or a timeout that is not above 0.
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
