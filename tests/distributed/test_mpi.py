"""A ring that a real MPI carries, on the processors of one host: the wheels mpi4py and mpich."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.search import deep

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or MPIEXEC is None, reason="no mpi4py, or no mpiexec"
)

OPEN_MPI = {  # refuses root, and more ranks than processors, where it is not told otherwise
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def ended(ranks: int, what: str, folder: Path) -> dict[int, tuple[float, str]]:
    """How ranks ended that did not end well: after how many seconds, and what they said."""
    path = os.pathsep.join([".", "tests", os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "support.mpi_rank", what, folder],
        env={**os.environ, **OPEN_MPI, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    lines = re.findall(r"^(\d+) after (\S+) s: (.*)$", process.stdout, re.MULTILINE)
    return {int(rank): (float(took), said) for rank, took, said in lines}


@pytest.mark.parametrize("ranks", [1, 3, *deep(2, 4)])
def test_mpi_carries_the_ring(ranks, tmp_path):
    assert ended(ranks, "right", tmp_path) == {}


def test_a_rank_that_raises_ends_the_others_by_the_timeout(tmp_path):
    failed = ended(3, "raises", tmp_path)
    assert failed[2][1] == "ZeroDivisionError: planted"
    for rank in (0, 1):
        took, said = failed[rank]
        assert took < 15
        assert re.match(rf"RankFailedError: rank {rank} waited 1 s for rank {1 - rank} or 2", said)


def test_a_rank_that_raises_tells_the_others_through_a_folder(tmp_path):
    failed = ended(3, "tells", tmp_path)
    for rank in (0, 1):
        took, said = failed[rank]
        assert took < 15  # of 60
        assert said == "RankFailedError: rank 2 failed: ZeroDivisionError: planted"


def test_a_rank_that_is_late_ends_all(tmp_path):
    failed = ended(2, "is late", tmp_path)
    assert "rank 0 waited 1 s for rank 1" in failed[0][1]
    assert "RankFailedError" in failed[1][1]
