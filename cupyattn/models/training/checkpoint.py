"""Files from which a training goes on: one safetensors file for each, whole or not there.

The arrays are its tensors; the rest is JSON in its metadata, beside a digest of all: disks and
copies change bytes, and a training that went on from other numbers would not be told.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.models.checkpoints.safetensors_writer import DTYPES, bytes_of, write_tensors
from cupyattn.models.extras import extra
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, explaining, size_text
from cupyattn.runtime.reading import open_regular, parsed

_NAME = re.compile(r"step-(\d{8})\.safetensors")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the oldest first."""
    found = folder.glob("step-*.safetensors") if folder.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name) and path.is_file())


def way_on(folder: Path) -> str:
    """Return what to do where something could not be written, in a training that keeps these."""
    if saved := saved_in(folder):
        return f"make room, and go on from {saved[-1].name}, which is still there, with --resume"
    return "make room, and begin anew: there is no checkpoint yet"


def save(
    folder: Path, step: int, arrays: Mapping[str, Array], state: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write a checkpoint, and remove all but the newest ones.

    Where the disk is full, older ones than the newest make room for it.

    Parameters
    ----------
    folder : path
        Made if need be.
    step : int
        In its name.
    arrays : mapping of arrays
        NumPy or CuPy.
    state : mapping
        What JSON holds.
    keep : int
        How many stay, this one among them.

    Raises
    ------
    OSError
        If there is no room, or the folder cannot be written: the newest one is as it was.
    """
    path = folder / f"step-{step:08d}.safetensors"
    text = json.dumps(state, allow_nan=False)
    metadata = {"training": text, "sha256": _digest(arrays, text)}
    size = sum(array.nbytes for array in arrays.values())
    with explaining(
        f"the checkpoint {path} could not be written",
        f"it takes {size_text(size)} beside those that are kept",
        lambda: way_on(folder),
    ):
        while True:
            for partial in filter(Path.is_file, folder.glob("step-*.partial")):
                partial.unlink()  # of a process that was killed
            try:
                write_tensors(path, arrays, metadata)
                break
            except OSError as failure:
                *older, _ = saved_in(folder) or [path]
                if not older or failure.errno not in _NO_ROOM:
                    raise
                older[0].unlink()
        for old in saved_in(folder)[:-keep]:
            old.unlink()
    return path


def load(path: Path, like: Mapping[str, Array]) -> tuple[dict[str, np.ndarray], Any]:
    """Read a checkpoint: its arrays, and its state.

    Parameters
    ----------
    path : path
        The file.
    like : mapping of arrays
        The arrays of a training. If those of the file have other names, shapes or dtypes, they are
        not read, and none are returned: a small file can say that they are large.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is damaged, were it by a single bit, or no checkpoint.
    RuntimeError
        If the package safetensors is not installed.
    """
    safetensors = extra("safetensors", "reads checkpoints")
    open_regular(path, damaged).close()  # safetensors opens it by name, and a FIFO would block
    try:
        with safetensors.safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            found = {name: _kind(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
            fit = found == {name: (a.shape, DTYPES[a.dtype.name]) for name, a in like.items()}
            arrays = {name: file.get_tensor(name) for name in like if fit}
    except safetensors.SafetensorError as failure:
        raise damaged(path, str(failure)) from failure
    if missing := [name for name in ("training", "sha256") if name not in metadata]:
        raise damaged(path, f"its metadata have no {missing[0]!r}")
    text = metadata["training"]
    if fit and _digest(arrays, text) != metadata["sha256"]:
        raise damaged(path, "its sha256 is another")
    return arrays, parsed(text, str(path), damaged, constants=False)


def _kind(part: Any) -> tuple[tuple[int, ...], str]:
    return tuple(part.get_shape()), str(part.get_dtype())


def _digest(arrays: Mapping[str, Array], text: str) -> str:
    found = sha256(text.encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        for part in bytes_of(array):
            found.update(part)
    return found.hexdigest()


def damaged(path: Path | str, why: str) -> ValueError:
    """Return what is raised for a file that is no checkpoint."""
    return error(
        ValueError,
        f"{path} is no checkpoint of a training, or damaged ({why})",
        "one is read as it was written",
        "remove it, and the one before it is used",
    )
