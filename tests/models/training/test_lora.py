"""Adapters: their gradients, their options, and patterns of module names."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from support.search import mostly_deep
from support.tiny_models import TINY
from support.training import adapters_of, batch_of, gradients_of, model_of, packed_loss

from cupyattn import models
from cupyattn.models.training import lora_options
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.lora_options import LoraOptions
from cupyattn.models.weights import named_arrays

pytest.importorskip("regex")


CONFIGS = {
    **TINY,
    "phi by two products": TINY["phi"]._replace(mlp_bias=False),
    "phi, gated": TINY["phi"]._replace(activation="swiglu"),
}


@pytest.fixture(params=mostly_deep(CONFIGS, ["gpt2", "llama", "mistral", "phi", "phi, gated"]))
def config(request):
    return CONFIGS[request.param]


def test_merged_is_the_adapted_model(config):
    """It has the same logits, and generates the same text."""
    model = model_of(config, "float32")
    adapters = adapters_of(model)
    merged, ids, prompts = adapters.merged(), batch_of(config).ids[None], [[3, 1, 4], [1, 5]]
    expected = adapters.model.logits(ids)
    assert np.abs(expected - model.logits(ids)).max() > 0.1
    np.testing.assert_allclose(merged.logits(ids), expected, atol=2e-5)
    found = adapters.model.generate(prompts, max_new_tokens=6)
    assert found == merged.generate(prompts, max_new_tokens=6)
    if config.embedding_scale == 1:  # a larger tied embedding repeats the last token
        assert found != model.generate(prompts, max_new_tokens=6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_merged_weights_are_rounded_once(dtype):
    """B times the scale 4 / 3 is not rounded before it is multiplied with A."""
    model = models.random(TINY["llama"], dtype=dtype, xp=np, seed=4)
    adapters = adapters_of(model, targets=["o_proj"])
    for index, layer in enumerate(adapters.merged().weights.layers):
        a, b = (
            adapters.arrays[f"model.layers.{index}.self_attn.o_proj.lora_{x}.weight"] for x in "AB"
        )
        old = model.weights.layers[index].output.weight
        exact = old.astype(np.float64) + 4 / 3 * b.astype(np.float64) @ a
        error = np.abs(layer.output.weight.astype(np.float64) - exact)
        spacing = np.spacing(np.abs(exact).astype(old.dtype)).astype(np.float64)
        assert (error <= 0.5001 * spacing + 1e-6).all()


def test_adapters_that_begin_add_nothing(config):
    """And the model's own weights are never written."""
    model = model_of(config, "float32")
    before = {name: array.copy() for name, array in named_arrays(model.weights)}
    adapters, batch = LoraAdapters(model, rank=2, seed=4), batch_of(config)
    assert packed_loss(adapters.model, batch) == pytest.approx(packed_loss(model, batch), abs=1e-6)
    _, gradients = gradients_of(adapters, batch)
    for name, array in adapters.arrays.items():
        first = name.endswith("lora_A.weight")
        assert (np.abs(array).max() > 0) == first
        assert (np.abs(gradients[name]).max() > 0) != first
        array -= 0.1 * gradients[name]
    adapters.updated()
    assert packed_loss(adapters.model, batch) < packed_loss(model, batch)
    adapters.merged()
    for name, array in named_arrays(model.weights):
        np.testing.assert_array_equal(array, before[name])


def test_the_same_seed_gives_the_same_adapters():
    first, second, other = (
        LoraAdapters(model_of(TINY["llama"], dtype), rank=2, seed=seed).arrays
        for dtype, seed in (("float32", 1), ("float16", 1), ("float32", 2))
    )
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        assert name.endswith("B.weight") or (first[name] != other[name]).any()


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 14),
        (["all-linear"], 14),
        (["q_proj", "v_proj"], 4),
        (("layers.0.mlp.down_proj",), 1),
        ({"o_proj"}, 2),
        (r".*layers\.1\.mlp\..*", 3),
    ],
)
def test_targets(targets, count):
    adapters = LoraAdapters(model_of(TINY["llama"], "float32"), rank=2, targets=targets)
    assert len(adapters.arrays) == 2 * count


