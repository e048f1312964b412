"""Checkpoints from which a training resumes: the files, and the state of a training in them.

A checkpoint is one safetensors file, complete or absent. The arrays are its tensors. The rest is
JSON in its metadata, with a digest of everything: disks and copies change bytes, and a training
that resumed from other numbers would not notice.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.writing import DTYPES, bytes_of, write_tensors
from cupyattn.models.extras import extra
from cupyattn.models.training.batches import DIGEST, Packing, Position
from cupyattn.models.training.optimizer import MOST_SKIPPED
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, explaining, shown, size_text
from cupyattn.runtime.reading import open_regular, parsed

_NAME = re.compile(r"step-(\d{8})\.safetensors")
MOMENT = "the date of chat templates"
"""The name, in the identity of a training, of the date and time that its samples were made with."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the oldest first."""
    found = folder.glob("step-*.safetensors") if folder.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name) and path.is_file())


def way_on(folder: Path) -> str:
    """Return the fix for a failed write, in a training with checkpoints in this folder."""
    if saved := saved_in(folder):
        return f"make room, and go on from {saved[-1].name}, which is still there, with --resume"
    return "make room, and begin anew: there is no checkpoint yet"


def save(
    folder: Path, step: int, arrays: Mapping[str, Array], state: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`, this one among them.

    On a full disk, checkpoints older than the newest make room. If there is no room for all that,
    an OSError is raised and the newest one is as it was. JSON holds the `state`.
    """
    path = folder / f"step-{step:08d}.safetensors"
    text = json.dumps(state, allow_nan=False)
    metadata = {"training": text, "sha256": _digest(arrays, text)}
    size = sum(array.nbytes for array in arrays.values())
    with explaining(
        f"the checkpoint {path} could not be written",
        f"it takes {size_text(size)} in addition to those that are kept",
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
    """Read the arrays and the state of a checkpoint; raise ValueError for a single wrong bit.

    Arrays are not read, and none returned, unless they have the names, shapes and dtypes of `like`:
    a small file can claim that they are large.
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
        raise damaged(path, "its sha256 does not match its content")
    return arrays, parsed(text, str(path), damaged, constants=False)


def moment_of(path: Path) -> datetime | None:
    """Return the date and time that chat templates print, None if a checkpoint has none.

    Resuming compares all else of the checkpoint, and its digest, once the data are read.
    """
    safetensors = extra("safetensors", "reads checkpoints")
    open_regular(path, damaged).close()
    try:
        with safetensors.safe_open(str(path), framework="np") as file:
            text = (file.metadata() or {}).get("training", "null")
    except safetensors.SafetensorError as failure:
        raise damaged(path, str(failure)) from failure
    state = parsed(text, str(path), damaged, constants=False)
    identity = state.get("identity") if isinstance(state, dict) else None
    given = identity.get(MOMENT) if isinstance(identity, dict) else None
    try:
        return None if given is None else datetime.fromisoformat(given)
    except (TypeError, ValueError) as failure:
        raise damaged(path, f"{MOMENT} is {shown(given)}") from failure


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
    """Make the error for a file that is not a checkpoint."""
    return error(
        ValueError,
        f"{path} is no checkpoint of a training, or damaged ({why})",
        "a checkpoint is read only if it is exactly as it was written",
        "remove it to resume from the one before it",
    )


_LARGEST_COUNT = 2**63 - 1
_LEAST = {"v": 0, "m_scales": 0, "v_scales": 0}
"""Means of squares, and scales. A negative one gives NaN, or reverses steps."""
_LEAST_CODE = -127
"""The code of -1, the smallest number of "m" in 8 bits."""


class SavedState(NamedTuple):
    """The progress of a training.

    `identity` is what its losses depend on. `optimizer_steps` counts the steps that were not
    skipped.
    """

    identity: Json
    step: int
    optimizer_steps: int
    position: Position
    loss_scale: Json

    @classmethod
    def read(cls, file: Path, given: object, steps: int) -> SavedState:
        """Read the state in a checkpoint of a training of so many steps."""
        state = _fields(file, "its state", given, cls._fields)
        scale = _fields(
            file, "its loss_scale", state.given["loss_scale"], ("scale", "good", "skipped")
        )
        position = state.given["position"]
        if not isinstance(position, list) or len(position) != len(Position._fields):
            raise damaged(file, f"its position is {shown(position)}, not an epoch and a batch")
        where = state._replace(given=dict(zip(Position._fields, position, strict=True)))
        identity = state.given["identity"]
        if not isinstance(identity, dict):
            raise damaged(file, f"its identity is {shown(identity)}, which is not an object")
        step = state.integer("step", least=0, most=steps)
        most = _LARGEST_COUNT
        return cls(
            identity,
            step,
            state.integer("optimizer_steps", least=0, most=step),
            Position(*(where.integer(name, least=0, most=most) for name in Position._fields)),
            {
                "scale": scale.number("scale"),
                "good": scale.integer("good", least=0, most=most),
                "skipped": scale.integer("skipped", least=0, most=MOST_SKIPPED - 1),
            },
        )


def _fields(file: Path, what: str, given: object, names: tuple[str, ...]) -> Fields:
    """Return the fields of an object that has these and no others."""
    if not isinstance(given, dict):
        raise damaged(file, f"{what} is {shown(given)}, which is not an object")
    if given.keys() != set(names):
        found = ", ".join(map(shown, sorted(given)[:9])) or "nothing"
        raise damaged(file, f"{what} must have {', '.join(names)}, not {found}")
    return Fields(given, str(file), refuse_file=damaged)


def require_position(file: Path, position: Position, packing: Packing) -> None:
    """Raise ValueError unless an epoch has the batch of a position."""
    batches = len(packing.epoch(position.epoch))
    if position.batch >= batches:
        raise damaged(file, f"batch is {position.batch}, but epoch {position.epoch} has {batches}")


def require_arrays(
    file: Path, arrays: Mapping[str, np.ndarray], saved: Mapping[str, Array]
) -> None:
    """Raise ValueError unless the arrays of a checkpoint are valid for those of the training."""
    if arrays.keys() != saved.keys():
        raise damaged(file, f"its arrays are not {', '.join(saved)}, each whole")
    for name, array in arrays.items():
        least, most = array.min(initial=0), array.max(initial=0)  # which pass NaN on
        if not np.isfinite([least, most]).all():
            raise damaged(file, f"its {name} are not finite")
        lowest = _LEAST_CODE if array.dtype == np.int8 else _LEAST.get(name, least)
        if least < lowest:
            raise damaged(file, f"its {name} begin at {least}, and not at {lowest} or above")


def require_same(
    file: Path, saved: Mapping[str, object], here: Mapping[str, object], called: Mapping[str, str]
) -> None:
    """Raise ValueError if a checkpoint is of another training.

    `saved` and `here` are what losses depend on; `called` has the names by which a user knows them.
    """
    for name in (*here, *(saved.keys() - here.keys())):  # what was passed is compared first
        now, before = here.get(name), saved.get(name)
        if now != before:
            found = f" is {shown(now)}, and was {shown(before)} in the checkpoint"
            if str(now).startswith(DIGEST):
                found = ": other than in the checkpoint"
            raise error(
                ValueError,
                f"{file}: {called.get(name, name)}{found}",
                "a training is resumed with the model, the data, the options and the number of "
                "steps that it began with",
                "pass those, or begin anew in another folder",
            )
