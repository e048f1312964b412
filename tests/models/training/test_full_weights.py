"""The gradients of every weight, against finite differences in float64."""

from __future__ import annotations

import pytest
from support.tiny_models import TINY
from support.training import batch_of, gradients_of, model_of, require_gradients

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
    trained, batch = FullWeights(model_of(config)), batch_of(config)
    loss, gradients = gradients_of(trained, batch)
    assert loss > 1
    require_gradients(
        lambda: gradients_of(trained, batch)[0], trained.arrays, gradients, trained.updated
    )
