"""Models whose layers are kept in four and eight bits."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.search import deep, mostly_deep
from support.tiny_models import TINY

import cupyattn
from cupyattn import QuantizedWeight, models
from cupyattn.models import Config, Layer, Model, Product
from cupyattn.models.checkpoints import copying
from cupyattn.models.weights import PRODUCTS, named_arrays, named_parts

KINDS = ("nf4", "int4", "int8")
IDS = np.random.default_rng(5).integers(0, 59, (2, 11))


def blocky(config: Config) -> Config:
    """A config whose rows are whole blocks, of 64 and of 96 weights."""
    return config._replace(hidden_size=64, intermediate_size=96, head_dim=64 // config.num_heads)


CONFIGS = {name: blocky(config) for name, config in TINY.items()}
EACH = mostly_deep(
    product(CONFIGS, KINDS),
    [*(("llama", kind) for kind in KINDS), ("gpt2", "nf4"), ("phi", "int8"), ("qwen2", "int4")],
)


def plain_product(product: Product | None, dtype: str) -> Product | None:
    """The product with a dequantised weight."""
    if product is None or not isinstance(product.weight, QuantizedWeight):
        return product
    return Product(cupyattn.dequantize(product.weight, dtype=dtype), product.bias)


def dequantised(model: Model) -> Model:
    """The model with dequantised weights."""

    def plain(layer: Layer) -> Layer:
        names = (*PRODUCTS, "qkv_up")
        return layer._replace(
            **{name: plain_product(getattr(layer, name), model.dtype) for name in names}
        )

    layers = tuple(plain(layer) for layer in model.weights.layers)
    return Model(model.config, model.weights._replace(layers=layers), model.dtype, model.xp)


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_logits_are_those_of_dequantised_weights(name, kind):
    model = models.random(CONFIGS[name], dtype="float32", quantize=kind, xp=np, seed=3)
    expected = dequantised(model).logits(IDS)
    np.testing.assert_allclose(model.logits(IDS), expected, atol=1e-5)
    assert np.abs(expected).max() > 1


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("llama", "nf4", "float16"),
     *deep(("phi", "int8", "float16"), ("gpt2", "int4", "float16"), ("qwen2", "nf4", "float32"))],
)  # fmt: skip
def test_kernels_give_the_same(name, kind, dtype):
    model = models.random(CONFIGS[name], dtype=dtype, quantize=kind, xp=np, seed=4)
    expected = dequantised(model).logits(IDS[:, :7]).astype(np.float32)
    with cupyattn.backend("emulator"):
        found = model.logits(IDS[:, :7]).astype(np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-2 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "nf4"), ("phi", "int8"), *deep(("gpt2", "int4"), ("llama", "int8"))],
)
def test_text_is_that_of_dequantised_weights(name, kind):
    model = models.random(CONFIGS[name], dtype="float32", quantize=kind, xp=np, seed=3)
    prompts = [[1, 2, 3], [4, 5]]
    expected = dequantised(model).generate(prompts, max_new_tokens=6)
    assert model.generate(prompts, max_new_tokens=6) == expected


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_random_weights_are_quantised_as_they_would_be_later(name, kind):
    config = CONFIGS[name]
    plain = dict(named_parts(models.random(config, dtype="float32", xp=np, seed=1).weights))
    model = models.random(config, dtype="float32", quantize=kind, xp=np, seed=1)
    quantised = 0
    for part_name, part in named_parts(model.weights):
        if isinstance(part, QuantizedWeight):
            quantised += 1
            again = cupyattn.quantize(plain[part_name].T, format=kind, block_size=part.block_size).T
            for own, array in part.arrays.items():
                assert_array_equal(array, again.arrays[own])
        else:
            assert_array_equal(part, plain[part_name])
    assert quantised == 4 * config.num_layers


def test_blocks_are_smaller_where_rows_ask_for_that():
    layer = models.random(CONFIGS["llama"], quantize="int4", xp=np).weights.layers[0]
    assert [getattr(layer, name).weight.block_size for name in PRODUCTS] == [64, 64, 64, 32]
    layer = models.random(CONFIGS["llama"], quantize="int8", xp=np).weights.layers[0]
    assert [getattr(layer, name).weight.block_size for name in PRODUCTS] == [64, 64, 64, 96]


def test_what_a_model_takes():
    """All arrays have a name, and the model is as large as they are."""
    config = CONFIGS["phi"]._replace(intermediate_size=128)
    whole = models.random(config, dtype="float16", xp=np)
    model = models.random(config, dtype="float16", quantize="nf4", xp=np)
    arrays = dict(named_arrays(model.weights))
    assert {"layers.0.qkv.weight.codes", "layers.1.up.weight.scales", "head.weight"} <= set(arrays)
    assert model.nbytes == sum(array.nbytes for array in arrays.values())
    of_layers = sum(
        getattr(layer, name).weight.nbytes for layer in whole.weights.layers for name in PRODUCTS
    )
    assert whole.nbytes - model.nbytes == of_layers * (16 - 4.5) / 16
    layer = model.weights.layers[0]
    assert layer.qkv_up is not None
    assert layer.qkv.weight.codes.base is layer.qkv_up.weight.codes
    assert f"float16, layers in nf4, {model.nbytes:,} bytes" in repr(model)


def test_rows_may_be_filled_in_pieces(monkeypatch):
    monkeypatch.setattr("cupyattn.models.loading._AT_ONCE", 500)
    pieces = models.random(CONFIGS["llama"], dtype="float32", quantize="nf4", xp=np, seed=1)
    monkeypatch.undo()
    whole = models.random(CONFIGS["llama"], dtype="float32", quantize="nf4", xp=np, seed=1)
    for (name, array), (_, found) in zip(
        named_arrays(whole.weights), named_arrays(pieces.weights), strict=True
    ):
        assert_array_equal(found, array, err_msg=name)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"quantize": "nf5"}, ValueError, "weights are quantised to 'nf4', 'int4', 'int8'"),
        ({"quantize": "file"}, ValueError, "quantize = 'file'"),
        ({"quantize": "nf4_nested"}, ValueError, "only files of bitsandbytes have"),
        ({"quantize": 4}, TypeError, "quantize = 4"),
    ],
)
def test_other_formats_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        models.random(CONFIGS["llama"], xp=np, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_whole_blocks_are_refused(kind):
    """By the layer and the product, before anything is quantised."""
    with pytest.raises(ValueError, match=r"down of layer 0 has K = 48.*quantize=None"):
        models.random(TINY["llama"], xp=np, quantize=kind)


def test_making_one_takes_the_memory_of_the_quantised_model(monkeypatch):
    monkeypatch.setattr("cupyattn.models.loading._AT_ONCE", 1 << 12)
    monkeypatch.setattr(copying, "_AT_ONCE", 1 << 12)
    config = CONFIGS["llama"]._replace(vocab_size=10, hidden_size=256, intermediate_size=2048)
    tracemalloc.start()
    try:
        model = models.random(config, dtype="float32", quantize="nf4", xp=np)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * model.nbytes
