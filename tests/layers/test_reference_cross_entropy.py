"""The reference of cross_entropy: scalar loops, finite differences, and torch where it is."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cupyattn
from cupyattn import reference, vjp

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((3, 4, 7)) * 3
LABELS = RNG.integers(0, 7, (3, 4))
LABELS[0, 1] = LABELS[2, 3] = -100
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "with z": {"z_loss": 0.03},
    "both": {"label_smoothing": 0.1, "z_loss": 0.01},
    "another index": {"ignore_index": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_what_scalar_loops_make(name):
    options = OPTIONS[name]
    ignored = options.get("ignore_index", -100)
    labels = np.where(LABELS == -100, ignored, LABELS)
    smoothing, z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    losses, lse = reference.cross_entropy(LOGITS, labels, reduction="none", **options)
    for at in np.ndindex(labels.shape):
        row = [float(value) for value in LOGITS[at]]
        log_sum = math.log(sum(map(math.exp, row)))
        share = [smoothing / 7] * 7
        share[labels[at] % 7] += 1 - smoothing
        loss = sum(p * (log_sum - value) for p, value in zip(share, row, strict=True))
        expected = 0.0 if labels[at] == ignored else loss + z * log_sum**2
        assert losses[at] == pytest.approx(expected, rel=1e-12)
        assert lse[at] == pytest.approx(log_sum, rel=1e-12)
    counted = np.count_nonzero(labels != ignored)
    for reduction, expected in (("sum", losses.sum()), ("mean", losses.sum() / counted)):
        found, _ = reference.cross_entropy(LOGITS, labels, reduction=reduction, **options)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_are_those_of_finite_differences(name, reduction, return_lse):
    """Through vjp, on float64: with return_lse also of the log-sum-exp."""
    ignored = OPTIONS[name].get("ignore_index", -100)
    labels = np.where(LABELS == -100, ignored, LABELS)
    options = {**OPTIONS[name], "reduction": reduction, "return_lse": return_lse}
    direction = RNG.standard_normal(LOGITS.shape)
    results, pullback = vjp(cupyattn.cross_entropy, LOGITS, labels, **options)
    several = results if return_lse else (results,)
    weights = tuple(RNG.standard_normal(np.shape(result))[()] for result in several)
    given = tuple(map(np.asarray, weights))
    dlogits, dlabels = pullback(given if return_lse else given[0])
    assert dlabels is None

    def scalar(step: float) -> float:
        found = cupyattn.cross_entropy(LOGITS + step * direction, labels, **options)
        pairs = zip(found if return_lse else (found,), weights, strict=True)
        return sum(float((result * weight).sum()) for result, weight in pairs)

    difference = (scalar(1e-5) - scalar(-1e-5)) / 2e-5
    np.testing.assert_allclose((dlogits * direction).sum(), difference, rtol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torch_says_the_same(reduction):
    torch = pytest.importorskip("torch")
    logits = torch.tensor(LOGITS.reshape(-1, 7), requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        logits, torch.tensor(LABELS.reshape(-1)), reduction=reduction, label_smoothing=0.1
    )
    options = {"reduction": reduction, "label_smoothing": 0.1}
    flat = LOGITS.reshape(-1, 7), LABELS.reshape(-1)
    loss, pullback = vjp(cupyattn.cross_entropy, *flat, **options)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-12)
    dloss = RNG.standard_normal(np.shape(loss))
    (gradient,) = torch.autograd.grad(expected, logits, torch.tensor(dloss))
    np.testing.assert_allclose(
        pullback(np.asarray(dloss))[0], gradient.numpy(), rtol=1e-9, atol=1e-12
    )
