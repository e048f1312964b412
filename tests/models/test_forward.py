"""The forward and the loss against the same in plain NumPy, and on the emulator."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from models.test_generate import model_on, prompts_of
from support.devices import emulated
from support.model_twin import twin_logits, twin_states
from support.search import deep
from support.tiny_models import TINY

import cupyattn
from cupyattn import models
from cupyattn.models import forward as losses
from cupyattn.models.generation.steps import PagedAttend
from cupyattn.models.weights import empty, named_arrays
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.recorder import LaunchRecorder

IDS = np.random.default_rng(5).integers(0, 59, (3, 11))


@pytest.fixture(params=TINY)
def config(request):
    return TINY[request.param]


def test_logits_are_those_of_plain_numpy(config):
    model = models.random(config, dtype="float32", xp=np, seed=1)
    logits = model.logits(IDS)
    assert logits.shape == (3, 11, config.vocab_size) and logits.dtype == np.float32
    for found, ids in zip(logits, IDS, strict=True):
        np.testing.assert_allclose(found, twin_logits(model, ids), atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "swiglu", *deep("silu")])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_a_parallel_layer_by_one_product_or_two(activation, mlp_bias):
    """One where nothing is done at its end and all or no rows have a bias."""
    config = TINY["phi"]._replace(activation=activation, mlp_bias=mlp_bias)
    model = models.random(config, dtype="float32", xp=np, seed=1)
    (one, *_), weights = (layer.qkv_up for layer in model.weights.layers), model.weights.layers[0]
    assert (one is not None) == (mlp_bias and activation != "swiglu")
    if one is not None:
        assert np.shares_memory(one.weight, weights.qkv.weight)
        assert np.shares_memory(one.weight, weights.up.weight)
    assert model.nbytes == sum(array.nbytes for _, array in named_arrays(model.weights))
    np.testing.assert_allclose(model.logits(IDS)[0], twin_logits(model, IDS[0]), atol=1e-5)


def test_hidden_states_are_those_of_plain_numpy(config):
    model = models.random(config, dtype="float32", xp=np, seed=2)
    ids = IDS[0]
    attend = model.dense_attention(1, len(ids))
    found = list(model.hidden_states(ids, np.arange(len(ids)), attend))
    for step, (states, expected) in enumerate(zip(found, twin_states(model, ids), strict=True)):
        np.testing.assert_allclose(states, expected, atol=1e-5, err_msg=f"step {step}")
    np.testing.assert_array_equal(model.hidden(ids, np.arange(len(ids)), attend), found[-1])


def test_sequences_may_be_packed(config):
    """Only `attend` knows which rows of `hidden` are one sequence."""
    model = models.random(config, dtype="float32", xp=np, seed=3)
    first, second = IDS[0, :4], IDS[1, :9]
    bounds = np.array([0, 4, 13], np.int32)

    def attend(layer, q, k, v):
        return cupyattn.attention_varlen(
            q, k, v, bounds, bounds, 9, 9,
            rotary=model.rotary_of(layer), **config.attention_options(layer),
        )  # fmt: skip

    positions = np.concatenate([np.arange(4), np.arange(9)])
    hidden = model.hidden(np.concatenate([first, second]), positions, attend)
    logits = model.head(hidden)
    np.testing.assert_allclose(logits[:4], model.logits(first[None])[0], atol=1e-5)
    np.testing.assert_allclose(logits[4:], model.logits(second[None])[0], atol=1e-5)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["phi", *deep("gpt2", "llama")])
def test_kernels_give_the_same(name):
    """float16 kernels, within what float16 keeps of hidden states about 1 in size."""
    model = models.random(TINY[name], dtype="float16", xp=np, seed=4)
    expected = model.logits(IDS[:, :7])
    with cupyattn.backend("emulator"):
        found = model.logits(IDS[:, :7])
    np.testing.assert_allclose(found, expected, atol=1e-2)
    assert np.abs(expected).max() > 1


LAUNCHES = {**dict.fromkeys(("gpt2", "llama", "qwen3", "gemma3", "gemma2", "smollm3"), 8), "phi": 7}
"""Kernels of a layer in a decode step: 2 norms, 4 products, append and attention. Phi has 1 norm, 3
products and an activation."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_decode_step_in_float16_launches_each_kernel_once(name, monkeypatch):
    """Norms of heads are in the launch that rotates, norms of products in the one that adds."""
    recorder = LaunchRecorder(TURING)
    backend = importlib.import_module("cupyattn.runtime.backend")
    monkeypatch.setattr(backend, "_device", lambda *choice: recorder)
    config = TINY[name]
    turned = {"rotary_dim": 64} if config.rotary_dim == config.head_dim else {}
    config = config._replace(head_dim=64, **turned)  # short keys of which are not split
    model = models.random(config, dtype="float16", xp=np)
    sizes = config.num_layers, 2, 16, config.num_kv_heads, config.head_dim
    cache = cupyattn.PagedKVCache(*sizes, dtype="float16", xp=np)
    tables = cache.step_tables([cache.allocator.add([1, 2, 3])], 1)
    counts = []
    attend = PagedAttend(model, cache, tables, 1)
    with cupyattn.backend("emulator", checks=False), np.errstate(all="ignore"):
        for _ in model.hidden_states(np.array([1]), tables.positions, attend):
            counts.append(len(recorder.launches))
    layers = np.diff(counts)[: config.num_layers]
    assert layers.tolist() == [LAUNCHES[name]] * config.num_layers


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "smollm3", "ministral3"])
def test_norms_in_the_launch_that_rotates_give_the_same(name):
    config = TINY[name]._replace(unrotated_layers=(0,))
    model = models.random(config, dtype="float32", xp=np, seed=2)
    sizes = config.num_layers, 2, 16, config.num_kv_heads, config.head_dim
    cache = cupyattn.PagedKVCache(*sizes, dtype="float32", xp=np)
    tables = cache.step_tables([cache.allocator.add([0] * 11)], 11)
    found = model.hidden(IDS[0], tables.positions, PagedAttend(model, cache, tables))
    expected = model.hidden(IDS[0], np.arange(11), model.dense_attention(1, 11))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.nvrtc
