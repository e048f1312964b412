"""How a rank that fails ends all others: who failed is posted where every rank looks.

A rank that waits knows its neighbour, not which rank keeps all of them waiting. It leaves a
question in a folder. Every rank whose watch runs answers with the number of transfers that it has
begun. A rank that is stopped does not answer.
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
    """One rank's questions and answers.

    Parameters
    ----------
    folder : path
        One that all ranks see.
    rank, size : int
        Which rank this is, of how many.
    write : callable
        ``write(path, content)`` writes a file at once.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, write: Callable[[Path, bytes], None]
    ) -> None:
        self._folder, self._rank, self._size, self._write = folder, rank, size, write
        self._next_look = 0.0
        self._answered = -1

    def answer(self, begun: int) -> None:
        """Answer if a rank asks; call it as often as you like.

        Parameters
        ----------
        begun : int
            The transfers that this rank has begun.
        """
        now = time.monotonic()
        if now < self._next_look or begun == self._answered:
            return
        self._next_look = now + _SECONDS_BETWEEN_QUESTIONS
        if (self._folder / _QUESTION).exists():
            self._say(begun)

    def ask(
        self, number: int, begun: int, stop: Callable[[], bool]
    ) -> list[tuple[int, int | None]]:
        """Return the ranks that have not begun a transfer, each with those that it has begun.

        Parameters
        ----------
        number : int
            The transfer, counted from 1.
        begun : int
            The transfers that this rank has begun.
        stop : callable
            Whether it is no use to wait for answers any longer.

        Returns
        -------
        list of (int, int or None)
            None for a rank that gives no answer.
        """
        self._say(begun)
        self._write(self._folder / _QUESTION, b"")
        until = time.monotonic() + _SECONDS_TO_ANSWER
        while True:
            answers = [(rank, self._answer_of(rank)) for rank in range(self._size)]
            behind = [each for each in answers if each[1] is None or each[1] < number]
            silent = any(answer is None for _, answer in behind)
            if not behind or stop() or time.monotonic() > until:
                with suppress(OSError):  # another rank has asked and taken it away
                    (self._folder / _QUESTION).unlink()
                # A rank that answers and is behind may itself wait for one that gives no answer.
                return [each for each in behind if each[1] is None] if silent else behind
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)

    def leave(self) -> None:
        """Take this rank's answer away."""
        with suppress(OSError):
            self._file(self._rank).unlink()

    def _say(self, begun: int) -> None:
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
PATIENCE = "look what that rank does, or pass a longer timeout"
_NOTE = "failed"
_LONGEST = 2000  # characters of a note
_MOST_BYTES = 5 * _LONGEST
_MOST_PROCESSES = 2**31  # a negative id, or 0, is several processes
_SECONDS_BETWEEN_LOOKS = 0.5  # for processes that are gone


def seconds_of(timeout: Any) -> float:
    """Return a timeout as what threads can wait: infinity is as long as they ever do.

    Raises
    ------
    ValueError
        For what is no number above 0.
    """
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
    """A rank has failed, or has not come in time, and with it what all ranks do together.

    Attributes
    ----------
    rank : int
        Which one.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.rank, str(self))


class Failures(Protocol):
    """Where ranks tell one another that one has failed."""

    def post(self, rank: int, message: str) -> None:
        """Say that a rank has failed; the first to be posted stays."""

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did."""

    def look(self) -> None:
        """Look for ranks that have ended without a word, and post them; as often as one likes."""

    def answer(self, begun: int) -> None:
        """Tell ranks that ask how many transfers this one has begun; as often as one likes."""

    def missing(self, number: int, begun: int) -> tuple[int, str] | None:
        """Find a rank that has not come to a transfer of that number, and say what it does.

        `begun` is how many transfers this rank has begun. None if there is no way to ask, or all
        have come.
        """

    def leave(self, rank: int) -> None:
        """Say that a rank ends and has not failed."""


