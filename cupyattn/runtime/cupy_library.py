"""CuPy, imported when it is needed and with a folder that it can write: the only place that does.

CuPy makes a folder for its own kernels while it is imported, by default in the home, and the
import fails where that cannot be made.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from cupyattn.runtime.errors import error
from cupyattn.runtime.folders import CACHE_VARIABLE, cache_directory, temporary_directory
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.trust import make_private_folder, require_trusted_folder

_VARIABLE = "CUPY_CACHE_DIR"
_DEFAULT = "~/.cupy/kernel_cache"


def load_cupy() -> ModuleType:
    """Import CuPy; a home that cannot be written does not keep it from being imported.

    Raises
    ------
    ImportError
        If it is not installed, or not for this machine.
    RuntimeError
        If CUPY_CACHE_DIR names what can be no folder, or there is no place for one.
    """
    with no_fork():
        if "cupy" not in sys.modules:
            _find_it_a_folder()
        import cupy
    return cupy


def loaded_nvtx() -> Any | None:
    """Return CuPy's NVTX ranges; None where nothing has imported CuPy yet."""
    if "cupy" not in sys.modules:
        return None
    with no_fork():
        import cupy.cuda.nvtx
    return cupy.cuda.nvtx


def _find_it_a_folder() -> None:
    """Point CUPY_CACHE_DIR beside our own kernels, unless the user set it or its default will do.

    It stays set for processes that this one starts.
    """
    named = os.environ.get(_VARIABLE)
    try:
        _require_writable(Path(named) if named else Path(_DEFAULT).expanduser())
        return
    except (OSError, RuntimeError) as failure:  # RuntimeError: pathlib finds no home
        why = failure
    if not named:
        os.environ[_VARIABLE] = str(_folder_of_ours())
    elif not Path(named).is_dir():  # one that can only be read will do for the import
        raise error(
            RuntimeError,
            f"{_VARIABLE}={named!r}, where CuPy keeps its own kernels, cannot be made ({why})",
            "CuPy is imported only where that is a folder",
            f"set {_VARIABLE} to a folder that can be written, or unset it",
        ) from why


def _folder_of_ours() -> Path:
    """Return a folder for CuPy's kernels, which it runs as it reads them.

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
    except OSError:  # it is the temporary one's turn
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
