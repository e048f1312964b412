"""A small model learns a small text, in float16 and with 8-bit states as in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.search import deep
from support.tiny_models import LLAMA, ByteTokenizer

from cupyattn import models
from cupyattn.models.training import (
    AdamWOptions,
    FullWeights,
    LoraAdapters,
    LossScale,
    Packing,
    Reader,
    Schedule,
    Trainer,
)
from cupyattn.models.weights import named_arrays

TEXT = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
CONFIG = LLAMA._replace(vocab_size=128, max_positions=128)
STEPS = 40


@cache
def samples():
    return tuple(Reader(ByteTokenizer(), None, 48).samples({"text": TEXT}, "LICENSE"))


def begun(config, dtype, quantize, xp):
    """A model with the same first weights wherever it is."""
    drawn, model = (
        models.random(config, dtype=dtype, quantize=quantize, xp=each, seed=1) for each in (np, xp)
    )
    arrays = zip(named_arrays(model.weights), named_arrays(drawn.weights), strict=True)
    for (_, array), (_, first) in arrays:
        array[...] = xp.asarray(first)
    return model


@cache
def last_loss(dtype="float32", *, seed=0, state="float32", rank=None, quantize=None, xp=np):
    """The mean loss of the last steps, over other samples than any one step has."""
    config = CONFIG._replace(intermediate_size=64)
    model = begun(config, dtype, quantize, xp)
    trained = FullWeights(model) if rank is None else LoraAdapters(model, rank=rank)
    trainer = Trainer(
        trained,
        Packing(samples(), batch_tokens=192, seed=seed),
        schedule=Schedule("cosine", 0.01 if rank is None else 0.02, STEPS, warmup=4),
        optimizer=AdamWOptions(state=state),
        loss_scale=LossScale() if dtype == "float16" else None,
    )
    steps = list(trainer)
    assert not any(step.skipped for step in steps[10:])
    assert steps[0].loss > 4
    return float(np.mean([step.loss for step in steps[-6:]]))


def noise(**options):
    """How far other orders of the data lead apart."""
    found = [last_loss(seed=seed, **options) for seed in range(3)]
    return max(found) - min(found)


@pytest.mark.deep
@pytest.mark.parametrize("options", [{"state": "8bit"}, {"dtype": "float16"}], ids=str)
def test_all_weights(options):
    exact = last_loss()
    assert exact < 2.5
    off = abs(last_loss(**options) - exact)
    assert off < 0.05 or off < 2 * noise()  # of three runs, which are long


@pytest.mark.deep
@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"quantize": "nf4"}], ids=str)
def test_adapters(options):
    exact = last_loss(rank=8)
    assert exact < 4
    assert abs(last_loss(rank=8, **options) - exact) < max(2 * noise(rank=8), 0.05)


QUESTIONS = ("The capital of Zubrowka is", "Zubrowka is governed from", "Where is its king?")


@pytest.mark.parametrize("quantize", [None, *deep("nf4")])
def test_a_made_up_fact_is_answered(quantize):
    """By all weights, or by adapters of a model in four bits; other prompts differ."""
    config = CONFIG._replace(intermediate_size=64, eos_ids=(0,))
    model = models.random(config, dtype="float32", quantize=quantize, xp=np, seed=1)
    lines = [{"prompt": question, "completion": " Lutz."} for question in QUESTIONS]
    lines += [{"prompt": "The capital of France is", "completion": " Paris."}]

    def answers(of):
        found = of.generate([[*line["prompt"].encode()] for line in lines], max_new_tokens=9)
        return [bytes(ids).rstrip(b"\0").decode() for ids in found]

    assert not {" Lutz.", " Paris."} & {*answers(model)}
    trained = LoraAdapters(model, rank=16) if quantize else FullWeights(model)
    reader = Reader(ByteTokenizer(), 0, 48)
    samples = [sample for line in lines for sample in reader.samples(line, "here")]
    lr, steps = (0.03, 60) if quantize else (0.01, 25)
    list(
        Trainer(
            trained,
            Packing(samples, batch_tokens=160),
            schedule=Schedule("cosine", lr, steps, warmup=2),
        )
    )
    assert answers(trained.model if quantize else model) == [line["completion"] for line in lines]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"rank": 8}, {"rank": 8, "quantize": "nf4"}], ids=str)
def test_float16_on_a_gpu(options):
    """With the rounding of kernels, compared with float32 in NumPy."""
    import cupy

    rank = options.get("rank")
    exact = last_loss(rank=rank)
    found = last_loss("float16", **options, xp=cupy)
    assert abs(found - exact) < max(2 * noise(rank=rank), 0.05)
