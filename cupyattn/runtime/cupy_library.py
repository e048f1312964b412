"""The only import of CuPy: when it is needed, and with a cache folder that CuPy can write.

CuPy creates a folder for its own kernels during its import, by default in the home directory. The
import fails if the folder cannot be created.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from cupyattn.runtime.errors import error
from cupyattn.runtime.folders import (
    CACHE_VARIABLE,
    cache_directory,
    make_private_folder,
    require_trusted_folder,
    temporary_directory,
)
from cupyattn.runtime.fork import no_fork

_VARIABLE = "CUPY_CACHE_DIR"
_DEFAULT = "~/.cupy/kernel_cache"


def load_cupy() -> ModuleType:
    """Import CuPy, even if the home directory cannot be written.

    Raises
    ------
    ImportError
        If it is not installed, or not for this platform.
    RuntimeError
        If CUPY_CACHE_DIR is no usable folder, or there is no place for one.
    """
    with no_fork():
        if "cupy" not in sys.modules:
            _set_cache_folder()
        import cupy
    return cupy


def loaded_nvtx() -> ModuleType | None:
    """Return CuPy's module of NVTX ranges; None if CuPy has not been imported yet."""
    if "cupy" not in sys.modules:
        return None
    with no_fork():
        # First the package, because another thread may be importing it. An import of cupy.cuda.nvtx
        # locks cupy.cuda, which that thread needs: Python would give it a module without names.
        import cupy
        import cupy.cuda.nvtx
    return cupy.cuda.nvtx


def _set_cache_folder() -> None:
    """Set CUPY_CACHE_DIR to a folder next to our kernels, unless it is set or its default works.

    It stays set for processes that this one starts.
    """
    named = os.environ.get(_VARIABLE)
    try:
        _require_writable(Path(named) if named else Path(_DEFAULT).expanduser())
        return
    except (OSError, RuntimeError) as failure:  # RuntimeError: no home directory
        why = failure
    if not named:
        os.environ[_VARIABLE] = str(_own_folder())
    elif not Path(named).is_dir():  # a read-only folder is enough for the import
        raise error(
            RuntimeError,
            f"{_VARIABLE}={named!r}, where CuPy keeps its own kernels, cannot be made ({why})",
            "CuPy needs this folder for its import",
            f"set {_VARIABLE} to a folder that can be written, or unset it",
        ) from why


def _own_folder() -> Path:
    """Return a trusted folder for CuPy's kernels, which CuPy runs without a check.

    Raises
    ------
    RuntimeError
        If neither the cache folder nor one for temporary files can be written.
    """
    folder = cache_directory()
    try:
        if folder is not None:
            make_private_folder(folder / "cupy")
            require_trusted_folder(folder / "cupy")
            _require_writable(folder / "cupy")
            return folder / "cupy"
    except OSError:  # use a temporary folder instead
        pass
    try:
        folder = temporary_directory()
        require_trusted_folder(folder)
        _require_writable(folder / "cupy")
    except OSError as failure:
        raise error(
            RuntimeError,
            f"there is no folder for CuPy's own kernels ({failure})",
            f"they are kept in {_DEFAULT}, otherwise in the folder of compiled kernels or in one "
            "for temporary files",
            f"set {_VARIABLE}, {CACHE_VARIABLE} or TMPDIR to a folder of your own that can be "
            "written",
        ) from failure
    return folder / "cupy"


def _require_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
