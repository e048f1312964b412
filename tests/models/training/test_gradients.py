"""Gradients of adapters and of all weights: against finite differences, and what holds of both."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import deep, examples, mostly_deep
from support.tiny_models import TINY
from support.training import (
    adapters_of,
    batch_of,
    gradients_of,
    model_of,
    num_labels,
    packed_loss,
    require_gradients,
    samples_of,
)

import cupyattn
from cupyattn.models import Config, Product
from cupyattn.models import forward as losses
from cupyattn.models.training import backward
from cupyattn.models.training.full_weights import FullWeights

ROUNDINGS = 40
"""The error of a gradient through two layers, forward and backward, in units of round-off."""
KINDS = {"lora": adapters_of, "full": FullWeights}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("name", ["gpt2", "mistral", "phi"])
def test_gradients_of_packed_samples_are_the_sum_of_each_alone(kind, name):
    trained, batch = kind(model_of(TINY[name])), batch_of(TINY[name])
    count = num_labels(batch)
    loss, packed = gradients_of(trained, batch)
    into = {key: np.zeros_like(array) for key, array in trained.arrays.items()}
    alone = [
        gradients_of(trained, sample, num_labels=count, into=into, accumulate=True)[0]
        for sample in samples_of(batch)
    ]
    assert loss == pytest.approx(sum(alone), abs=1e-14)
    for key, gradient in packed.items():
        np.testing.assert_allclose(into[key], gradient, atol=1e-13, err_msg=key)


def test_gradients_are_those_of_the_scaled_loss(kind):
    """By a power of two, which is exact; the loss itself is not scaled."""
    trained, batch = kind(model_of(TINY["llama"], "float32")), batch_of(TINY["llama"])
    loss, plain = gradients_of(trained, batch)
    for scale in (1024.0, np.array(1024.0, np.float32), np.float32(1024)):
        scaled_loss, scaled = gradients_of(trained, batch, loss_scale=scale)
        assert scaled_loss == loss
        for key, gradient in plain.items():
            np.testing.assert_array_equal(scaled[key], 1024 * gradient)
    half, fewer = gradients_of(trained, batch, num_labels=2 * num_labels(batch))
    assert half == pytest.approx(loss / 2)
    for key, gradient in plain.items():
        np.testing.assert_allclose(fewer[key], gradient / 2, rtol=1e-5, atol=1e-8)


def test_gradients_are_added_where_asked(kind):
    trained, batch = kind(model_of(TINY["gpt2"], "float32")), batch_of(TINY["gpt2"])
    _, once = gradients_of(trained, batch)
    into = {key: array.copy() for key, array in once.items()}
    gradients_of(trained, batch, into=into, accumulate=True)
    for key, gradient in once.items():
        np.testing.assert_allclose(into[key], 2 * gradient, rtol=1e-5, atol=1e-7)


def test_logits_of_some_rows_at_a_time(kind, monkeypatch):
    trained, batch = kind(model_of(TINY["phi"])), batch_of(TINY["phi"])
    loss, at_once = gradients_of(trained, batch)
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * TINY["phi"].vocab_size * 8)
    in_parts_loss, in_parts = gradients_of(trained, batch)
    assert in_parts_loss == pytest.approx(loss, abs=1e-14)
    for key, gradient in at_once.items():
        np.testing.assert_allclose(in_parts[key], gradient, atol=1e-13)


def test_a_gradient_that_overflows_is_seen(kind):
    """It is inf or NaN in the sum, which the trainer checks."""
    trained, batch = kind(model_of(TINY["llama"], "float16")), batch_of(TINY["llama"])
    _, gradients = gradients_of(trained, batch, loss_scale=2.0**40)
    assert not all(np.isfinite(gradient).all() for gradient in gradients.values())


class Watched:
    """The inputs of products in the forward, and in their backward."""

    def __init__(self, monkeypatch):
        self.forward: dict[int, list[bytes]] = {}
        self.backward: dict[int, bytes] = {}
        call, product_backward = Product.__call__, backward.product_backward

        def watched_call(product, x, /, **options):
            self.forward.setdefault(id(product.weight), []).append(x.tobytes())
            return call(product, x, **options)

        def watched_backward(product, dout, x, gradients, **options):
            self.backward[id(product.weight)] = x.tobytes()
            return product_backward(product, dout, x, gradients, **options)

        monkeypatch.setattr(Product, "__call__", watched_call)
        monkeypatch.setattr(backward, "product_backward", watched_backward)


EMULATED = [pytest.mark.nvrtc, pytest.mark.deep]


@pytest.mark.parametrize(
    ("name", "emulated"),
    [
        *((name, False) for name in ("gpt2", "llama", "phi")),
        *(pytest.param(name, True, marks=EMULATED) for name in ("gpt2", "llama", "phi")),
    ],
)
def test_what_is_computed_again_has_the_same_bits(name, emulated, monkeypatch):
    config, watched = TINY[name], Watched(monkeypatch)
    trained = FullWeights(model_of(config, "float16" if emulated else "float32"))
    with cupyattn.backend("emulator" if emulated else "reference", checks=False):
        gradients_of(trained, batch_of(config), loss_scale=64.0)
    products = 3 if name == "phi" else 4  # Phi's first is two
    assert len(watched.backward) == products * config.num_layers + 1
    for weight, x in watched.backward.items():
        first, *again = watched.forward[weight]
        assert len(again) <= 1 and {x, *again} == {first}


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "kind_of"),
    mostly_deep(
        product(("gpt2", "llama", "phi", "gemma3", "gemma2", "qwen3"), KINDS), [("llama", "full")]
    ),
)
def test_kernels_give_the_same(name, kind_of):
    """Gradients of float16 with every check on, within what float16 keeps of each array's."""
    config, kind = TINY[name], KINDS[kind_of]
    batch = batch_of(config, (5, 8))
    trained, exact = kind(model_of(config, "float16")), kind(model_of(config))
    for key, array in exact.arrays.items():  # those of float16, which are rounded
        array[...] = trained.arrays[key]
    exact.updated()
    expected_loss, expected = gradients_of(exact, batch, loss_scale=256.0)
    with cupyattn.backend("emulator"):
        trained.updated()
        loss, gradients = gradients_of(trained, batch, loss_scale=256.0)
        _, again = gradients_of(trained, batch, loss_scale=256.0)
    assert abs(loss - expected_loss) < 2e-3 * expected_loss
    for key, gradient in gradients.items():
        error = np.linalg.norm(gradient - expected[key]) / np.linalg.norm(expected[key])
        assert error < ROUNDINGS * 2**-11, key
        np.testing.assert_array_equal(again[key], gradient)  # from run to run


