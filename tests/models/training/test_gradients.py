"""What holds of the gradients of adapters and of all weights alike."""

from __future__ import annotations

import numpy as np
import pytest
from support.search import mostly_deep
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
from cupyattn import dropout_backward
from cupyattn.models import Product
from cupyattn.models import loss as losses
from cupyattn.models.training import adapted_product, backward, places, sample_attention
from cupyattn.models.training.full_weights import FullWeights

ROUNDINGS = 40
"""What a gradient went through in two layers, there and back, as many times the unit round-off."""
KINDS = {"lora": adapters_of, "full": FullWeights}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("name", ["gpt2", "mistral", "phi"])
def test_packed_samples_are_each_by_itself(kind, name):
    trained, batch = kind(model_of(TINY[name])), batch_of(TINY[name])
    count = num_labels(batch)
    loss, together = gradients_of(trained, batch)
    into = {key: np.zeros_like(array) for key, array in trained.arrays.items()}
    alone = [
        gradients_of(trained, sample, num_labels=count, into=into, accumulate=True)[0]
        for sample in samples_of(batch)
    ]
    assert loss == pytest.approx(sum(alone), abs=1e-14)
    for key, gradient in together.items():
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
    """It is inf or NaN where it is added, and whoever steps looks there."""
    trained, batch = kind(model_of(TINY["llama"], "float16")), batch_of(TINY["llama"])
    _, gradients = gradients_of(trained, batch, loss_scale=2.0**40)
    assert not all(np.isfinite(gradient).all() for gradient in gradients.values())


class Watched:
    """What products read: in the forward, and where their gradients are."""

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
        pytest.param("llama", True, marks=pytest.mark.nvrtc),
        *(pytest.param(name, True, marks=EMULATED) for name in ("gpt2", "phi")),
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
@pytest.mark.parametrize("name", mostly_deep(["gpt2", "llama", "phi"], ["llama"]))
def test_kernels_give_the_same(kind, name):
    """Of float16 with every check on, within what float16 keeps of each array's gradient."""
    config = TINY[name]
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


def no_sum(norm, dnormed, x, statistics, dx, gradients, *, of=backward.norm_backward):
    return of(norm, dnormed, x, statistics, None, gradients)


def other_mask(dout, p, seed, *, grads, accumulate):
    return dropout_backward(dout, p, seed + 1, grads=grads, accumulate=accumulate)


def no_scale(self, array, gradient, *, of=places.Gradients.add):
    for place, _, into in self._parts.get(id(array), ()):
        into += gradient[place.part]


def last_label_first(head, hidden, labels, *rest, of=backward.head_backward):
    return of(head, hidden, np.roll(labels, 1), *rest)


def no_rows(self, table, ids, gradient):
    pass


def first_sample_only(
    dout, q, k, v, out, lse, bounds, *rest, grads, of=cupyattn.attention_varlen_backward, **options
):
    for gradient in grads[:3]:
        gradient[...] = 0
    bounds = np.array([0, bounds[1]], np.int32)
    of(dout, q, k, v, out, lse, bounds, bounds, *rest[1:], grads=grads, **options)


def not_gated(dout, preactivation, activation, into, *, of=backward.activation_backward):
    return of(dout, preactivation[:, ::-1].copy(), activation, into)


PLANTED = {
    "a residual's gradient is lost": ("lora", backward, "norm_backward", no_sum),
    "another mask of dropout": ("lora", adapted_product, "dropout_backward", other_mask),
    "the scale is forgotten": ("lora", places.Gradients, "add", no_scale),
    "labels are shifted": ("lora", backward, "head_backward", last_label_first),
    "gate and up are swapped": ("lora", backward, "activation_backward", not_gated),
    "samples but the first": ("full", sample_attention, "attention_varlen_backward",
                              first_sample_only),
    "a tied embedding is the head's": ("full", places.Gradients, "add_rows", no_rows),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_wrong_gradient_is_found(bug, monkeypatch):
    kind, *planted = PLANTED[bug]
    model = model_of(TINY["qwen2"])
    batch = batch_of(TINY["qwen2"])
    trained = adapters_of(model, dropout=0.3) if kind == "lora" else FullWeights(model)
    dropping = trained.with_dropout(3) if kind == "lora" else model
    monkeypatch.setattr(*planted)
    _, gradients = gradients_of(trained, batch, seed=3)
    with pytest.raises(AssertionError, match="by differences"):
        require_gradients(
            lambda: packed_loss(dropping, batch), trained.arrays, gradients, trained.updated
        )


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
