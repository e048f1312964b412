"""Models whose layers are kept in four and eight bits."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.search import deep, mostly_deep
from support.tiny_models import TINY, tensors_of, write_folder
from support.training import batch_of

import cupyattn
from cupyattn import QuantizedWeight, models
from cupyattn.models import Config, Layer, Model, Product, training
from cupyattn.models.checkpoints import copying
from cupyattn.models.training.backward import frozen_backward
from cupyattn.models.weights import PRODUCTS, named_arrays, named_parts

KINDS = ("nf4", "int4", "int8")
IDS = np.random.default_rng(5).integers(0, 59, (2, 11))


def blocky(config: Config) -> Config:
    """A config whose rows are whole blocks, of 64 and of 96 weights."""
    dim = 64 // config.num_heads
    rotary = min(config.rotary_dim, dim)
    return config._replace(hidden_size=64, intermediate_size=96, head_dim=dim, rotary_dim=rotary)


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


LARGE = CONFIGS["llama"]._replace(intermediate_size=128)
"""K of 64 and 128: every product is rotated."""


@pytest.mark.parametrize("name", ["llama", *deep(*(each for each in CONFIGS if each != "llama"))])
@pytest.mark.parametrize("dtype", ["float32", "float16", *deep("bfloat16")])
def test_int8_times_int8_is_what_products_of_codes_make(name, dtype):
    """Norms make the codes that products would make; K of 96 has no rotation."""
    given = {"dtype": dtype, "quantize": "int8", "activations": "int8", "xp": np, "seed": 3}
    model = models.random(CONFIGS[name], **given)
    layer = model.weights.layers[0]
    assert layer.qkv.weight.rotation == 64 and layer.down.weight.rotation is None
    assert "int8 x int8" in repr(model)
    found = model.logits(IDS)

    def separate(layer: Layer) -> Layer:
        def own(product: Product | None) -> object:
            if product is None:
                return None
            return lambda x, **options: product(x, **options)

        taken = {each: own(getattr(layer, each)) for each in ("qkv", "up", "qkv_up")}
        return layer._replace(**taken) if layer.qkv_up is None else layer

    layers = tuple(separate(layer) for layer in model.weights.layers)
    again = model.with_weights(model.weights._replace(layers=layers))
    assert_array_equal(again.logits(IDS), found)
    exact = dequantised(model).logits(IDS).astype(np.float32)
    error = np.abs(found.astype(np.float32) - exact)
    assert 1e-4 < error.max() < 0.3 and np.abs(exact).max() > 1


@pytest.mark.nvrtc
@pytest.mark.deep
@pytest.mark.parametrize(("rows", "both"), [(28, True), (21, False)])
def test_kernels_multiply_many_rows_as_int8(rows, both):
    """4 x 28 tokens are enough on a T4, and 4 x 21 are multiplied with the weights' numbers."""
    config = LARGE._replace(num_layers=1)
    given = {"dtype": "float32", "quantize": "int8", "activations": "int8"}
    model = models.random(config, **given, xp=np, seed=4)
    ids = np.random.default_rng(0).integers(0, 59, (4, rows))
    expected = (model if both else dequantised(model)).logits(ids)
    with cupyattn.backend("emulator"):
        found = model.logits(ids)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_norms_make_codes_where_products_multiply_them(monkeypatch):
    """And rows in the model's dtype where they do not, or where adapters read them."""
    kinds = []
    honest = Product.__call__

    def noting(product, x, /, **options):
        kinds.append(type(x).__name__)
        return honest(product, x, **options)

    monkeypatch.setattr(Product, "__call__", noting)
    model = models.random(LARGE, quantize="int8", activations="int8", xp=np)
    plain = models.random(LARGE, quantize="int8", xp=np)
    of_layer = ["QuantizedRows", "ndarray", "QuantizedRows", "ndarray"]  # qkv, output, up, down
    each = LARGE.num_layers
    for made, expected in ((model, of_layer), (plain, ["ndarray"] * 4)):
        kinds.clear()
        made.logits(IDS)
        assert kinds == expected * each + ["ndarray"]
    adapted = training.LoraAdapters(model, targets=["q_proj"]).model
    kinds.clear()
    found = adapted.logits(IDS)  # B is 0
    assert kinds == of_layer[1:] * each + ["ndarray"]
    assert_array_equal(found, model.logits(IDS))


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "float32"), ("phi", "float32"), *deep(("llama", "float16"))]
)
def test_adapters_of_int8_times_int8_learn(name, dtype):
    """The gradients are those of the frozen weights' numbers; the base product has codes of x."""
    config = CONFIGS[name]._replace(num_layers=2, intermediate_size=128)
    model = models.random(config, dtype=dtype, quantize="int8", activations="int8", xp=np)
    batch = batch_of(config, (24, 9))
    found = []
    for each in (model, dequantised(model)):
        adapters = training.LoraAdapters(each, rank=4, seed=1)
        generator = np.random.default_rng(2)
        for name, array in adapters.arrays.items():
            if "lora_B" in name:
                array[...] = 0.05 * generator.standard_normal(array.shape)
        adapters.updated()
        into = {name: np.empty_like(array) for name, array in adapters.arrays.items()}
        loss = adapters.gradients(
            batch, into, num_labels=9, loss_scale=1.0, seed=1, accumulate=False
        )
        found.append((float(loss), into))
    (loss, mine), (wanted_loss, wanted) = found
    assert abs(loss - wanted_loss) < 0.02 * wanted_loss
    for name, gradient in mine.items():
        error = np.linalg.norm(gradient - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 0.1, (name, error)


def test_the_gradient_of_rotated_weights_is_rotated_back():
    generator = np.random.default_rng(0)
    dout, x, residual = (generator.standard_normal((5, n), np.float32) for n in (32, 64, 64))
    weight = cupyattn.quantize(
        generator.standard_normal((64, 32), np.float32), format="int8", rotation=64
    ).T
    exact = dout @ cupyattn.dequantize(weight)
    np.testing.assert_allclose(frozen_backward(dout, x, weight), exact, atol=1e-4)
    found = frozen_backward(dout, x, weight, residual)
    np.testing.assert_allclose(found, exact + residual, atol=1e-4)


def test_merged_weights_are_rotated_back():
    model = models.random(LARGE, dtype="float32", quantize="int8", activations="int8", xp=np)
    merged = training.LoraAdapters(model, rank=2).merged().weights.layers[0]
    for name in PRODUCTS:
        weight = getattr(model.weights.layers[0], name).weight
        assert weight.rotation == 64
        assert_array_equal(getattr(merged, name).weight, cupyattn.dequantize(weight))


def test_loaded_weights_are_rotated(tmp_path):
    """With the codes of `quantize`, whatever pieces they are read in."""
    model = models.random(LARGE, dtype="float32", xp=np)
    write_folder(tmp_path, LARGE, tensors_of(model))
    kept = models.load(tmp_path, dtype="float32", quantize="int8", activations="int8", xp=np)
    for mine, plain in zip(kept.weights.layers, model.weights.layers, strict=True):
        for name in PRODUCTS:
            wanted = cupyattn.quantize(getattr(plain, name).weight.T, format="int8", rotation=64)
            assert_array_equal(getattr(mine, name).weight.codes, wanted.codes)
            assert_array_equal(getattr(mine, name).weight.scales, wanted.scales)


def test_float16_has_room_for_rotated_rows(tmp_path):
    """Leave room in what `output` and `down` read: of 64 items one may become 8 times as large."""
    model = models.random(LARGE, dtype="float32", xp=np)
    layer = model.weights.layers[0]
    layer.qkv.weight[-16:] *= 2e4  # of v
    layer.up.weight[-128:] *= 1e3
    folder = write_folder(tmp_path, LARGE, tensors_of(model))
    kept = {"dtype": "float16", "quantize": "int8", "xp": np}
    alone, both = (
        models.load(folder, **kept, activations=each).weights.layers[0].scales
        for each in (None, "int8")
    )
    assert both.v == alone.v / 8 < 1 / 8
    assert both.up == alone.up / 8 < 1 / 8


@pytest.mark.parametrize("quantize", [None, "nf4", "int4"])
def test_int8_rows_need_int8_weights(quantize):
    with pytest.raises(ValueError, match="pass quantize='int8' too"):
        models.random(LARGE, quantize=quantize, activations="int8", xp=np)
    with pytest.raises(ValueError, match="pass quantize='int8' too"):
        models.load("absent", quantize="file", activations="int8", xp=np)


@pytest.mark.parametrize(("given", "kind"), [("int4", ValueError), (8, TypeError)])
def test_other_activations_are_refused(given, kind):
    with pytest.raises(kind, match="activations = "):
        models.random(LARGE, quantize="int8", activations=given, xp=np)
