"""Files from which a training goes on: one safetensors file for each, whole or not there.

The arrays are its tensors; the rest is JSON in its metadata.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error
from cupyattn.models.extras import extra

_NAME = re.compile(r"step-(\d{8})\.safetensors")
_DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}
_PARTIAL = ".partial"
_AT_ONCE = 1 << 24
"""Bytes that are on their way from a GPU to the file."""


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the oldest first."""
    found = folder.glob("step-*.safetensors") if folder.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def save(
    folder: Path, step: int, arrays: Mapping[str, Array], state: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write a checkpoint, and remove all but the newest ones.

    It is written beside its place, to the disk, and then renamed: a name is that of a whole file.

    Parameters
    ----------
    folder : path
        Made if need be.
    step : int
        In its name.
    arrays : mapping of arrays
        In C order, NumPy or CuPy.
    state : mapping
        What JSON holds.
    keep : int
        How many stay, this one among them.

    Raises
    ------
    OSError
        If there is no room, or the folder cannot be written: the earlier ones are as they were.
    """
    path = folder / f"step-{step:08d}.safetensors"
    partial = path.with_suffix(_PARTIAL)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            _write(file, arrays, state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(folder)
    except OSError as failure:
        partial.unlink(missing_ok=True)
        before = saved_in(folder)
        stands = f"{before[-1].name} is still there" if before else "there is none yet"
        size = sum(array.nbytes for array in arrays.values())
        told = error(
            OSError,
            f"the checkpoint {path} could not be written ({failure})",
            f"it takes {size / 1e6:,.0f} MB beside those that are kept; {stands}",
            "make room, or pass another folder, and go on from it with --resume",
        )
        told.errno = failure.errno
        raise told from failure
    for old in saved_in(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a checkpoint: its arrays, and its state.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is damaged, or no checkpoint.
    RuntimeError
        If the package safetensors is not installed.
    """
    safetensors = extra("safetensors", "reads checkpoints")
    try:
        with safetensors.safe_open(str(path), framework="np") as file:
            state = json.loads((file.metadata() or {})["training"])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (safetensors.SafetensorError, KeyError, ValueError) as failure:
        raise error(
            ValueError,
            f"{path} is no checkpoint of a training, or damaged ({failure})",
            "one is read as it was written",
            "remove it, and the one before it is used",
        ) from failure


def _write(file: BinaryIO, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
    """Write the format: the header's length, the header, the arrays (safetensors, format 0.4)."""
    header: dict[str, Any] = {"__metadata__": {"training": json.dumps(state, allow_nan=False)}}
    end = 0
    for name, array in arrays.items():
        places = [end, end + array.nbytes]
        dtype = _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": places}
        end = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for array in arrays.values():
        flat = array.reshape(-1)
        items = _AT_ONCE // flat.dtype.itemsize
        for start in range(0, flat.size, items):
            part = flat[start : start + items]
            file.write((part if isinstance(part, np.ndarray) else part.get()).tobytes())


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk too, where folders can be opened (not on Windows)."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
