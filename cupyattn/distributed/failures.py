"""A rank's failure ends all ranks: the failed rank is posted where every rank reads it.

A rank that waits knows its neighbour, but not which rank keeps all of them waiting. It leaves a
question in a folder. Every rank that runs answers with the number of transfers that it has begun;
a rank that is stopped does not answer.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from cupyattn.runtime.errors import error, explaining, shown
from cupyattn.runtime.reading import read_text

_QUESTION = "question"
_LONGEST_ANSWER = 100
_SECONDS_BETWEEN_QUESTIONS = 0.1
_SECONDS_TO_ANSWER = 2.0


class Presence:
    """The questions and answers of one rank.

    All ranks see the `folder`; ``write(path, content)`` writes a file atomically.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, write: Callable[[Path, bytes], None]
    ) -> None:
        self._folder, self._rank, self._size, self._write = folder, rank, size, write
        self._next_look = 0.0
        self._answered = -1

    def answer(self, begun: int) -> None:
        """Answer with the number of transfers begun, if a rank asks; calling it often is cheap."""
        now = time.monotonic()
        if now < self._next_look or begun == self._answered:
            return
        self._next_look = now + _SECONDS_BETWEEN_QUESTIONS
        if (self._folder / _QUESTION).exists():
            self._write_answer(begun)

    def ask(
        self, number: int, begun: int, stop: Callable[[], bool]
    ) -> list[tuple[int, int | None]]:
        """Return the ranks that have not begun transfer `number`, each with the number begun.

        `begun` is the number that this rank has begun; None is returned for a rank that does not
        answer. `stop` returns whether to stop waiting for answers.
        """
        self._write_answer(begun)
        self._write(self._folder / _QUESTION, b"")
        until = time.monotonic() + _SECONDS_TO_ANSWER
        while True:
            answers = [(rank, self._answer_of(rank)) for rank in range(self._size)]
            late = [each for each in answers if each[1] is None or each[1] < number]
            silent = [each for each in late if each[1] is None]
            if not late or stop() or time.monotonic() > until:
                with suppress(OSError):  # another rank has asked and removed it
                    (self._folder / _QUESTION).unlink()
                return silent or late  # a late rank may itself wait for a silent one
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)

    def leave(self) -> None:
        """Remove this rank's answer."""
        with suppress(OSError):
            self._file(self._rank).unlink()

    def _write_answer(self, begun: int) -> None:
        self._write(self._file(self._rank), str(begun).encode())
        self._answered = begun

    def _answer_of(self, rank: int) -> int | None:
        try:
            return int(read_text(self._file(rank), _LONGEST_ANSWER, _no_answer))
        except (OSError, ValueError):
            return None

    def _file(self, rank: int) -> Path:
        return self._folder / f"begun-{rank}"


def _no_answer(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


ALIKE = "all ranks make the same calls in the same order"
PATIENCE = "check that rank, or pass a longer timeout"
_NOTE = "failed"
_LONGEST = 2000  # characters of a note
_MOST_BYTES = 5 * _LONGEST
_MOST_PROCESSES = 2**31  # a negative id, or 0, is several processes
_SECONDS_BETWEEN_LOOKS = 0.5  # for processes that are gone


def seconds_of(timeout: Any) -> float:
    """Return a timeout in seconds that threads can wait; raise ValueError for anything else."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or not timeout > 0:  # NaN too
        raise error(
            ValueError,
            f"timeout = {shown(timeout)}",
            "it is a number of seconds above 0",
            "leave it out for 300",
        )
    return float(min(timeout, threading.TIMEOUT_MAX))


class RankFailedError(RuntimeError):
    """A rank has failed or has not come in time, so the transfers of all ranks end.

    Attributes
    ----------
    rank : int
        The failed rank.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.rank, str(self))


