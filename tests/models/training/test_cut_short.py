"""Steps that are cut short: called again they give the same, or the trainer goes no further."""

from __future__ import annotations

import numpy as np
import pytest
from support.bigram import STEPS, trained
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.training import optimizer
from cupyattn.models.training.batch import Sample
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.packing import Packing
from cupyattn.models.training.schedules import Schedule
from cupyattn.models.training.trainer import Trainer

pytest.importorskip("safetensors")

AT = 8
"""Steps before: some were skipped, and the next is not."""


def begun(folder):
    made = trained()
    steps = [made.step() for _ in range(AT)]
    made.save(folder)
    assert made.packing.position.batch and any(step.skipped for step in steps)
    return made


def cut(monkeypatch, where, name, *, call=1, failure=KeyboardInterrupt, before=True):
    """Have a call of a function end in a failure, before it does anything or behind all of it."""
    function, calls = getattr(where, name), iter(range(1, 1000))

    def cutting(*arguments, **options):
        last = next(calls) == call
        if last and before:
            raise failure
        found = function(*arguments, **options)
        if last:
            raise failure
        return found

    monkeypatch.setattr(where, name, cutting)


PLACES = {
    "the second batch": lambda made: (made.packing, "at", 2),
    "gradients": lambda made: (made.trainable, "gradients", 1),
    "the second gradients": lambda made: (made.trainable, "gradients", 2),
    "the norm": lambda made: (made.optimizer, "norm", 1),
}


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_changed_nothing_is_called_again(place, before, failure, tmp_path, monkeypatch):
    rest = repr([*trained()][AT:])
    made = begun(tmp_path)
    with monkeypatch.context() as patch:
        where, name, call = PLACES[place](made)
        cut(patch, where, name, call=call, failure=failure, before=before)
        with pytest.raises(failure):
            made.step()
    made.save(tmp_path / "behind")
    assert repr(list(made)) == rest
    again = trained()
    again.resume(tmp_path / "behind")
    assert repr(list(again)) == rest


CHANGES = {
    "matrices": lambda made: (optimizer, "adamw_step", 1),
    "what does not decay": lambda made: (optimizer, "adamw_step", 2),
    "the model": lambda made: (made.trainable, "updated", 1),
    "the loss scale": lambda made: (made.loss_scale, "update", 1),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("place", CHANGES)
def test_a_step_that_began_to_change_is_not_gone_on_from(place, before, tmp_path, monkeypatch):
    """But from the last checkpoint."""
    rest = repr([*trained()][AT:])
    made = begun(tmp_path)
    with monkeypatch.context() as patch:
        where, name, call = CHANGES[place](made)
        cut(patch, where, name, call=call, before=before)
        with pytest.raises(KeyboardInterrupt):
            made.step()
    for refused in (made.step, lambda: made.save(tmp_path), lambda: list(made)):
        with pytest.raises(
            RuntimeError,
            match=r"what followed step 8 was cut short .*; .*; resume from the last checkpoint",
        ):
            refused()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008.safetensors"]
    made.resume(tmp_path)
    assert repr(list(made)) == rest and made.number == STEPS


def test_a_checkpoint_that_is_half_read_is_not_gone_on_from(tmp_path, monkeypatch):
    begun(tmp_path)
    made = trained()
    with monkeypatch.context() as patch:
        cut(patch, made.trainable, "updated")
        with pytest.raises(KeyboardInterrupt):
            made.resume(tmp_path)
    with pytest.raises(RuntimeError, match="cut short"):
        made.step()
    with pytest.raises(RuntimeError, match="cut short"):
        made.save(tmp_path)


def test_a_trainer_has_its_adapters_to_itself(tmp_path):
    """A second one would take their arrays away, and the first would train nothing that is seen."""
    adapters = LoraAdapters(models.random(TINY["llama"], dtype="float32", xp=np), rank=2)
    samples = [Sample.of([1, 2, 3], [True] * 3)]

    def made():
        packing = Packing(samples, batch_tokens=8)
        return Trainer(adapters, packing, schedule=Schedule("constant", 0.1, 3))

    older = made()
    older.step()
    older.save(tmp_path)
    newer = made()
    learnt = {name: array.copy() for name, array in adapters.arrays.items()}
    for refused in (older.step, lambda: older.resume(tmp_path)):
        with pytest.raises(
            RuntimeError, match=r"no longer its own: another was made of it; .*; go on with the new"
        ):
            refused()
    assert all((adapters.arrays[name] == array).all() for name, array in learnt.items())
    newer.step()
    assert any((adapters.arrays[name] != array).any() for name, array in learnt.items())
