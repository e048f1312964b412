"""Models beyond float16's range: float16 gives what float32 gives, or names a tensor."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.test_parallel import shared
from support.search import deep, examples, mostly_deep
from support.tiny_models import TINY
from support.training import batch_of

import cupyattn
from cupyattn import YarnScaling, models
from cupyattn.distributed import run
from cupyattn.models import Config, Model, float16_range
from cupyattn.models.checkpoints import copying
from cupyattn.models.checkpoints.contents import HUGGING_FACE, Checkpoint, Tensor, places
from cupyattn.models.checkpoints.copying import filled
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.float16_range import LARGEST, LIMIT
from cupyattn.models.loading import quantises_to
from cupyattn.models.training import FullWeights, LoraAdapters
from cupyattn.models.weights import Weights, empty, factors_of, named_arrays, row_factors, unscaled
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.device.recorder import LaunchRecorder

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file

IDS = np.random.default_rng(5).integers(0, 59, (2, 9))
U16 = 2.0**-11
"""The relative rounding of float16."""


def tensors_of(model: Model) -> dict[str, Tensor]:
    naming = HUGGING_FACE[model.config.architecture]
    found = places(naming, model.config, model.weights, {f"{naming.prefix}x": None}).filled  # type: ignore[dict-item]
    arrays = {name: np.ascontiguousarray(p.targets["all"]) for name, p in found.items()}
    return {
        name: Tensor(array.shape, lambda start, stop, array=array: array[start:stop])
        for name, array in arrays.items()
    }


def loaded(model: Model, dtype: str, quantize: str | None = None) -> Model:
    """Return a model as it is loaded from a checkpoint with these weights."""
    naming = HUGGING_FACE[model.config.architecture]
    checkpoint = Checkpoint("folder", model.config, naming, tensors_of(model), lambda: None)
    weights = filled(checkpoint, dtype, np, quantises_to(quantize))
    return Model(model.config, weights, dtype, np)


def cast(model: Model) -> Model:
    """Return a float16 model whose weights are only rounded."""
    weights = empty(model.config, "float16", np)
    with np.errstate(over="ignore"):
        pairs = zip(named_arrays(weights), named_arrays(model.weights), strict=True)
        for (_, into), (_, array) in pairs:
            into[...] = array.astype(np.float16)
    return Model(model.config, weights, "float16", np)


def plant_output(weights: Weights, config: Config) -> None:
    weights.layers[0].output.weight[3] *= 2e6


def plant_down(weights: Weights, config: Config) -> None:
    weights.layers[0].down.weight[5] *= 3e6


def plant_embedding(weights: Weights, config: Config) -> None:
    weights.embedding[:, 5] = 1e6


def plant_v(weights: Weights, config: Config) -> None:
    first = (config.num_heads + config.num_kv_heads) * config.head_dim
    weights.layers[0].qkv.weight[first + 3] *= 1e6


def plant_norm(weights: Weights, config: Config) -> None:
    """Queries, keys and values are beyond float16."""
    weights.layers[-1].norm.weight[2] = 3e5


def plant_term(weights: Weights, config: Config) -> None:
    """A norm of what the MLP computes makes 1e6 of it (Gemma)."""
    weights.layers[0].down_norm.weight[3] = 1e6


def plant_logits(weights: Weights, config: Config) -> None:
    weights.norm.weight[3] = 1e6


PLANTS = (plant_output, plant_down, plant_embedding, plant_v, plant_norm, plant_logits)
CASES = [
    (name, plant)
    for name, config in TINY.items()
    for plant in (*PLANTS, *((plant_term,) if config.architecture == "gemma" else ()))
    # Phi's MLP reads the same norm: its inside would be beyond float16.
    if not (name == "phi" and plant is plant_norm)
]
PLAIN = [
    ("gpt2", plant_embedding), ("gpt2", plant_down), ("llama", plant_output), ("llama", plant_norm),
    ("phi", plant_down), ("phi", plant_v), ("gemma3", plant_term), ("gemma3", plant_embedding),
    ("gemma2", plant_logits), ("qwen2", plant_logits), ("qwen3", plant_v), ("phi3", plant_down),
]  # fmt: skip


def named(value: Any) -> str:
    """Return the name of a parameter of a test."""
    return getattr(value, "__name__", str(value))


def planted(name: str, plant: Callable[[Weights, Config], None], seed: int = 1) -> Model:
    """Return a float32 model with a large number."""
    model = models.random(TINY[name], dtype="float32", xp=np, seed=seed)
    plant(model.weights, model.config)
    return model


def perturbed(model: Model, seed: int, size: float = U16) -> Model:
    """Return a model whose weights have random relative errors."""
    generator = np.random.default_rng(seed)
    weights = empty(model.config, "float32", np)
    pairs = zip(named_arrays(weights), named_arrays(model.weights), strict=True)
    for (_, into), (_, array) in pairs:
        into[...] = array * (1 + size * generator.uniform(-1, 1, array.shape))
    return model.with_weights(weights)


def bound_of(model: Model, found: Callable[[Model], Any]) -> Any:
    """Return how much rounding to float16 may change a result, estimated with other errors.

    A float16 model rounds its weights and all that its products and norms give, each by at most
    2^-11 of it. A product's result with weights that have errors of that size changes by as much as
    with errors of its input or its result. Twice as many arrays are rounded as there are weights.
    So an error of float16 is about that of the float32 model with errors of its weights; 4 is for
    the differences between draws, of which there are 4.
    """
    exact = found(model)
    draws = [found(perturbed(model, seed)) for seed in range(4)]
    return 4 * max(float(np.abs(draw - exact).max()) for draw in draws)


def logits_of(model: Model) -> np.ndarray:
    return model.logits(IDS).astype(np.float64)


@pytest.mark.parametrize(("name", "plant"), mostly_deep(CASES, PLAIN), ids=named)
def test_planted_numbers_give_the_logits_of_float32(name, plant):
    """Where rounding the weights alone gives infinities."""
    model = planted(name, plant)
    if model.config.logit_softcap is None or plant is not plant_logits:  # a cap of inf is right
        with np.errstate(all="ignore"):
            assert not np.isfinite(cast(model).logits(IDS)).all()
    found = loaded(model, "float16")
    assert factors_of(found.weights, found.config)
    logits = logits_of(found)
    assert np.isfinite(logits).all()
    assert np.abs(logits - logits_of(model)).max() <= bound_of(model, logits_of)


def plant_inverse_values(weights: Weights, config: Config) -> None:
    """Values are beyond float16, and weights of `output` make up for most of it."""
    first = (config.num_heads + config.num_kv_heads) * config.head_dim
    for layer in weights.layers:
        for array in (layer.qkv.weight, layer.qkv.bias):
            if array is not None:
                array[first:] *= 2**13
        array = layer.output.weight
        array *= 2**-11


def plant_inverse_scores(weights: Weights, config: Config, of_query: float = 2**13) -> None:
    """Queries are beyond float16, and keys make up for it."""
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    for layer in weights.layers:
        for array in (layer.qkv.weight, layer.qkv.bias):
            if array is not None:
                array[:queries] *= of_query
                array[queries : queries + keys] /= of_query


def plant_inverse_keys(weights: Weights, config: Config) -> None:
    """Keys are beyond float16, and queries make up for it."""
    plant_inverse_scores(weights, config, 2**-13)


@pytest.mark.parametrize(
    ("name", "plant"),
    [("phi", plant_inverse_values), ("llama", plant_inverse_scores),
     ("qwen2", plant_inverse_keys),
     *deep(("gpt2", plant_inverse_values), ("gemma2", plant_inverse_scores))],
    ids=named,
)  # fmt: skip
def test_numbers_that_other_weights_make_up_for(name, plant):
    """Every factor then decides about the logits: none of the large numbers covers the others."""
    model = planted(name, plant)
    found = loaded(model, "float16")
    assert factors_of(found.weights, found.config)
    assert np.abs(logits_of(found) - logits_of(model)).max() <= bound_of(model, logits_of)


@pytest.mark.parametrize("of_key", [False, True])
def test_bounds_of_rotated_heads_include_the_attention_factor(of_key):
    """Rows of q or k are below float16's end, and their rotations, 8 times as large, beyond it."""
    config = TINY["llama"]._replace(num_layers=1, rope_scaling=YarnScaling(4.0, 8, 32.0, 1.0, 8.0))
    model = models.random(config, dtype="float32", xp=np, seed=1)
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    rows = slice(queries, queries + keys) if of_key else slice(queries)
    weight = model.weights.layers[0].qkv.weight
    weight[rows] *= 2e4 / np.linalg.norm(weight[rows], axis=1, keepdims=True) / 32**0.5
    model.weights.embedding[...] = weight[rows][0] / np.abs(weight[rows][0]).max()
    half = loaded(model, "float16")
    attend = half.dense_attention(1, 9)

    def seen(layer: int, q: Array, k: Array, v: Array) -> Array:
        cos, sin = (np.abs(np.asarray(each)).max() for each in half.rotary_of(layer)[:2])
        assert np.abs((k if of_key else q).astype(np.float32)).max() * max(cos, sin) <= LARGEST
        return attend(layer, q, k, v)

    half.hidden(IDS[0], np.arange(9), seen)


