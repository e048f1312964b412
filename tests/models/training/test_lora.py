"""Adapters: their gradients against finite differences, and what the adapted model computes."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import TINY
from support.training import batch_of, gradients_of, model_of, packed_loss, require_gradients

from cupyattn.models.training.lora import LoraAdapters

CONFIGS = {
    **TINY,
    "phi by two products": TINY["phi"]._replace(mlp_bias=False),
    "phi, gated": TINY["phi"]._replace(activation="swiglu"),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def adapters_of(model, **options):
    """Adapters that add something."""
    adapters = LoraAdapters(model, **{"rank": 3, "alpha": 4, **options})
    generator = np.random.default_rng(9)
    for array in adapters.arrays.values():
        array[...] = 0.3 * generator.standard_normal(array.shape)
    adapters.updated()
    return adapters


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
