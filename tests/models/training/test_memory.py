"""The memory of a training: its budget and its working set."""

from __future__ import annotations

import importlib
import tracemalloc

import numpy as np
import pytest
from support.search import mostly_deep
from support.tiny_models import GPT2, LLAMA, PHI
from support.training import batch_of

import cupyattn
from cupyattn import models
from cupyattn.models import Model
from cupyattn.models.forward import LOGITS_BYTES
from cupyattn.models.loading import quantises_to
from cupyattn.models.training.backward import AdaptedProduct
from cupyattn.models.training.budget import Training, budget_of, require_room, working_bytes
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.training.optimizer import AdamW, AdamWOptions
from cupyattn.models.weights import empty
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.recorder import LaunchRecorder

PHI_2 = models.PRESETS["phi-2"]
QLORA = Training(PHI_2, "float16", "nf4", LoraOptions(), "float32", 2048, 2)


def lines(training):
    return {line.what: line.size for line in budget_of(training).lines}


@pytest.mark.parametrize("config", [GPT2, LLAMA, PHI], ids=lambda config: config.architecture)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("targets", ["all-linear", ".*(q_proj|c_attn|fc1)"])
def test_a_budget_of_adapters_is_exact(config, quantize, targets):
    config = config._replace(hidden_size=64, intermediate_size=96)
    model = models.random(config, dtype="float16", quantize=quantize, xp=np)
    lora = LoraOptions(rank=5, targets=targets)
    adapters = LoraAdapters(model, **lora._asdict())
    rounded = sum(
        product.a.nbytes + product.b.nbytes
        for layer in adapters.model.weights.layers
        for product in layer
        if isinstance(product, AdaptedProduct)
    )
    for state in ("float32", "8bit"):
        optimizer = AdamW(adapters.arrays, AdamWOptions(state=state), np)
        kept = {name: array.nbytes for name, array in optimizer.saved().items()}
        found = lines(Training(config, "float16", quantize, lora, state, 64))
        parameters = kept.pop("parameters")
        assert found["weights"] == model.nbytes
        assert found["adapters"] == parameters + rounded
        assert found["gradients"] == parameters
        assert found["optimizer"] == sum(kept.values())


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config.architecture)
def test_all_weights(config):
    model = models.random(config, dtype="float16", xp=np)
    optimizer = AdamW(FullWeights(model).arrays, AdamWOptions(), np)
    found = lines(Training(config, "float16", None, None, "float32", 64))
    kept = optimizer.saved()
    assert found["weights in float32"] == found["gradients"] == kept["parameters"].nbytes
    assert found["optimizer"] == kept["m"].nbytes + kept["v"].nbytes


def test_the_rest_is_the_working_set():
    found = lines(QLORA)
    work = working_bytes(PHI_2, 2048, samples=2)
    assert found["inputs of all layers"] == 33 * 2048 * 2560 * 4
    assert found["inputs of all layers"] + found["working set"] == work.layer == max(work)
    assert found["cross entropy"] == 0  # 128 MiB of logits lie where a layer's activations do


@pytest.mark.parametrize("tokens", [64, 700, 4096])
def test_cross_entropy_is_a_line_of_its_own(tokens):
    """For few tokens logits take most; the sum of the lines is the larger of the two."""
    training = Training(
        models.PRESETS["llama-3.2-1b"], "float16", None, LoraOptions(), "float32", tokens
    )
    found, work = lines(training), working_bytes(training.config, tokens)
    total = sum(found[name] for name in ("inputs of all layers", "working set", "cross entropy"))
    assert total == max(work)
    assert (found["cross entropy"] > 0) == (work.head > work.layer) == (tokens < 4096)


def test_the_goals_of_phi_2():
    """Below 4.5 GB with 2 x 1,024 tokens, and below 7 GB with 4 x 2,048."""
    assert budget_of(QLORA).needed < 4.5e9
    assert budget_of(QLORA._replace(batch_tokens=8192, samples=4)).needed < 7e9


