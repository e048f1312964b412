"""Gradients of any small model, whatever is trained of it, along a direction in all its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import examples
from support.training import adapters_of, batch_of, gradients_of, model_of, packed_loss

from cupyattn.models import Config
from cupyattn.models.training.full_weights import FullWeights

STEP = 1e-5
flags = st.booleans()


@st.composite
def configs(draw):
    architecture = draw(st.sampled_from(["gpt2", "llama", "phi"]))
    groups, share = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    size = draw(st.sampled_from([2, 4, 6]))
    rotary = 0 if architecture == "gpt2" else draw(st.sampled_from(range(2, size + 1, 2)))
    gated = architecture == "llama"
    return Config(
        architecture, draw(st.integers(3, 30)), draw(st.integers(1, 3)),
        draw(st.sampled_from([4, 7, 8])), groups * share, groups, size, draw(st.integers(1, 9)), 16,
        draw(st.sampled_from([1e-5, 0.1])),
        draw(st.sampled_from(["swiglu", "geglu"] if gated else ["gelu", "gelu_tanh", "silu"])),
        rotary_dim=rotary, tied=draw(flags), window_size=draw(st.sampled_from([None, (2, 0)])),
        qkv_bias=draw(flags), output_bias=draw(flags), mlp_bias=draw(flags), head_bias=draw(flags),
    )  # fmt: skip


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
trainings = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "rank": st.integers(1, 5),
            "dropout": st.sampled_from([0.0, 0.3]),
            "use_rslora": flags,
            "targets": st.sampled_from(
                ["all-linear", r".*(v_proj|c_attn)", r".*(up_proj|fc|k_pr).*"]
            ),
        }
    ),
)


@examples(17)
@given(configs(), lengths, trainings, st.integers(0, 99))
def test_gradients_are_those_of_finite_differences(config, lengths, options, seed):
    model = model_of(config, seed=seed)
    batch = batch_of(config, lengths, seed=seed)
    trained = FullWeights(model) if options is None else adapters_of(model, **options)
    dropping = model if options is None else trained.with_dropout(seed)
    loss, gradients = gradients_of(trained, batch, seed=seed)
    assert loss == pytest.approx(packed_loss(dropping, batch), abs=1e-12)
    generator, sides, slope = np.random.default_rng(seed), [], 0.0
    directions = {}
    for name, array in trained.arrays.items():
        directions[name] = generator.standard_normal(array.shape) / array.size**0.5
        slope += float((gradients[name] * directions[name]).sum())
    before = {name: array.copy() for name, array in trained.arrays.items()}
    for sign in (1, -1):
        for name, array in trained.arrays.items():
            array[...] = before[name] + sign * STEP * directions[name]
        trained.updated()
        sides.append(packed_loss(dropping, batch))
    expected = (sides[0] - sides[1]) / (2 * STEP)
    assert abs(slope - expected) <= 1e-5 * max(1.0, abs(expected))
