"""A number that tells weights from any others of their shape: a bit of them is enough."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.training.fingerprint import fingerprint
from cupyattn.models.weights import named_arrays


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [("float16", None), ("bfloat16", None), ("float32", "nf4"), ("float32", "int8")],
)
def test_each_bit_of_each_array_is_told(dtype, quantize):
    config = TINY["llama"]._replace(hidden_size=64, intermediate_size=128)
    weights = models.random(config, dtype=dtype, quantize=quantize, xp=np, seed=2).weights
    before = fingerprint(weights)
    assert before == fingerprint(weights)
    rng = np.random.default_rng(0)
    for name, array in named_arrays(weights):
        items = array.reshape(-1).view(np.uint8)
        at, bit = rng.integers(items.size), np.uint8(1 << rng.integers(8))
        items[at] ^= bit
        assert fingerprint(weights) != before, f"{name}, byte {at}"
        items[at] ^= bit
    assert fingerprint(weights) == before
