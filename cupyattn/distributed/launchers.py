"""Which rank a process is, from what launchers leave in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cupyattn.distributed.placement import require_rank
from cupyattn.runtime.errors import error, shown

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
    """Which of the processes of its host; the rank where nothing says so."""


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Read which rank this process is, of how many.

    Slurm's batch job is in the environment of all that is started in it, so any other launcher
    knows better.

    Raises
    ------
    RuntimeError
        If nothing there says so, or launchers disagree.
    ValueError
        For numbers that are none.

    Examples
    --------
    >>> launched({"PMI_RANK": "1", "PMI_SIZE": "4"})
    Launched(rank=1, size=4, local_rank=1)
    """
    for names in ((_OUR_OWN,), _LAUNCHERS, (_BATCH_SYSTEM,)):
        found = {
            rank: _read(environment, rank, size, local)
            for rank, size, local in names
            if rank in environment and size in environment
        }
        if len({(place.rank, place.size) for place in found.values()}) > 1:
            raise error(
                RuntimeError,
                ", ".join(f"{name} says {at.rank} of {at.size}" for name, at in found.items()),
                "a process is one rank, and launchers may stand inside of one another",
                _FIX,
            )
        if found:
            return next(iter(found.values()))
    raise error(
        RuntimeError,
        "nothing in the environment says which rank this process is",
        f"launchers set {', '.join(rank for rank, *_ in (*_LAUNCHERS, _BATCH_SYSTEM))}",
        f"start with mpiexec -n 2 python ..., or {_FIX}",
    )


def _read(environment: Mapping[str, str], rank: str, size: str, local: str) -> Launched:
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
