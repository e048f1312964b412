"""Files that are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

_PARTIAL, _BEFORE = ".partial", ".before"


def write_whole(files: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files beside their places, bring all to the disk, and only then rename them.

    Parameters
    ----------
    files : mapping from path to callable
        Each is called with the file to write into. Folders are made if need be.

    Raises
    ------
    OSError
        If one cannot be written: what was there before is as it was, also where Ctrl-C ends it.
    """
    *firsts, _ = files
    partials: list[Path] = []
    replaced: list[Path] = []
    before: dict[Path, Path] = {}
    try:
        for path, write in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partials.append(path.with_suffix(_PARTIAL))
            with partials[-1].open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for path in firsts:  # where the last cannot be replaced, these are put back
            if path.exists():
                before[path] = path.with_suffix(_BEFORE)
                _keep(path, before[path])
        for partial, path in zip(partials, files, strict=True):
            os.replace(partial, path)
            replaced.append(path)
    except BaseException:
        for path in replaced:
            if path in before:
                os.replace(before.pop(path), path)
            else:
                path.unlink()
        raise
    finally:
        for left in (*partials, *before.values()):
            left.unlink(missing_ok=True)
    for folder in {path.parent for path in files}:
        _sync_folder(folder)


def _keep(path: Path, beside: Path) -> None:
    beside.unlink(missing_ok=True)
    try:
        os.link(path, beside)
    except OSError:  # not every file system has links
        shutil.copy2(path, beside)


def _sync_folder(folder: Path) -> None:
    """Bring the new names to the disk too, where folders can be opened (not on Windows)."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
