"""Checkpoints that a training does not go on from: of another one, and damaged ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.bigram import trained
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.training import checkpoint
from cupyattn.models.training.batch import Sample
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import AdamWOptions
from cupyattn.models.training.packing import Packing
from cupyattn.models.training.schedules import Schedule
from cupyattn.models.training.trainer import Trainer
from cupyattn.models.weights import named_arrays

pytest.importorskip("safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 31}, "the samples: other than in the checkpoint; a training is resumed with"),
        ({"lr": 0.2}, "Schedule.lr is 0.2, and was 0.1"),
        ({"seed": 1}, "seed is 1, and was 0"),
        ({"vocabulary": 8}, "what is learnt is .*'bias': .8.*, and was .*'bias': .7"),
        ({"optimizer": AdamWOptions(clip=None)}, "AdamWOptions.clip is None, and was 1.0"),
        ({"names": {"model": "other"}}, "model is 'other', and was None"),
    ],
)
def test_another_training_is_refused(changed, message, tmp_path):
    trainer = trained()
    trainer.save(tmp_path)
    with pytest.raises(ValueError, match=message):
        trained(**changed).resume(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alpha": 8}, "alpha is 8, and was 32"),
        ({"dropout": 0.1}, "dropout is 0.1, and was 0.0"),
        ({"use_rslora": True}, "use_rslora is True, and was False"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is .*, and was {}"),
        ({"of": 3}, "the model's weights: other than in the checkpoint"),
    ],
)
def test_another_model_or_other_adapters_are_refused(changed, message, tmp_path):
    """Whoever made the trainer, and with the same shapes."""
    samples = [Sample.of([1, 2, 3], [True] * 3)]

    def made(of=2, **options):
        model = models.random(TINY["llama"], dtype="float32", xp=np, seed=of)
        adapters = LoraAdapters(model, rank=2, **options)
        return Trainer(
            adapters, Packing(samples, batch_tokens=8), schedule=Schedule("linear", 0.1, 2)
        )

    first = made()
    first.step()
    first.save(tmp_path)
    made().resume(tmp_path)
    with pytest.raises(ValueError, match=message):
        made(**changed).resume(tmp_path)


@pytest.mark.parametrize("index", [0, 1, 4, -1])
def test_weights_trained_as_a_whole_are_compared_as_they_began(index, tmp_path):
    samples = [Sample.of([1, 2, 3], [True] * 3)]

    def made(change=0.0):
        model = models.random(TINY["gpt2"], dtype="float32", xp=np, seed=2)
        list(dict(named_arrays(model.weights)).values())[index].reshape(-1)[5] += change
        packing = Packing(samples, batch_tokens=8)
        return Trainer(FullWeights(model), packing, schedule=Schedule("linear", 0.003, 3))

    first = made()
    losses = [first.step().loss]
    first.save(tmp_path)
    second = made()
    second.resume(tmp_path)
    assert second.step().loss == first.step().loss < losses[0]
    with pytest.raises(ValueError, match="the model's weights: other"):
        made(0.5).resume(tmp_path)


def test_damaged_and_missing_checkpoints(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*; one is a file step-"):
        trained().resume(tmp_path)
    path = trained().save(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-4], whole[:20], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"is no checkpoint of a training, or damaged .*; .*rem"
        ):
            trained().resume(tmp_path)
    header = json.dumps({"__metadata__": {"other": "1"}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="no checkpoint"):
        trained().resume(tmp_path)


@pytest.mark.parametrize("what", ["parameters", "v", "the state"])
def test_a_bit_that_changed_is_found(what, tmp_path):
    """Though the file is as long as it was, and safetensors reads it."""
    trainer = trained()
    trainer.step()
    path = trainer.save(tmp_path)
    content = bytearray(path.read_bytes())
    if what == "the state":
        at = content.index(b'\\"step\\": 1') + 10
    else:
        size = int.from_bytes(content[:8], "little")
        at = 8 + size + json.loads(content[8 : 8 + size])[what]["data_offsets"][0]
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged .its sha256 is another.; .*; remove it, and"):
        trained().resume(tmp_path)


def test_states_and_arrays_of_another_kind_are_refused(tmp_path):
    made = trained()
    arrays, state = made.optimizer.saved(), made._state()
    fewer = {name: value for name, value in state.items() if name != "step"}
    for wrong, told in (
        ((arrays, fewer), "its state is not that of a training"),
        (({**arrays, "m": arrays["m"][:1]}, state), "its arrays are not parameters, m, v, each wh"),
        (({"parameters": arrays["m"]}, state), "its arrays are not"),
        ((arrays, [1]), r"its state is \[1\]"),
    ):
        checkpoint.save(tmp_path, 1, *wrong)
        with pytest.raises(ValueError, match=f"is no checkpoint .*{told}"):
            trained().resume(tmp_path)
