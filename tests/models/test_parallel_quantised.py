"""A model in four or eight bits over several ranks gives what it gives on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.test_parallel import IDS, shared
from models.test_quantised import CONFIGS, KINDS
from numpy.testing import assert_allclose, assert_array_equal

import cupyattn
from cupyattn import QuantizedWeight, models
from cupyattn.distributed import Group, RankFailedError, run
from cupyattn.functional.device_info import device_count
from cupyattn.models import loading
from cupyattn.models.checkpoints import copying
from cupyattn.models.config import GATED
from cupyattn.models.quantised import quantises_to
from cupyattn.models.shares import columns_of, rows_of
from cupyattn.weight_formats import FORMATS

SIZES = {
    "nf4": [(64, 128), (64, 192), (128, 128), (32, 64)],
    "nf4_nested": [(64, 128), (64, 192), (32, 512)],
    "int4": [(128, 256), (128, 384), (32, 64)],
    "int8": [(128, 128), (192, 192), (32, 192), (64, 192)],
    "q4_1": [(32, 64)],
    "q4_k": [(32, 512), (32, 1024)],
}
"""Of each format sizes of blocks, and K; parts of half of it may end within a block."""


def weight_of(kind: str, block_size: int, inner: int) -> QuantizedWeight:
    """Eight rows of random codes and scales."""
    rng = np.random.default_rng(inner)
    empty = cupyattn.quantized_weight.empty(
        cupyattn.weight_formats.Blocks(kind, block_size), 8, inner, np
    )
    for name, array in empty.arrays.items():
        if name == "codes":
            array[...] = rng.integers(0, 256, array.shape).astype(np.uint8).view(array.dtype)
        elif array.dtype == np.uint8:
            array[...] = rng.integers(0, 64, array.shape)
        else:
            array[...] = rng.standard_normal(array.shape)
    return empty


def numbers(weight: QuantizedWeight) -> np.ndarray:
    return cupyattn.dequantize(weight)


def test_no_format_is_left_out():
    assert set(SIZES) == set(FORMATS)


@pytest.mark.parametrize(
    ("kind", "block_size", "inner"), [(kind, *size) for kind in SIZES for size in SIZES[kind]]
)
def test_parts_stand_for_the_same_numbers(kind, block_size, inner):
    weight = weight_of(kind, block_size, inner)
    whole = numbers(weight)
    for half in (slice(0, inner // 2), slice(inner // 2, inner)):
        part = columns_of(weight, half, np)
        assert part.blocks.format == kind.removesuffix("_nested")
        assert_array_equal(numbers(part), whole[:, half])
    parts = [slice(6, 8), slice(1, 2)]
    assert_array_equal(
        numbers(rows_of(weight, parts, np)), np.concatenate([whole[x] for x in parts])
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
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


def test_a_share_has_half_of_the_bytes():
    config = even("llama")._replace(head_dim=32)
    model = models.random(config, dtype="float32", quantize="nf4", xp=np)
    layer = model.weights.layers[0]
    for share in run(lambda group: shared(model, group), 2):
        mine = share.weights.layers[0]
        for name in ("qkv", "output", "up", "down"):
            assert 2 * getattr(mine, name).weight.nbytes == getattr(layer, name).weight.nbytes


def test_the_ranks_that_blocks_do_not_suit_are_told():
    model = models.random(
        CONFIGS["llama"]._replace(num_kv_heads=4, intermediate_size=96),
        dtype="float32",
        quantize="nf4",
        xp=np,
    )
    with pytest.raises(RankFailedError, match="a rank's columns are whole blocks of its format"):
        run(lambda group: shared(model, group), 4, timeout=20)


@pytest.mark.parametrize(
    ("how", "quantize"), [("nested", "file"), ("gptq", "file"), ("awq", "file"), ("gptq", "int8")]
)
def test_files_are_loaded_by_share(tmp_path, how, quantize):
    """In the blocks of the file, and quantised as they are read."""
    pytest.importorskip("safetensors")
    pytest.importorskip("gguf")
    from models.test_quantised_files import packed_folder

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


def test_what_does_not_split_is_refused_before_it_is_read(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    pytest.importorskip("gguf")
    from models.test_quantised_files import packed_folder

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
    assert copying._beside(target, Far(made)) is made
    assert copying._beside(target, made) is made
    far = Far(made)
    assert copying._beside(far, far) is far


def test_weights_for_the_host_are_quantised_by_the_device_s_library(tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("gguf")
    from models.test_quantised_files import packed_folder

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
        assert_array_equal(numbers(mine.down.weight), numbers(wanted.down.weight))


@pytest.mark.gpu
@pytest.mark.skipif(device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_generation_on_two_gpus_equals_one(kind):
    """Float32, in which no two tokens are as likely as one another within the rounding."""
    import cupy

    on_host = models.random(even("llama"), dtype="float32", quantize=kind, xp=np)
    expected = on_host.generate([[1, 2, 3], [4, 5]], max_new_tokens=12)

    def of_rank(group: Group) -> Any:
        return shared(on_host, group, cupy).generate([[1, 2, 3], [4, 5]], max_new_tokens=12)

    for found in run(of_rank, devices=[0, 1], timeout=60):
        assert found == expected
