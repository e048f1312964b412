"""The disk cache of compiled kernels: code under its key, and beside it a record to know it by.

A folder that can only be read is read; what is not in it goes to the process's temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cupyattn.folders import (
    cache_directory,
    directories,
    remove_temporary_directory,
    stand_in,
)
from cupyattn.fork import no_fork

_writing = threading.Lock()

Facts = dict[str, Any] | None
"""What the compiler said of the code, in terms that JSON has."""


class Entry(NamedTuple):
    """What the cache has under a name."""

    path: Path
    facts: Facts


def find(name: str) -> Entry | None:
    """Return what is kept under a name; None if that is nothing, or damaged."""
    for folder in directories():
        entry = _read(folder / name)
        if entry is not None:
            return entry
    return None


def keep(name: str, code: bytes, facts: Facts) -> Path:
    """Write code under a name and return where it is: in a temporary folder if need be."""
    try:
        return _write(cache_directory() / name, code, facts)
    except OSError as failure:  # it can only be read, or the disk is full
        return _write(stand_in(failure) / name, code, facts)


def keep_if_possible(name: str, content: bytes) -> None:
    """Write what is soon made again; in a folder that can only be read, that is what happens."""
    with suppress(OSError):
        _write(cache_directory() / name, content, None)


def _write(path: Path, code: bytes, facts: Facts) -> Path:
    record = {"code_bytes": len(code), "resources": facts, "digest": _digest(code, facts)}
    write_atomically(path, code)
    write_atomically(_record_path(path), json.dumps(record).encode())
    return path


def _read(path: Path) -> Entry | None:
    try:
        record = json.loads(_record_path(path).read_bytes())
        facts: Facts = record["resources"]
        sound = record["digest"] == _digest(path.read_bytes(), facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(path, facts) if sound else None


def _digest(code: bytes, facts: Facts) -> str:
    """Hash the code and what is said of it: a change of either is seen."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + b"\0" + code).hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def write_atomically(path: Path, content: bytes) -> None:
    """Write so that another process sees the whole file or none; its folder is made if need be.

    On Windows a file that another process has open cannot be replaced; what is there will do if it
    is the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp, whose files only their owner may read: a cache can belong to several users. Nor
    # the process's id, which two containers on one folder may share.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with no_fork(), _writing:
            temporary.write_bytes(content)
            os.replace(temporary, path)
    except PermissionError:
        temporary.unlink(missing_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def end_process(code: int) -> NoReturn:
    """End the process at once, whatever its threads compile, but let none leave half a file."""
    with no_fork(), _writing:
        remove_temporary_directory()
        os._exit(code)
