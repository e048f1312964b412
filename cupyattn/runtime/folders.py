"""The cache folder, whose files outlive the process, and a temporary folder of the process.

``CUPYATTN_CACHE_DIR`` names the cache folder. The default is in the platform's folder of caches.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

from cupyattn.runtime.trust import UntrustedError, make_private_folder, require_trusted_folder

CACHE_VARIABLE = "CUPYATTN_CACHE_DIR"

_told: set[str | type | None] = set()
"""Warnings given so far: named folders, None for the default one, an error class for files."""


@lru_cache(maxsize=1)
def cache_directory() -> Path | None:
    """Return the cache folder, created if needed; None if no folder can be used.

    A read-only folder, for example one that root has filled, is fine. A folder that somebody else
    can write is not used (see `cupyattn.runtime.trust`), nor one that cannot be created, for
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
    warnings.warn(f"{passed}; {fix}{unset}", stacklevel=_users_level())


def tell_untrusted_file(why: UntrustedError) -> None:
    """Warn the user, once, that a file of the cache is not used."""
    if UntrustedError in _told:
        return
    _told.add(UntrustedError)
    warnings.warn(
        f"a file of the folder of compiled kernels is not read: {why}; it is code to run, so it "
        "has to be a file that only this user and root can write; find out who wrote the file, and "
        f"{why.fix}",
        stacklevel=_users_level(),
    )


def _users_level() -> int:
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