class Failures(Protocol):
    """A place where ranks post and read that one has failed."""

    def post(self, rank: int, message: str) -> None:
        """Post that a rank has failed; the first post is kept."""

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did."""

    def look(self) -> None:
        """Post ranks that have ended without leaving; calling it often is cheap."""

    def answer(self, begun: int) -> None:
        """Answer ranks that ask for the number of transfers that this one has begun; cheap."""

    def missing(self, number: int, begun: int) -> tuple[int, str] | None:
        """Return a rank that has not come to a transfer, and a description of its state.

        `begun` is the number of transfers that this rank has begun. None if ranks cannot be asked,
        or all have come.
        """

    def leave(self, rank: int) -> None:
        """Post that a rank ends and has not failed."""


class SharedFailures:
    """`Failures` for ranks that are threads of one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._first: tuple[int, str] | None = None
        self._left: set[int] = set()

    def post(self, rank: int, message: str) -> None:
        """Post that a rank has failed, and wake up all that wait for `changed`."""
        with self.changed:
            self._first = self._first or (rank, message)
            self.changed.notify_all()

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did."""
        return self._first and RankFailedError(*self._first)

    def look(self) -> None:
        """Do nothing: a thread that ends posts it."""

    def answer(self, begun: int) -> None:
        """Do nothing: threads do not ask."""

    def missing(self, number: int, begun: int) -> tuple[int, str] | None:
        """Return None: `wait` finds the missing rank."""

    def leave(self, rank: int) -> None:
        """Post that a rank ends; ranks that wait for it stop waiting."""
        with self.changed:
            self._left.add(rank)
            self.changed.notify_all()

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], int], rank: int, timeout: float
    ) -> None:
        """Wait on a rank's thread until `done()`; `missing()` returns the rank that it waits for.

        Raises RankFailedError if a rank has failed, or the missing rank has left or is late.
        """
        until = time.monotonic() + timeout
        with self.changed:
            while not done():
                culprit, seconds = missing(), until - time.monotonic()
                if culprit in self._left:
                    self.post(
                        culprit,
                        f"rank {culprit} has returned, and rank {rank} waits for it; {ALIKE}",
                    )
                elif seconds <= 0:
                    self.post(
                        culprit,
                        f"rank {culprit} did not come: rank {rank} waited {timeout:g} s; {ALIKE}; "
                        f"{PATIENCE}",
                    )
                failure = self.first()
                if failure is not None:
                    raise failure
                self.changed.wait(seconds)


class FolderFailures:
    """`Failures` for processes that see one folder.

    Each process writes its process id into the folder, and a note if it fails. A process of this
    host that has ended without `leave` has failed too. `first` only reads the note, because it is
    called before each transfer; `look` finds processes that have ended.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self._rank, self._size = folder, rank, size
        self._host = os.uname().nodename if hasattr(os, "uname") else ""
        self._processes: dict[int, int | None] = {}
        """Process ids by rank, None on another host: read once, as they do not change."""
        self._next_look = 0.0
        self._presence = Presence(folder, rank, size, write_at_once)
        self._presence.leave()  # the answer of an earlier run
        leave_in(folder, self._file(rank).name, f"{os.getpid()} {self._host}".encode())

    def post(self, rank: int, message: str) -> None:
        """Write a note, unless there is one."""
        note = self.folder / _NOTE
        content = f"{rank} {message[:_LONGEST]}".encode(errors="backslashreplace")
        with _written(self.folder, content) as text:
            try:
                os.link(text, note)  # all of it at once, and of two only the first
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                if not note.exists():
                    os.replace(text, note)

    def leave(self, rank: int) -> None:
        """Post that a process ends and has not failed; the last one removes the folder."""
        self._presence.leave()
        self._file(rank).unlink(missing_ok=True)
        left = [self.folder / f"left-{rank}" for rank in range(self._size)]
        left[rank].touch()
        if all(file.exists() for file in left):
            for file in left:
                file.unlink(missing_ok=True)
            with suppress(OSError):  # another rank saw the same, or there is a note
                self.folder.rmdir()

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did.

        A note that no rank of this group has written ends the group too: it blocks other notes.
        """
        try:
            note = read_text(self.folder / _NOTE, _MOST_BYTES, _garbage)
            culprit, _, message = note.partition(" ")
            if culprit not in map(str, range(self._size)):
                raise _garbage(str(self.folder / _NOTE), f"it is {shown(note)}")
        except FileNotFoundError:
            return None
        except ValueError as failure:
            return RankFailedError(self._rank, str(failure))
        return RankFailedError(int(culprit), message)

    def absent(self) -> list[int]:
        """Return the ranks that have left no file in the folder."""
        return [
            rank
            for rank in range(self._size)
            if not (self._file(rank).exists() or (self.folder / f"left-{rank}").exists())
        ]

    def look(self) -> None:
        """Post a rank of this host that has ended without leaving; checked twice a second."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        for rank in range(self._size):
            if rank != self._rank and self._is_gone(rank):
                self.post(rank, f"rank {rank} has ended: its process is gone")
                return

    def answer(self, begun: int) -> None:
        """Answer a rank that asks who is missing."""
        with suppress(OSError):  # the folder may be gone
            self._presence.answer(begun)

    def missing(self, number: int, begun: int) -> tuple[int, str] | None:
        """Ask all ranks how many transfers they have begun; wait for their answers."""
        try:
            late = self._presence.ask(number, begun, lambda: self.first() is not None)
        except OSError:
            return None
        for rank, has_begun in late:
            if (self.folder / f"left-{rank}").exists():
                return rank, f"rank {rank} has returned"
            if has_begun is None:
                return rank, f"rank {rank} does not answer: it is stopped, or has begun no transfer"
            return rank, f"rank {rank} has begun {has_begun} of {number} transfers"
        return None

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}"

    def _is_gone(self, rank: int) -> bool:
        if rank not in self._processes:
            try:
                number, _, host = read_text(self._file(rank), _MOST_BYTES, _garbage).partition(" ")
                found = int(number)
            except (FileNotFoundError, ValueError):  # not there yet, has left, or no rank wrote it
                return False
            here = host == self._host and hasattr(os, "getpgid")
            self._processes[rank] = found if here and 0 < found < _MOST_PROCESSES else None
        process = self._processes[rank]
        # One that has left took its file away before it ended.
        return process is not None and not _runs(process) and self._file(rank).exists()


def _garbage(where: str, what: str) -> ValueError:
    return error(
        ValueError,
        f"{where}: {what}",
        "a file of that name is a note of a rank of this group that has failed",
        "pass a folder that is new for each run, or remove the file",
    )


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _has_ended(process)


def _has_ended(process: int) -> bool:
    """Return whether a process has ended, but its parent has not read its exit code yet."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux, or gone by now: found the next time
        return False
    return status.rpartition(")")[2].split()[:1] == ["Z"]


def leave_in(folder: Path, name: str, content: bytes) -> None:
    """Make the folder of a group's ranks, and write a file there; raise OSError if it fails."""
    with explaining(
        f"a file in the folder {shown(str(folder))}",
        "ranks find one another there, or post that one has failed",
        "pass a folder that all ranks can write to",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        write_at_once(folder / name, content)


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see all of it."""
    with _written(path.parent, content) as written:
        os.replace(written, path)


@contextmanager
def _written(folder: Path, content: bytes) -> Iterator[str]:
    """Yield the name of a temporary file with this content."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as temporary:
        temporary.write(content)
    try:
        yield temporary.name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary.name)
