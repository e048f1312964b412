"""The cache of compiled kernels: code under its key, and beside it a record to know it by.

It is on the disk, in a folder that this user and root alone can write. What cannot be written there
is kept in memory for as long as the process lives.
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

from cupyattn.runtime.folders import (
    cache_directory,
    remove_temporary_directory,
    tell_untrusted_file,
    tell_unused,
)
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.trust import (
    UntrustedError,
    make_private_folder,
    read_trusted,
    require_trusted_folder,
    write_private,
)

_writing = threading.Lock()

Facts = dict[str, Any] | None
"""What the compiler said of the code, in terms that JSON has."""


class Entry(NamedTuple):
    """What the cache has under a name."""

    code: bytes
    facts: Facts
    path: Path | None
    """Where it is on the disk; None if it is in memory alone."""


_in_memory: dict[str, Entry] = {}


def find(name: str) -> Entry | None:
    """Return what is kept under a name; None if that is nothing, damaged, or not to be trusted."""
    if name in _in_memory:
        return _in_memory[name]
    folder = cache_directory()
    return None if folder is None else _read(folder / name)


def keep(name: str, code: bytes, facts: Facts) -> Path | None:
    """Keep code under a name; return where it is on the disk, None if it is in memory alone."""
    folder = cache_directory()
    if folder is not None:
        try:
            return _write(folder / name, code, facts)
        except OSError as failure:  # it can only be read, the disk is full, or it is another's now
            tell_unused(failure)
    _in_memory[name] = Entry(code, facts, None)
    return None


def keep_if_possible(name: str, content: bytes) -> None:
    """Write what is soon made again; in a folder that can only be read, that is what happens."""
    folder = cache_directory()
    if folder is not None:
        with suppress(OSError):
            _write(folder / name, content, None)


def _write(path: Path, code: bytes, facts: Facts) -> Path:
    record = {"code_bytes": len(code), "resources": facts, "digest": _digest(code, facts)}
    write_atomically(path, code)
    write_atomically(_record_path(path), json.dumps(record).encode())
    return path


def _read(path: Path) -> Entry | None:
    try:
        require_trusted_folder(path.parent)
    except UntrustedError as failure:  # it was changed since this process first used it
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
    return Entry(code, facts, path) if sound else None


def _digest(code: bytes, facts: Facts) -> str:
    """Hash the code and what is said of it: a change of either is seen."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + b"\0" + code).hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def write_atomically(path: Path, content: bytes) -> None:
    """Write so that another process sees the whole file or none; its folder is made if need be.

    Others can read it, but not write it. On Windows a file that another process has open cannot be
    replaced; what is there will do if it is the same.
    """
    make_private_folder(path.parent)
    require_trusted_folder(path.parent)
    # Not mkstemp, whose files only their owner may read: others can use what root has compiled. Nor
    # the process's id, which two containers on one folder may share.
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
    """End the process at once, whatever its threads compile, but let none leave half a file."""
    with no_fork(), _writing:
        remove_temporary_directory()
        os._exit(code)
