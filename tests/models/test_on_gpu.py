"""Models on a GPU, loaded and random, have the logits of the NumPy path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.archives import unpacked
from support.tiny_models import TINY, expected_of

from cupyattn import models
from cupyattn.models.weights import named_arrays

pytestmark = pytest.mark.gpu

FOLDER = unpacked(Path(__file__).parent / "checkpoints.zip")
ERRORS = {"float32": 2e-4, "float16": 0.03, "bfloat16": 0.25}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", ["gpt2_older", "llama3", "mistral_older", "phi"])
def test_loaded_models_give_the_same_logits(name, dtype):
    import cupy

    pytest.importorskip("safetensors")
    model = models.load(FOLDER / name, dtype=dtype, xp=cupy)
    twin = models.load(FOLDER / name, dtype=dtype, xp=np)
    assert_same_arrays(model, twin)
    expected = expected_of(Path(__file__).parent / "expected.npz", name)
    logits = model.logits(expected["ids"]).get().astype(np.float32)
    float16 = 3 * float(expected["float16_difference"])
    allowed = float16 if dtype == "float16" else ERRORS[dtype]
    assert np.abs(logits - expected["logits"]).max() <= allowed


def test_gguf_files_give_the_same_weights(tmp_path):
    import cupy

    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    model = models.random(TINY["llama"], dtype="float32", xp=np)
    path = write_gguf(tmp_path / "m.gguf", model, "llama")
    loaded = models.load(path, dtype="float32", xp=cupy)
    assert_same_arrays(loaded, model)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", TINY)
def test_random_models(name, dtype):
    """By default on the GPU, from its own generator; the twin gets the same weights."""
    import cupy

    model = models.random(TINY[name], dtype=dtype, seed=3)
    assert model.xp is cupy
    twin = models.random(TINY[name], dtype="float32", xp=np)
    for (_, array), (_, given) in zip(
        named_arrays(twin.weights), named_arrays(model.weights), strict=True
    ):
        array[...] = given.get()
    ids = np.random.default_rng(1).integers(0, 59, (2, 13))
    logits = model.logits(ids).get().astype(np.float32)
    assert np.abs(logits - twin.logits(ids)).max() <= 2 * ERRORS[dtype]


def assert_same_arrays(model, twin):
    for (key, array), (_, expected) in zip(
        named_arrays(model.weights), named_arrays(twin.weights), strict=True
    ):
        np.testing.assert_array_equal(array.get(), expected, err_msg=key)


@pytest.mark.parametrize("kind", ["nf4", "int4", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
def test_quantised_models(tmp_path, name, kind):
    """The codes of NumPy, its logits, and text that a CUDA graph computes."""
    import cupy

    pytest.importorskip("safetensors")
    from models.test_quantised import CONFIGS
    from support.tiny_models import tensors_of, write_folder

    plain = models.random(CONFIGS[name], dtype="float32", xp=np, seed=2)
    folder = write_folder(tmp_path, CONFIGS[name], tensors_of(plain))
    model = models.load(folder, dtype="float16", quantize=kind, xp=cupy)
    twin = models.load(folder, dtype="float16", quantize=kind, xp=np)
    assert_same_arrays(model, twin)
    ids = np.random.default_rng(1).integers(0, 59, (2, 13))
    wide = models.load(folder, dtype="float32", quantize=kind, xp=np)
    logits = model.logits(ids).get().astype(np.float32)
    assert np.abs(logits - wide.logits(ids)).max() <= 2 * ERRORS["float16"]
    exact = models.load(folder, dtype="float32", quantize=kind, xp=cupy)
    prompts = [[1, 2, 3], [4, 5]]
    assert exact.generate(prompts, max_new_tokens=8) == wide.generate(prompts, max_new_tokens=8)
    assert [len(each) for each in model.generate(prompts, max_new_tokens=8)] == [8, 8]


@pytest.mark.parametrize("how", ["nested", "gptq", "awq"])
@pytest.mark.parametrize("quantize", [None, "file"])
def test_packed_files(tmp_path, how, quantize):
    import cupy

    for module in ("safetensors", "gguf"):
        pytest.importorskip(module)
    from models.test_quantised_files import packed_folder

    folder, _ = packed_folder(tmp_path, how)
    model = models.load(folder, dtype="float32", quantize=quantize, xp=cupy)
    assert_same_arrays(model, models.load(folder, dtype="float32", quantize=quantize, xp=np))


@pytest.mark.alone
@pytest.mark.parametrize(("name", "layers", "quantize"), [("phi-2", 4, "nf4"), ("gpt2", 2, None)])
def test_making_a_model_takes_little_more(name, layers, quantize):
    """It makes pieces of floats, never a whole tensor of a large model, and reuses their memory."""
    import cupy

    config = models.PRESETS[name]._replace(num_layers=layers)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    model = models.random(config, dtype="float16", quantize=quantize)
    assert pool.total_bytes() - before < model.nbytes + (100 << 20)


def test_by_default_float16():
    assert models.random(TINY["phi"]).dtype == "float16"
