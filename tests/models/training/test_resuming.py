"""Checkpoints: whole or not there, and the same losses behind them, bit for bit."""

from __future__ import annotations

import errno
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.bigram import STEPS, trained
from support.devices import KERNELS
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.checkpoints import safetensors_writer
from cupyattn.models.training import checkpoint
from cupyattn.models.training.batch import Sample
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.training.optimizer import AdamWOptions
from cupyattn.models.training.packing import Packing
from cupyattn.models.training.scaling import LossScale
from cupyattn.models.training.schedules import Schedule
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
    "told",
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
def test_numbers_of_any_kind_are_kept(told, tmp_path):
    """As Python's own, which JSON has; a tuple comes back as a list."""
    first = trained(**told)
    first.step()
    first.save(tmp_path)
    again = trained(**told)
    again.resume(tmp_path)
    assert again.number == 1


def test_ranks_and_alphas_of_any_kind_are_kept(tmp_path):
    model = models.random(TINY["llama"], dtype="float32", xp=np, seed=2)
    options = {"rank": np.int64(2), "alpha": np.float32(4), "dropout": np.float32(0.5)}
    patterns = {
        "rank_pattern": {"q_proj": np.int8(1)},
        "alpha_pattern": {"k_proj": np.float16(2)},
    }
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
        match=r"step-00000002.*No space left.*; it takes 6.1 kB beside .*; make room, and go on "
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


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_end_leaves_nothing(call, tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, refuses)
    with pytest.raises(OSError, match=r"Input/output error.*begin anew: there is no "):
        trained().save(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_an_interrupted_checkpoint_leaves_the_old_one(tmp_path, monkeypatch):
    """A second Ctrl-C ends it at once; of a process that was killed a part stays, for a while."""
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
    monkeypatch.setattr(safetensors_writer, "_AT_ONCE", 64)
    arrays = {"a": np.arange(100, dtype=np.float32).reshape(4, 25), "b": np.arange(70, dtype="i1")}
    arrays |= {"c": arrays["a"].T, "d": np.float32([3]).reshape(()), "e": np.zeros((0, 3), "u1")}
    path = checkpoint.save(tmp_path, 3, arrays, {"x": 0.1})
    found, state = checkpoint.load(path, arrays)
    assert state == {"x": 0.1}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and (found[name] == array).all()
