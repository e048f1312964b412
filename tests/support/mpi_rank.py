"""One rank of a ring that MPI carries: ``mpiexec -n 3 python -m support.mpi_rank WHAT FOLDER``.

The last rank does what WHAT says; the others say on a line of their own how they ended, and when.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.ring import CLOSE, case, one_device, ring

from cupyattn.distributed import Group, RankFailedError

TIMEOUT = 1.0
OPTIONS = (
    {"causal": True, "sinks": np.linspace(-1, 1, 4)},
    {"window_size": (3, 1)},
    {"sizes": (2, 0, 3), "dtype": "bfloat16"},  # which MPI does not know
)


def right(group: Group, world: Any) -> None:
    """Compute what one device does, while other messages are on the way."""
    from mpi4py import MPI

    other = world.irecv(source=MPI.ANY_SOURCE)  # it would take any message of this communicator
    for options in OPTIONS[: 2 if sys.modules.get("ml_dtypes") is None else 3]:
        problem = case(group.size, "zigzag", **options)
        results = world.allgather(ring(problem, group))
        out, _, grads = one_device(problem)
        close = CLOSE if "dtype" not in options else {"rtol": 0.1, "atol": 0.1}
        found = problem.unshard([result[0] for result in results])
        np.testing.assert_allclose(found.astype(float), out.astype(float), **close)
        for name in ("dq", "dk", "dv"):
            found = problem.unshard([getattr(result[2], name) for result in results])
            expected = getattr(grads, name)
            np.testing.assert_allclose(found.astype(float), expected.astype(float), **close)
    world.isend(None, dest=(group.rank + 1) % group.size)
    assert other.wait() is None


def main(what: str, folder: Path) -> None:
    """Be one rank."""
    from mpi4py import MPI  # in functions: doctests are collected where there is no mpi4py

    world = MPI.COMM_WORLD
    last = world.Get_rank() == world.Get_size() - 1
    shared = folder if what == "tells" else None
    timeout = 60.0 if what in ("right", "tells") else TIMEOUT
    world.Barrier()  # processes start when they may
    begun = time.monotonic()
    try:
        with Group(world, size=world.Get_size(), folder=shared, timeout=timeout) as group:
            if what == "right":
                right(group, world)
                return
            group.all_gather(np.zeros(3))
            begun = time.monotonic()
            if last and what in ("raises", "tells"):
                raise ZeroDivisionError("planted")
            if last and what == "is late":
                time.sleep(1.5 * TIMEOUT)
            right(group, world)
    except (RankFailedError, ZeroDivisionError) as ended:
        took = time.monotonic() - begun
        said = f"{world.Get_rank()} after {took:.1f} s: {type(ended).__name__}: {ended}\n"
        sys.stdout.write(said)  # at once: mpiexec may put another rank's line before a print's end
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
