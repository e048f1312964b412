"""Adapters of models whose quantised weights are frozen."""

from __future__ import annotations

import numpy as np
import pytest
from support.quantised_weights import of_usual_size
from support.search import mostly_deep
from support.tiny_models import TINY
from support.training import (
    adapters_of,
    batch_of,
    gradients_of,
    model_of,
    packed_loss,
    require_gradients,
)

import cupyattn
from cupyattn import dequantize, quantize
from cupyattn.models import Product
from cupyattn.models.training import backward
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.weights import named_arrays, rows_of

CONFIGS = {
    "llama": TINY["llama"]._replace(intermediate_size=64),
    "gpt2": TINY["gpt2"],
    "phi": TINY["phi"]._replace(intermediate_size=96),
}
WIDE = {"num_layers": 1, "hidden_size": 256, "num_heads": 16, "num_kv_heads": 16, "head_dim": 16,
        "intermediate_size": 256}  # fmt: skip
"""Every weight of it has whole super-blocks of 256."""
FORMATS = {
    "nf4": {"block_size": 32},
    "nf4_nested": {"block_size": 32},
    "int4": {"block_size": 32},
    "int8": {},
    "int8 in blocks": {"block_size": 32},  # as a Q8_0 of GGUF
    "q4_1": {"block_size": 32},
    "q4_k": {"block_size": 32},
}
OF_FILES = ("q4_1", "q4_k")
"""Formats that are only read from files: random codes and scales."""


def with_products(model, change):
    """The model with other weights in its layers."""
    layers = []
    for layer in model.weights.layers:
        fields = {
            field: product._replace(weight=change(product.weight))
            for field, product in layer._asdict().items()
            if isinstance(product, Product)
        }
        if layer.qkv_up is not None:
            whole, first = fields["qkv_up"], len(layer.qkv.weight)
            fields["qkv"] = rows_of(whole, slice(None, first))
            fields["up"] = rows_of(whole, slice(first, None))
        layers.append(layer._replace(**fields))
    return model.with_weights(model.weights._replace(layers=tuple(layers)))


def quantised(model, format):
    kind, options = format.split()[0], FORMATS[format]

    def change(weight):
        if kind not in OF_FILES:
            return quantize(weight.astype(np.float32).T, format=kind, **options).T
        made = of_usual_size(kind, *weight.shape, **options)
        of_all = made.super_scales if kind == "q4_k" else made.scales
        of_all *= np.float16(0.1)
        return made.T

    return with_products(model, change)


def dequantised(model, dtype):
    return with_products(model, lambda weight: dequantize(weight).astype(dtype))


@pytest.mark.parametrize(
    ("name", "format"),
    # Of the tiny Phi rows of `up` begin within a group of scales.
    mostly_deep(
        every := [(n, f) for n in CONFIGS for f in FORMATS if (n, f) != ("phi", "nf4_nested")],
        [
            *(("llama", name) for name in ("nf4_nested", "int4", "int8", "q4_k")),
            *(("gpt2", "nf4"), ("phi", "int8 in blocks")),
        ],
    ),
)
def test_gradients_are_those_with_dequantised_weights(name, format):
    """And those of finite differences."""
    config = CONFIGS[name]._replace(**(WIDE if format == "q4_k" else {}))
    model, batch = quantised(model_of(config), format), batch_of(config)
    assert model.weights.layers[0].output.weight.format == format.split()[0]
    adapters = adapters_of(model, dropout=0.25)
    loss, found = gradients_of(adapters, batch)
    plain = adapters_of(dequantised(model, np.float64), dropout=0.25)
    expected_loss, expected = gradients_of(plain, batch)
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    for key, gradient in expected.items():
        np.testing.assert_allclose(found[key], gradient, atol=1e-12, err_msg=key)
    dropping = adapters.with_dropout(3)
    require_gradients(
        lambda: packed_loss(dropping, batch), adapters.arrays, found, adapters.updated
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_weights_are_dequantised(name):
    model = quantised(model_of(CONFIGS[name], "float32"), "nf4")
    adapters = adapters_of(model, targets=r".*\.0\..*")
    merged = adapters.merged()
    first, second = (layer.output.weight for layer in merged.weights.layers)
    assert first.dtype == np.float32 and second is model.weights.layers[1].output.weight
    ids = batch_of(CONFIGS[name]).ids[None]
    np.testing.assert_allclose(merged.logits(ids), adapters.model.logits(ids), atol=2e-5)


@pytest.mark.parametrize("at_once", [1, 700, 10**6])
def test_weights_with_nested_scales_are_merged_from_group_to_group(at_once, monkeypatch):
    monkeypatch.setattr(backward, "_AT_ONCE", at_once)
    model = quantised(model_of(CONFIGS["llama"], "float32"), "nf4_nested")
    merged, plain = (adapters_of(each).merged() for each in (model, dequantised(model, np.float32)))
    pairs = zip(named_arrays(merged.weights), named_arrays(plain.weights), strict=True)
    for (name, array), (_, expected) in pairs:
        np.testing.assert_allclose(array, expected, atol=1e-6, err_msg=name)


def test_quantised_weights_are_not_trained_themselves():
    with pytest.raises(NotImplementedError, match=r"layers.0.qkv.weight is .*nf4.*LoraAdapters"):
        FullWeights(quantised(model_of(CONFIGS["llama"], "float32"), "nf4"))


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_give_the_same(name):
    """In float16, within its rounding of each array's gradient."""
    model = quantised(model_of(CONFIGS[name], "float16"), "nf4")
    adapters, batch = adapters_of(model), batch_of(CONFIGS[name], (5, 8))
    expected_loss, expected = gradients_of(adapters, batch, loss_scale=256.0)
    with cupyattn.backend("emulator"):
        loss, found = gradients_of(adapters, batch, loss_scale=256.0)
    assert abs(loss - expected_loss) < 5e-3 * expected_loss
    for key, gradient in found.items():
        error = np.linalg.norm(gradient - expected[key]) / np.linalg.norm(expected[key])
        assert error < 3e-2, key
