"""The gradients of every weight, against finite differences in float64."""

from __future__ import annotations

import pytest
from support.tiny_models import TINY
from support.training import batch_of, gradients_of, model_of, packed_loss, require_gradients

from cupyattn.models.training.full_weights import FullWeights

PHIS = {
    "phi by two products": TINY["phi"]._replace(mlp_bias=False),
    "phi, gated": TINY["phi"]._replace(activation="swiglu"),
    "phi, silu": TINY["phi"]._replace(activation="silu"),
    "gpt2, gelu": TINY["gpt2"]._replace(activation="gelu"),
}
CONFIGS = {**TINY, **PHIS}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def test_gradients_are_those_of_finite_differences(config):
    model, batch = model_of(config), batch_of(config)
    trained = FullWeights(model)
    loss, gradients = gradients_of(trained, batch)
    assert loss == pytest.approx(packed_loss(model, batch), abs=1e-14) and loss > 1
    require_gradients(lambda: packed_loss(model, batch), trained.arrays, gradients, trained.updated)
