"""The files of a split GGUF file: NAME-00001-of-00003.gguf and so on, as llama.cpp names them."""

from __future__ import annotations

import re
from pathlib import Path

from cupyattn.runtime.errors import error

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def split_names(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file, by the name of one; none for another name.

    Examples
    --------
    >>> [part.name for part in split_names(Path("m-00002-of-00002.gguf"))]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named[2]) <= int(named[3]):
        return []
    stem, _, count, suffix = named.groups()
    return [
        path.with_name(f"{stem}-{number:05d}-of-{count}{suffix}")
        for number in range(1, int(count) + 1)
    ]


def part_paths(path: Path, count: int) -> list[Path]:
    """Return the paths of all parts, by one of them; raise if a name or a file is not right."""
    paths = split_names(path)
    if len(paths) != count:
        raise error(
            ValueError,
            f"{path}: one of {count} files",
            "the parts of a split GGUF file are named NAME-00001-of-00003.gguf and so on",
            "rename them, or join them: llama-gguf-split --merge FIRST_FILE NEW_FILE",
        )
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise error(
            FileNotFoundError,
            f"{path}: one of {count} files, of which {len(missing)} are missing: {missing[0]}",
            "all parts of a split GGUF file must be in one folder",
            "download them as well",
        )
    return paths
