"""A model over several ranks gives what it gives on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import TINY

from cupyattn import linear, models
from cupyattn.distributed import Group, RankFailedError, run
from cupyattn.functional.device_info import device_count
from cupyattn.models import parallel
from cupyattn.models.training import FullWeights, LoraAdapters
from cupyattn.models.transformer import Model

CHECKPOINTS = Path(__file__).parent / "checkpoints"
IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


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
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    shares = run(lambda group: shared(model, group), 2)
    for share in shares:
        assert (share.config.num_heads, share.config.num_kv_heads) == (2, 1)
        layer, whole = share.weights.layers[0], model.weights.layers[0]
        assert layer.qkv.weight.size * 2 == whole.qkv.weight.size
        assert layer.output.weight.size * 2 == whole.output.weight.size
        assert layer.up.weight.size * 2 == whole.up.weight.size
        assert layer.down.weight.size * 2 == whole.down.weight.size


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4, "n": 2}], ids=str)
def test_generation_of_two_ranks_equals_one(name, options):
    model = models.random(TINY[name], dtype="float32", xp=np)
    prompts = [[1, 2, 3], [4, 5], [6]]
    given = {"max_new_tokens": 8, **options}
    expected = model.generate(prompts, **given)
    for found in run(lambda group: shared(model, group).generate(prompts, **given), 2):
        assert found == expected


def test_ranks_draw_alike_without_a_seed():
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    options = {"max_new_tokens": 8, "temperature": 1.5}
    first, second = run(lambda group: shared(model, group).generate([1, 2], **options), 2)
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
    """Its sums over ranks have no backward: gradients would be wrong, and adapters unheard."""

    def of_rank(group: Group) -> None:
        model = models.random(TINY["llama"], dtype="float32", xp=np)
        with pytest.raises(NotImplementedError, match=r"a model over 2 ranks; .*without a group"):
            trained(shared(model, group))

    run(of_rank, 2)


def test_what_does_not_split_is_refused():
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    with pytest.raises(RankFailedError, match="a model of 4 heads over 3 ranks"):
        run(lambda group: shared(model, group), 3, timeout=20)
    with pytest.raises(RankFailedError, match="2 key-value heads over 4 ranks"):
        run(lambda group: shared(model, group), 4, timeout=20)


def test_captured_steps_are_refused():
    model = models.random(TINY["llama"], dtype="float32", xp=np)

    def of_rank(group: Group) -> None:
        shared(model, group).generate([1], max_new_tokens=2, captured=True)

    with pytest.raises(RankFailedError, match="captured=True with a model over several ranks"):
        run(of_rank, 2, timeout=20)


def the_bias_on_every_rank(self: Any, x: Any, /, *, residual: Any = None) -> Any:
    parts = self.group.all_gather(linear(x, self.weight.T, self.bias))
    return sum(parts) + (0 if residual is None else residual)


def no_sum(self: Any, x: Any, /, *, residual: Any = None) -> Any:
    return linear(x, self.weight.T, self.bias, residual=residual)


@pytest.mark.parametrize("mistake", [the_bias_on_every_rank, no_sum])
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    monkeypatch.setattr(parallel.Summed, "__call__", mistake)
    with pytest.raises(AssertionError):
        test_logits_of_two_ranks("gpt2")


@pytest.mark.gpu
@pytest.mark.skipif(device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("transport", [None, "peer"])
def test_generation_on_two_gpus_equals_one(transport):
    import cupy

    on_host = models.random(TINY["llama"], dtype="float32", xp=np)
    expected = on_host.generate([[1, 2, 3], [4, 5]], max_new_tokens=12)

    def of_rank(group: Group) -> Any:
        return shared(on_host, group, cupy).generate([[1, 2, 3], [4, 5]], max_new_tokens=12)

    for found in run(of_rank, devices=[0, 1], transport=transport, timeout=60):
        assert found == expected