def test_norms_of_scaled_products_have_a_scaled_epsilon():
    config = TINY["gemma3"]._replace(norm_eps=1e3)
    model = models.random(config, dtype="float32", xp=np, seed=1)
    for layer in model.weights.layers:
        for weight in (layer.norm.weight, layer.mlp_norm.weight, model.weights.norm.weight):
            weight += 30  # such that an epsilon of 1000 leaves numbers of a size of 1
        for weight in (layer.down.weight, layer.qkv.weight):
            weight *= 300
    found = loaded(model, "float16")
    scales = found.weights.layers[0].scales
    assert max(scales.down, scales.q, scales.k) < 1
    assert np.abs(logits_of(found) - logits_of(model)).max() <= bound_of(model, logits_of)


@pytest.mark.parametrize("at_once", [64, 1000])
def test_chunks_of_a_tensor_have_one_factor(at_once, monkeypatch):
    """The first rows are stored before a later chunk shows that they need a factor."""
    model = planted("llama", plant_down)
    exact = loaded(model, "float16")
    monkeypatch.setattr(copying, "_AT_ONCE", at_once)
    monkeypatch.setattr(float16_range, "_AT_ONCE", at_once)
    for (name, array), (_, expected) in zip(
        named_arrays(loaded(model, "float16").weights), named_arrays(exact.weights), strict=True
    ):
        np.testing.assert_allclose(array, expected, rtol=U16, atol=2.0**-23, err_msg=name)


