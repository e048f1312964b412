"""Files from which a training goes on: one safetensors file for each, whole or not there.

The arrays are its tensors; the rest is JSON in its metadata, beside a digest of all: disks and
copies change bytes, and a training that went on from other numbers would not be told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.arrays import Array
from cupyattn.errors import error, shown
from cupyattn.models.checkpoints.safetensors_writer import bytes_of, write_tensors
from cupyattn.models.extras import extra

_NAME = re.compile(r"step-(\d{8})\.safetensors")


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the oldest first."""
    found = folder.glob("step-*.safetensors") if folder.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def save(
    folder: Path, step: int, arrays: Mapping[str, Array], state: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write a checkpoint, and remove all but the newest ones.

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
        If there is no room, or the folder cannot be written: the earlier ones are as they were.
    """
    path = folder / f"step-{step:08d}.safetensors"
    text = json.dumps(state, allow_nan=False)
    try:
        write_tensors(path, arrays, {"training": text, "sha256": _digest(arrays, text)})
    except OSError as failure:
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
    for old in (*saved_in(folder)[:-keep], *folder.glob("step-*.partial")):
        old.unlink(missing_ok=True)  # what is partial is of a process that was killed
    return path


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a checkpoint: its arrays, and its state.

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
    try:
        with safetensors.safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            text, digest = metadata["training"], metadata["sha256"]
            state = json.loads(text)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, KeyError, ValueError) as failure:
        raise damaged(path, str(failure)) from failure
    if _digest(arrays, text) != digest:
        raise damaged(path, "its sha256 is another")
    if not isinstance(state, dict):
        raise damaged(path, f"its state is {shown(state)}")
    return arrays, state


def _digest(arrays: Mapping[str, Array], text: str) -> str:
    found = sha256(text.encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        for part in bytes_of(array):
            found.update(part)
    return found.hexdigest()


def damaged(path: Path, why: str) -> ValueError:
    """Return what is raised for a file that is no checkpoint."""
    return error(
        ValueError,
        f"{path} is no checkpoint of a training, or damaged ({why})",
        "one is read as it was written",
        "remove it, and the one before it is used",
    )
