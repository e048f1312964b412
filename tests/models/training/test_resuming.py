"""Checkpoints: the same losses after them, bit for bit, wherever a step is cut short."""

from __future__ import annotations

import errno
import os
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.devices import KERNELS
from support.search import mostly_deep
from support.tiny_models import TINY
from support.training import STEPS, trained

from cupyattn import models
from cupyattn.models.checkpoints import writing
from cupyattn.models.training import checkpoint, optimizer
from cupyattn.models.training.batches import Packing, Sample
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.training.optimizer import AdamWOptions, LossScale, Schedule
from cupyattn.models.training.trainer import Trainer

pytest.importorskip("safetensors")


@pytest.mark.parametrize(("at", "state"), [(1, "float32"), (6, "8bit"), (STEPS - 1, "float32")])
def test_the_same_losses_bit_for_bit(at, state, tmp_path):
    def made():
        return trained(optimizer=AdamWOptions(state=state, weight_decay=0.1))

    whole = list(made())
    assert any(step.skipped for step in whole) and not all(step.skipped for step in whole[: at + 5])
    assert made().packing.batches(1) < 2 * STEPS  # epochs end within
    first = made()
    began = [first.step() for _ in range(at)]
    first.save(tmp_path)
    second = made()
    second.resume(tmp_path)
    rest = list(second)
    assert repr(began + rest) == repr(whole)
    for name, array in first.trainable.arrays.items():  # which went on too
        list(first)
        assert array.tobytes() == second.trainable.arrays[name].tobytes()


@pytest.mark.deep
@pytest.mark.nvrtc
def test_the_same_losses_of_a_model_on_the_kernels(tmp_path):
    """Adapters of a float16 model in four bits, with dropout."""
    config = TINY["llama"]._replace(intermediate_size=64)
    samples = [Sample.of(np.arange(i, i + 4 + i) % 7, [True] * (4 + i)) for i in range(6)]

    def made():
        model = models.random(config, dtype="float16", quantize="nf4", xp=KERNELS.xp, seed=2)
        return Trainer(
            LoraAdapters(model, rank=2, dropout=0.2),
            Packing(samples, batch_tokens=16),
            schedule=Schedule("linear", 0.05, 3),
            loss_scale=LossScale(2.0**12),
        )

    with KERNELS.running():
        first = made()
        whole = [first.step()]
        first.save(tmp_path)
        whole += list(first)
        again = made()
        again.resume(tmp_path)
        assert repr(list(again)) == repr(whole[1:])
    assert len({step.loss for step in whole}) == 3 and not any(step.skipped for step in whole)
    for name, array in first.trainable.arrays.items():
        assert KERNELS.get(array).tobytes() == KERNELS.get(again.trainable.arrays[name]).tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": np.float32(0.1)},
        {"lr": Fraction(1, 10)},
        {"optimizer": AdamWOptions((np.float32(0.9), 0.99), np.float32(1e-8), np.float32(0.1))},
        {"optimizer": AdamWOptions(clip=np.float32(1))},
        {"optimizer": AdamWOptions(clip=Fraction(1, 2))},
        {"loss_scale": LossScale(np.float32(4), good=np.int64(1), dynamic=np.bool_(True))},
        {"seed": np.int64(3)},
        {"names": {"shape": (1, 2), "of": {"a": (3,)}}},
    ],
)
def test_numbers_of_any_kind_are_kept(options, tmp_path):
    """As Python's own, which JSON has; a tuple comes back as a list."""
    first = trained(**options)
    first.step()
    first.save(tmp_path)
    again = trained(**options)
    again.resume(tmp_path)
    assert again.number == 1


def test_ranks_and_alphas_of_any_kind_are_kept(tmp_path):
    model = models.random(TINY["llama"], dtype="float32", xp=np, seed=2)
    options = {"rank": np.int64(2), "alpha": np.float32(4), "dropout": np.float32(0.5)}
    patterns = {"rank_pattern": {"q_proj": np.int8(1)}, "alpha_pattern": {"k_proj": np.float16(2)}}
    LoraAdapters(model, **options, **patterns).save(tmp_path)
    assert LoraAdapters.load(model, tmp_path).options == LoraOptions(
        2, 4, 0.5, LoraAdapters.load(model, tmp_path).options.targets, {"q_proj": 1}, {"k_proj": 2}
    )


@pytest.mark.parametrize("value", [Path("a"), float("nan"), np.float32(2), {1, 2}])
def test_what_json_does_not_keep_is_found_before_the_first_step(value):
    with pytest.raises((TypeError, ValueError), match=r"x = .*; .* kept as JSON; pass numbers"):
        trained(names={"x": value})


def test_a_checkpoint_is_a_safetensors_writer(tmp_path):
    from safetensors.numpy import load_file

    trainer = trained()
    for _ in range(9):
        trainer.step()
    path = trainer.save(tmp_path)
    assert path.name == "step-00000009.safetensors"
    arrays = load_file(path)
    assert set(arrays) == {"parameters", "m", "v"}
    assert (arrays["m"] == trainer.optimizer.saved()["m"]).all() and np.any(arrays["m"])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_newest_ones_stay(tmp_path):
    trainer = trained()
    for _ in range(4):
        trainer.step()
        trainer.save(tmp_path, keep=2)
    numbers = [int(path.stem[5:]) for path in checkpoint.saved_in(tmp_path)]
    assert numbers == [3, 4]
    again = trained()
    again.resume(tmp_path / "step-00000003.safetensors")
    assert again.number == 3


