"""The cache of compiled kernels: for each key a file of code, and a record with its digest.

The files are in a folder that only this user and root can write. Code that cannot be written there
stays in memory until the process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from cupyattn.runtime.folders import (
    UntrustedError,
    cache_directory,
    make_private_folder,
    read_trusted,
    remove_temporary_directory,
    require_trusted_folder,
    tell_untrusted_file,
    tell_unused,
    write_private,
)
from cupyattn.runtime.fork import no_fork

_writing = threading.Lock()

Facts = dict[str, int] | None
"""The compiler's report on the code, of types that JSON has."""


class CacheEntry(NamedTuple):
    """A cached file."""

    code: bytes
    facts: Facts
    path: Path | None
    """Its path on disk; None if it is only in memory."""


_in_memory: dict[str, CacheEntry] = {}


def find(name: str) -> CacheEntry | None:
    """Return the entry of a name; None if it is missing, damaged or not trusted."""
    if name in _in_memory:
        return _in_memory[name]
    folder = cache_directory()
    return None if folder is None else _read(folder / name)


def keep(name: str, code: bytes, facts: Facts) -> Path | None:
    """Store code under a name; return its path on disk, None if it is only in memory."""
    folder = cache_directory()
    if folder is not None:
        try:
            return _write(folder / name, code, facts)
        except OSError as failure:  # the folder is read-only or another user's, or the disk is full
            tell_unused(failure)
    _in_memory[name] = CacheEntry(code, facts, None)
    return None


def keep_if_possible(name: str, content: bytes) -> None:
    """Store content that is cheap to make again; do nothing if the folder cannot be written."""
    folder = cache_directory()
    if folder is not None:
        with suppress(OSError):
            _write(folder / name, content, None)


def _write(path: Path, code: bytes, facts: Facts) -> Path:
    record = {"code_bytes": len(code), "resources": facts, "digest": _digest(code, facts)}
    write_atomically(path, code)
    write_atomically(_record_path(path), json.dumps(record).encode())
    return path


def _read(path: Path) -> CacheEntry | None:
    try:
        require_trusted_folder(path.parent)
    except UntrustedError as failure:  # the folder changed since this process first used it
        tell_unused(failure)
        return None
    except OSError:
        return None
    try:
        record = json.loads(read_trusted(_record_path(path)))
        facts: Facts = record["resources"]
        code = read_trusted(path)
        sound = record["digest"] == _digest(code, facts)
    except UntrustedError as failure:
        tell_untrusted_file(failure)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CacheEntry(code, facts, path) if sound else None


def _digest(code: bytes, facts: Facts) -> str:
    """Hash the code and its facts, so that a change of either is detected."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + b"\0" + code).hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or none; create its folder if needed.

    Other users can read the file but not write it. On Windows a file that another process has open
    cannot be replaced; that is no error if its content is the same.
    """
    make_private_folder(path.parent)
    require_trusted_folder(path.parent)
    # Not mkstemp: only the owner may read its files, but others can use kernels that root compiled.
    # No process id in the name: two containers that share a folder may have the same.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with no_fork(), _writing:
            write_private(temporary, content)
            os.replace(temporary, path)
    except PermissionError:
        temporary.unlink(missing_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def end_process(code: int) -> NoReturn:
    """End the process at once, even while threads compile, but without half-written files."""
    with no_fork(), _writing:
        remove_temporary_directory()
        os._exit(code)
