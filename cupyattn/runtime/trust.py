"""Checks that only this user and root can change a folder or file of code.

Code that is read is executed, and a checksum next to it proves nothing: whoever can write the file
can write the checksum. The rules are those of OpenSSH's StrictModes. Windows has no such permission
bits; there `cupyattn.runtime.folders` checks the folder instead.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

_MOST_LINKS = 40  # the limit of Linux for symbolic links in a path


class UntrustedError(PermissionError):
    """A folder or file that somebody else could have written.

    Attributes
    ----------
    fix : str
        Advice for the error message.
    """

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def require_trusted_folder(folder: Path) -> None:
    """Raise unless only this user and root can change a folder.

    All parent folders and all symbolic links in the path are checked too: whoever can rename one of
    them can replace the folder. A parent that anyone can write is allowed if it is sticky, as /tmp
    is: there nobody can rename another user's files.

    Raises
    ------
    UntrustedError
        If somebody else can change it.
    OSError
        If it does not exist, or its status cannot be read.
    """
    if not _has_owners():
        return
    folder = folder.absolute()
    here, below, links = Path(folder.anchor), [*reversed(folder.parts[1:])], 0
    _require_private(here, os.lstat(here), sticky=True)
    while below:
        part = below.pop()
        if part == "..":  # `here` has no symbolic link in it
            here = here.parent
            continue
        status = os.lstat(here / part)
        if not stat.S_ISLNK(status.st_mode):
            here = here / part
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(here))
            _require_private(here, status, sticky=True)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        _require_owner(here / part, status)
        target = Path(os.readlink(here / part))
        below += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        here = Path(target.anchor) if target.is_absolute() else here
    _require_private(here, os.lstat(here), sticky=False)


def read_trusted(path: Path) -> bytes:
    """Return the content of a file that only this user and root can write.

    The check is on the open file. The caller has checked the folder already.

    Raises
    ------
    UntrustedError
        If somebody else can write it, or if it is a symbolic link or no regular file.
    OSError
        If it cannot be read.
    """
    # O_NONBLOCK: otherwise opening a FIFO waits for a writer.
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        opened = os.open(path, flags)
    except OSError as failure:
        if path.is_symlink():
            raise UntrustedError(f"{path} is a symbolic link", f"delete {path}") from failure
        raise
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{path} is no regular file", f"delete {path}")
        if _has_owners():
            _require_private(path, status, sticky=False)
        with open(opened, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(opened)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its parents, which others can read but not write, whatever the umask.

    Raises
    ------
    OSError
        If it cannot be created.
    """
    missing = []
    while not folder.exists() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(0o755, exist_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file, which others can read but not write, whatever the umask.

    Raises
    ------
    OSError
        If the file exists, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags, 0o644), "wb") as file:
        file.write(content)


def _has_owners() -> bool:
    return sys.platform != "win32" and hasattr(os, "geteuid")


def _require_private(path: Path, status: os.stat_result, *, sticky: bool) -> None:
    """Raise if other users can write a path; `sticky` allows shared sticky folders."""
    _require_owner(path, status)
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not (sticky and status.st_mode & stat.S_ISVTX):
        who = "anyone" if writable & stat.S_IWOTH else f"group {status.st_gid}"
        mode = stat.S_IMODE(status.st_mode)
        # A sticky folder such as /tmp has to stay writable for everyone.
        is_shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        fix = f"name a folder within {path}" if is_shared else f"run 'chmod go-w {path}'"
        raise UntrustedError(f"{who} can write {path} (mode {mode:o})", fix)


def _require_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(
            f"{path} belongs to user {status.st_uid}, this process runs as user {os.geteuid()}",
            f"change the owner of {path}",
        )
