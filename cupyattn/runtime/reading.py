"""Reading of untrusted files, with limits of size and nesting.

A reader opens the file and then checks the open file, so that the file cannot be replaced between
check and use. It reads only regular files: a FIFO would block, and /dev/zero has no end. The size
is checked before anything is read.

Each reader takes ``refuse(where, what)``, which makes the exception for an invalid file, because
the advice depends on the caller. `where` is the name of the file.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import size_text

Refuse = Callable[[str, str], Exception]

MOST_NESTED = 64
"""The deepest nesting of lists and objects: recursive code, such as json.dumps, fails at 1,000."""

_PART = 1 << 16  # bytes
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_BINARY", "O_NONBLOCK", "O_NOCTTY"))
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, refuse: Refuse) -> BinaryIO:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        If it cannot be opened.
    Exception
        The exception of `refuse`, for a FIFO, a device or a folder.
    """
    number = os.open(path, _FLAGS)  # O_NONBLOCK: opening a FIFO does not wait for a writer
    kind = stat.S_IFMT(os.fstat(number).st_mode)
    if kind != stat.S_IFREG:
        os.close(number)
        raise refuse(str(path), f"it is {_KINDS.get(kind, 'something else')}, not a regular file")
    return os.fdopen(number, "rb")


def read_bytes(path: Path, most: int, refuse: Refuse) -> bytes:
    """Return the content of a regular file of at most `most` bytes; raises as `open_regular`."""
    with open_regular(path, refuse) as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        # The reported size is not enough: a file may grow, and files of /proc report 0.
        while size <= most and (part := file.read(_PART)):
            content += part
            size = max(size, len(content))
    if size > most:
        raise refuse(str(path), f"it has {size_text(size)}, and at most {size_text(most)} are read")
    return bytes(content)


def read_text(path: Path, most: int, refuse: Refuse) -> str:
    """Return a text in UTF-8, its lines ended by a newline; raises as `read_bytes`."""
    content = io.BytesIO(read_bytes(path, most, refuse))
    try:
        return io.TextIOWrapper(content, encoding="utf-8").read()
    except UnicodeDecodeError as failure:
        raise refuse(str(path), f"no UTF-8 ({failure})") from failure


def read_json(path: Path, most: int, refuse: Refuse) -> Any:
    """Return the content of a JSON file; raises as `read_text` and `parsed`."""
    return parsed(read_text(path, most, refuse), str(path), refuse)


def parsed(text: str | bytes, where: str, refuse: Refuse, *, constants: bool = True) -> Any:
    """Return the value of a JSON text.

    Parameters
    ----------
    text : str or bytes
        Bytes are UTF-8.
    where : str
        The name of the text in errors.
    refuse : callable
        Makes the exception for a text that is no JSON or nested more than `MOST_NESTED` deep.
    constants : bool
        Whether to allow NaN and Infinity, which Python writes but JSON does not have.
    """
    try:
        value = json.loads(text, parse_constant=None if constants else _no_constant)
    except ValueError as failure:
        raise refuse(where, f"no JSON ({failure})") from failure
    except RecursionError:
        raise _too_deep(where, refuse) from None
    level = _containers([value])
    for _ in range(MOST_NESTED):
        level = [inner for each in level for inner in _containers(each)]
    if level:
        raise _too_deep(where, refuse)
    return value


def lines_of(path: Path, longest: int, refuse: Refuse) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers (from 1) and the lines of a file; refuse a line longer than `longest`."""
    with open_regular(path, refuse) as file:
        number = 1
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise refuse(f"line {number} of {path}", f"it has more than {size_text(longest)}")
            yield number, line
            number += 1


def _containers(value: list[object] | Json) -> list[Any]:
    """Return the items of a list or an object that are lists or objects."""
    items = value.values() if isinstance(value, dict) else value
    return [each for each in items if isinstance(each, list | dict)]


def _too_deep(where: str, refuse: Refuse) -> Exception:
    return refuse(where, f"no JSON that is read: it is nested more than {MOST_NESTED} deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
