"""The disk cache of compiled kernels: one file per cache key, written atomically.

``CUPYATTN_CACHE_DIR`` names the folder; without it, it is the platform's cache folder.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """Return the folder of compiled kernels, made if need be.

    Where the usual place cannot be written (a read-only home), it is a temporary folder, and the
    next process compiles again.
    """
    named = os.environ.get("CUPYATTN_CACHE_DIR")
    try:
        directory = Path(named).expanduser() if named else _platform_directory() / "cupyattn"
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: pathlib finds no home
        directory = Path(tempfile.mkdtemp(prefix="cupyattn-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return directory


def _platform_directory() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def write_atomically(path: Path, content: bytes) -> None:
    """Write so that another process sees the whole file or none; its folder is made if need be.

    On Windows a file that another process has open cannot be replaced; since a key names its
    content, the file that is there already will do.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp, whose files only their owner may read: a cache can belong to several users.
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except PermissionError:
        temporary.unlink(missing_ok=True)
        if not path.exists():
            raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
