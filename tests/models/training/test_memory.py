"""What gradients take, counted: all allocations of a step, whose kernels do nothing."""

from __future__ import annotations

import importlib
import tracemalloc

import numpy as np
import pytest
from support.training import batch_of

import cupyattn
from cupyattn import models
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.kernels.arch import TURING
from cupyattn.models import Model
from cupyattn.models.quantised import quantises_to
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.memory import working_bytes
from cupyattn.models.weights import empty

LAYERS = 3


class Idle(LaunchRecorder):
    """A T4 whose kernels do nothing, and are forgotten with their arrays."""

    def load(self, specialisation):
        kernel = super().load(specialisation)
        kernel.start = lambda *arguments: None
        return kernel


def counted(name, lengths, monkeypatch, *, full=False, quantize=None, **options):
    """The most bytes that NumPy had at once beside those that it had before."""
    backend = importlib.import_module("cupyattn.functional.backend")
    monkeypatch.setattr(backend, "_device", lambda *choice: Idle(TURING))
    config = models.PRESETS[name]._replace(num_layers=LAYERS)
    if full:
        config = config._replace(vocab_size=5_000)  # whose masters are written
    weights = empty(config, "float16", np, quantises_to(quantize))
    model = Model(config, weights, "float16", np)
    batch = batch_of(config, lengths)
    with cupyattn.backend("emulator", checks=False), np.errstate(all="ignore"):
        trained = FullWeights(model) if full else LoraAdapters(model, rank=8, **options)
        into = {name: np.empty_like(array) for name, array in trained.arrays.items()}
        given = {"num_labels": 9, "loss_scale": 1.0, "seed": 1, "accumulate": True}
        trained.gradients(batch, into, **given)  # plans are made and kept
        tracemalloc.start(1)
        before, _ = tracemalloc.get_traced_memory()
        trained.gradients(batch, into, **given)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    found = working_bytes(
        config, sum(lengths), samples=len(lengths), full=full, rank=8, dropout=bool(options)
    )
    return most - before, max(found)


@pytest.mark.parametrize("lengths", [(700, 324, 1024), (1024,) * 4], ids=["2048", "4096"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in models.PRESETS for options in ({}, {"dropout": 0.1})),
        ("gpt2", {"full": True}),
        *((name, {"quantize": "nf4"}) for name in models.PRESETS),
    ],
    ids=str,
)
def test_what_is_said_is_what_is_taken(name, lengths, options, monkeypatch):
    taken, said = counted(name, lengths, monkeypatch, **options)
    assert 0.99 * taken <= said <= 1.01 * taken + (name == "gpt2") * 2**26
