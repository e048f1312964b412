"""Folders of small files, each kept as one archive."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import zipfile
from pathlib import Path

_DATE = (2026, 11, 28, 0, 0, 0)


@functools.cache
def unpacked(archive: Path) -> Path:
    """Return a folder with the files of an archive. It is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"{archive.stem}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return folder


def pack(folder: Path, archive: Path) -> None:
    """Write an archive of a folder: the same bytes for the same contents."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(entry, path.read_bytes())