def test_large_scores_stay_finite_in_float16():
    """Products of q and k of Phi-2 exceed 65504: scores are float32 whatever the dtype."""
    model = models.random(TINY["phi"], dtype="float16", xp=np, seed=6)
    for layer in model.weights.layers:
        size = 2 * model.config.num_heads * model.config.head_dim
        layer.qkv.weight[:size] *= 200
    seen = []

    def attend(layer, q, k, v):
        seen.append(
            np.abs(np.einsum("qhd,khd->hqk", *(x.astype(np.float32) for x in (q, k)))).max()
        )
        return dense(layer, q, k, v)

    dense = model.dense_attention(1, 11)
    expected = model.hidden(IDS[0], np.arange(11), attend)
    assert max(seen) > 65504
    assert np.isfinite(expected).all()
    with cupyattn.backend("emulator"):
        found = model.hidden(IDS[0], np.arange(11), dense)
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("llama-3.2-1b", 1_235_814_400),
        ("phi-2", 2_779_683_840),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("gemma-3-1b", 999_885_952),
        ("phi-4-mini", 3_836_021_760),
    ],
)
def test_presets_have_as_many_weights_as_published(name, count):
    shapes = SimpleNamespace(empty=lambda shape, kind: np.broadcast_to(kind.type(0), shape))
    weights = empty(models.PRESETS[name], "float16", shapes)
    assert sum(array.size for _, array in named_arrays(weights)) == count


def test_random_weights_come_from_the_seed():
    first, again, other = (models.random(TINY["llama"], xp=np, seed=seed) for seed in (0, 0, 1))
    ids = IDS[:1]
    np.testing.assert_array_equal(first.logits(ids), again.logits(ids))
    assert not np.allclose(first.logits(ids), other.logits(ids))


