"""The folder that a training writes to: one training at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path

from cupyattn.runtime.errors import error, explaining

_NAME = ".training"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other trainings out of a folder, which is made if need be, until the block is left.

    The lock is the system's, on a file in the folder: whose process has ended, however it did,
    holds none.

    Raises
    ------
    FileExistsError
        If another training has it.
    OSError
        If the folder cannot be made, or written to.
    """
    path, made = folder / _NAME, False
    try:
        with _writing(folder):
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        with _locked(path) as file:
            try:
                with _writing(folder):
                    file.truncate(0)
                    file.write(str(os.getpid()).encode())
                yield
            finally:
                with suppress(OSError):  # Windows keeps open files: an unlocked one is no harm
                    path.unlink()
    finally:
        if made:
            with suppress(OSError):  # it is not empty: something was written
                folder.rmdir()


def _writing(folder: Path) -> AbstractContextManager[None]:
    return explaining(
        f"--out {folder}",
        "a training writes its checkpoints and its losses there",
        "make room, or pass an --out that can be written",
    )


@contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    while True:
        with path.open("a+b", buffering=0) as file:  # or closing would write again
            if not _lock(file):
                raise _taken(path)
            if not _is_still(path, file):
                continue  # whoever had it removed it between opening and locking
            yield file
            return


def _is_still(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    _BEHIND_ALL = 1 << 30  # what is locked cannot be read, and the number is to be

    def _lock(file: FileIO) -> bool:
        file.seek(_BEHIND_ALL)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(file: FileIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _taken(path: Path) -> FileExistsError:
    number = path.read_bytes()[:20].decode("ascii", "replace") or "one that begins"
    return error(
        FileExistsError,
        f"another training writes to {path.parent} (process {number})",
        "a folder has one at a time",
        "wait until it has ended, or pass another --out",
    )
