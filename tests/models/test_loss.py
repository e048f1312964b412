"""The loss of a model: that of its logits, a chunk of rows at a time."""

from __future__ import annotations

import numpy as np
import pytest
from support.model_twin import twin_logits
from support.tiny_models import TINY

import cupyattn
from cupyattn import models
from cupyattn.models import loss as losses

IDS = np.random.default_rng(5).integers(0, 59, (3, 11))


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
@pytest.mark.parametrize("rows", [1, 4, 1000])
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
    labels[1, 4] = 7  # another token than the one that stands there
    assert abs(model.loss(IDS, labels) - expected_loss(model, IDS, labels)) < 1e-5
    first = np.full_like(IDS, -100)
    first[:, 0] = IDS[:, 0]  # which nothing predicts
    assert np.isnan(model.loss(IDS, first))


def test_chunks_are_whole_tiles():
    assert losses.rows_at_once(128_256, 2) == 512
    assert losses.rows_at_once(50_257, 2) % 128 == 0
    assert losses.rows_at_once(2**29, 2) == 1


@pytest.mark.nvrtc
def test_kernels_give_the_same():
    model = models.random(TINY["gpt2"], dtype="float16", xp=np, seed=4)
    expected = model.loss(IDS[:, :7])
    with cupyattn.backend("emulator"):
        assert abs(model.loss(IDS[:, :7]) - expected) < 5e-3


def test_what_is_refused():
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    with pytest.raises(ValueError, match=r"labels have shape \(3, 10\), ids \(3, 11\)"):
        model.loss(IDS, IDS[:, 1:])
    with pytest.raises(TypeError, match="ids are of float64"):
        model.loss(IDS, IDS * 1.0)
    with pytest.raises(ValueError, match="67"):
        model.loss(IDS, np.full_like(IDS, 67))
