"""The steps of a training, one after the other, which can be interrupted and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupyattn.models.generation.options import as_count
from cupyattn.models.training import checkpoint
from cupyattn.models.training.batches import IGNORED, Batch, Packing, moved
from cupyattn.models.training.checkpoint import (
    SavedState,
    require_arrays,
    require_position,
    require_same,
)
from cupyattn.models.training.optimizer import AdamW, AdamWOptions, LossScale, Schedule
from cupyattn.models.training.trainable import Trainable
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown


class TrainedStep(NamedTuple):
    """The result of a step.

    Attributes
    ----------
    number : int
        From 1 on.
    loss : float
        The mean over its labels, before the step.
    lr : float
        Its learning rate.
    grad_norm : float
        The norm of all gradients, before it is clipped.
    tokens : int
        Of its batches.
    loss_scale : float
        That its gradients had.
    skipped : bool
        Whether they were not finite: then nothing was changed but the loss scale.
    """

    number: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    loss_scale: float
    skipped: bool


class Trainer:
    """Trains what has gradients, step by step.

    Parameters
    ----------
    trainable : Trainable
        `LoraAdapters` or `FullWeights`, or something else that follows that protocol. One trainer
        has it: a further one takes it over, and this one takes no more steps.
    packing : Packing
        The samples, and how they become batches.
    schedule : Schedule
        Learning rates, and how many steps there are.
    optimizer : AdamWOptions
    accumulate : int
        Batches of a step: their losses are averaged over all of their labels.
    loss_scale : LossScale, optional
        For float16 models `LossScale()`; by default none.
    seed : int
        Of dropout.
    names : dict
        What else must be the same where a training is resumed, beside what is known here: how it
        was told, for errors that say so. JSON keeps it.
    """

    def __init__(
        self,
        trainable: Trainable,
        packing: Packing,
        *,
        schedule: Schedule,
        optimizer: AdamWOptions = AdamWOptions(),  # noqa: B008 - a tuple of numbers
        accumulate: int = 1,
        loss_scale: LossScale | None = None,
        seed: int = 0,
        names: Json | None = None,
    ) -> None:
        if not trainable.arrays:
            raise error(
                ValueError,
                "nothing is learnt",
                "a training changes some arrays",
                "choose other targets of the adapters",
            )
        trainable.require(packing.samples)
        self.trainable = trainable
        self.packing = packing
        self.schedule = Schedule.checked(*schedule)
        self.accumulate = as_count("accumulate", accumulate, 1)
        self.loss_scale = LossScale.off() if loss_scale is None else loss_scale
        self.seed = as_count("seed", seed, 0)
        self.number = 0
        self._whole = True
        first = next(iter(trainable.arrays.values()))
        self.xp = np if isinstance(first, np.ndarray) else load_cupy()
        self.optimizer = AdamW(trainable.arrays, optimizer, self.xp)
        self._identity = _as_json(self._found(names or {}))

    def __iter__(self) -> Iterator[TrainedStep]:
        while self.number < self.schedule.steps:
            yield self.step()

    def step(self) -> TrainedStep:
        """Take a step.

        Loss and norm are read together, once a step: the only time that the host waits. A step
        that is cut short, as by Ctrl-C or for want of memory, can be called again, and gives what
        it would have given. If it had begun to change what is learnt, the trainer goes on only
        behind `resume`.

        Raises
        ------
        FloatingPointError
            If no loss scale makes gradients finite.
        RuntimeError
            Behind a step that was cut short while it changed what is learnt, and where another
            trainer was made of the same trainable.
        ValueError
            Behind the last step of the schedule, and for a step without labels.
        """
        self._require_own()
        self._require_whole()
        number, position = self.number + 1, self.packing.position
        lr = self.schedule.at(number)
        batches = []
        for _ in range(self.accumulate):
            batch, position = self.packing.at(position)
            batches.append(batch)
        scale = self.loss_scale.scale
        loss = self._gradients(number, batches, scale)
        mean, scaled_norm = self.xp.stack([loss, self.optimizer.norm()]).tolist()
        grad_norm = scaled_norm / scale
        finite = bool(np.isfinite([mean, scaled_norm]).all())
        tokens = sum(len(batch.ids) for batch in batches)
        with self._changing():
            if finite:
                self.optimizer.step(lr, grad_norm, scale)
                self.trainable.updated()
            self.loss_scale.update(finite)
            self.number, self.packing.position = number, position
        return TrainedStep(number, mean, lr, grad_norm, tokens, scale, not finite)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the state of the training: whatever ends the block early leaves a part of it."""
        self._whole = False
        yield
        self._whole = True

    def _require_whole(self) -> None:
        if not self._whole:
            raise error(
                RuntimeError,
                f"what followed step {self.number} was cut short while it changed the training",
                "a training goes on, and is saved, behind whole steps",
                "resume from the last checkpoint",
            )

    def _require_own(self) -> None:
        learnt = self.trainable.arrays
        if any(learnt.get(name) is not own for name, own in self.optimizer.parameters.items()):
            raise error(
                RuntimeError,
                "what this trainer has learnt is no longer its own: another was made of it",
                "a trainer has the arrays of its trainable to itself",
                "go on with the newer one, or give each a trainable, and a model, of its own",
            )

    def _gradients(self, number: int, batches: Sequence[Batch], scale: float) -> object:
        num_labels = sum(int(np.count_nonzero(batch.labels != IGNORED)) for batch in batches)
        if not num_labels:
            raise error(
                ValueError,
                f"step {number} has no labels",
                "a loss is of one token or more that is to be predicted: the first of a sample "
                "is not, nor is what is not learnt",
                "leave out samples without labels (Sample.num_labels)",
            )
        self.optimizer.zero_gradients()  # all at once
        loss = None
        for i, batch in enumerate(batches):
            part = self.trainable.gradients(
                moved(batch, self.xp),
                self.optimizer.gradients,
                num_labels=num_labels,
                loss_scale=scale,
                seed=seed_of(self.seed, number, i),
                accumulate=True,
            )
            loss = part if loss is None else loss + part
        return self.xp.asarray(loss, np.float32)

    def save(self, folder: str | os.PathLike[str], *, keep: int = 2) -> Path:
        """Write a checkpoint; see ``checkpoint.save``.

        Raises
        ------
        OSError
            If it cannot be written: older ones are as they were.
        RuntimeError
            Behind a step that was cut short while it changed what is learnt.
        """
        self._require_whole()
        arrays = self.optimizer.saved()
        return checkpoint.save(Path(folder), self.number, arrays, self._state(), keep=keep)

    def _state(self) -> Json:
        return {
            "identity": self.identity(),
            "step": self.number,
            "optimizer_steps": self.optimizer.steps,
            "position": list(self.packing.position),
            "loss_scale": self.loss_scale.state(),
        }

    def resume(
        self, path: str | os.PathLike[str], *, called: Mapping[str, str] | None = None
    ) -> None:
        """Go on from a checkpoint, or the newest one of a folder.

        Parameters
        ----------
        path : str or path
        called : mapping from str to str, optional
            What errors call what differs (a key of `identity`), where it was told by another name.

        Raises
        ------
        FileNotFoundError
            If there is none.
        RuntimeError
            Where another trainer was made of the same trainable.
        ValueError
            If it is damaged, or of another model, other data or other options: the file, and what
            is wrong. Nothing of this trainer has changed then.
        """
        self._require_own()
        file, saved = _newest(Path(path)), self.optimizer.saved()
        arrays, given = checkpoint.load(file, saved)
        state = SavedState.read(file, given, self.schedule.steps)
        require_same(file, state.identity, self._identity, called or {})
        require_arrays(file, arrays, saved)
        require_position(file, state.position, self.packing)
        with self._changing():
            for name, array in saved.items():
                array[...] = self.xp.asarray(arrays[name])
            self.number, self.optimizer.steps = state.step, state.optimizer_steps
            self.packing.position = state.position
            self.loss_scale.restore(state.loss_scale)
            self.trainable.updated()

    def identity(self) -> Json:
        """Return what the losses depend on, as JSON has it: it is that of the first step."""
        return self._identity

    def _found(self, names: Json) -> Json:
        """Find what is known here; `names` has the rest."""
        return {
            **names,
            **self.trainable.identity(),
            "what is learnt": {
                name: list(array.shape) for name, array in self.trainable.arrays.items()
            },
            **self.packing.identity(),
            "accumulate": self.accumulate,
            "seed": self.seed,
            **{f"Schedule.{name}": value for name, value in self.schedule._asdict().items()},
            **{
                f"AdamWOptions.{name}": value
                for name, value in self.optimizer.options._asdict().items()
            },
            "LossScale.dynamic": self.loss_scale.dynamic,
        }


def _as_json(found: Json) -> Json:
    """Return what a checkpoint will give back, before a step is taken that it could not keep."""
    for name, value in found.items():
        try:
            found[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as failure:
            raise error(
                type(failure),
                f"{name} = {shown(value)} ({failure})",
                "what a training is resumed with is kept as JSON",
                "pass numbers, texts, and lists and dicts of them",
            ) from failure
    return found


def seed_of(*numbers: int) -> int:
    """Return a seed of 63 bits that differs wherever one of the numbers does."""
    (word,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(word >> np.uint64(1))


def _newest(path: Path) -> Path:
    if path.is_file():
        return path
    if found := checkpoint.saved_in(path):
        return found[-1]
    raise error(
        FileNotFoundError,
        f"there is no checkpoint {path}",
        "one is a file step-*.safetensors, or the newest of a folder",
        "pass the folder that a training wrote to, or begin anew",
    )
