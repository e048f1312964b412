"""The folder of files that outlive the process, and the temporary one that stands in for it.

``CUPYATTN_CACHE_DIR`` names the folder; without it, it is below the platform's cache folder.
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

from cupyattn.errors import error

CACHE_VARIABLE = "CUPYATTN_CACHE_DIR"

_told: set[str | None] = set()
"""The named folders, None for that of the platform, whose users know that nothing is kept."""


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """Return the folder where files are looked for first, made if need be.

    It may be one that can only be read, warmed by someone else. Where it cannot even be made (a
    user without a home), the temporary folder stands in.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        directory = Path(named).expanduser() if named else _platform_directory() / "cupyattn"
        directory = directory.absolute()  # the same when the process goes to another folder
        directory.mkdir(parents=True, exist_ok=True)
        next(directory.iterdir(), None)  # a folder that cannot be listed is of no use
    except (OSError, RuntimeError) as failure:  # RuntimeError: pathlib finds no home
        return stand_in(failure)
    return directory


def directories() -> tuple[Path, ...]:
    """Return where files are looked for, in this order."""
    made = temporary_directory.cache_info().currsize
    return (cache_directory(), temporary_directory()) if made else (cache_directory(),)


def stand_in(why: Exception) -> Path:
    """Return the temporary folder, for what `cache_directory` cannot take.

    The user is told `why`, once.

    Raises
    ------
    RuntimeError
        If there is no place for temporary files either.
    """
    try:
        directory = temporary_directory()
    except OSError as failure:
        raise error(
            RuntimeError,
            f"compiled kernels cannot be written ({why}; {failure})",
            "they are kept in the cache folder, or in one for temporary files",
            f"set {CACHE_VARIABLE} or TMPDIR to a folder that can be written",
        ) from failure
    named = os.environ.get(CACHE_VARIABLE) or None
    if named not in _told:
        _told.add(named)
        folder = f"{CACHE_VARIABLE}={named!r}" if named else "the folder of compiled kernels"
        warnings.warn(
            f"{folder} cannot be written ({why}); what is compiled now is lost when this process "
            f"ends; set {CACHE_VARIABLE} to a folder that can be written"
            + (", or unset it" if named else ""),
            stacklevel=_users_level(),
        )
    return directory


def _users_level() -> int:
    """Return how far above the function that calls this the user's line is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "cupyattn":
        frame, level = frame.f_back, level + 1
    return level


@lru_cache(maxsize=1)
def temporary_directory() -> Path:
    """Return a folder of this process, which is removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="cupyattn-"))
    atexit.register(_remove, directory, os.getpid())
    return directory


def remove_temporary_directory() -> None:
    """Remove that folder, if there is one: for a process that ends without its exit handlers."""
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
