"""A model over several ranks gives what it gives on one, in floats and in four or eight bits."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models.test_quantised import CONFIGS, KINDS
from numpy.testing import assert_allclose, assert_array_equal
from support.archives import unpacked
from support.search import deep, mostly_deep
from support.tiny_models import TINY

import cupyattn
from cupyattn import QuantizedWeight, dequantize, models
from cupyattn.distributed import Group, RankFailedError, run
from cupyattn.models import loading, parallel
from cupyattn.models.checkpoints import copying
from cupyattn.models.config import GATED
from cupyattn.models.loading import quantises_to
from cupyattn.models.parallel import columns_of, rows_of
from cupyattn.models.training import FullWeights, LoraAdapters
from cupyattn.models.transformer import Model
from cupyattn.models.weights import PRODUCTS
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.runtime.device.cuda import device_count

CHECKPOINTS = unpacked(Path(__file__).parent / "checkpoints.zip")
IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
LLAMA = models.random(TINY["llama"], dtype="float32", xp=np)


@pytest.fixture
def packed_folder():
    pytest.importorskip("safetensors")
    pytest.importorskip("gguf")
    from models.test_quantised_files import packed_folder

    return packed_folder


def shared(model: Model, group: Group, xp: Any = np) -> Model:
    """A rank's share of a model."""
    config, weights = parallel.split(model.config, model.weights, group, xp)
    return Model(config, weights, model.dtype, xp, lambda: None, group)


@pytest.mark.parametrize("name", [name for name in TINY if TINY[name].num_kv_heads > 1])
def test_logits_of_two_ranks(name):
    """Float32, so two more sums a layer round by some 1e-7 of logits that are about 1."""
    model = models.random(TINY[name], dtype="float32", xp=np)
    expected = model.logits(IDS)
    for found in run(lambda group: shared(model, group).logits(IDS), 2):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_ranks_have_the_same_bits():
    model = models.random(TINY["gpt2"], dtype="float16", xp=np)
    first, *others = run(lambda group: shared(model, group).logits(IDS), 4)
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_a_rank_holds_its_share():
    for share in run(lambda group: shared(LLAMA, group), 2):
        assert (share.config.num_heads, share.config.num_kv_heads) == (2, 1)
        layer, whole = share.weights.layers[0], LLAMA.weights.layers[0]
        for name in PRODUCTS:
            assert getattr(layer, name).weight.size * 2 == getattr(whole, name).weight.size


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}), ("phi", {"temperature": 1.0, "seed": 4, "n": 2}),
        *deep(("gpt2", {}), ("llama", {"temperature": 1.0, "seed": 4, "n": 2})),
    ],
    ids=str,
)  # fmt: skip
def test_generation_of_two_ranks_equals_one(name, options):
    model = models.random(TINY[name], dtype="float32", xp=np)
    prompts = [[1, 2, 3], [4, 5]]
    given = {"max_new_tokens": 5, **options}
    expected = model.generate(prompts, **given)
    for found in run(lambda group: shared(model, group).generate(prompts, **given), 2):
        assert found == expected


def test_ranks_draw_alike_without_a_seed():
    options = {"max_new_tokens": 8, "temperature": 1.5}
    first, second = run(lambda group: shared(LLAMA, group).generate([1, 2], **options), 2)
    assert first == second


@pytest.mark.parametrize("name", ["gpt2", "llama3", "phi"])
def test_files_are_loaded_by_share(name):
    folder = CHECKPOINTS / name
    expected = models.load(folder, dtype="float32", xp=np).logits(IDS)

    def of_rank(group: Group) -> Any:
        return models.load(folder, dtype="float32", xp=np, group=group).logits(IDS)

    for found in run(of_rank, 2):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("trained", [LoraAdapters, FullWeights])
def test_a_share_is_not_trained(trained):
    """The sums over ranks have no backward."""

    def of_rank(group: Group) -> None:
        with pytest.raises(NotImplementedError, match=r"a model over 2 ranks; .*without a group"):
            trained(shared(LLAMA, group))

    run(of_rank, 2)


@pytest.mark.parametrize(
    ("ranks", "call", "message"),
    [
        (3, lambda group: shared(LLAMA, group), "a model of 4 heads over 3 ranks"),
        (4, lambda group: shared(LLAMA, group), "2 key-value heads over 4 ranks"),
        (4, lambda group: shared(small_blocks(), group), "a rank's columns must be whole blocks"),
        (2, lambda group: shared(LLAMA, group).generate([1], max_new_tokens=2, captured=True),
         "captured=True with a model over several ranks"),
    ],
)  # fmt: skip
def test_bad_calls_of_ranks_are_refused(ranks, call, message):
    with pytest.raises(RankFailedError, match=message):
        run(call, ranks, timeout=20)


def small_blocks() -> Model:
    config = CONFIGS["llama"]._replace(num_kv_heads=4, intermediate_size=96)
    return models.random(config, dtype="float32", quantize="nf4", xp=np)