@pytest.mark.parametrize(
    ("training", "free", "would"),
    [
        (QLORA._replace(batch_tokens=8192), 5e9, "with --batch-tokens 4096 --accumulate 2 it"),
        (QLORA._replace(quantize=None), 5e9, "with --quantize nf4 it fits"),
        (QLORA._replace(batch_tokens=128), None, "with --optimizer-state 8bit it fits"),
        (QLORA._replace(quantize=None, lora=None), 20e9, r"with adapters \(without --full\) it"),
        (QLORA._replace(quantize=None, lora=None), 4e9,
         r"with adapters \(without --full\) and --quantize nf4 it fits"),
        (QLORA._replace(batch_tokens=2**32, samples=2**21), 4e9,
         "with --batch-tokens 2048 --accumulate 2097152 it fits"),
        (QLORA._replace(lora=LoraOptions(rank=4096)), 4.4e9, "with --lora-rank 32 it fits"),
        (QLORA._replace(lora=LoraOptions(rank=4096), state="8bit", batch_tokens=128), 2.4e9,
         "with --lora-rank 4 it fits"),
        (QLORA, 1e9, "take a smaller model, or a larger device"),
    ],
)  # fmt: skip
def test_what_would_fit(training, free, would):
    free = budget_of(training).needed - 1 if free is None else free
    with pytest.raises(MemoryError, match=rf"needs .* GB, .* are free; {would}"):
        require_room(training, int(free))


def test_what_the_model_cannot_have_is_not_offered():
    """Rows of 100 weights are no blocks: neither is NF4 advised, nor does it hide the budget."""
    config = models.PRESETS["gpt2"]._replace(intermediate_size=100)
    training = Training(config, "float16", None, LoraOptions(), "float32", 2048)
    with pytest.raises(MemoryError, match=r"needs .* GB, .* are free; take a smaller model"):
        require_room(training, 10**6)
    with pytest.raises(MemoryError, match="with --batch-tokens 1024 --accumulate 2 it fits"):
        require_room(training, budget_of(training).needed - 1)


def test_what_fits_is_passed():
    budget = budget_of(QLORA)
    assert require_room(QLORA, budget.needed) == budget
    with pytest.raises(MemoryError):
        require_room(QLORA, budget.needed - 1)
    assert 0 < budget.logits <= LOGITS_BYTES and budget.logits % (2 * 51200) == 0


def test_targets_are_checked_before_anything_is_loaded():
    with pytest.raises(ValueError, match="name no module of this model"):
        budget_of(QLORA._replace(lora=LoraOptions(targets=("c_attn",))))


LAYERS = 3
WIDE = {
    "gemma-4": models.PRESETS["gemma-3-1b"]._replace(
        architecture="gemma4", global_layers=(2,), global_head_dim=512, global_rotary_dim=128,
        num_heads=8, num_kv_heads=4, global_kv_heads=2, keys_as_values=True, softmax_scale=1.0,
    )
}  # fmt: skip


class Idle(LaunchRecorder):
    """A T4 whose kernels do nothing, and are forgotten with their arrays."""

    def load(self, specialisation):
        kernel = super().load(specialisation)
        kernel.start = lambda *arguments: None
        return kernel


def counted(name, lengths, monkeypatch, *, full=False, quantize=None, activations=None, **options):
    """The peak of NumPy's memory in bytes, less the memory before the call."""
    backend = importlib.import_module("cupyattn.runtime.backend")
    monkeypatch.setattr(backend, "_device", lambda *choice: Idle(TURING))
    config = (models.PRESETS | WIDE)[name]._replace(num_layers=LAYERS)
    if full:
        config = config._replace(vocab_size=5_000)  # whose masters are written
    weights = empty(config, "float16", np, quantises_to(quantize), activations)
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
        config, sum(lengths), samples=len(lengths), full=full, rank=8, dropout=bool(options),
        activations=activations,
    )  # fmt: skip
    return most - before, max(found)


BOTH = {"quantize": "int8", "activations": "int8"}


@pytest.mark.parametrize(
    ("name", "lengths", "options"),
    mostly_deep(
        every := [
            (name, lengths, options)
            for lengths in ((700, 324, 1024), (1024,) * 4)
            for name in (
                "gpt2",
                "llama-3.2-1b",
                "phi-2",
                "qwen3-0.6b",
                "gemma-3-1b",
                "phi-4-mini",
                *WIDE,
            )
            for options in ({}, {"dropout": 0.1}, {"full": True}, {"quantize": "nf4"}, BOTH)
            if name == "gpt2" or "full" not in options
        ],
        [*every[1:3], every[5], every[13], every[40], every[8]],
    ),
    ids=str,
)
def test_the_working_set_is_exact_to_a_percent(name, lengths, options, monkeypatch):
    taken, said = counted(name, lengths, monkeypatch, **options)
    assert (
        0.99 * taken
        <= said
        <= 1.01 * taken
        + 2**26
        * (
            name in ("gpt2", "qwen3-0.6b", "gemma-3-1b", "gemma-4")  # whose head may take most
        )
    )