@pytest.mark.parametrize("name", mostly_deep(TINY, ["gpt2", "llama", "gemma3"]))
def test_models_in_range_have_no_factors(name):
    model = models.random(TINY[name], dtype="float32", xp=np, seed=2)
    found = loaded(model, "float16")
    assert not factors_of(found.weights, found.config)
    assert np.abs(logits_of(found) - logits_of(model)).max() <= bound_of(model, logits_of)


@pytest.mark.parametrize("plant", [plant_down, plant_embedding])
def test_the_stream_holds_the_planted_number(plant):
    model = loaded(planted("llama", plant), "float16")
    attend = model.dense_attention(1, 9)
    *states, hidden = model.hidden_states(IDS[0], np.arange(9), attend)
    assert all(state.dtype == np.float32 for state in states) and hidden.dtype == np.float16
    assert max(np.abs(state).max() for state in states) > 9e5


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "plant"),
    [("llama", plant_down), *deep(("gpt2", plant_embedding), ("phi", plant_down),
     ("gemma3", plant_term), ("qwen3", plant_norm), ("qwen2", plant_logits))],
    ids=named,
)  # fmt: skip
def test_kernels_give_the_logits_of_float32(name, plant):
    model = planted(name, plant)
    with cupyattn.backend("emulator"):
        found = logits_of(loaded(model, "float16"))
    assert np.abs(found - logits_of(model)).max() <= bound_of(model, logits_of)


@pytest.mark.parametrize(
    ("name", "plant"), [("llama", plant_norm), ("gemma3", plant_term), ("gpt2", plant_embedding)]
)
def test_generation_sees_the_same_numbers(name, plant):
    """A paged cache has keys with a factor too; each token is the largest logit of the model."""
    model = loaded(planted(name, plant), "float16")
    (tokens,) = model.generate(IDS[:1].tolist(), max_new_tokens=4)
    known = [*IDS[0].tolist(), *tokens]
    logits = model.logits([known[:-1]])[0, -len(tokens) :]
    assert tokens == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("name", ["llama", *deep("gpt2", "phi", "gemma3")])
