"""Checkpoints that a training does not go on from: each is refused by its file."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.search import Search
from support.tiny_models import TINY
from support.training import STEPS, trained

from cupyattn import models
from cupyattn.models.training import checkpoint
from cupyattn.models.training.batches import Packing, Sample
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import AdamWOptions, Schedule
from cupyattn.models.training.trainer import Trainer
from cupyattn.models.weights import named_arrays

pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.numpy").save_file


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
    with pytest.raises(
        ValueError, match=r"damaged .its sha256 does not match its content.; .*; remove it to"
    ):
        trained().resume(tmp_path)


DELETED = object()
NESTED: Any = []
for _ in range(100):
    NESTED = [NESTED]
VALUES = [
    DELETED, None, "1", True, -1, 0, 1, 0.5, -0.5, math.nan, math.inf, 1e300, 2**31, 10**40,
    [], [1], {}, {"a": 1}, [1, 2, 3], "x" * 100_000, NESTED,
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the fields of a state are, lists and objects among them."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield (*at, name)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, name))


def mutants(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield states with each field replaced by each value or extended, each with its name."""
    for at in places(state):
        for value in VALUES:
            mutant = copy.deepcopy(state)
            place = mutant
            for name in at[:-1]:
                place = place[name]
            if value is DELETED:
                del place[at[-1]]
            else:
                place[at[-1]] = value
            yield f"{at} = {'deleted' if value is DELETED else repr(value)[:40]}", mutant
            if isinstance(place, list) and value is not DELETED:
                place.append(1)
                yield f"{at} = {repr(value)[:40]}, and one more", mutant
    yield "one more field", {**state, "more": 1}
    yield "one more of the loss scale", {
        **state, "loss_scale": {**state["loss_scale"], "dynamic": False}
    }  # fmt: skip
    yield from ((f"the state = {repr(value)[:40]}", value) for value in VALUES[1:])


def write(folder: Path, arrays: Any, state: Any) -> Path:
    """Write a checkpoint with its right digest, as `checkpoint.save` does, whatever is in it."""
    path = folder / "step-00000003.safetensors"
    text = json.dumps(state)
    digest = checkpoint._digest(arrays, text)
    save_file(arrays, path, {"training": text, "sha256": digest})
    return path


def saved(**options: Any) -> Trainer:
    trainer = trained(**options)
    for _ in range(3):
        trainer.step()
    return trainer


def outcome(path: Path, **options: Any) -> str:
    """Resume a new trainer; return the error after the name of the file, "" if it goes on."""
    trainer = trained(**options)
    before = trainer.optimizer.saved()["parameters"].copy()
    try:
        trainer.resume(path)
    except ValueError as failure:
        text = str(failure)
        assert str(path) in text and text.count("; ") >= 2 and len(text) < 1200
        assert trainer.number == 0
        np.testing.assert_array_equal(trainer.optimizer.saved()["parameters"], before)
        trainer.step()
        return text.partition(str(path))[2]
    state = trainer._state()
    assert 0 <= state["optimizer_steps"] <= state["step"] <= STEPS
    assert all(np.isfinite(each).all() for each in trainer.optimizer.saved().values())
    if trainer.number < STEPS:
        assert np.isfinite(trainer.step().loss)
    return ""


def test_each_mutant_of_the_state_is_refused_by_its_file_or_goes_on(tmp_path):
    trainer = saved()
    arrays, state = trainer.optimizer.saved(), trainer._state()
    right = write(tmp_path, arrays, state)
    assert outcome(right) == ""
    stride = 1 if Search.deep else 5  # no divisor of the number of values: each has another place
    tried = [*mutants(state)][::stride]
    found = {what: outcome(write(tmp_path, arrays, mutant)) for what, mutant in tried}
    assert len(found) > 700 // stride
    went_on = {what for what, message in found.items() if not message}
    # Numbers in their range, and those that are equal: JSON's 1 and true, say, in the identity.
    assert 10 // stride < len(went_on) < 60
    names = ("step", "optimizer_steps", "position", "loss_scale")
    for what in went_on:
        assert "deleted" not in what and "nan" not in what and "-1" not in what, what
        if any(what.startswith(f"('{name}'") for name in names):
            assert not what.endswith(("= True", "= '1'", "one more", "}", "]", "None")), what


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("step",), -1, f"step is -1, which is not an integer from 0 to {STEPS}"),
        (("optimizer_steps",), 4, "optimizer_steps is 4, which is not an integer from 0 to 3"),
        (("position", 1), -1, "batch is -1, which is not an integer from 0 to"),
        (("position", 1), 10_000, "batch is 10000, but epoch 0 has"),
        (("position",), [0], "its position is [0], not an epoch and a batch"),
        (("loss_scale", "scale"), math.nan, "no JSON (NaN is no JSON)"),
        (("loss_scale", "scale"), 0, "scale is 0, which is not a finite number above 0"),
        (("loss_scale", "skipped"), 40, "skipped is 40, which is not an integer from 0 to 39"),
        (("loss_scale",), [1], "its loss_scale is [1], which is not an object"),
        (("identity",), None, "its identity is None, which is not an object"),
        (("identity", "seed"), 7, "seed is 0, and was 7 in the checkpoint"),
    ],
)
def test_what_is_wrong_with_a_state_is_said(at, value, message, tmp_path):
    trainer = saved()
    state = trainer._state()
    place = state
    for name in at[:-1]:
        place = place[name]
    place[at[-1]] = value
    assert message in outcome(write(tmp_path, trainer.optimizer.saved(), state))


