"""Which rank a process is: what launchers say, alone and inside of one another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cupyattn.distributed import launched_group, processes
from cupyattn.distributed.launchers import launched

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, 2)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (5, 8, 1),
        ),
        ({**MPICH, "MPI_LOCALRANKID": "0"}, (1, 2, 0)),
        (TORCHRUN, (3, 4, 1)),
        ({**TORCHRUN, **BATCH}, (3, 4, 1)),
        ({**MPICH, **BATCH}, (1, 2, 1)),
        ({**MPICH, "RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({**MPICH, **TORCHRUN, "CUPYATTN_RANK": "0", "CUPYATTN_SIZE": "3"}, (0, 3, 0)),
    ],
)
def test_launchers_say_who_is_who(environment, found):
    assert launched(environment) == found


def test_launchers_that_disagree_are_refused():
    """Either may have started the other: torchrun on each host by mpiexec, or the reverse."""
    says = "PMI_RANK says 1 of 2, RANK says 3 of 4; .*CUPYATTN_RANK"
    with pytest.raises(RuntimeError, match=says):
        launched({**MPICH, **TORCHRUN})


@pytest.mark.parametrize("wrong", ["x", "", "1.0"])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(ValueError, match=f"RANK = '{wrong}', WORLD_SIZE = '4'; they are integers"):
        launched({"RANK": wrong, "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match="rank 4 of 4"):
        launched({"RANK": "4", "WORLD_SIZE": "4"})


def test_without_a_launcher_it_is_said():
    with pytest.raises(RuntimeError, match="mpiexec -n 2"):
        launched({})


@pytest.mark.parametrize(
    ("local", "device", "used"), [("1", None, 1), ("3", None, 1), ("1", 0, 0), (None, None, 0)]
)
def test_a_process_takes_the_device_of_its_number_on_its_host(
    local, device, used, tmp_path, monkeypatch
):
    """Of two; rank 6 of 8 is not the sixth on its host."""
    taken = []

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.use = lambda: taken.append(ordinal)

    cuda = SimpleNamespace(Device=Device, runtime=SimpleNamespace(getDeviceCount=lambda: 2))
    monkeypatch.setattr(processes, "load_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(processes, "load_nccl", lambda: None)
    monkeypatch.setattr(processes, "shared_id", lambda *given: given)
    monkeypatch.setattr(processes, "nccl_group", lambda *given, **named: (given, named))
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", local)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    given, named = launched_group(tmp_path, device=device, timeout=7)
    assert taken == [used]
    assert given == (6, 8, (tmp_path, 6, 8, 7))
    assert named == {"folder": tmp_path, "timeout": 7}