def test_two_ranks_give_what_one_gives(name):
    """Their sums are of scaled products. A float16 sum of two rounds once more."""
    model = loaded(planted(name, plant_down), "float16")
    allowed = bound_of(planted(name, plant_down), logits_of)
    for found in run(lambda group: shared(model, group).logits(IDS), 2):
        assert np.abs(found.astype(np.float64) - logits_of(model)).max() <= allowed


@pytest.mark.parametrize("quantize", ["int8", *deep("nf4", "int4")])
def test_quantised_weights_have_factors_in_their_scales(quantize):
    """All rows of a weight are quantised before they are scaled, and so are below 65,504."""
    config = TINY["llama"]._replace(hidden_size=64, head_dim=16, intermediate_size=96)
    model = models.random(config, dtype="float32", xp=np, seed=1)
    for weight in (model.weights.layers[0].output.weight, model.weights.layers[1].down.weight):
        weight[5] *= 1e5
    exact = logits_of(loaded(model, "float32", quantize))
    found = loaded(model, "float16", quantize)
    assert factors_of(found.weights, config)
    assert np.abs(logits_of(found) - exact).max() <= bound_of(model, logits_of)


def plant_gate(weights: Weights, config: Config) -> None:
    weights.layers[1].up.weight[3] *= 1e6


def plant_query(weights: Weights, config: Config) -> None:
    weights.layers[1].q_norm.weight[3] = 3e5


def plant_scalar(weights: Weights, config: Config) -> None:
    weights.layers[1].scalar[:] = 7e4


@pytest.mark.parametrize(
    ("name", "plant", "tensor"),
    [
        ("gemma4", plant_scalar, "model.layers.1.layer_scalar: the scalar of a layer may be 7e+04"),
        ("llama", plant_gate, "model.layers.1.mlp.gate_proj.weight: a product"),
        ("gpt2", plant_gate, "transformer.h.1.mlp.c_fc.weight: a product"),
        ("phi", plant_norm, "model.layers.1.mlp.fc1.weight: a product"),
        ("phi3", plant_gate, "model.layers.1.mlp.gate_up_proj.weight: a product"),
        ("gemma3", plant_query, "model.layers.1.self_attn.q_norm.weight: a head"),
    ],
)
def test_what_no_power_of_two_brings_into_range_is_named(name, plant, tensor):
    model = planted(name, plant)
    with pytest.raises(ValueError, match=rf"^{re.escape(tensor)}.*up to 65,504.*bfloat16"):
        loaded(model, "float16")
    assert np.isfinite(loaded(model, "bfloat16").logits(IDS).astype(np.float32)).all()


def test_numbers_that_are_not_finite_are_refused():
    model = planted("llama", plant_down)
    model.weights.layers[0].down.weight[0, 0] = np.inf
    with pytest.raises(ValueError, match=r"down_proj\.weight holds inf"):
        loaded(model, "float16")


@pytest.mark.parametrize("name", ["llama", "gemma3", *deep("gpt2", "phi", "qwen2")])
@pytest.mark.parametrize("plant", [None, plant_down])
def test_gradients_are_those_of_float32(name, plant):
    """Those of all weights, by the names and in the units of the checkpoint."""
    model = planted(name, plant or (lambda weights, config: None))
    batch = batch_of(model.config, (7, 5))
    given = {"num_labels": 9, "loss_scale": 64.0, "seed": 1, "accumulate": False}

    def gradients(model: Model) -> dict[str, np.ndarray]:
        trained = FullWeights(model)
        into = {name: np.zeros_like(array) for name, array in trained.arrays.items()}
        trained.gradients(batch, into, **given)
        return into

    half = loaded(model, "float16")
    trained, exact, found = FullWeights(half), gradients(model), gradients(half)
    draws = [gradients(perturbed(model, seed)) for seed in range(4)]
    for name, array in trained.arrays.items():
        whole = dict(named_arrays(model.weights))[name]
        least = np.min(factors_of(half.weights, half.config).get(name, 1.0))
        np.testing.assert_allclose(array, whole, rtol=U16, atol=2.0**-25 / min(least, 1.0))
        differences = [np.abs(draw[name] - exact[name]).max() for draw in draws]
        # A smaller gradient than 2^-14 is not normal in float16.
        allowed = 8 * max(differences) + len(batch.ids) * 2.0**-14 * np.abs(whole).max()
        assert np.abs(found[name] - exact[name]).max() <= allowed, name
    before = logits_of(half)
    trained.updated()
    np.testing.assert_array_equal(logits_of(half), before)


