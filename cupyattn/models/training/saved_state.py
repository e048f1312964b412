"""The state of a training as its checkpoint has it, read as what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.training.checkpoint import damaged
from cupyattn.models.training.counts import LARGEST, as_float
from cupyattn.models.training.packing import DIGEST, Packing, Position
from cupyattn.models.training.scaling import MOST_SKIPPED
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown

_LARGEST_COUNT = 2**63 - 1
_LEAST = {"v": 0, "m_scales": 0, "v_scales": 0}
"""Means of squares, and scales. A negative one makes what is learnt NaN, or turns its steps."""
_LEAST_CODE = -127
"""Codes of "m" in 8 bits stand for -1 to 1; there is none below."""


class SavedState(NamedTuple):
    """The progress of a training.

    Attributes
    ----------
    identity : dict
        What its losses depend on: see `require_same`.
    step, optimizer_steps : int
        Steps that were taken, and those of them that were not skipped.
    position : Position
        Where it was in its data.
    loss_scale : dict
        For `LossScale.restore`.
    """

    identity: dict[str, Any]
    step: int
    optimizer_steps: int
    position: Position
    loss_scale: dict[str, Any]

    @classmethod
    def read(cls, file: Path, given: Any, steps: int) -> SavedState:
        """Read what a checkpoint of a training of so many steps holds.

        Raises
        ------
        ValueError
            For a field that is missing, unknown, of another type or out of range.
        """
        state = _Fields.of(file, "its state", given, cls._fields)
        scale = _Fields.of(
            file, "its loss_scale", state.given["loss_scale"], ("scale", "good", "skipped")
        )
        position = state.given["position"]
        if not isinstance(position, list) or len(position) != len(Position._fields):
            raise damaged(file, f"its position is {shown(position)}, and not an epoch and a batch")
        where = _Fields(file, dict(zip(Position._fields, position, strict=True)))
        identity = state.given["identity"]
        if not isinstance(identity, dict):
            raise damaged(file, f"its identity is {shown(identity)}, which is no object")
        step = state.integer("step", steps)
        return cls(
            identity,
            step,
            state.integer("optimizer_steps", step),
            Position(*(where.integer(name, _LARGEST_COUNT) for name in Position._fields)),
            {
                "scale": scale.positive("scale"),
                "good": scale.integer("good", _LARGEST_COUNT),
                "skipped": scale.integer("skipped", MOST_SKIPPED - 1),
            },
        )


class _Fields(NamedTuple):
    """Values by name, of the state of a checkpoint."""

    file: Path
    given: Mapping[str, Any]

    @classmethod
    def of(cls, file: Path, what: str, given: Any, names: tuple[str, ...]) -> _Fields:
        """Take an object that has these fields and no others."""
        if not isinstance(given, dict):
            raise damaged(file, f"{what} is {shown(given)}, which is no object")
        if given.keys() != set(names):
            found = ", ".join(map(shown, sorted(given)[:9])) or "nothing"
            raise damaged(
                file, f"{what} is not that of a training: {found} in place of {', '.join(names)}"
            )
        return cls(file, given)

    def integer(self, name: str, most: int) -> int:
        """Return an integer from 0 to `most`."""
        value = self.given[name]
        if type(value) is not int or not 0 <= value <= most:
            raise damaged(
                self.file, f"its {name} is {shown(value)}, which is no integer of 0 to {most}"
            )
        return value

    def positive(self, name: str) -> float:
        """Return a positive number."""
        value = self.given[name]
        number = as_float(value)
        if not 0 < number <= LARGEST:
            raise damaged(self.file, f"its {name} is {shown(value)}, which is no number above 0")
        return number


def require_position(file: Path, position: Position, packing: Packing) -> None:
    """Raise ValueError unless an epoch has the batch of a position."""
    batches = len(packing.epoch(position.epoch))
    if position.batch >= batches:
        raise damaged(
            file, f"its batch is {position.batch}, and epoch {position.epoch} has {batches}"
        )


def require_arrays(
    file: Path, arrays: Mapping[str, np.ndarray], saved: Mapping[str, Array]
) -> None:
    """Raise ValueError unless arrays are those of a training, and its optimizer can go on.

    Parameters
    ----------
    file : path
        The checkpoint, for errors.
    arrays : mapping of arrays
        Those of the checkpoint; none if they had other names, shapes or dtypes.
    saved : mapping of arrays
        Those of the training.
    """
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
    file: Path, saved: Mapping[str, Any], here: Mapping[str, Any], called: Mapping[str, str]
) -> None:
    """Raise ValueError if a checkpoint is of another training.

    Parameters
    ----------
    file : path
        The checkpoint, for errors.
    saved, here : mapping
        What the losses depend on, in the checkpoint and in the training that is to go on.
    called : mapping from str to str
        What errors call it, where the user knows it by another name.
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
