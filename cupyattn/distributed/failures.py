"""How a rank that fails ends all others: who failed is posted where every rank looks."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Protocol

_NOTE = "failed"
_LONGEST = 2000  # characters of a note


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


class SharedFailures:
    """Of ranks that are threads of one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._first: tuple[int, str] | None = None

    def post(self, rank: int, message: str) -> None:
        """Say that a rank has failed; who waits for `changed` wakes up."""
        with self.changed:
            self._first = self._first or (rank, message)
            self.changed.notify_all()

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did."""
        return self._first and RankFailedError(*self._first)


class FolderFailures:
    """Of processes that see one folder: each leaves its process id there, and a note if it fails.

    A process of this host that is gone without having left (`leave`) has failed too.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._host = os.uname().nodename if hasattr(os, "uname") else ""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"rank-{rank}", f"{os.getpid()} {self._host}")

    def post(self, rank: int, message: str) -> None:
        """Leave a note, unless there is one."""
        note = self._folder / _NOTE
        if not note.exists():
            _write(note, f"{rank} {message[:_LONGEST]}")

    def leave(self) -> None:
        """Say that this process ends and has not failed."""
        (self._folder / f"rank-{self._rank}").unlink(missing_ok=True)
        (self._folder / f"left-{self._rank}").touch()
        if all((self._folder / f"left-{rank}").exists() for rank in range(self._size)):
            for rank in range(self._size):
                (self._folder / f"left-{rank}").unlink(missing_ok=True)

    def first(self) -> RankFailedError | None:
        """Return the error for the rank that failed first, if one did."""
        try:
            culprit, _, message = (self._folder / _NOTE).read_text(encoding="utf-8").partition(" ")
            return RankFailedError(int(culprit), message)
        except FileNotFoundError:
            pass
        for rank in range(self._size):
            if rank != self._rank and self._is_gone(rank):
                return RankFailedError(rank, f"rank {rank} has ended: its process is gone")
        return None

    def _is_gone(self, rank: int) -> bool:
        try:
            process, _, host = (
                (self._folder / f"rank-{rank}").read_text(encoding="utf-8").partition(" ")
            )
        except FileNotFoundError:  # not there yet, or has left
            return False
        if host != self._host or not hasattr(os, "getpgid"):
            return False
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _has_ended(int(process))


def _has_ended(process: int) -> bool:
    """Tell whether a process has ended and its parent has not asked for its exit code yet."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # no Linux, or gone by now: the next look sees that
        return False
    return status.rpartition(")")[2].split()[:1] == ["Z"]


def _write(path: Path, text: str) -> None:
    """Write a file at once: who reads it sees all of it."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, delete=False, encoding="utf-8"
    ) as temporary:
        temporary.write(text)
    os.replace(temporary.name, path)