@pytest.mark.gpu
@pytest.mark.skipif(device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize(
    ("kind", "transport"), [(None, None), (None, "peer"), *((kind, None) for kind in KINDS)]
)
def test_generation_on_two_gpus_equals_one(kind, transport):
    """In float32 no two tokens are equally likely within the rounding."""
    import cupy

    config = even("llama") if kind else TINY["llama"]
    on_host = models.random(config, dtype="float32", quantize=kind, xp=np)
    expected = on_host.generate([[1, 2, 3], [4, 5]], max_new_tokens=12)

    def of_rank(group: Group) -> Any:
        return shared(on_host, group, cupy).generate([[1, 2, 3], [4, 5]], max_new_tokens=12)

    for found in run(of_rank, devices=[0, 1], transport=transport, timeout=60):
        assert found == expected


SIZES = {
    "nf4": [(64, 128), (64, 192), (128, 128), (32, 64)],
    "nf4_nested": [(64, 128), (64, 192), (32, 512)],
    "int4": [(128, 256), (128, 384), (32, 64)],
    "int8": [(128, 128), (192, 192), (32, 192), (64, 192)],
    "q4_1": [(32, 64)],
    "q4_k": [(32, 512), (32, 1024)],
}
"""Sizes of blocks of each format, and K; half of it may end within a block."""


def weight_of(kind: str, block_size: int, inner: int) -> QuantizedWeight:
    """Eight rows of random codes and scales."""
    rng = np.random.default_rng(inner)
    empty = cupyattn.ops.linear.weight_formats.empty(
        cupyattn.ops.linear.weight_formats.Blocks(kind, block_size), 8, inner, np
    )
    for name, array in empty.arrays.items():
        if name == "codes":
            array[...] = rng.integers(0, 256, array.shape).astype(np.uint8).view(array.dtype)
        elif array.dtype == np.uint8:
            array[...] = rng.integers(0, 64, array.shape)
        else:
            array[...] = rng.standard_normal(array.shape)
    return empty


def test_no_format_is_left_out():
    assert set(SIZES) == set(FORMATS)


@pytest.mark.parametrize(
    ("kind", "block_size", "inner"), [(kind, *size) for kind in SIZES for size in SIZES[kind]]
)
def test_parts_have_the_same_numbers(kind, block_size, inner):
    weight = weight_of(kind, block_size, inner)
    whole = dequantize(weight)
    for half in (slice(0, inner // 2), slice(inner // 2, inner)):
        part = columns_of(weight, half, np)
        assert part.blocks.format == kind.removesuffix("_nested")
        assert_array_equal(dequantize(part), whole[:, half])
    parts = [slice(6, 8), slice(1, 2)]
    assert_array_equal(
        dequantize(rows_of(weight, parts, np)), np.concatenate([whole[x] for x in parts])
    )


@pytest.mark.parametrize(
    ("kind", "block_size", "inner", "stop"),
    [("nf4", 64, 128, 16), ("int4", 32, 96, 48), ("q4_k", 32, 512, 128), ("int8", 32, 96, 48)],
)
def test_blocks_that_would_be_too_small_are_refused(kind, block_size, inner, stop):
    weight = weight_of(kind, block_size, inner)
    with pytest.raises(ValueError, match=f"columns 0 to {stop} of <QuantizedWeight {kind}"):
        columns_of(weight, slice(0, stop), np)


def even(name: str) -> Any:
    """A config whose shares of two ranks are whole blocks of 32."""
    config = CONFIGS[name]
    return config._replace(
        num_kv_heads=2,
        num_heads=4,
        head_dim=16,
        intermediate_size=128 if config.activation in GATED else 192,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_deep(
        product(("llama", "phi", "gpt2"), KINDS),
        [("llama", "nf4"), ("phi", "int4"), ("gpt2", "int8")],
    ),
)
def test_logits_and_tokens_of_two_ranks(name, kind):
    """Float32, so two more sums a layer round by some 1e-7 of logits that are about 1."""
    config = even(name) if name != "gpt2" else even(name)._replace(num_kv_heads=4)
    model = models.random(config, dtype="float32", quantize=kind, xp=np)
    expected = model.logits(IDS), model.generate([[1, 2, 3], [4, 5]], max_new_tokens=6)

    def of_rank(group: Group) -> Any:
        share = shared(model, group)
        layer = share.weights.layers[0]
        assert isinstance(layer.down.weight, QuantizedWeight)
        assert isinstance(layer.qkv.weight, QuantizedWeight)
        return share.logits(IDS), share.generate([[1, 2, 3], [4, 5]], max_new_tokens=6)

    for logits, tokens in run(of_rank, 2):
        assert_allclose(logits, expected[0], atol=1e-5)
        assert tokens == expected[1]


@pytest.mark.parametrize(
    ("how", "quantize"), [("nested", "file"), ("gptq", "file"), ("awq", "file"), ("gptq", "int8")]
)
def test_quantised_files_are_loaded_by_share(tmp_path, how, quantize, packed_folder):
    """In the blocks of the file, and quantised as they are read."""
    config = even("llama")._replace(intermediate_size=256)
    folder, _ = packed_folder(tmp_path / how, how, config)
    given = {"dtype": "float32", "xp": np, "quantize": quantize}
    expected = models.load(folder, **given).logits(IDS)

    def of_rank(group: Group) -> Any:
        model = models.load(folder, group=group, **given)
        assert isinstance(model.weights.layers[0].down.weight, QuantizedWeight)
        return model.logits(IDS)

    for found in run(of_rank, 2):
        assert_allclose(found, expected, atol=1e-5)


def test_what_does_not_split_is_refused_before_it_is_read(tmp_path, monkeypatch, packed_folder):
    folder, _ = packed_folder(tmp_path / "packed", "gptq")
    monkeypatch.setattr(loading, "filled", None)
    with pytest.raises(RankFailedError, match="heads over 3 ranks"):
        run(lambda group: models.load(folder, xp=np, group=group), 3, timeout=20)


class Far:
    """An array that is not NumPy's, as far as a copy to the host goes."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def get(self) -> np.ndarray:
        return self._array


def test_what_a_gpu_has_made_is_brought_to_the_host():
    target, made = np.zeros(3), np.arange(3.0)
    assert copying._where_target_is(target, Far(made)) is made
    assert copying._where_target_is(target, made) is made
    far = Far(made)
    assert copying._where_target_is(far, far) is far


def test_weights_for_the_host_are_quantised_by_the_device_s_library(tmp_path, packed_folder):
    asked = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(np, name)

    folder, _ = packed_folder(tmp_path / "packed", "gptq", even("llama"))
    checkpoint = loading.opened(folder)
    found = copying.filled(checkpoint, "float32", np, quantises_to("nf4"), by=Noting())
    assert "asarray" in asked
    expected = models.load(folder, dtype="float32", xp=np, quantize="nf4").weights
    for mine, wanted in zip(found.layers, expected.layers, strict=True):
        assert_array_equal(dequantize(mine.down.weight), dequantize(wanted.down.weight))


def load(group: Group, name: str = "llama3", **options: Any) -> Model:
    return models.load(CHECKPOINTS / name, xp=np, group=group, **{"dtype": "float32", **options})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"name": "gpt2"}, {"name": "llama3"}], "architecture = "),
        ([{"dtype": "float16"}, {"dtype": "float32"}], "dtype = "),
        ([{"quantize": "int8"}, {}], "quantize = "),
    ],
)
def test_another_model_is_an_error_before_it_is_read(given, says, monkeypatch):
    monkeypatch.setattr("cupyattn.models.loading.filled", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(RankFailedError, match=rf"ValueError: rank . called with {says}.*, rank . "):
        run(lambda group: load(group, **given[group.rank]), 2, timeout=20)


@pytest.mark.parametrize("group", [3, "g", object()])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(
        TypeError, match=r"got group = .*; group must be a cupyattn.distributed.Group"
    ):
        load(group)


def test_the_model_is_where_its_rank_is():
    """On NumPy ranks, as if their communicators had devices."""

    def of_rank(group: Group, xp: Any) -> None:
        group.device = group.rank
        parallel.require_group(group, xp)

    with pytest.raises(RankFailedError, match=r"xp=numpy on a rank of device .; .*; leave xp out"):
        run(lambda group: of_rank(group, np), 2, timeout=20)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=1)))
    with pytest.raises(RankFailedError, match=r"device 1 is the current .* of device 0;"):
        run(lambda group: of_rank(group, cupy), 2, timeout=20)


GREEDY: dict[str, Any] = {"prompts": [1, 2, 3], "max_new_tokens": 4}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 3}


@pytest.mark.parametrize(
    ("both", "name", "values"),
    [
        (GREEDY, "prompts", ([1, 2, 3], [4, 5, 6])),
        (GREEDY, "prompts", ([1, 2, 3], [[1, 2, 3], [1]])),
        (GREEDY, "prompts", ([[1] * 30 + [2]], [[1] * 30 + [3]])),
        (GREEDY, "max_new_tokens", (4, 5)),
        (GREEDY, "stop", ((), 7)),
        (DRAWN, "seed", (3, 4)),
        (DRAWN, "seed", (3, None)),
        (DRAWN, "temperature", (1.0, 2.0)),
        (DRAWN, "top_k", (3, None)),
        (DRAWN, "n", (1, 2)),
        (GREEDY, "num_blocks", (40, None)),
        (GREEDY, "block_size", (16, 32)),
        (GREEDY, "lookup", (0, 2)),
        (GREEDY, "max_tokens", (32, 64)),
    ],
)
def test_a_generation_that_differs_is_an_error(both, name, values):
    with pytest.raises(RankFailedError, match=rf"ValueError: rank . called with (.*, )?{name} = "):
        run(
            lambda group: shared(LLAMA, group).generate(**{**both, name: values[group.rank]}),
            2,
            timeout=20,
        )


def test_each_prompt_draws_from_a_seed_of_its_own():
    options = {"max_new_tokens": 12, "temperature": 5.0}
    first, second = run(lambda group: shared(LLAMA, group).generate([[1, 2]] * 2, **options), 2)
    assert first == second
    assert first[0] != first[1]