@pytest.mark.parametrize("name", ["llama", *deep("gpt2", "phi", "gemma3")])
def test_adapters_add_what_they_add_in_float32(name):
    model = planted(name, plant_output)
    half = loaded(model, "float16")
    pair = [LoraAdapters(each, rank=3, seed=1) for each in (model, half)]
    generator = np.random.default_rng(0)
    for module, array in pair[0].arrays.items():
        if "lora_B" in module:
            array[...] = 0.05 * generator.standard_normal(array.shape)
        pair[1].arrays[module][...] = array
    for adapters in pair:
        adapters.updated()
    exact, found = (logits_of(adapters.model) for adapters in pair)
    assert np.abs(exact - logits_of(model)).max() > 0.1
    allowed = bound_of(pair[0].merged(), logits_of)
    assert np.abs(found - exact).max() <= 2 * allowed
    assert np.abs(logits_of(pair[1].merged()) - exact).max() <= 2 * allowed
    wholes = (
        pair[0].merged().weights.layers,
        unscaled(pair[1].merged().weights, model.config).layers,
    )
    for layer, other in zip(*wholes, strict=True):
        for field in PRODUCTS:
            whole, rounded = getattr(layer, field).weight, getattr(other, field).weight
            finite = np.abs(whole) < LARGEST
            np.testing.assert_allclose(
                rounded[finite], whole[finite], rtol=4 * U16, atol=2.0**-9, err_msg=field
            )


def with_head_and_dora(model: Model, folder: Path) -> None:
    """Write adapters with another embedding, one of the head, and magnitudes of v and o."""
    LoraAdapters(model, rank=2, seed=1, targets=["v_proj", "o_proj"]).save(folder)
    tensors, prefix = load_file(folder / "adapter_model.safetensors"), "base_model.model."
    generator = np.random.default_rng(3)
    shorter = partial(generator.uniform, 0.5, 1.0)
    for index, layer in enumerate(model.weights.layers):
        values = layer.qkv.weight[-model.config.num_kv_heads * model.config.head_dim :]
        for module, weight in (("v_proj", values), ("o_proj", layer.output.weight)):
            lengths = np.linalg.norm(weight, axis=1) * shorter(len(weight)).astype(np.float32)
            name = f"{prefix}model.layers.{index}.self_attn.{module}.lora_magnitude_vector"
            tensors[name] = lengths
    head, table = model.weights.head.weight, model.weights.embedding
    for name, shape in (("lora_A", (2, head.shape[1])), ("lora_B", (len(head), 2))):
        size = 0.1 * np.abs(head).max() ** 0.5
        array = size * generator.standard_normal(shape, np.float32)
        tensors[f"{prefix}lm_head.{name}.weight"] = array
    tensors[f"{prefix}model.embed_tokens.weight"] = np.roll(table, 1, axis=0)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"use_dora": True, "modules_to_save": ["embed_tokens"]}
    config["target_modules"] += ["lm_head"]
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_whole_weights_and_magnitudes_are_merged_with_factors(tmp_path):
    """The numbers of an adapter's file are those of the checkpoint, without factors."""
    model = planted("llama", plant_v)
    plant_embedding(model.weights, model.config)
    head = model.weights.head.weight
    head *= 1e5
    half = loaded(model, "float16")
    ends = half.weights.scales
    assert max(ends.embedding, ends.head / ends.norm) < 1
    with_head_and_dora(model, tmp_path)
    exact, found = (LoraAdapters.load(each, tmp_path).model for each in (model, half))
    assert np.abs(logits_of(exact) - logits_of(model)).max() > 1e3
    assert np.abs(logits_of(found) - logits_of(exact)).max() <= bound_of(exact, logits_of)
    written = dict(named_arrays(unscaled(found.weights, found.config)))
    for name, array in named_arrays(exact.weights):
        finite = np.abs(array) < LARGEST
        allowed = 4 * U16 * np.abs(array[finite]).max()
        np.testing.assert_allclose(
            written[name][finite], array[finite], rtol=4 * U16, atol=allowed, err_msg=name
        )


