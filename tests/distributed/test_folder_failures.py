"""Processes that see one folder hear there of a rank that has failed, or is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.wires import Own, Wires

from cupyattn.distributed import Group, RankFailedError, failures, processes
from cupyattn.distributed.communicators import nccl
from cupyattn.distributed.failures import FolderFailures
from cupyattn.distributed.processes import nccl_group
from cupyattn.distributed.rendezvous import shared_id


def test_processes_leave_notes(tmp_path):
    ranks = [FolderFailures(tmp_path, rank, 3) for rank in range(3)]
    assert all(rank.first() is None for rank in ranks)
    ranks[2].post(2, "rank 2 failed: ValueError: planted")
    ranks[0].post(0, "rank 0 failed: a consequence")
    for rank in ranks:
        failure = rank.first()
        assert failure is not None
        assert (failure.rank, str(failure)) == (2, "rank 2 failed: ValueError: planted")


def test_of_two_notes_at_once_the_first_stays(tmp_path, monkeypatch):
    """Each of the two looked before the other had written."""
    ranks = [FolderFailures(tmp_path, rank, 2) for rank in range(2)]
    monkeypatch.setattr(Path, "exists", lambda path: False)
    for rank in (1, 0):
        ranks[rank].post(rank, f"rank {rank} failed")
    assert str(ranks[0].first()) == "rank 1 failed"


def test_a_file_system_without_links_has_notes(tmp_path, monkeypatch):
    def link(source: str, target: Path) -> None:
        raise PermissionError("planted")

    monkeypatch.setattr(os, "link", link)
    ranks = [FolderFailures(tmp_path, rank, 2) for rank in range(2)]
    for rank in (1, 0):
        ranks[rank].post(rank, f"rank {rank} failed")
    assert str(ranks[0].first()) == "rank 1 failed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "rank-0", "rank-1"]


def test_few_files_are_read_before_each_transfer(tmp_path, monkeypatch):
    """With 64 ranks on one host; who is gone is not looked for at each one either."""
    ranks = [FolderFailures(tmp_path, rank, 64) for rank in range(64)]
    read, asked, right = [], [], failures.read_text
    monkeypatch.setattr(
        failures, "read_text", lambda path, *given: read.append(path.name) or right(path, *given)
    )
    monkeypatch.setattr(os, "kill", lambda process, signal: asked.append(process))
    for _ in range(3):
        assert ranks[0].first() is None
        ranks[0].look()
    assert read.count("failed") == 3
    assert len([name for name in read if name.startswith("rank-")]) == len(asked) == 63


def test_the_last_to_leave_takes_the_folder_away(tmp_path):
    ranks = [FolderFailures(tmp_path / "ranks", rank, 3) for rank in range(3)]
    for rank, each in enumerate(ranks):
        assert any(tmp_path.iterdir())
        each.leave(rank)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_says_so(tmp_path):
    file = tmp_path / "notes.txt"
    file.touch()
    for join in (
        lambda: Group(Own(Wires(), 0, 1), folder=file),
        lambda: shared_id(file, 1, 2, timeout=1.0),
    ):
        with pytest.raises(OSError, match=r"the folder '.*notes\.txt.*; pass a folder that all"):
            join()


def test_without_nccl_no_folder_is_left(tmp_path, monkeypatch):
    def load_nccl() -> None:
        raise RuntimeError("planted")

    for module in (processes, nccl):
        monkeypatch.setattr(module, "load_nccl", load_nccl)
    with pytest.raises(RuntimeError, match="planted"):
        nccl_group(0, 1, bytes(128), folder=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("asked", [True, False], ids=["asked for its exit code", "not asked"])
def test_a_process_that_is_gone_has_failed(tmp_path, asked):
    """Killed, it leaves no note; one that has left in order has not failed."""
    if not asked and not sys.platform.startswith("linux"):
        pytest.skip("who has ended unasked is seen on Linux")
    program = (
        "import sys; from pathlib import Path\n"
        "from cupyattn.distributed.failures import FolderFailures\n"
        "failures = FolderFailures(Path(sys.argv[1]), int(sys.argv[2]), 3)\n"
        "if sys.argv[2] == '2': failures.leave(2)\n"
    )
    here = FolderFailures(tmp_path, 0, 3)
    call = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run([*call, "2"], check=True)
    here.look()
    assert here.first() is None
    with subprocess.Popen([*call, "1"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()  # until it ends
        if asked:
            assert process.wait() == 0
        until = time.monotonic() + 10
        while (failure := here.first()) is None and time.monotonic() < until:
            here.look()
            time.sleep(0.01)
    assert failure is not None
    assert failure.rank == 1
    assert "its process is gone" in str(failure)


GARBAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "no number": lambda path: path.write_text("ValueError"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a rank that is none": lambda path: path.write_text("3 rank 3 failed"),
    "a negative rank": lambda path: path.write_text("-1 failed"),
    "a long number": lambda path: path.write_text("9" * 5000),
    "a large file": lambda path: path.write_bytes(b"1 " + b"x" * 1_000_000),
    "a folder": lambda path: path.mkdir(),
}
if hasattr(os, "mkfifo"):
    GARBAGE["a FIFO"] = os.mkfifo


@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
def test_a_note_that_no_rank_wrote_ends_the_group_by_its_name(make, tmp_path):
    """No other note could be left beside it."""
    group = Group(Own(Wires(), 0, 3), folder=tmp_path)
    make(tmp_path / "cupyattn-ranks" / "failed")
    with pytest.raises(
        RankFailedError, match=r"cupyattn-ranks.failed: .*; pass a folder"
    ) as caught:
        group.check()
    assert caught.value.rank == 0 and len(str(caught.value)) < 800
    group.fail("planted")
    group.close()


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff", b"-1 ", b"0 ", b"1", b"99999999999999999999 ", b"x" * 100_000]
)
def test_an_id_of_a_process_that_is_none_is_passed_over(content, tmp_path, monkeypatch):
    """A signal to -1 would go to all processes."""
    asked = []
    monkeypatch.setattr(os, "kill", lambda process, signal: asked.append(process))
    here = FolderFailures(tmp_path, 0, 2)
    host = b"" if content == b"1" else here._host.encode()
    (tmp_path / "rank-1").write_bytes(content + host)
    here.look()
    assert here.first() is None and not asked


def test_a_message_that_is_no_unicode_is_posted(tmp_path):
    ranks = [FolderFailures(tmp_path, rank, 2) for rank in range(2)]
    ranks[1].post(1, "rank 1 failed: \udcff")
    assert str(ranks[0].first()) == "rank 1 failed: \\udcff"
