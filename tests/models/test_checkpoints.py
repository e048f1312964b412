"""Published folders give the logits that transformers computes; written folders are read again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.archives import unpacked
from support.tiny_models import TINY, expected_of

import cupyattn
from cupyattn import models
from cupyattn.models.checkpoints import writing
from cupyattn.models.checkpoints.config_writing import config_json
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.hugging_face import config_of
from cupyattn.models.checkpoints.writing import write_folder, write_whole
from cupyattn.models.weights import named_arrays

pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

FOLDER = unpacked(Path(__file__).parent / "checkpoints.zip")
EXPECTED = Path(__file__).parent / "expected.npz"
NAMES = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture(params=NAMES)
def folder(request):
    return FOLDER / request.param


def states_of(model, ids) -> np.ndarray:
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), len(ids))
    states = model.hidden_states(ids.reshape(-1), positions, model.dense_attention(*ids.shape))
    return np.stack([each.reshape(*ids.shape, -1) for each in states])


def layer_report(model, expected) -> str:
    """Say by how much hidden states are off, layer by layer: the first wrong one is the culprit."""
    found = states_of(model, expected["ids"]).astype(np.float32)
    errors = np.abs(found - expected["states"]).max(axis=(1, 2, 3))
    steps = ["embedded", *(f"after layer {each}" for each in range(len(errors) - 2)), "normed"]
    return ", ".join(f"{step}: {each:.2g}" for step, each in zip(steps, errors, strict=True))


def test_logits_in_float32(folder):
    expected = expected_of(EXPECTED, folder.name)
    model = models.load(folder, dtype="float32", xp=np)
    error = np.abs(model.logits(expected["ids"]) - expected["logits"]).max()
    assert error <= 2e-4, layer_report(model, expected)
    assert np.abs(expected["logits"]).max() > 1


def test_logits_in_float16(folder):
    """Within three times by how much transformers' own float16 is off."""
    expected = expected_of(EXPECTED, folder.name)
    model = models.load(folder, dtype="float16", xp=np)
    logits = model.logits(expected["ids"])
    assert logits.dtype == np.float16
    error = np.abs(logits.astype(np.float32) - expected["logits"]).max()
    assert error <= 3 * expected["float16_difference"], layer_report(model, expected)


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["llama3", "phi", "gpt2", "mistral_older"])
def test_kernels_in_float16(name):
    expected = expected_of(EXPECTED, name)
    model = models.load(FOLDER / name, dtype="float16", xp=np)
    with cupyattn.backend("emulator"):
        logits = model.logits(expected["ids"])
        error = np.abs(logits.astype(np.float32) - expected["logits"]).max()
        assert error <= 3 * expected["float16_difference"], layer_report(model, expected)


def test_bfloat16_is_read_as_it_is():
    """Weights that are bfloat16 in the files are the same numbers in a model of bfloat16."""
    wide = models.load(FOLDER / "llama3", dtype="float32", xp=np)
    same = models.load(FOLDER / "llama3", dtype="bfloat16", xp=np)
    np.testing.assert_array_equal(wide.weights.embedding, same.weights.embedding.astype(np.float32))
    expected = expected_of(EXPECTED, "llama3")
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
    config = models.load(FOLDER / name, xp=np).config
    assert {trait: getattr(config, trait) for trait in traits} == traits


@pytest.mark.parametrize("name", ["llama_older", "qwen2"])
def test_logits_of_a_checkpoint_in_fp8(tmp_path, name):
    """Those of the weights that FP8 has, and near those that transformers has without FP8."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    tensors = load_file(FOLDER / name / "model.safetensors")
    stored, decoded = {}, {}
    for key, array in tensors.items():
        stored[key] = decoded[key] = array
        if key.endswith("proj.weight"):
            scale = np.float32(np.abs(array).max() / 448)
            stored[key] = (array / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = np.array(scale)
            decoded[key] = stored[key].astype(np.float32) * scale
    quantization = {"quant_method": "fp8", "weight_block_size": None}
    for folder, own, more in (
        ("fp8", stored, {"quantization_config": quantization}),
        ("decoded", decoded, {}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file(own, tmp_path / folder / "model.safetensors")
    expected = expected_of(EXPECTED, name)
    found, same = (
        models.load(tmp_path / folder, dtype="float32", xp=np).logits(expected["ids"])
        for folder in ("fp8", "decoded")
    )
    assert_array_equal(found, same)
    error = np.abs(found - expected["logits"]).max()
    assert 0 < error < 0.25 * np.abs(expected["logits"]).max()


@pytest.mark.parametrize(
    ("name", "given", "window"),
    [
        ("mistral_older", {}, (4095, 0)),
        ("mistral_older", {"sliding_window": None}, None),
        ("llama_older", {}, None),
    ],
)
def test_a_window_that_a_config_leaves_out(name, given, window):
    """transformers has 4,096 for Mistral, and null means none."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    config.pop("sliding_window", None)
    config["max_position_embeddings"] = 8192
    found = config_of(Fields({**config, **given}, "config.json"), Fields({}, "none"))
    assert found.window_size == window


@pytest.mark.deep
def test_the_installed_transformers_gives_the_same_logits(folder):
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