class Full:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.file.close()


@pytest.mark.parametrize("room", [0, 100, 2000])
def test_a_full_disk_leaves_the_old_one(room, tmp_path, monkeypatch):
    trainer = trained()
    trainer.step()
    trainer.save(tmp_path, keep=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    trainer.step()
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: Full(opened(path, mode), room))
    with pytest.raises(
        OSError,
        match=r"step-00000002.*No space left.*; it takes 6.1 kB in .*; make room, and go on "
        r"from step-00000001.safetensors, which is still there, with --resume",
    ) as failure:
        trainer.save(tmp_path, keep=1)
    monkeypatch.undo()
    assert failure.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    again = trained()
    again.resume(tmp_path)
    assert again.number == 1
    trainer.save(tmp_path, keep=1)  # with room again nothing is lost
    assert len(checkpoint.saved_in(tmp_path)) == 1


@pytest.mark.parametrize(("room", "stay"), [(3, [1, 2, 3]), (2, [2, 3]), (1, [2])])
def test_the_oldest_make_room_for_a_new_one(room, stay, tmp_path, monkeypatch):
    """On a disk for so many of them; the newest stays whatever happens."""
    trainer, write = trained(), checkpoint.write_tensors
    for _ in range(2):
        trainer.step()
        trainer.save(tmp_path, keep=3)

    def within(path, *contents):
        if len(list(tmp_path.iterdir())) >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *contents)

    (tmp_path / "step-00000009.partial").write_bytes(b"of a process that was killed")
    monkeypatch.setattr(checkpoint, "write_tensors", within)
    trainer.step()
    if room == 1:
        with pytest.raises(OSError, match=r"go on from step-00000002.safetensors"):
            trainer.save(tmp_path, keep=3)
    else:
        trainer.save(tmp_path, keep=3)
    assert [int(path.stem[5:]) for path in sorted(tmp_path.iterdir())] == stay


def test_folders_are_no_checkpoints(tmp_path):
    trained().save(tmp_path)
    (tmp_path / "step-00000009.safetensors").mkdir()
    (tmp_path / "step-00000009.partial").mkdir()
    again = trained()
    again.resume(tmp_path)
    again.step()
    again.save(tmp_path, keep=1)
    assert [path.name for path in checkpoint.saved_in(tmp_path)] == ["step-00000001.safetensors"]


def test_an_interrupted_checkpoint_leaves_the_old_one(tmp_path, monkeypatch):
    """A second Ctrl-C ends it at once; the next save removes the part of a killed process."""
    trainer = trained()
    trainer.save(tmp_path)
    trainer.step()

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000.safetensors"]
    (tmp_path / "step-00000007.partial").write_bytes(b"of a process that was killed")
    trainer.save(tmp_path)
    assert sorted(tmp_path.iterdir()) == checkpoint.saved_in(tmp_path)


def test_large_arrays_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_AT_ONCE", 64)
    arrays = {"a": np.arange(100, dtype=np.float32).reshape(4, 25), "b": np.arange(70, dtype="i1")}
    arrays |= {"c": arrays["a"].T, "d": np.float32([3]).reshape(()), "e": np.zeros((0, 3), "u1")}
    path = checkpoint.save(tmp_path, 3, arrays, {"x": 0.1})
    found, state = checkpoint.load(path, arrays)
    assert state == {"x": 0.1}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and (found[name] == array).all()


AT = 8
"""Steps before: some were skipped, and the next is not."""


def begun(folder):
    made = trained()
    steps = [made.step() for _ in range(AT)]
    made.save(folder)
    assert made.packing.position.batch and any(step.skipped for step in steps)
    return made


def cut(monkeypatch, where, name, *, call=1, failure=KeyboardInterrupt, before=True):
    """Make a call of a function fail, before or after all that it does."""
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


@pytest.mark.parametrize(
    ("place", "before", "failure"),
    mostly_deep(
        every := [*product(PLACES, (True, False), (KeyboardInterrupt, MemoryError))],
        [each for each in every if each[1:] == (False, KeyboardInterrupt)]
        + [("the second gradients", True, MemoryError)],
    ),
)
def test_a_step_that_changed_nothing_is_called_again(place, before, failure, tmp_path, monkeypatch):
    rest = repr([*trained()][AT:])
    made = begun(tmp_path)
    with monkeypatch.context() as patch:
        where, name, call = PLACES[place](made)
        cut(patch, where, name, call=call, failure=failure, before=before)
        with pytest.raises(failure):
            made.step()
    made.save(tmp_path / "after")
    assert repr(list(made)) == rest
    again = trained()
    again.resume(tmp_path / "after")
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
            RuntimeError,
            match=r"another trainer was made of the trainable .*; .*; go on with the new",
        ):
            refused()
    assert all((adapters.arrays[name] == array).all() for name, array in learnt.items())
    newer.step()
    assert any((adapters.arrays[name] != array).any() for name, array in learnt.items())