def test_factors_of_rows_are_those_of_the_arrays():
    """The factors of v and up are not those of their neighbours q, k and gate."""
    model = planted("llama", plant_v)
    up = model.weights.layers[0].up.weight[model.config.intermediate_size :]
    up *= 1e4
    half = loaded(model, "float16")
    for field in ("qkv", "output", "up", "down"):
        factors, _ = row_factors(half.weights.layers[0], field, model.config, 0)
        whole = getattr(model.weights.layers[0], field).weight
        scaled = getattr(half.weights.layers[0], field).weight.astype(np.float32)
        np.testing.assert_allclose(
            scaled, whole * factors[:, None], rtol=U16, atol=2.0**-25 * factors.max()
        )
        assert len(set(factors)) > 1 or field == "down"


def test_written_weights_have_no_factors(tmp_path):
    pytest.importorskip("safetensors")
    model = planted("llama", lambda weights, config: None)
    up, down = (getattr(model.weights.layers[0], field).weight for field in ("up", "down"))
    up *= 60
    down *= 30
    half = loaded(model, "float16")
    assert half.weights.layers[0].scales.up < 1
    write_folder(half.weights, half.config, None, tmp_path)
    again = models.load(tmp_path, dtype="float32", xp=np)
    for (name, array), (_, whole) in zip(
        named_arrays(again.weights), named_arrays(model.weights), strict=True
    ):
        np.testing.assert_allclose(array, whole, rtol=U16, atol=2.0**-16, err_msg=name)
    assert unscaled(model.weights, model.config) is model.weights
    same = models.load(tmp_path, dtype="float16", xp=np)
    np.testing.assert_array_equal(same.logits(IDS), half.logits(IDS))


@examples(6, deep=60)
@given(st.sampled_from(sorted(TINY)), st.integers(0, 2**32 - 1), st.floats(0, 12), st.floats(-4, 8))
def test_no_stream_makes_a_product_overflow(name, seed, spread, size):
    """States of any size and direction, also along a row of a weight, which reach the bounds."""
    config = TINY[name]._replace(num_layers=1, logit_softcap=None)
    generator = np.random.default_rng(seed)
    model = models.random(config, dtype="float32", xp=np, seed=seed)
    for array in (model.weights.layers[0].output.weight, model.weights.layers[0].down.weight):
        array *= np.float32(2.0**spread)
    half = loaded(model, "float16")
    weights, layer = half.weights, model.weights.layers[0]
    states = generator.standard_normal((59, config.hidden_size))
    states[::2] = layer.up.weight[generator.integers(0, len(layer.up.weight), 30)]
    table = (states * 10.0**size).astype(np.float32)
    seen: list[float] = []

    class Seen:
        """A product that keeps its largest result."""

        def __init__(self, product: Any) -> None:
            self.weight, self.bias, self._product = product.weight, product.bias, product

        def __call__(self, x: np.ndarray, **options: Any) -> Any:
            found = self._product(x, **options)
            seen.append(float(np.abs(found.astype(np.float32)).max()))
            return found

    watched = {field: Seen(getattr(weights.layers[0], field)) for field in PRODUCTS}
    layers = (weights.layers[0]._replace(qkv_up=None, **watched),)
    scale = half.config.embedding_scale or 1.0
    importlib.import_module("cupyattn.models.forward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cupyattn.models.forward.embedded",
            lambda config, weights, ids, positions: scale * table[ids],
        )
        half.with_weights(weights._replace(layers=layers)).logits(np.arange(59)[None, :16])
    assert max(seen) <= LARGEST and len(seen) == len(PRODUCTS)
    assert LIMIT < LARGEST


PRODUCTS = ("qkv", "output", "up", "down")


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi", "gemma3"])
def test_a_float32_stream_takes_no_launch_more(name, monkeypatch):
    """Products of bfloat16 models add their residual, norms of float16 models do.

    They also compute Gemma's norms of products, which bfloat16 models launch, and add to the stream
    in a step that is not a kernel of the library, and not counted.
    """
    backend = importlib.import_module("cupyattn.runtime.backend")
    counts = {}
    for dtype in ("float16", "bfloat16"):
        recorder = LaunchRecorder(TURING)
        monkeypatch.setattr(backend, "_device", lambda *choice, recorder=recorder: recorder)
        model = models.random(TINY[name], dtype=dtype, xp=np)
        with cupyattn.backend("emulator", checks=False), np.errstate(all="ignore"):
            model.logits(IDS)
        counts[dtype] = len(recorder.launches)
    norms = 2 * TINY[name].num_layers if name == "gemma3" else 0
    assert counts["float16"] + norms == counts["bfloat16"] > norms