LLAMA, GEMMA4 = TINY["llama"], TINY["gemma4"]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: m.logits([1, 2]), ValueError, "got ids with 1 axes; .*sequences of one length"),
        (lambda m: m.logits([[1, 2], [3]]), ValueError, "sequences of one length"),
        (lambda m: m.logits([[0.5]]), TypeError, "got ids of float64; ids must be integers"),
        (lambda m: m.logits([[1] * 41]), ValueError, "the model has 40 positions"),
        (lambda m: m.logits([[67]]), ValueError, "67"),
        (lambda m: m.loss(IDS, IDS[:, 1:]), ValueError, r"shape \(3, 10\) for ids of .*\(3, 11\)"),
        (lambda m: m.loss(IDS, IDS * 1.0), TypeError, "got ids of float64"),
        (lambda m: m.loss(IDS, np.full_like(IDS, 67)), ValueError, "67"),
        (lambda _: models.random("gpt3"), ValueError, "'gpt2', 'llama-3.2-1b', 'phi-2', 'qw"),
        (lambda _: models.random(3), TypeError, "models.Config"),
        (lambda _: models.random(LLAMA._replace(architecture="bert")), NotImplementedError,
         "'bert'.*Llama"),
        (lambda _: models.random(LLAMA._replace(num_kv_heads=3)), ValueError,
         "num_heads = 4, num_kv_heads = 3; num_heads must be a multiple"),
        (lambda _: models.random(LLAMA._replace(rotary_dim=18)), ValueError, "rotary_dim = 18"),
        (lambda _: models.random(LLAMA._replace(num_layers=0)), ValueError, "num_layers = 0"),
        (lambda _: models.random(LLAMA._replace(keys_as_values=True)), ValueError,
         "keys_as_values in a model of llama; only gemma4"),
        (lambda _: models.random(GEMMA4._replace(global_rotary_dim=26)), ValueError,
         "global_rotary_dim = 26, head dim 24 in global layers; .* at most the head dim"),
        (lambda _: models.random(GEMMA4._replace(global_rotary_dim=None, global_head_dim=6)),
         ValueError, "rotary_dim = 8, global_rotary_dim = None, head dim 6 in global layers"),
        (lambda _: models.random(GEMMA4._replace(rope_scaling=cupyattn.LinearScaling(2.0))),
         ValueError, "global_rotary_dim = 6 with LinearScaling"),
        *((lambda _, part=part: models.random(GEMMA4._replace(global_rotary_dim=part)), ValueError,
           "global_rotary_dim = .*6.*; it must be an int") for part in ("6", 6.0)),
        (lambda _: models.random(GEMMA4._replace(global_layers=(-1,))), ValueError,
         r"global_layers = \(-1,\); layers are counted from 0"),
        (lambda _: models.random(GEMMA4._replace(global_head_dim=513)), NotImplementedError,
         "global_head_dim = 513; attention has kernels for head dims up to 512"),
        (lambda _: models.random("gpt2", xp="cupy"), TypeError, "xp ="),
        (lambda _: models.random("gpt2", xp=np, dtype="int8"), TypeError, "dtype = 'int8'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, kind, message):
    model = models.random(LLAMA, dtype="float32", xp=np)
    with pytest.raises(kind, match=message):
        call(model)


def test_layers_without_a_window_keep_the_rotary_positions_of_their_kind():
    ids = np.arange(12)[None] % 8
    windowed, none = (
        models.random(GEMMA4._replace(window_size=window), dtype="float32", xp=np)
        for window in ((31, 0), None)
    )
    np.testing.assert_allclose(none.logits(ids), windowed.logits(ids), rtol=1e-5, atol=1e-5)


def expected_loss(model, ids, labels):
    total, count = 0.0, 0
    for row, wanted in zip(ids, labels, strict=True):
        logits = twin_logits(model, row)
        for position, label in enumerate(wanted[1:]):
            if label != -100:
                z = logits[position]
                total += np.log(np.exp(z - z.max()).sum()) + z.max() - z[label]
                count += 1
    return total / count


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("rows", [4, *deep(1, 1000)])
def test_loss_is_that_of_plain_numpy(name, rows, monkeypatch):
    model = models.random(TINY[name], dtype="float32", xp=np, seed=1)
    monkeypatch.setattr(losses, "LOGITS_BYTES", rows * TINY[name].vocab_size * 4)
    loss = model.loss(IDS)
    assert loss.dtype == np.float32 and loss.shape == ()
    assert abs(loss - expected_loss(model, IDS, IDS)) < 1e-5


def test_labels_say_what_counts():
    model = models.random(TINY["llama"], dtype="float32", xp=np, seed=1)
    labels = IDS.copy()
    labels[0, :6] = -100
    labels[2] = -100
    labels[1, 4] = 7  # not the token at this position
    assert abs(model.loss(IDS, labels) - expected_loss(model, IDS, labels)) < 1e-5
    first = np.full_like(IDS, -100)
    first[:, 0] = IDS[:, 0]  # which nothing predicts
    assert np.isnan(model.loss(IDS, first))


def test_chunks_are_whole_tiles():
    assert losses.rows_at_once(128_256, 2) == 512
    assert losses.rows_at_once(50_257, 2) % 128 == 0
    assert losses.rows_at_once(2**29, 2) == 1


@pytest.mark.nvrtc
def test_kernels_give_the_same_loss():
    model = models.random(TINY["phi"], dtype="float16", xp=np, seed=4)
    expected = model.loss(IDS[:, :7])
    with cupyattn.backend("emulator"):
        assert abs(model.loss(IDS[:, :7]) - expected) < 5e-3


@pytest.mark.nvrtc
def test_bfloat16_runs_on_the_tensor_cores_of_sm_80():
    """A prompt through the forward over the cache, then steps of decoding; no path of its own."""
    changes = {"head_dim": 64, "rotary_dim": 64, "num_heads": 2, "num_kv_heads": 1}
    model = model_on(np, "llama", "bfloat16", **changes)
    twin = model_on(np, "llama", "float32", **changes)
    (prompt,) = prompts_of("llama", (33,))
    entries = []
    with emulated(80) as device:
        load = device.load

        def noted(specialisation):
            macros = dict(specialisation.macros)
            entries.append((specialisation.spec.entry, macros.get("LANES")))
            return load(specialisation)

        device.load = noted
        (new,) = models.Generator(model, lengths=[40]).generate([prompt], max_new_tokens=3)
        found = model.logits([[*prompt, *new[:-1]]])[0].astype(np.float32)
    assert {("attention_forward_native_paged", None), ("attention_decode", 0)} <= set(entries)
    exact = twin.logits([[*prompt, *new[:-1]]])[0]
    error = np.abs(found - exact).max()
    assert error <= 0.25
    drawn = exact[len(prompt) - 1 :]
    assert (drawn.max(axis=1) - drawn[np.arange(3), new]).max() <= 4 * error