FOLDERS = ("gpt2", "llama3", "phi", "qwen2")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_is_read_as_it_was_written(name, dtype, request, tmp_path):
    source = FOLDER / name
    model = models.load(source, dtype=dtype, xp=np)
    write_folder(model.weights, model.config, source, tmp_path / "new")
    again = models.load(tmp_path / "new", dtype=dtype, xp=np)
    assert again.config == model.config
    for (key, array), (_, found) in zip(
        named_arrays(model.weights), named_arrays(again.weights), strict=True
    ):
        assert_array_equal(array, found, err_msg=key)
    assert not (tmp_path / "new" / "model.safetensors.index.json").exists()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert {config[key] for key in ("torch_dtype", "dtype") if key in config} <= {dtype}


@pytest.mark.parametrize("fails", ["weights", "the tokenizer", "the config"])
def test_a_folder_with_a_config_is_complete(fails, request, tmp_path, monkeypatch):
    source = tmp_path / "model"
    shutil.copytree(FOLDER / "qwen2", source)
    (source / "tokenizer_config.json").write_text("{}")
    model = models.load(source, dtype="float32", xp=np)
    new = tmp_path / "new"

    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    def synced(number, sync=os.fsync):
        return no_room() if (new / "tokenizer_config.json").exists() else sync(number)

    with monkeypatch.context() as patch:
        if fails == "weights":
            patch.setattr(writing, "store", no_room)
        elif fails == "the tokenizer":
            patch.setattr(shutil, "copy2", no_room)
        else:
            patch.setattr(os, "fsync", synced)
        with pytest.raises(OSError, match="No space left"):
            write_folder(model.weights, model.config, source, new)
    assert not (new / "config.json").exists()
    write_folder(model.weights, model.config, source, new)
    assert models.load(new, dtype="float32", xp=np).config == model.config
    assert (new / "tokenizer_config.json").exists()


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("fails_at", ["two.txt", "three.txt"])
def test_files_are_replaced_together_or_not_at_all(older, links, fails_at, tmp_path, monkeypatch):
    files = [tmp_path / "new" / f"{name}.txt" for name in ("one", "two", "three")]
    replace = os.replace

    def refuses(old, new):
        if os.path.basename(new) == fails_at:
            raise PermissionError(13, "Permission denied")
        replace(old, new)

    def no_links(*_):
        raise OSError(95, "Operation not supported")

    def all_of(text):
        return {path: lambda file: file.write(text) for path in files}

    if older:
        write_whole(all_of(b"older"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuses)
        if not links:
            patch.setattr(os, "link", no_links)
        with pytest.raises(PermissionError):
            write_whole(all_of(b"newer"))
    found = {path: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert found == (dict.fromkeys(files, b"older") if older else {})
    write_whole(all_of(b"newer"))
    assert {path.read_bytes() for path in files} == {b"newer"}
    assert len(list((tmp_path / "new").iterdir())) == len(files)


SCALINGS = (
    cupyattn.LinearScaling(4.0),
    cupyattn.Llama3Scaling(32.0, 1.0, 4.0, 8192),
    cupyattn.YarnScaling(2.0, 16),
    cupyattn.YarnScaling(2.0, 16, 16.0, 2.0, 1.25),
)


@pytest.mark.parametrize("name", TINY)
def test_a_config_is_written_as_it_is_read(name):
    config = TINY[name]._replace(bos_id=1, eos_ids=(2, 3))
    config = config._replace(qkv_bias=config.qkv_bias or config.output_bias)
    pairs = config.rotary_dim // 2
    longrope = cupyattn.LongRopeScaling((1.5,) * pairs, (2.5,) * pairs, 16, 1.25)
    has_scalings = pairs and name != "gemma4"
    for scaling in (None, *SCALINGS, longrope) if has_scalings else (None,):
        config = config._replace(rope_scaling=scaling)
        length = getattr(scaling, "original_length", 8)
        if config.query_growth is not None:  # one field of config.json is both lengths
            config = config._replace(query_growth=(0.5, length))
        written = json.loads(json.dumps(config_json(config, "m.gguf")))
        assert config_of(Fields(written, "m.gguf"), Fields({}, "m.gguf")) == config
        config = config._replace(eos_ids=config.eos_ids[:-1])


@given(dim=st.integers(1, 256), part=st.integers(0, 256))
def test_rotated_parts_of_heads_are_written_as_they_are_read(dim, part):
    assume(0 < part <= dim)
    config = TINY["gemma4"]._replace(global_head_dim=2 * dim, global_rotary_dim=2 * part)
    written = json.loads(json.dumps(config_json(config, "m.gguf")))
    found = config_of(Fields(written, "m.gguf"), Fields({}, "m.gguf"))
    assert found.global_rotary_dim == 2 * part


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": False},
        {"rope_scaling": cupyattn.NTKScaling(2.0)},
        {"activation": "relu"},
        {"global_layers": ()},
    ],
)
def test_a_config_that_no_folder_has_is_refused(changes):
    config = TINY["gemma4" if "global_layers" in changes else "phi"]._replace(**changes)
    if changes == {"activation": "relu"}:  # Llama's MLP is gated in every folder
        config = TINY["llama"]._replace(**changes)
    with pytest.raises(NotImplementedError, match=r"m\.gguf: no config\.json.*--adapters DIR"):
        config_json(config, "m.gguf")