def test_dropout_is_that_of_the_seed():
    adapters = adapters_of(model_of(TINY["llama"], "float32"), dropout=0.3)
    batch = batch_of(TINY["llama"])
    first, second = gradients_of(adapters, batch, seed=5), gradients_of(adapters, batch, seed=5)
    assert first[0] == second[0]
    for key, gradient in first[1].items():
        np.testing.assert_array_equal(second[1][key], gradient)
    assert gradients_of(adapters, batch, seed=6)[0] != first[0]
    seeds = {
        part.seed
        for seed in (5, 6, 2**64 - 1)
        for layer in adapters.with_dropout(seed).weights.layers
        for part in (layer.qkv, layer.output, layer.up, layer.down)
    }
    assert len(seeds) == 3 * 2 * 4 and max(seeds) < 2**64
    assert packed_loss(adapters.model, batch) == packed_loss(adapters.model, batch)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bfloat16(kind, name):
    """Its gradients are added in float32 too."""
    exact = kind(model_of(TINY[name]))
    trained = kind(model_of(TINY[name], "bfloat16"))
    for key, array in exact.arrays.items():
        array[...] = trained.arrays[key]
    exact.updated()
    batch = batch_of(TINY[name])
    _, expected = gradients_of(exact, batch)
    _, found = gradients_of(trained, batch)
    for key, gradient in found.items():
        assert gradient.dtype == np.float32
        error = np.linalg.norm(gradient - expected[key]) / np.linalg.norm(expected[key])
        assert error < ROUNDINGS * 2**-8, key


STEP = 1e-5
flags = st.booleans()


@st.composite
def configs(draw):
    architecture = draw(st.sampled_from(["gpt2", "llama", "phi", "gemma"]))
    groups, share = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    size = draw(st.sampled_from([2, 4, 6]))
    rotary = 0 if architecture == "gpt2" else draw(st.sampled_from(range(2, size + 1, 2)))
    activations = ("gelu", "gelu_tanh", "silu")
    if architecture in ("llama", "gemma"):
        activations = ("swiglu", "geglu", "geglu_tanh")
    scale, cap = st.sampled_from([None, 0.3]), st.sampled_from([None, 2.0])
    layers = st.lists(st.integers(0, 2), max_size=2).map(tuple)
    return Config(
        architecture, draw(st.integers(3, 30)), draw(st.integers(1, 3)),
        draw(st.sampled_from([4, 7, 8])), groups * share, groups, size, draw(st.integers(1, 9)), 16,
        draw(st.sampled_from([1e-5, 0.1])),
        draw(st.sampled_from(activations)),
        rotary_dim=rotary, tied=draw(flags), window_size=draw(st.sampled_from([None, (2, 0)])),
        qkv_bias=draw(flags), output_bias=draw(flags), mlp_bias=draw(flags), head_bias=draw(flags),
        qk_norm=draw(flags), global_layers=draw(layers), unrotated_layers=draw(layers),
        local_rope_base=draw(st.sampled_from([None, 50.0])), softmax_scale=draw(scale),
        query_growth=draw(st.sampled_from([None, (0.5, 3)])),
        attention_softcap=draw(cap), logit_softcap=draw(cap), embedding_scale=draw(cap),
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


@examples(10)
@given(configs(), lengths, trainings, st.integers(0, 99))
def test_gradients_of_any_small_model_are_those_of_finite_differences(
    config, lengths, options, seed
):
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


PHIS = {
    "phi by two products": TINY["phi"]._replace(mlp_bias=False),
    "phi, gated": TINY["phi"]._replace(activation="swiglu"),
    "phi, silu": TINY["phi"]._replace(activation="silu"),
    "gpt2, gelu": TINY["gpt2"]._replace(activation="gelu"),
}
CONFIGS = {**TINY, **PHIS}


@pytest.mark.parametrize(
    "name", mostly_deep(CONFIGS, ["gpt2", "qwen2", "qwen3", "phi", "phi, gated", "gemma2"])
)
@pytest.mark.parametrize("dropout", [None, 0.4, *deep(0.0)], ids=lambda p: f"dropout {p}")
def test_gradients_are_those_of_finite_differences(name, dropout):
    """All weights are trained, or adapters with dropout."""
    config = CONFIGS[name]
    model, batch = model_of(config), batch_of(config)
    trained = FullWeights(model) if dropout is None else adapters_of(model, dropout=dropout)
    dropping = model if dropout is None else trained.with_dropout(3)
    loss, gradients = gradients_of(trained, batch, seed=3)
    assert loss == pytest.approx(packed_loss(dropping, batch), abs=1e-14) and loss > 1
    require_gradients(
        lambda: packed_loss(dropping, batch), trained.arrays, gradients, trained.updated
    )
