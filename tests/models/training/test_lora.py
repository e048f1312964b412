"""Adapters: their gradients against finite differences, and what the adapted model computes."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import TINY
from support.training import (
    adapters_of,
    batch_of,
    gradients_of,
    model_of,
    packed_loss,
    require_gradients,
)

from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.weights import named_arrays

CONFIGS = {
    **TINY,
    "phi by two products": TINY["phi"]._replace(mlp_bias=False),
    "phi, gated": TINY["phi"]._replace(activation="swiglu"),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_are_those_of_finite_differences(config, dropout):
    adapters = adapters_of(model_of(config), dropout=dropout)
    batch = batch_of(config)
    loss, gradients = gradients_of(adapters, batch, seed=3)
    dropping = adapters.with_dropout(3)
    assert loss == pytest.approx(packed_loss(dropping, batch), abs=1e-14) and loss > 1
    require_gradients(
        lambda: packed_loss(dropping, batch), adapters.arrays, gradients, adapters.updated
    )


def test_merged_is_the_adapted_model(config):
    model = model_of(config, "float32")
    adapters = adapters_of(model)
    ids = batch_of(config).ids[None]
    expected = adapters.model.logits(ids)
    assert np.abs(expected - model.logits(ids)).max() > 0.1
    np.testing.assert_allclose(adapters.merged().logits(ids), expected, atol=2e-5)


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


def test_adapted_models_generate(config):
    adapters = adapters_of(model_of(config, "float32"))
    prompts = [[3, 1, 4], [1, 5]]
    found = adapters.model.generate(prompts, max_new_tokens=6)
    assert found == adapters.merged().generate(prompts, max_new_tokens=6)
    assert found != model_of(config, "float32").generate(prompts, max_new_tokens=6)


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
        ({"seed": -1}, ValueError, "seed = -1; it is an integer of 0 or more"),
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