def test_ranks_and_scales_of_some():
    adapters = LoraAdapters(
        model_of(TINY["llama"], "float32"), rank=4, alpha=8, use_rslora=True,
        rank_pattern={"k_proj": 1, r"layers\.1\.mlp\.\w+": 9}, alpha_pattern={"o_proj": 2},
    )  # fmt: skip
    shapes = {name: array.shape for name, array in adapters.arrays.items()}
    before = "model.layers.1."
    assert shapes[f"{before}self_attn.k_proj.lora_A.weight"] == (1, 32)
    assert shapes[f"{before}mlp.down_proj.lora_B.weight"] == (32, 9)
    assert shapes["model.layers.0.mlp.down_proj.lora_B.weight"] == (32, 4)
    scale = adapters.options.scale_of
    assert scale(f"{before}self_attn.q_proj") == 4 and scale(f"{before}self_attn.o_proj") == 1
    assert scale(f"{before}mlp.up_proj") == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rank": 0}, ValueError, "rank = 0; a rank is an int, 1 to"),
        ({"rank": True}, ValueError, "rank = True"),
        ({"rank": 2.0}, ValueError, "rank = 2.0"),
        ({"alpha": 0}, ValueError, "alpha = 0; an alpha is a number above 0"),
        ({"alpha": float("nan")}, ValueError, "alpha = nan"),
        ({"dropout": 1}, ValueError, "dropout = 1"),
        ({"targets": ["lm_head"]}, ValueError, "'lm_head' name no module .* the head and the"),
        ({"targets": "q_proj"}, ValueError, "'q_proj' name no module of this model"),
        ({"targets": []}, ValueError, r"targets \(\) name no module"),
        ({"targets": 7}, TypeError, "targets = 7"),
        ({"targets": [7]}, TypeError, r"targets = \[7\]"),
        ({"targets": "("}, ValueError, "the pattern"),
        ({"targets": ["q_proj", "all-linear"]}, ValueError, "'all-linear' is all .* stands alone"),
        ({"use_rslora": "no"}, TypeError, "use_rslora = 'no'; .*; pass True or False"),
        ({"use_rslora": 1}, TypeError, "use_rslora = 1; "),
        ({"rank_pattern": {"nothing": 4}}, ValueError, "the pattern 'nothing' matches no module"),
        ({"alpha_pattern": {"q_proj": 4, "k_pro": 4}}, ValueError, "'k_pro' matches no module"),
        (
            {"rank_pattern": {"k_proj": 4}, "targets": ["q_proj"]},
            ValueError,
            "'k_proj' matches no module that has an adapter; .*, or add what it matches to",
        ),
        ({"rank_pattern": 5}, ValueError, "rank_pattern = 5; patterns are a dict"),
        ({"seed": -1}, ValueError, "seed = -1; it must be an integer, 0 or more"),
    ],
)
def test_what_is_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        LoraAdapters(model_of(TINY["llama"], "float32"), **options)


def test_adapters_upon_adapters_are_refused():
    adapters = LoraAdapters(model_of(TINY["gpt2"], "float32"))
    with pytest.raises(NotImplementedError, match=r"a model that has adapters.*merged"):
        LoraAdapters(adapters.model)
    with pytest.raises(NotImplementedError, match=r"merged"):
        FullWeights(adapters.model)


MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
# The branches of each group are alike: of 40 groups there are 2^40 ways to fail.
ENDLESS = "(a|a)" * 40
LONG_NAME = "a" * 40 + "b"


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("q_proj", 3),
        ("proj", 0),
        ("self_attn.q_proj", 3),
        (r"layers\.1\.mlp\.\w+", 1),
        ("q_proj|v_proj", 6),
        (r"model\.layers\.\d+\.mlp\.down_proj", 3),
        (r"(?!q).*proj", 9),  # the parts before the last ones may be any of the name's
        (r"(?!down)\w+_proj", 6),
        (r".*\.(?:1|10)\.self_attn\.[qv]_proj", 4),
        (r"(?P<of>[qv])_proj", 6),
    ],
)
def test_patterns_match_whole_last_parts(pattern, count):
    options = LoraOptions(rank_pattern={pattern: 3}).checked()
    assert sum(options.rank_of(module) == 3 for module in MODULES) == count
    assert options.idle(MODULES) == ([] if count else [pattern])


@pytest.mark.parametrize("target", [r"(?i).*Q_PROJ", r"^(?!.*(?:mlp|v_proj)).*\.\d+\..*$"])
def test_a_target_matches_whole_names(target):
    options = LoraOptions(targets=target).checked()
    assert [options.targeted(module) for module in MODULES] == [True, False, False] * 3
    assert not LoraOptions(targets="q_proj").checked().targeted(MODULES[0])


@pytest.mark.parametrize("pattern", ["(?i)q_proj", "a{99999999999999999999}", "(" * 5000, "[", 5])
def test_what_is_no_pattern_is_a_value_error(pattern):
    with pytest.raises(ValueError, match="the pattern"):
        LoraOptions(rank_pattern={pattern: 8}).checked()


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ENDLESS},
        {"rank_pattern": {ENDLESS: 8}},
        {"alpha_pattern": {ENDLESS + str(end): 8 for end in range(50)}},
    ],
    ids=["targets", "rank", "fifty of alpha"],
)
def test_a_pattern_that_backtracks_is_stopped(monkeypatch, options):
    monkeypatch.setattr(lora_options, "SECONDS", 0.2)
    lora_options.matcher.cache_clear()
    found = LoraOptions(**options).checked()
    names = [LONG_NAME + str(end) for end in range(100)]
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"the pattern .* takes more than 0\.2 s"):
        found.require_found(names)
    with pytest.raises(ValueError, match="takes more than"):
        found.idle(names) if "targets" not in options else found.targeted(names[0])
    assert time.monotonic() - began < 5
    lora_options.matcher.cache_clear()


def test_adapters_with_a_pattern_that_backtracks_are_refused(monkeypatch, tmp_path):
    pytest.importorskip("safetensors")
    monkeypatch.setattr(lora_options, "SECONDS", 0.2)
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    LoraAdapters(model, rank=2).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    given = json.loads(path.read_text())
    endless = "(?:.|.)" * 20 + "[^a-z0-9_.]"
    path.write_text(json.dumps({**given, "rank_pattern": {endless: 2}}))
    with pytest.raises(ValueError, match=r"adapter_config\.json: the pattern .* takes more than"):
        LoraAdapters.load(model, tmp_path)
    path.write_text(json.dumps({**given, "target_modules": endless}))
    with pytest.raises(ValueError, match=rf"{tmp_path.name}: .* the pattern .* takes more than"):
        LoraAdapters.load(model, tmp_path)


def test_hundreds_of_patterns_match_quickly():
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(300)]
    options = LoraOptions(rank_pattern=dict.fromkeys(names, 3)).checked()
    began = time.monotonic()
    assert [options.rank_of(name) for name in names] == [3] * 300
    assert time.monotonic() - began < 5


def test_patterns_that_are_large_once_compiled_are_refused():
    began = time.monotonic()
    for pattern in ("a{99999999}", "(?:(?:a|b){999}){999,}"):
        with pytest.raises(ValueError, match="it repeats more than 1000 times"):
            LoraOptions(rank_pattern={pattern: 8}).checked()
    assert time.monotonic() - began < 1
    LoraOptions(rank_pattern={r"layers\.\d{1,2}\.\w{4}": 8}).checked()
