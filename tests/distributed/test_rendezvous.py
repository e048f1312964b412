"""Processes that find one another by a folder and an id of NCCL, with a fake NCCL."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupyattn.distributed import RankFailedError, nccl, nccl_group, processes
from cupyattn.distributed.failures import FolderFailures
from cupyattn.distributed.processes import shared_id


class NCCL:
    """Its communicators begin when all ranks of an id have come; it waits for them for ever."""

    available, NCCL_INT8 = True, 0

    def __init__(self) -> None:
        self.came: dict[bytes, set[int]] = {}
        self.changed = threading.Condition()
        self.given_up = False

    def get_unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> Any:  # noqa: N802
        with self.changed:
            came = self.came.setdefault(unique_id, set())
            came.add(rank)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(came) == size or self.given_up)
        return SimpleNamespace(
            rank_id=lambda: rank, size=lambda: size, device_id=lambda: 0, abort=lambda: None,
            destroy=lambda: None,
        )  # fmt: skip


class Device:
    id = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def library(monkeypatch):
    library = NCCL()
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device))
    for module in (nccl, processes):
        monkeypatch.setattr(module, "load_nccl", lambda: library)
    monkeypatch.setattr(nccl, "load_cupy", lambda: cupy)
    yield library
    library.given_up = True
    with library.changed:
        library.changed.notify_all()


def on_ranks(ranks: Any, act: Any) -> dict[int, Any]:
    """The results or errors of act(rank), each on a thread; threads start one after another."""
    found: dict[int, Any] = {}

    def of_rank(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except Exception as raised:
            found[rank] = raised

    threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0), (3, 1, 0, 2)])
def test_all_have_one_id_whoever_comes_first(order, tmp_path):
    found = on_ranks(order, lambda rank: shared_id(tmp_path / "new", rank, len(order), 20))
    assert len(found) == len(order)
    (one,) = set(found.values())
    assert len(one) == 128


@pytest.mark.parametrize("missing", [0, 2])
def test_who_does_not_come_is_named_by_all(missing, tmp_path):
    """Before any of them asks NCCL for anything, which would wait for ever."""
    ranks = [rank for rank in range(3) if rank != missing]
    found = on_ranks(ranks, lambda rank: shared_id(tmp_path, rank, 3, 0.5))
    for rank in ranks:
        assert isinstance(found[rank], TimeoutError)
        assert f"rank {rank} waited 0.5 s in {tmp_path} for rank {missing} of 3" in str(found[rank])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_what_an_earlier_run_left_is_not_taken_for_an_answer(order, tmp_path):
    before = on_ranks(range(3), lambda rank: shared_id(tmp_path, rank, 3, 20))
    after = on_ranks(order, lambda rank: shared_id(tmp_path, rank, 3, 20))
    assert len(set(before.values())) == len(set(after.values())) == 1
    assert before[0] != after[0]


@pytest.mark.parametrize("missing", [0, 2])
def test_who_was_there_in_an_earlier_run_alone_is_named(missing, tmp_path):
    on_ranks(range(3), lambda rank: shared_id(tmp_path, rank, 3, 20))
    ranks = [rank for rank in range(3) if rank != missing]
    found = on_ranks(ranks, lambda rank: shared_id(tmp_path, rank, 3, 0.5))
    for rank in ranks:
        assert f"for rank {missing} of 3" in str(found[rank])


@pytest.mark.parametrize("left", [b"", bytes(5), bytes(128), bytes(200), b"\n" * 128 + b" \xff"])
def test_a_file_that_holds_no_id_of_this_run_is_none(left, tmp_path):
    (tmp_path / "id").write_bytes(left)
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.1 s in .* for rank 0 of 2"):
        shared_id(tmp_path, 1, 2, 0.1)


GARBAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "words": lambda path: path.write_bytes(b"one two three " * 1000),
    "a large file": lambda path: path.write_bytes(b"x" * (2 << 20)),
}
if hasattr(os, "mkfifo"):
    GARBAGE["a FIFO"] = os.mkfifo


@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("name", ["id", "go", "rank-0", "rank-1"])
def test_garbage_in_the_folder_is_replaced(name, make, tmp_path):
    make(tmp_path / name)
    found = on_ranks((0, 1), lambda rank: shared_id(tmp_path, rank, 2, 20))
    assert len(found[0]) == 128 and found[0] == found[1]


@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
def test_a_rank_of_which_there_is_garbage_alone_has_not_come(make, tmp_path):
    make(tmp_path / "rank-2")
    found = on_ranks((0, 1), lambda rank: shared_id(tmp_path, rank, 3, 0.5))
    for rank in (0, 1):
        assert "for rank 2 of 3" in str(found[rank]) or rank
        assert isinstance(found[rank], TimeoutError)


@pytest.mark.parametrize("name", ["id", "go", "rank-0"])
def test_a_folder_in_the_place_of_a_file_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    found = on_ranks((0, 1), lambda rank: shared_id(tmp_path, rank, 2, 0.5))
    assert isinstance(found[0], OSError)
    assert f"{tmp_path / name}" in str(found[0]) and "pass a folder that all" in str(found[0])
    assert "for rank 0 of 2" in str(found[1])


def test_processes_join_one_communicator(tmp_path, library):
    def act(rank: int) -> Any:
        unique_id = shared_id(tmp_path, rank, 3, 20)
        with nccl_group(rank, 3, unique_id, folder=tmp_path, timeout=20) as group:
            return group.rank, group.size

    assert on_ranks(range(3), act) == {rank: (rank, 3) for rank in range(3)}
    assert [*library.came.values()] == [{0, 1, 2}]


def test_nccl_s_own_wait_has_an_end(tmp_path):
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.3 s .* no sign of rank 1, 2;"):
        nccl_group(0, 3, bytes(128), folder=tmp_path, timeout=0.3)
    assert time.monotonic() - begun < 10


def test_who_waits_for_nccl_hears_of_a_failure(tmp_path):
    unique_id = bytes(128)
    found: list[Any] = []

    def fail() -> None:
        (place,) = tmp_path.iterdir()
        FolderFailures(place, 1, 2).post(1, "rank 1 failed: planted")

    threading.Timer(0.3, fail).start()
    with pytest.raises(RankFailedError, match="rank 1 failed: planted"):
        found.append(nccl_group(0, 2, unique_id, folder=tmp_path, timeout=60))


def test_an_id_of_another_length_is_refused():
    with pytest.raises(ValueError, match="128 bytes"):
        nccl_group(0, 1, b"short")
    with pytest.raises(ValueError, match="rank 2 of 2"):
        nccl_group(2, 2, bytes(128))


def test_rank_0_makes_the_id(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "new_id", lambda: b"n" * 128)
    assert shared_id(tmp_path, 0, 1, 1) == b"n" * 128
