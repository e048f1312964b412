"""Where the CUDA sources are, and a digest of a source with everything that it includes."""

from __future__ import annotations

import hashlib
import os
import re
import time
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


_Stamp = tuple[int, int, int]
_digests: dict[tuple[Path, Path], tuple[dict[Path, _Stamp | None], str]] = {}
_SETTLED = 2.0  # seconds since a file's last change, beyond which another one has another time


def include_closure(source: Path) -> tuple[Path, ...]:
    """Return `source` and every project file that it includes, directly or not, sorted by path.

    Names are looked up as the compiler does: beside the file, then below the source root. Only
    quoted includes count: those in angle brackets belong to the toolkit, whose version is part of
    the cache key by itself.
    """
    return _closure(source, set())


def source_digest(source: Path) -> str:
    """Hash the text of `source` and of its include closure: it changes when any of them does.

    To read thirty files takes ten milliseconds. So it is remembered for as long as each of them
    has the size and the times that it had, and none stands where there was none.
    """
    place = source, source_root()
    stamps, digest = _digests.get(place, ({}, ""))
    if digest and all(_stamp(path) == stamp for path, stamp in stamps.items()):
        return digest
    looked_at: set[Path] = set()
    closure = _closure(source, looked_at)
    stamps = {path: _stamp(path) for path in looked_at}
    digest = _digest(source, closure)
    newest = max(max(stamp[:2]) for stamp in stamps.values() if stamp is not None)
    if time.time() - newest / 1e9 > _SETTLED:
        _digests[place] = stamps, digest
    return digest


def _closure(source: Path, looked_at: set[Path]) -> tuple[Path, ...]:
    """Return the include closure, and add to `looked_at` every path that could be a file of it."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        looked_at.add(pending[-1])
        path = pending.pop().resolve()
        if path in found:
            continue
        found.add(path)
        for name in _QUOTED_INCLUDE.findall(path.read_bytes()):
            beside = path.parent / name.decode()
            looked_at.add(beside)
            pending.append(beside if beside.is_file() else source_root() / name.decode())
    return tuple(sorted(found))


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _digest(source: Path, closure: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in closure:
        # Relative names, so that a checkout can move without compiling anew.
        digest.update(os.path.relpath(path, source.parent).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
