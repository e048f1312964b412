"""Processes that share a folder learn there who failed, is gone or did not come to a transfer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.communicators import Own, Pipes, Wires
from support.search import deep

from cupyattn.distributed import Group, RankFailedError, failures, nccl, processes
from cupyattn.distributed.failures import FolderFailures, Presence, SharedFailures, write_at_once
from cupyattn.distributed.processes import nccl_group, shared_id
from cupyattn.distributed.watch import Watch


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


@pytest.mark.parametrize("asked", [True, *deep(False)])
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
    if asked:
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
    """It blocks any other note."""
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


class Waiting:
    """A user's communicator whose methods return when they are let go."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.let_go = threading.Event()

    def send(self, array: Any, peer: int, stream: Any) -> None:
        self.let_go.wait(60)

    receive = all_gather = send


def gathered(size: int, stopped: int, folder: Path | None) -> dict[int, RankFailedError]:
    """The errors of all ranks except one, which has joined the group and never calls."""
    found: dict[int, RankFailedError] = {}
    others = [rank for rank in range(size) if rank != stopped]
    communicators = {rank: Waiting(rank, size) for rank in others}
    if folder is not None:
        FolderFailures(folder / "cupyattn-ranks", stopped, size)

    def of_rank(rank: int) -> None:
        group = Group(communicators[rank], folder=folder, timeout=0.3)
        with pytest.raises(RankFailedError) as caught:
            group.all_gather(np.zeros(1))
        found[rank] = caught.value

    threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for communicator in communicators.values():
        communicator.let_go.set()
    assert sorted(found) == others
    return found


@pytest.mark.parametrize("stopped", [0, 2, *deep(1, 3)])
def test_with_a_folder_all_ranks_name_the_one_that_is_stopped(stopped, tmp_path):
    for failure in gathered(4, stopped, tmp_path).values():
        assert failure.rank == stopped
        assert str(failure).startswith(
            f"rank {stopped} does not answer: it is stopped, or has begun"
        )
        assert "waited 0.3 s for it; all ranks make the same calls" in str(failure)


@pytest.mark.parametrize("stopped", [1, *deep(0, 2)])
def test_without_a_folder_each_rank_names_all_others_and_how_to_find_out(stopped):
    for rank, failure in gathered(3, stopped, None).items():
        one, other = (each for each in range(3) if each != rank)
        told = f"rank {rank} waited 0.3 s for rank {one} or {other} (pass folder= to Group, and it"
        assert str(failure).startswith(told)


def test_of_many_ranks_some_are_named():
    for rank, failure in gathered(12, 11, None).items():
        assert f"rank {rank} waited 0.3 s for rank {0 if rank else 1}, " in str(failure)
        assert f", {7 if rank < 7 else 6} or another (pass folder=" in str(failure)
        assert len(str(failure)) < 300


def of_pipes(rank: int, pipes: dict[int, Any], folder: Path, stopped: int, results: Any) -> None:
    """Be one rank, which gathers twice; or is stopped in between."""
    try:
        with Group(Pipes(rank, pipes), folder=folder, timeout=2) as group:
            group.all_gather(np.zeros(1))
            if rank == stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            group.all_gather(np.zeros(1))
    except RankFailedError as failure:
        results.send((failure.rank, str(failure)))


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system stops no processes")
def test_a_process_that_is_stopped_is_named_by_the_others(tmp_path):
    """By the one too that has a neighbour which waits as well."""
    context, stopped = get_context("spawn"), 1
    pipes: list[dict[int, Any]] = [{} for _ in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        pipes[one][other], pipes[other][one] = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in range(3)]
    processes = [
        context.Process(
            target=of_pipes, args=(rank, pipes[rank], tmp_path, stopped, results[rank][1])
        )
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    try:
        for rank in (0, 2):
            assert results[rank][0].poll(60)
            culprit, told = results[rank][0].recv()
            assert culprit == stopped
            # It has answered no question, or was on its way out of the first transfer.
            assert told.startswith(("rank 1 does not answer", "rank 1 has begun 1 of 2 transfers"))
    finally:
        for process in processes:
            process.kill()
            process.join()


def presences(folder: Path, size: int) -> list[Presence]:
    return [Presence(folder, rank, size, write_at_once) for rank in range(size)]


def asked(presence: Presence, answers: Any, *, number: int, begun: int) -> Any:
    """The answers that a rank reads while others write them repeatedly."""
    done = threading.Event()

    def answer() -> None:
        while not done.wait(0.01):
            for other, has_begun in answers:
                other.answer(has_begun)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        return presence.ask(number, begun, lambda: False)
    finally:
        done.set()
        thread.join()


def test_who_is_behind_is_told_apart_from_who_gives_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("cupyattn.distributed.failures._SECONDS_TO_ANSWER", 0.5)
    first, second, third = presences(tmp_path, 3)
    assert asked(first, [(second, 4), (third, 5)], number=5, begun=7) == [(1, 4)]
    assert asked(first, [(second, 5), (third, 9)], number=5, begun=7) == []
    first, second, third = presences(tmp_path / "new", 3)
    (tmp_path / "new").mkdir()
    assert asked(first, [(second, 4)], number=5, begun=5) == [(2, None)]


def test_all_that_have_come_are_heard_at_once_and_no_question_stays(tmp_path):
    first, second = presences(tmp_path, 2)
    begun = time.monotonic()
    assert asked(first, [(second, 5)], number=5, begun=5) == []
    assert time.monotonic() - begun < 1.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun-0", "begun-1"]
    for each in (first, second):
        each.leave()
        each.leave()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("garbage", [b"", b"x", b"\xff", b"9" * 101, b"1.5"])
def test_an_answer_that_is_none_is_no_answer(garbage, tmp_path, monkeypatch):
    monkeypatch.setattr("cupyattn.distributed.failures._SECONDS_TO_ANSWER", 0.1)
    (tmp_path / "begun-1").write_bytes(garbage)
    first, _ = presences(tmp_path, 2)
    assert first.ask(1, 1, lambda: False) == [(1, None)]


def test_nobody_answers_who_is_not_asked(tmp_path):
    first, _ = presences(tmp_path, 2)
    first.answer(1)
    assert not any(tmp_path.iterdir())


def test_a_rank_that_has_returned_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("cupyattn.distributed.failures._SECONDS_TO_ANSWER", 0.1)
    here, other = (FolderFailures(tmp_path, rank, 2) for rank in range(2))
    other.leave(1)
    assert here.missing(1, 1) == (1, "rank 1 has returned")


def test_a_transfer_that_ends_while_others_are_asked_is_no_failure(monkeypatch):
    """Who was slow has come by then."""

    class Late(SharedFailures):
        asked = threading.Event()

        def missing(self, number: int, begun: int) -> None:
            ends.done = True
            self.asked.set()

    class Event:
        done = True

    ends = Event()
    ends.done = False
    marks = iter([Event(), ends])
    failures = Late()
    monkeypatch.setattr("cupyattn.distributed.watch._mark", lambda stream: next(marks))
    monkeypatch.setattr("cupyattn.distributed.watch.current_device", lambda: None)
    watch = Watch(0, 0.1, failures, lambda: None)
    with watch.over(object(), 1, "rank 1"):
        pass
    assert failures.asked.wait(10)
    watch.drain()
    watch.stop()
    assert failures.first() is None
