"""The cache folder, whose files outlive the process, and a temporary folder of the process.

``CUPYATTN_CACHE_DIR`` names the cache folder. The default is in the platform's folder of caches.

Code that is read is executed, and a checksum next to it proves nothing: whoever can write the file
can write the checksum. So only this user and root may be able to change the folder and its files,
by the rules of OpenSSH's StrictModes. Windows has no such permission bits.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import stat
import sys
import tempfile
import warnings
from functools import lru_cache
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


CACHE_VARIABLE = "CUPYATTN_CACHE_DIR"

_told: set[str | type | None] = set()
"""Warnings given so far: named folders, None for the default one, an error class for files."""


@lru_cache(maxsize=1)
def cache_directory() -> Path | None:
    """Return the cache folder, created if needed; None if no folder can be used.

    A read-only folder, for example one that root has filled, is fine. A folder that somebody else
    can write is not used (see `cupyattn.runtime.folders`), nor one that cannot be created, for
    example because the user has no home directory. Both cases give one warning.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        directory = Path(named).expanduser() if named else _platform_directory() / "cupyattn"
        directory = directory.absolute()  # the process may change its working directory
        make_private_folder(directory)
        if not named and sys.platform == "win32":
            _require_own_profile(directory)
        require_trusted_folder(directory)
        next(directory.iterdir(), None)  # raises if the folder cannot be listed
    except (OSError, RuntimeError) as failure:  # RuntimeError: no home directory
        tell_unused(failure)
        return None
    return directory


def tell_unused(why: Exception) -> None:
    """Warn the user, once, that the cache folder is not used, or cannot be written."""
    named = os.environ.get(CACHE_VARIABLE) or None
    if named in _told:
        return
    _told.add(named)
    folder = f"{CACHE_VARIABLE}={named!r}" if named else "the folder of compiled kernels"
    if isinstance(why, UntrustedError):
        passed = (
            f"{folder} is not used: {why}; kernels are code to run, so they are kept only in a "
            "folder that only this user and root can write, parents included; what is compiled "
            "now stays in memory and is lost when this process ends"
        )
        fix = f"{why.fix}, or set {CACHE_VARIABLE} to a folder of your own"
    else:
        passed = (
            f"{folder} cannot be written ({why}); what is compiled now stays in memory and is lost "
            "when this process ends"
        )
        fix = f"set {CACHE_VARIABLE} to a folder that can be written"
    unset = ", or unset it" if named else ""
    warnings.warn(f"{passed}; {fix}{unset}", stacklevel=users_level())


def tell_untrusted_file(why: UntrustedError) -> None:
    """Warn the user, once, that a file of the cache is not used."""
    if UntrustedError in _told:
        return
    _told.add(UntrustedError)
    warnings.warn(
        f"a file of the folder of compiled kernels is not read: {why}; it is code to run, so it "
        "has to be a file that only this user and root can write; find out who wrote the file, and "
        f"{why.fix}",
        stacklevel=users_level(),
    )


def users_level() -> int:
    """Return the stack level of the user's line, as warnings.warn in the caller needs it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "cupyattn":
        frame, level = frame.f_back, level + 1
    return level


@lru_cache(maxsize=1)
def temporary_directory() -> Path:
    """Return a temporary folder of this process, which is removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="cupyattn-"))
    atexit.register(_remove, directory, os.getpid())
    return directory


def remove_temporary_directory() -> None:
    """Remove the temporary folder, for a process that ends without its exit handlers."""
    if temporary_directory.cache_info().currsize:
        _remove(temporary_directory(), os.getpid())


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends while its parent still needs the files
        shutil.rmtree(directory, ignore_errors=True)


def _platform_directory() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _require_own_profile(directory: Path) -> None:
    """Raise unless a folder is in the user's profile, which Windows protects from other users."""
    home = Path.home()
    if not directory.resolve().is_relative_to(home.resolve()):
        raise UntrustedError(
            f"{directory} is not in the profile folder of this user, {home}",
            f"set {CACHE_VARIABLE}={directory} if nobody else can write there",
        )
