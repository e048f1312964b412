"""Models of 2024 to 2026 against transformers: logits, greedy tokens and gradients of adapters.

newer.zip has a folder for each, whose config.json is that of transformers 5 and whose older.json is
that of transformers 4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.archives import unpacked
from support.search import deep, mostly_deep
from support.tiny_models import expected_of
from support.training import converted, gradients_of

import cupyattn
from cupyattn import LinearScaling, LongRopeScaling, YarnScaling, models
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.training.batches import Batch
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.weights import named_arrays
from cupyattn.runtime.arrays import dtype_of

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file

NAMES = (
    "gemma2", "gemma3", "gemma4", "gemma4_unified", "ministral", "ministral3", "mistral", "phi3",
    "phi4_mini", "qwen3", "qwen3_sliding", "smollm3",
)  # fmt: skip
ADAPTED = ("gemma2", "gemma3", "ministral3", "phi4_mini", "qwen3", "smollm3")
PROMPT, SHORT = 9, 7


@pytest.fixture(scope="module")
def archive():
    return unpacked(Path(__file__).parent / "newer.zip")


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def load(archive, name, **options):
    return models.load(archive / name, **{"dtype": "float32", "xp": np, **options})


def of(archive, name):
    return expected_of(archive / "expected.npz", name)


def test_logits_in_float32(archive, name):
    expected, model = of(archive, name), load(archive, name)
    ids = expected["ids"]
    assert np.abs(model.logits(ids) - expected["logits"]).max() <= 1e-4
    assert np.abs(model.logits(ids[:, :SHORT]) - expected["short_logits"]).max() <= 1e-4
    assert np.abs(expected["logits"]).max() > 1


def test_hidden_states_in_float32(archive, name):
    """The residual stream after each layer, so that a wrong layer is found."""
    expected, model = of(archive, name), load(archive, name)
    batch, length = expected["ids"].shape
    positions = np.tile(np.arange(length, dtype=np.int32), batch)
    attend = model.dense_attention(batch, length)
    states = model.hidden_states(expected["ids"].reshape(-1), positions, attend)
    found = [each.reshape(batch, length, -1) for each in states]
    assert len(found) == len(expected["states"])
    for step, (ours, theirs) in enumerate(zip(found, expected["states"], strict=True)):
        scale = max(1, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * scale, err_msg=f"step {step}")


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 1), ("bfloat16", 8)])
def test_logits_in_16_bits(archive, name, dtype, unit):
    expected, model = of(archive, name), load(archive, name, dtype=dtype)
    logits = model.logits(expected["ids"])
    assert logits.dtype == dtype_of(dtype)
    error = np.abs(logits.astype(np.float32) - expected["logits"]).max()
    assert error <= 4 * unit * expected["float16_difference"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", mostly_deep((*ADAPTED, "gemma4", "gemma4_unified"), ["gemma4"]))
def test_kernels_in_float16(archive, name):
    expected, model = of(archive, name), load(archive, name, dtype="float16")
    with cupyattn.backend("emulator"):
        logits = model.logits(expected["ids"][:1])
    error = np.abs(logits.astype(np.float32) - expected["logits"][:1]).max()
    assert error <= 4 * expected["float16_difference"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", mostly_deep(ADAPTED, ["qwen3"]))
def test_kernels_generate_the_same(archive, name):
    """Prompts of two lengths, then captured steps of decoding, in float16."""
    model = load(archive, name, dtype="float16")
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8]]

    def generated():
        generator = models.Generator(model, captured=True, lengths=[12, 12])
        return generator.generate(prompts, max_new_tokens=6)

    expected = generated()
    with cupyattn.backend("emulator"):
        assert generated() == expected


@pytest.mark.parametrize("captured", [False, True])
def test_greedy_tokens(archive, name, captured):
    """From a paged cache, in steps of decoding too."""
    expected, model = of(archive, name), load(archive, name)
    model.config = model.config._replace(eos_ids=())
    count = expected["greedy"].shape[1]
    generator = models.Generator(model, captured=captured, lengths=[PROMPT + count] * 2)
    found = generator.generate(expected["ids"][:, :PROMPT].tolist(), max_new_tokens=count)
    assert_array_equal(found, expected["greedy"])


def test_configs_of_transformers_4_are_the_same(archive, name, tmp_path):
    folder = shutil.copytree(archive / name, tmp_path / name)
    shutil.copyfile(folder / "older.json", folder / "config.json")
    model = models.load(folder, dtype="float32", xp=np)
    assert model.config == load(archive, name).config


LONGROPE = LongRopeScaling((1.0, 1.25, 1.5), (1.0, 3.0, 9.0), 8, (1 + 1.0) ** 0.5)


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("qwen3", {"qk_norm": True, "head_dim": 8, "tied": True, "window_size": None}),
        ("qwen3_sliding", {"window_size": (3, 0), "global_layers": (0,), "output_bias": True}),
        ("gemma3", {"architecture": "gemma", "qk_norm": True, "window_size": (3, 0),
                    "global_layers": (2,), "rope_base": 1e6, "local_rope_base": 1e3,
                    "rope_scaling": LinearScaling(8.0), "softmax_scale": 20**-0.5,
                    "embedding_scale": 4.0, "tied": True, "activation": "geglu_tanh"}),
        ("gemma2", {"architecture": "gemma", "qk_norm": False, "global_layers": (1,),
                    "attention_softcap": 2.0, "logit_softcap": 3.0, "local_rope_base": None}),
        ("gemma4", {"architecture": "gemma4", "head_dim": 8, "global_head_dim": 12,
                    "num_kv_heads": 2, "global_kv_heads": 1, "global_layers": (1, 2),
                    "rotary_dim": 8, "global_rotary_dim": 6, "keys_as_values": True,
                    "softmax_scale": 1.0, "logit_softcap": 3.0, "window_size": (3, 0),
                    "rope_base": 1e4, "local_rope_base": 1e3}),
        ("gemma4_unified", {"keys_as_values": False, "global_kv_heads": 2}),
        ("phi3", {"architecture": "phi3", "window_size": (4, 0), "rope_scaling": None}),
        ("phi4_mini", {"architecture": "phi3", "rotary_dim": 6, "head_dim": 8, "tied": True,
                       "rope_scaling": LONGROPE}),
        ("smollm3", {"unrotated_layers": (3,), "tied": True}),
        ("mistral", {"window_size": None, "head_dim": 6}),
        ("ministral", {"window_size": (3, 0), "global_layers": (1,)}),
        ("ministral3", {"query_growth": (0.2, 4), "head_dim": 8}),
    ],
)  # fmt: skip
def test_configs(archive, name, traits):
    config = load(archive, name).config
    assert {trait: getattr(config, trait) for trait in traits} == traits


def test_the_scale_of_yarn_from_two_scales(archive):
    """(0.1 ln 4 + 1) / (0.05 ln 4 + 1)."""
    scaling = load(archive, "ministral3").config.rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.138629 / 1.069315, abs=1e-6)


VISION = ("vision_tower", "embed_vision", "embed_audio")


@pytest.mark.parametrize(
    ("name", "kind", "prefix", "head"),
    [
        ("gemma3", "gemma3", "model.language_model.", "lm_head."),
        ("gemma3", "gemma3", "language_model.model.", "language_model.lm_head."),
        ("ministral3", "mistral3", "language_model.model.", "language_model.lm_head."),
        ("gemma4", "gemma4", "model.language_model.", "lm_head."),
        ("gemma4_unified", "gemma4_unified", "model.language_model.", "lm_head."),
    ],
)
def test_the_text_of_a_model_of_text_and_images(archive, name, kind, prefix, head, tmp_path):
    """Its weights of vision are not read; the tokens that end a text are outside."""
    config = json.loads((archive / name / "config.json").read_text())
    outer = {each: config.pop(each) for each in ("bos_token_id", "eos_token_id")}
    outer["tie_word_embeddings"] = config.pop("tie_word_embeddings")
    whole = {"model_type": kind, "text_config": config, "vision_config": {}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    renamed = {
        each.replace("lm_head.", head) if each[0] == "l" else each.replace("model.", prefix, 1): a
        for each, a in load_file(archive / name / "model.safetensors").items()
    }
    vision = prefix.partition("language_model.")[0] + "{}.layers.0.weight"
    others = {vision.format(each): np.ones((2, 2), np.float32) for each in VISION}
    save_file({**renamed, **others}, tmp_path / "model.safetensors")
    model = models.load(tmp_path, dtype="float32", xp=np)
    assert model.config == load(archive, name).config
    ids = of(archive, name)["ids"]
    assert_array_equal(model.logits(ids), load(archive, name).logits(ids))
    write_folder(model.weights, model.config, tmp_path, tmp_path / "new")
    assert "text_config" not in json.loads((tmp_path / "new" / "config.json").read_text())
    again = models.load(tmp_path / "new", dtype="float32", xp=np)
    assert again.config == model.config
    assert_array_equal(model.logits(ids), again.logits(ids))


@pytest.mark.parametrize(
    ("changes", "kind", "passed"),
    [
        ({"use_bidirectional_attention": "all"}, NotImplementedError, "bidirectional_attention is"),
        ({"per_layer_config": {"1": {"head_dim": 12}}}, ValueError, "config differs among layers"),
        ({"per_layer_config": {"0": {}, "2": {}}}, ValueError, "config differs among layers"),
        *(({"per_layer_config": dict.fromkeys("12", own)}, ValueError, "more than head dims")
          for own in (5, [1], {"head_dim": 12, "sliding_window": 9})),
        ({"rope_parameters": {"full_attention": [1]}}, ValueError, "full_attention"),
        ({"rope_parameters": {"sliding_attention": 3}}, ValueError, "sliding_attention"),
        ({"per_layer_config": None, "global_head_dim": 513}, NotImplementedError,
         "global_head_dim = 513; attention has kernels for head dims up to 512"),
        ({"per_layer_config": None, "num_global_key_value_heads": 3}, ValueError,
         "num_heads must be a multiple of global_kv_heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, NotImplementedError,
         "rope_type is 'yarn'; there is code for 'proportional'"),
    ],
)  # fmt: skip
def test_other_configs_of_gemma_4_are_refused(archive, changes, kind, passed, tmp_path):
    folder = shutil.copytree(archive / "gemma4", tmp_path / "gemma4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(kind, match=passed):
        models.load(folder, xp=np)


def test_layers_with_a_longer_window_than_positions_keep_their_rotary_base(archive, tmp_path):
    folder = shutil.copytree(archive / "gemma3", tmp_path / "gemma3")
    config = (folder / "config.json").read_text()
    assert '"sliding_window": 4,' in config
    (folder / "config.json").write_text(config.replace('dow": 4,', 'dow": 512,'))
    found = models.load(folder, dtype="float32", xp=np)
    assert (found.config.window_size, found.config.global_layers) == ((511, 0), (2,))
    assert found.rotary_of(0) is not found.rotary_of(2)


@pytest.mark.parametrize(("length", "window"), [(None, (4095, 0)), (8, (7, 0)), (0, None)])
def test_mistral_without_the_field_has_a_window_of_4096(archive, length, window, tmp_path):
    folder = shutil.copytree(archive / "mistral", tmp_path / "mistral")
    config = (folder / "config.json").read_text()
    line = "" if length is None else f'"sliding_window": {length or "null"},'
    assert '"sliding_window": null,' in config
    config = config.replace('"max_position_embeddings": 64', '"max_position_embeddings": 8192')
    (folder / "config.json").write_text(config.replace('"sliding_window": null,', line))
    assert models.load(folder, xp=np).config.window_size == window


@pytest.mark.parametrize(("factor", "window"), [(4.0, (63, 0)), (1.0, None)])
def test_a_window_is_compared_with_the_positions_after_scaling(archive, factor, window, tmp_path):
    """A window of all 64 positions of the file, which YaRN extends to 256, still has an effect."""
    folder = shutil.copytree(archive / "mistral", tmp_path / "mistral")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": factor}
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
    found = models.load(folder, xp=np).config
    assert (found.max_positions, found.window_size) == (64 * factor, window)


def test_a_model_is_read_as_it_was_written(archive, name, tmp_path):
    """With its own config, and with one that is made from the numbers."""
    model = load(archive, name)
    for source in (archive / name, None):
        write_folder(model.weights, model.config, source, tmp_path / f"{source is None}")
        again = models.load(tmp_path / f"{source is None}", dtype="float32", xp=np)
        assert again.config == model.config
        pairs = zip(named_arrays(model.weights), named_arrays(again.weights), strict=True)
        for (key, array), (_, found) in pairs:
            assert_array_equal(array, found, err_msg=key)


def packed(ids):
    batch, length = ids.shape
    labels = np.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    positions = np.tile(np.arange(length, dtype=np.int32), batch)
    bounds = np.arange(0, ids.size + 1, length, np.int32)
    return Batch(ids.reshape(-1), labels.reshape(-1), positions, bounds, length)


@pytest.mark.parametrize("name", ADAPTED)
def test_gradients_of_adapters_are_those_of_torch(archive, name):
    """Norms of transformers are float32 also in a model of float64."""
    kept = expected_of(archive / "expected.npz", f"{name}/lora")
    expected = {key.removeprefix("lora/"): array for key, array in kept.items()}
    ids, losses = expected.pop("ids"), expected.pop("losses")
    model = converted(load(archive, name))
    adapters = LoraAdapters.load(model, archive / name / "adapters", dropout=0.0)
    loss, gradients = gradients_of(adapters, packed(ids))
    assert loss == pytest.approx(losses.mean(), abs=1e-5)
    prefix = "base_model.model."
    assert expected.keys() == {prefix + key for key in gradients}
    for key, gradient in gradients.items():
        wanted = expected[prefix + key]
        assert np.abs(gradient - wanted).max() <= 2e-4 * np.abs(wanted).max(), key


@pytest.mark.parametrize("quantize", [*deep("nf4"), "int8"])
def test_quantised_weights_are_close(archive, quantize, tmp_path):
    """Rows of whole blocks: the fused products of Phi-3, and a gate of tanh gelu."""
    config = load(archive, "gemma3").config._replace(
        hidden_size=64, intermediate_size=64, head_dim=32, rotary_dim=32, embedding_scale=8.0
    )
    model = models.random(config, dtype="float32", xp=np)
    write_folder(model.weights, config, None, tmp_path / "new")
    whole, quantised = (
        models.load(tmp_path / "new", dtype="float32", xp=np, quantize=each)
        for each in (None, quantize)
    )
    ids = np.arange(12)[None] % config.vocab_size
    expected, found = whole.logits(ids), quantised.logits(ids)
    assert 0 < np.abs(found - expected).max() < 0.3 * np.abs(expected).max()


def test_a_generator_for_short_sequences_refuses_long_ones(archive):
    """LongRoPE has other frequencies for these, for all positions."""
    model = load(archive, "phi4_mini")
    assert model.positions == 8 and model.config.max_positions == 64
    generator = models.Generator(model, num_blocks=8)
    with pytest.raises(ValueError, match=r"8 positions: longer.*Generator\(model, lengths=\[10\]"):
        generator.submit([1] * 5, max_new_tokens=5)
    generator.submit([1] * 5, max_new_tokens=4)
    assert model.for_length(8) is model
    assert model.for_length(9).rotary.cos.shape == (64, 3)
    assert models.load(archive / "phi3", xp=np).for_length(64).positions == 64
