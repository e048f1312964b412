"""Where the CUDA sources are, and a digest of a source with everything that it includes."""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_QUOTED_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@lru_cache(maxsize=1)
def source_root() -> Path:
    """Return the folder of CUDA sources: inside the installed package, or beside it in a checkout.

    Raises
    ------
    FileNotFoundError
        If neither place has them: the installation is broken.
    """
    candidates = (_PACKAGE / "_cuda_src", _PACKAGE.parent / "cuda_src")
    for candidate in candidates:
        if (candidate / "common" / "config.cuh").is_file():
            return candidate
    raise FileNotFoundError(
        f"the CUDA sources are in neither {candidates[0]} nor {candidates[1]}; "
        "reinstall cupyattn, or run it from a complete checkout"
    )


def include_closure(source: Path) -> tuple[Path, ...]:
    """Return `source` and every project file that it includes, directly or not, sorted by path.

    Names are looked up as the compiler does: beside the file, then below the source root. Only
    quoted includes count: those in angle brackets belong to the toolkit, whose version is part of
    the cache key by itself.
    """
    found: set[Path] = set()
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        for name in _QUOTED_INCLUDE.findall(path.read_bytes()):
            beside = path.parent / name.decode()
            included = beside if beside.is_file() else source_root() / name.decode()
            pending.append(included.resolve())
    return tuple(sorted(found))


def source_digest(source: Path) -> str:
    """Hash the text of `source` and of its include closure: it changes when any of them does."""
    digest = hashlib.sha256()
    for path in include_closure(source):
        # Relative names, so that a checkout can move without compiling anew.
        digest.update(os.path.relpath(path, source.parent).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
