"""Folders as they are published give what transformers makes of them, to 2e-4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.search import deep

import cupyattn
from cupyattn import models

FOLDER = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture(params=NAMES)
def folder(request):
    pytest.importorskip("safetensors")
    return FOLDER / request.param


def expected_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "expected.npz", allow_pickle=False) as file:
        return dict(file)


def states_of(model, ids) -> np.ndarray:
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), len(ids))
    states = model.hidden_states(ids.reshape(-1), positions, model.dense_attention(*ids.shape))
    return np.stack([each.reshape(*ids.shape, -1) for each in states])


def layer_report(model, expected) -> str:
    """Say by how much hidden states are off, layer by layer: the first wrong one is the culprit."""
    found = states_of(model, expected["ids"]).astype(np.float32)
    errors = np.abs(found - expected["states"]).max(axis=(1, 2, 3))
    steps = ["embedded", *(f"behind layer {each}" for each in range(len(errors) - 2)), "normed"]
    return ", ".join(f"{step}: {each:.2g}" for step, each in zip(steps, errors, strict=True))


def test_there_are_all_architectures_and_both_forms_of_configs():
    texts = [(FOLDER / name / "config.json").read_text() for name in NAMES]
    for kind in ("gpt2", "llama", "mistral", "qwen2", "phi"):
        assert any(f'"model_type": "{kind}"' in text for text in texts)
    for form in ('"rope_parameters"', '"rope_scaling"', '"torch_dtype"', '"dtype"'):
        assert any(form in text for text in texts)
    for kind in ("llama3", "linear", "yarn"):
        assert any(f'type": "{kind}"' in text for text in texts)


def test_logits_in_float32(folder):
    expected = expected_of(folder)
    model = models.load(folder, dtype="float32", xp=np)
    error = np.abs(model.logits(expected["ids"]) - expected["logits"]).max()
    assert error <= 2e-4, layer_report(model, expected)
    assert np.abs(expected["logits"]).max() > 1


def test_hidden_states_of_every_layer(folder):
    expected = expected_of(folder)
    model = models.load(folder, dtype="float32", xp=np)
    error = np.abs(states_of(model, expected["ids"]) - expected["states"]).max()
    assert error <= 2e-4, layer_report(model, expected)


def test_logits_in_float16(folder):
    """Within three times by how much transformers' own float16 is off."""
    expected = expected_of(folder)
    model = models.load(folder, dtype="float16", xp=np)
    logits = model.logits(expected["ids"])
    assert logits.dtype == np.float16
    error = np.abs(logits.astype(np.float32) - expected["logits"]).max()
    assert error <= 3 * expected["float16_difference"], layer_report(model, expected)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["llama3", "phi", *deep("gpt2", "mistral_older")])
def test_kernels_in_float16(name):
    pytest.importorskip("safetensors")
    expected = expected_of(FOLDER / name)
    model = models.load(FOLDER / name, dtype="float16", xp=np)
    with cupyattn.backend("emulator"):
        logits = model.logits(expected["ids"])
        error = np.abs(logits.astype(np.float32) - expected["logits"]).max()
        assert error <= 3 * expected["float16_difference"], layer_report(model, expected)


def test_bfloat16_is_read_as_it_is():
    """Weights that are bfloat16 in the files are the same numbers in a model of bfloat16."""
    pytest.importorskip("safetensors")
    wide = models.load(FOLDER / "llama3", dtype="float32", xp=np)
    same = models.load(FOLDER / "llama3", dtype="bfloat16", xp=np)
    np.testing.assert_array_equal(wide.weights.embedding, same.weights.embedding.astype(np.float32))
    expected = expected_of(FOLDER / "llama3")
    logits = same.logits(expected["ids"]).astype(np.float32)
    assert np.abs(logits - expected["logits"]).max() < 8 * 3 * expected["float16_difference"]


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("gpt2", {"tied": True, "rotary_dim": 0, "eos_ids": (2,), "activation": "gelu_tanh"}),
        ("llama3", {"tied": True, "eos_ids": (2, 3), "bos_id": 1, "rope_base": 500000.0,
                    "rope_scaling": cupyattn.Llama3Scaling(8.0, 1.0, 4.0, 16)}),
        ("llama_older", {"tied": False, "head_dim": 6, "mlp_bias": True, "output_bias": True,
                         "rope_scaling": cupyattn.LinearScaling(4.0)}),
        ("llama_yarn", {"rope_scaling": cupyattn.YarnScaling(4.0, 16)}),
        ("mistral_older", {"window_size": (4, 0), "rotary_dim": 8}),
        ("qwen2", {"qkv_bias": True, "output_bias": False, "window_size": None}),
        ("phi", {"rotary_dim": 4, "head_dim": 10, "head_bias": True}),
        ("phi_older", {"rotary_dim": 4, "rope_scaling": None}),
    ],
)  # fmt: skip
def test_configs(name, traits):
    pytest.importorskip("safetensors")
    config = models.load(FOLDER / name, xp=np).config
    assert {trait: getattr(config, trait) for trait in traits} == traits


def test_transformers_agrees_now(folder):
    """The same against the transformers that is installed, if one is: not in CI."""
    torch = pytest.importorskip("torch", reason="no torch: expected logits are those in the files")
    transformers = pytest.importorskip(
        "transformers", reason="no transformers: expected logits are those in the files"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = models.load(folder, dtype="float32", xp=np)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (3, 9))
    with torch.no_grad():
        logits = theirs(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(model.logits(ids) - logits).max() <= 2e-4