EIGHT_BITS = {"optimizer": AdamWOptions(state="8bit")}


@pytest.mark.parametrize(
    ("name", "change", "message", "options"),
    [
        ("parameters", math.nan, "its parameters are not finite", {}),
        ("parameters", -math.inf, "its parameters are not finite", {}),
        ("m", math.nan, "its m are not finite", {}),
        ("m", math.inf, "its m are not finite", {}),
        ("v", math.nan, "its v are not finite", {}),
        ("v", -1e-6, "its v begin at -", {}),
        ("m", -128, "its m begin at -128, and not at -127 or above", EIGHT_BITS),
        ("m_scales", math.nan, "its m_scales are not finite", EIGHT_BITS),
        ("m_scales", -1.0, "its m_scales begin at -1.0, and not at 0 or above", EIGHT_BITS),
        ("v_scales", -1.0, "its v_scales begin at -1.0, and not at 0 or above", EIGHT_BITS),
    ],
)
def test_an_item_out_of_range_is_refused(name, change, message, options, tmp_path):
    trainer = saved(**options)
    arrays = {own: array.copy() for own, array in trainer.optimizer.saved().items()}
    for at in (0, 17, -1):
        mutant = {**arrays, name: arrays[name].copy()}
        mutant[name][min(at, mutant[name].size - 1)] = change
        assert message in outcome(write(tmp_path, mutant, trainer._state()), **options)


@pytest.mark.parametrize("options", [{}, EIGHT_BITS], ids=["float32", "8bit"])
def test_arrays_of_another_form_are_refused(options, tmp_path):
    trainer = saved(**options)
    arrays = trainer.optimizer.saved()
    names = ", ".join(arrays)
    for name, array in arrays.items():
        wrong = [
            array[:-1],
            array.reshape(1, -1),
            array.astype(np.float64),
            array.astype(np.float16),
            array.astype(np.int64),
        ]
        mutants = [{**arrays, name: each} for each in wrong]
        mutants.append({own: each for own, each in arrays.items() if own != name})
        for mutant in [*mutants, {**arrays, "more": array}]:
            message = outcome(write(tmp_path, mutant, trainer._state()), **options)
            assert f"its arrays are not {names}, each whole" in message


def test_a_small_file_that_says_its_arrays_are_large_is_not_read(tmp_path):
    """A sparse file: of arrays that no training here has, no byte is read."""
    trainer = saved()
    path = write(tmp_path, trainer.optimizer.saved(), trainer._state())
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    items = 1 << 40
    for number, name in enumerate(("parameters", "m", "v")):
        ends = [number * 4 * items, (number + 1) * 4 * items]
        header[name] = {"dtype": "F32", "shape": [items], "data_offsets": ends}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 12 * items)
    assert "its arrays are not parameters, m, v, each whole" in outcome(path)


def test_metadata_without_a_digest_are_named(tmp_path):
    trainer = saved()
    path = tmp_path / "step-00000003.safetensors"
    for metadata, missing in ({}, "training"), ({"training": "{}"}, "sha256"):
        save_file(trainer.optimizer.saved(), path, metadata)
        assert f"its metadata have no '{missing}'" in outcome(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
@pytest.mark.parametrize(("make", "kind"), [("mkfifo", "a FIFO"), ("mkdir", "a directory")])
def test_what_is_no_file_is_refused_by_name(make, kind, tmp_path):
    path = tmp_path / "step-00000003.safetensors"
    getattr(os, make)(path)
    with pytest.raises(ValueError, match=rf"{path.name} .*it is {kind}, not a regular file"):
        checkpoint.load(path, {})