class SharedFailures:
    """`Failures` for ranks that are threads of one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._first: tuple[int, str] | None = None
        self._left: set[int] = set()

    def post(self, rank: int, message: str) -> None:
        """Say that a rank has failed; who waits for `changed` wakes up."""
        with self.changed:
            self._first = self._first or (rank, message)
            self.changed.notify_all()

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did."""
        return self._first and RankFailedError(*self._first)

    def look(self) -> None:
        """Do nothing: a thread that ends is heard of."""

    def answer(self, begun: int) -> None:
        """Do nothing: no thread asks."""

    def missing(self, number: int, begun: int) -> tuple[int, str] | None:
        """Return None: who waits for whom is known where it waits."""

    def leave(self, rank: int) -> None:
        """Say that a rank ends: who waits for it has waited long enough."""
        with self.changed:
            self._left.add(rank)
            self.changed.notify_all()

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], int], rank: int, timeout: float
    ) -> None:
        """Wait on a rank's thread until something is done; `missing` says for whom.

        Raises
        ------
        RankFailedError
            If a rank has failed, or who is missing has left or does not come in time.
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

    Each process leaves its process id in the folder, and a note if it fails. A process of this host
    that is gone without having left (`leave`) has failed too. `first` reads the note alone, because
    it is called before each transfer; `look` finds the processes that are gone.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self._rank, self._size = folder, rank, size
        self._host = os.uname().nodename if hasattr(os, "uname") else ""
        self._processes: dict[int, int | None] = {}
        """By rank the process id, None on another host: read once, for it stays."""
        self._next_look = 0.0
        self._presence = Presence(folder, rank, size, write_at_once)
        self._presence.leave()  # what an earlier run has answered
        leave_in(folder, self._file(rank).name, f"{os.getpid()} {self._host}".encode())

    def post(self, rank: int, message: str) -> None:
        """Leave a note, unless there is one."""
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
        """Say that a process ends and has not failed; the last takes the folder away."""
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

        A note that no rank of this group has written ends the group too: no other can be left.
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
        """Return the ranks that have never come here."""
        return [
            rank
            for rank in range(self._size)
            if not (self._file(rank).exists() or (self.folder / f"left-{rank}").exists())
        ]

    def look(self) -> None:
        """Post a rank of this host that has ended without a word; it looks twice a second."""
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
        with suppress(OSError):  # the folder may be gone: who asks sees no answer
            self._presence.answer(begun)

    def missing(self, number: int, begun: int) -> tuple[int, str] | None:
        """Ask all ranks how many transfers they have begun; wait for their answers."""
        try:
            behind = self._presence.ask(number, begun, lambda: self.first() is not None)
        except OSError:
            return None
        for rank, has_begun in behind:
            if (self.folder / f"left-{rank}").exists():
                return rank, f"rank {rank} has returned"
            if has_begun is None:
                return rank, f"rank {rank} gives no sign: it is stopped, or has begun no transfer"
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
    """Tell whether a process has ended and its parent has not asked for its exit code yet."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # no Linux, or gone by now: the next look sees that
        return False
    return status.rpartition(")")[2].split()[:1] == ["Z"]


def leave_in(folder: Path, name: str, content: bytes) -> None:
    """Make the folder of a group's ranks, and leave the first file there.

    Raises
    ------
    OSError
        If that cannot be.
    """
    with explaining(
        f"a file in the folder {shown(str(folder))}",
        "ranks find one another there, or tell that one has failed",
        "pass a folder that all ranks can write to",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        write_at_once(folder / name, content)


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file: who reads it sees all of it."""
    with _written(path.parent, content) as written:
        os.replace(written, path)


@contextmanager
def _written(folder: Path, content: bytes) -> Iterator[str]:
    """Give the name of a temporary file with something in it."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as temporary:
        temporary.write(content)
    try:
        yield temporary.name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary.name)
