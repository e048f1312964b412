"""A process for each rank: on the user's own communicator, and on a real MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.communicators import on_processes
from support.ring import CLOSE, case, one_device
from support.search import deep


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"sizes": (3, 0, 5), "dropout_p": 0.0}),
        *deep((3, {"causal": True, "sinks": np.array([0.5, -1.0, 2.0, 0.0])})),
    ],
)
def test_processes_give_what_one_device_gives(ranks, options):
    problem = case(ranks, "zigzag", **options)
    found, codes = on_processes(problem)
    assert codes == [0] * ranks
    out, lse, grads = one_device(problem)
    np.testing.assert_allclose(problem.unshard([f[0] for f in found]), out, **CLOSE)
    np.testing.assert_allclose(problem.unshard([f[1] for f in found], of_rows=True), lse, **CLOSE)
    for name in ("dq", "dk", "dv"):
        whole = problem.unshard([getattr(f[2], name) for f in found])
        np.testing.assert_allclose(whole, getattr(grads, name), **CLOSE)


@pytest.mark.parametrize("ranks", [2, *deep(3)])
def test_a_process_that_dies_ends_the_others(ranks):
    """Their own errors, of the pipes: a communicator of the user's own has no other way."""
    begun = time.monotonic()
    found: list[Any]
    found, codes = on_processes(case(ranks, "zigzag", causal=True), ends=ranks - 1)
    assert found == [None] * ranks
    assert codes[-1] == 9
    assert all(code not in (0, None) for code in codes)
    assert time.monotonic() - begun < 100


MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
NEEDS_MPI = pytest.mark.skipif(
    find_spec("mpi4py") is None or MPIEXEC is None, reason="no mpi4py, or no mpiexec"
)

OPEN_MPI = {  # refuses root, and more ranks than processors, where it is not told otherwise
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def ended(ranks: int, what: str, folder: Path) -> dict[int, tuple[float, str]]:
    """The ranks that failed: after how many seconds, and with which output."""
    path = os.pathsep.join([".", "tests", os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "support.mpi_rank", what, folder],
        env={**os.environ, **OPEN_MPI, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    lines = re.findall(r"^(\d+) after (\S+) s: (.*)$", process.stdout, re.MULTILINE)
    return {int(rank): (float(took), said) for rank, took, said in lines}


@NEEDS_MPI
@pytest.mark.parametrize("ranks", [2, *deep(1, 3, 4)])
def test_mpi_carries_the_ring(ranks, tmp_path):
    assert ended(ranks, "right", tmp_path) == {}


@pytest.mark.deep
@NEEDS_MPI
def test_a_rank_that_raises_ends_the_others_by_the_timeout(tmp_path):
    failed = ended(3, "raises", tmp_path)
    assert failed[2][1] == "ZeroDivisionError: planted"
    for rank in (0, 1):
        took, said = failed[rank]
        assert took < 15
        assert re.match(rf"RankFailedError: rank {rank} waited 1 s for rank {1 - rank} or 2", said)


@NEEDS_MPI
def test_a_rank_that_raises_tells_the_others_through_a_folder(tmp_path):
    took, said = ended(2, "tells", tmp_path)[0]
    assert took < 15  # of 60
    assert said == "RankFailedError: rank 1 failed: ZeroDivisionError: planted"


@pytest.mark.deep
@NEEDS_MPI
def test_a_rank_that_is_late_ends_all(tmp_path):
    failed = ended(2, "is late", tmp_path)
    assert "rank 0 waited 1 s for rank 1" in failed[0][1]
    assert "RankFailedError" in failed[1][1]
