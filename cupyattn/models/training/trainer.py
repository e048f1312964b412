"""The steps of a training, which can be interrupted and resumed."""

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
        The norm of all gradients, before clipping.
    tokens : int
        All tokens of its batches.
    loss_scale : float
        The loss scale of its gradients.
    skipped : bool
        Whether they were not finite: then only the loss scale changed.
    """

    number: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    loss_scale: float
    skipped: bool


class Trainer:
    """Trains a model step by step.

    Parameters
    ----------
    trainable : Trainable
        `LoraAdapters`, `FullWeights`, or another class with that protocol. It has one trainer:
        making another one ends the first.
    packing : Packing
        The samples, and how they become batches.
    schedule : Schedule
        Learning rates, and the number of steps.
    optimizer : AdamWOptions
    accumulate : int
        Batches of a step: the loss is the mean over all of their labels.
    loss_scale : LossScale, optional
        For float16 models `LossScale()`; by default none.
    seed : int
        For dropout.
    names : dict
        More values, which JSON can represent, that must be the same when the training is resumed.
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
        trainable.require(packing.samples)
        if not trainable.arrays:
            raise error(
                ValueError,
                "nothing is learnt",
                "a training needs at least one array to change",
                "choose other targets of the adapters",
            )
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

        The host waits only once in a step, to read the loss and the norm. After an interruption, by
        Ctrl-C or for lack of memory, the step can be called again with the same result. If it had
        begun to change the arrays, the trainer continues only after `resume`.

        Raises
        ------
        FloatingPointError
            If no loss scale makes gradients finite.
        RuntimeError
            After an interruption that left changed arrays, and if the trainable has another trainer
            now.
        ValueError
            After the last step of the schedule, and for a step without labels.
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
        """Change the state of the training: an early end leaves it incomplete."""
        self._whole = False
        yield
        self._whole = True

    def _require_whole(self) -> None:
        if not self._whole:
            raise error(
                RuntimeError,
                f"what followed step {self.number} was cut short while it changed the training",
                "a training can continue, and be saved, only after complete steps",
                "resume from the last checkpoint",
            )

    def _require_own(self) -> None:
        learnt = self.trainable.arrays
        if any(learnt.get(name) is not own for name, own in self.optimizer.parameters.items()):
            raise error(
                RuntimeError,
                "another trainer was made of the trainable of this one",
                "a trainable has one trainer",
                "go on with the newer one, or make a model and a trainable for each",
            )

    def _gradients(self, number: int, batches: Sequence[Batch], scale: float) -> object:
        num_labels = sum(int(np.count_nonzero(batch.labels != IGNORED)) for batch in batches)
        if not num_labels:
            raise error(
                ValueError,
                f"step {number} has no labels",
                "a loss needs at least one token to predict, which the first of a sample is not",
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
            After a step that was cut short while it changed the arrays.
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
        """Continue from a checkpoint, or from the newest one of a folder.

        Parameters
        ----------
        path : str or path
        called : mapping from str to str, optional
            Names in errors for keys of `identity`.

        Raises
        ------
        FileNotFoundError
            If there is none.
        RuntimeError
            If the trainable has another trainer now.
        ValueError
            If it is damaged, or of another model, other data or other options. Nothing has changed
            then.
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
        """Return what the losses depend on, as JSON."""
        return self._identity

    def _found(self, names: Json) -> Json:
        """Return all that the losses depend on; `names` has the caller's part."""
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
    """Return the values as a checkpoint will return them, or raise if JSON cannot keep one."""
    for name, value in found.items():
        try:
            found[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as failure:
            raise error(
                type(failure),
                f"{name} = {shown(value)} ({failure})",
                "values that must be the same after a resume are kept as JSON",
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
        "one is a file step-*.safetensors, or the newest in a folder",
        "pass the folder that a training wrote to, or begin anew",
    )
