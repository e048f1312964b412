"""Gradients on a GPU compared with float64, and between runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.archives import unpacked
from support.tiny_models import TINY, expected_of
from support.training import adapters_of, batch_of, gradients_of, model_of, num_labels

from cupyattn import models
from cupyattn.models.training.batches import moved
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.weights import named_arrays
from cupyattn.runtime.arrays import dtype_of

pytestmark = pytest.mark.gpu

CHECKPOINTS = unpacked(Path(__file__).parents[1] / "checkpoints.zip")
ADAPTERS = unpacked(Path(__file__).parent / "adapters.zip")
ERRORS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.2}
"""The error of a gradient relative to its norm, for the same rounded arrays."""
KINDS = {"lora": adapters_of, "full": FullWeights}


def on_gpu(model, dtype):
    """Round a model's numbers, and copy them to the GPU."""
    import cupy

    twin = models.random(model.config, dtype=dtype, xp=cupy)
    for (_, array), (_, given) in zip(
        named_arrays(twin.weights), named_arrays(model.weights), strict=True
    ):
        given[...] = given.astype(dtype_of(dtype))
        array[...] = cupy.asarray(given.astype(np.float32)).astype(array.dtype)
    return twin


def found_of(trained, batch, **options):
    """As `gradients_of`, on the GPU."""
    import cupy

    into = {name: cupy.full_like(array, cupy.nan) for name, array in trained.arrays.items()}
    given = {"num_labels": num_labels(batch), "accumulate": False, "seed": 3, **options}
    loss = trained.gradients(moved(batch, cupy), into, **given)
    return float(loss), {name: array.get() for name, array in into.items()}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "phi"])
def test_gradients(name, kind, dtype):
    import cupy

    exact = model_of(TINY[name])
    trained = KINDS[kind](on_gpu(exact, dtype))
    twin = KINDS[kind](exact)
    for key, array in trained.arrays.items():
        array[...] = cupy.asarray(twin.arrays[key].astype(np.float32))
    trained.updated()
    batch = batch_of(TINY[name])
    scale = cupy.asarray(np.float32(256))
    loss, found = found_of(trained, batch, loss_scale=scale)
    again_loss, again = found_of(trained, batch, loss_scale=scale)
    expected_loss, expected = gradients_of(twin, batch, loss_scale=256.0)
    assert loss == again_loss and abs(loss - expected_loss) <= ERRORS[dtype] * expected_loss
    for key, gradient in found.items():
        np.testing.assert_array_equal(gradient, again[key])
        error = np.linalg.norm(gradient - expected[key]) / np.linalg.norm(expected[key])
        assert error <= ERRORS[dtype], f"{key}: {error}"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_adapters_of_a_model_in_four_bits(dtype):
    import cupy

    config = TINY["llama"]._replace(intermediate_size=64)
    batch = batch_of(config)
    model = models.random(config, dtype=dtype, quantize="nf4", xp=cupy)
    adapters = LoraAdapters(model, rank=4, dropout=0.2)
    for array in adapters.arrays.values():
        array += 0.1
    adapters.updated()
    merged = adapters.merged()
    assert type(merged.weights.layers[0].up.weight) is cupy.ndarray
    ids = cupy.asarray(batch.ids[None])
    difference = cupy.abs(merged.logits(ids) - adapters.model.logits(ids)).max()
    assert float(difference) < (0.05 if dtype == "float16" else 1e-3)
    _, first = found_of(adapters, batch, loss_scale=64.0)
    _, second = found_of(adapters, batch, loss_scale=64.0)
    for key, gradient in first.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
        np.testing.assert_array_equal(gradient, second[key])


def test_files_of_adapters(tmp_path):
    import cupy

    pytest.importorskip("safetensors")
    model = models.load(CHECKPOINTS / "llama_older", dtype="float16", xp=cupy)
    adapters = LoraAdapters.load(model, ADAPTERS / "llama_older")
    adapters.save(tmp_path)
    again = LoraAdapters.load(model, tmp_path)
    for key, array in adapters.arrays.items():
        np.testing.assert_array_equal(array.get(), again.arrays[key].get())
    expected = expected_of(Path(__file__).parent / "expected.npz", "llama_older")
    for ids, loss in zip(expected["ids"], expected["losses"], strict=True):
        assert abs(float(adapters.model.loss(ids[None])) - loss) < 0.03
    prompts = [[3, 1, 4], [1, 5]]
    captured = adapters.model.generate(prompts, max_new_tokens=6)
    assert len(captured) == 2 and {len(tokens) for tokens in captured} <= set(range(1, 7))
