import math

import numpy as np
import pytest
from hypothesis import given, settings
from support.dtypes import DTYPES
from support.strategies import softmax_problems

import cupyattn
from cupyattn import reference, vjp
from cupyattn.reference import softmax, softmax_backward


@settings(deadline=None, max_examples=60)
@given(softmax_problems(dtypes=DTYPES, row_lengths=(0, 1, 2, 33)))
def test_matches_scalar_loops(problem):
    x = problem.x()
    result = softmax(x)
    assert result.shape == x.shape
    assert result.dtype == np.float64
    rows = x.reshape(-1, x.shape[-1]) if x.size else np.empty((0, 1))
    for row, actual in zip(rows[:5], result.reshape(rows.shape)[:5], strict=True):
        total = sum(math.exp(value) for value in row.astype(np.float64))
        expected = [math.exp(value) / total if total else 0.0 for value in row.astype(np.float64)]
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-300)


def test_special_values():
    inf, nan = np.inf, np.nan
    x = [[0.0, -inf], [-inf, -inf], [nan, 0.0], [inf, 0.0], [1e308, -1e308]]
    expected = [[1.0, 0.0], [0.0, 0.0], [nan, nan], [nan, nan], [1.0, 0.0]]
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(softmax(x), expected)
        assert softmax(np.empty((3, 0))).shape == (3, 0)
        assert softmax_backward(np.empty((3, 0)), np.empty((3, 0))).shape == (3, 0)


@settings(deadline=None, max_examples=30)
@given(softmax_problems(row_lengths=(1, 2, 33)))
def test_backward_matches_finite_differences(problem):
    x, dout = problem.x().astype(np.float64), problem.dout().astype(np.float64)
    direction = np.random.default_rng(problem.seed).standard_normal(x.shape)
    h = 1e-5
    difference = ((softmax(x + h * direction) - softmax(x - h * direction)) * dout).sum() / (2 * h)
    derivative = (softmax_backward(dout, softmax(x)) * direction).sum()
    np.testing.assert_allclose(derivative, difference, rtol=1e-6, atol=1e-7 * max(1, x.size))


RNG = np.random.default_rng(0)
MASK = RNG.random((3, 5)) < 0.7
MASK[1] = False  # with causality and this, rows without a column
OPTIONS = {
    "plain": {},
    "scaled": {"scale": -1.5},
    "masked": {"mask": MASK},
    "all of it": {
        "scale": 0.7,
        "mask": MASK,
        "bias": RNG.standard_normal((2, 1, 5)),
        "causal": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_scores_are_what_scalar_loops_make_of_them(name):
    x, options = RNG.standard_normal((2, 3, 5)), OPTIONS[name]
    mask = np.broadcast_to(options.get("mask", True), x.shape)
    bias = np.broadcast_to(options.get("bias", 0.0), x.shape)
    weights = np.zeros(x.shape)
    for b, i, j in np.ndindex(x.shape):
        if mask[b, i, j] and not (options.get("causal") and j > i + 5 - 3):
            weights[b, i, j] = math.exp(options.get("scale", 1.0) * x[b, i, j] + bias[b, i, j])
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        expected = weights / np.where(total, total, 1)
        np.testing.assert_allclose(softmax(x, **options), expected, rtol=1e-12)
        np.testing.assert_allclose(
            reference.log_softmax(x, **options), np.log(expected), atol=1e-12
        )
        np.testing.assert_allclose(reference.logsumexp(x, **options), np.log(total[..., 0]))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_gradients_are_those_of_finite_differences(function, name):
    """Through vjp, on float64: the public functions and their rules."""
    x, direction = RNG.standard_normal((2, 2, 3, 5))
    call = getattr(cupyattn, function)
    out, pullback = vjp(call, x, **OPTIONS[name])
    dout = np.where(np.isneginf(out), 0.0, RNG.standard_normal(out.shape))
    (dx,) = pullback(dout)
    step = 1e-5
    with np.errstate(invalid="ignore"):
        moved = call(x + step * direction, **OPTIONS[name]) - call(
            x - step * direction, **OPTIONS[name]
        )
    difference = (np.where(np.isneginf(out), 0.0, moved) * dout).sum() / (2 * step)
    np.testing.assert_allclose((dx * direction).sum(), difference, rtol=1e-7, atol=1e-9)
    if "bias" in OPTIONS[name] and function != "logsumexp":
        backward = getattr(cupyattn, f"{function}_backward")
        np.testing.assert_allclose(backward(dout, out), dx / OPTIONS[name]["scale"], atol=1e-12)


def test_a_bias_of_logsumexp_has_no_gradient_of_its_own():
    x = RNG.standard_normal((3, 5))
    with pytest.raises(TypeError, match=r"wrt names 'bias'.*logsumexp has gradients of x"):
        vjp(cupyattn.logsumexp, x, bias=x, wrt=("bias",))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 1), (2, 1, 5), (1, 1, 1), (2, 3, 5)])
def test_the_gradient_of_a_bias_is_that_of_finite_differences(name, shape):
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 2, 3, 5))
    bias, direction = rng.standard_normal((2, *shape))
    options = {"scale": -1.5, "mask": rng.random((3, 5)) < 0.7}
    function = getattr(cupyattn, name)

    def total(step):
        out = function(x, bias=bias + step * direction, **options)
        return float((np.where(np.isneginf(out), 0.0, out) * dout).sum())

    _, pullback = vjp(lambda b: function(x, bias=b, **options), bias)
    (dbias,) = pullback(dout)
    assert dbias.shape == shape
    difference = (total(1e-5) - total(-1e-5)) / 2e-5
    np.testing.assert_allclose((dbias * direction).sum(), difference, rtol=1e-6, atol=1e-8)


def test_torch_has_the_same_gradient_of_a_bias():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 2, 3, 5))
    bias = rng.standard_normal((3, 1, 5))
    x, dout = (np.stack([array] * 3, axis=1) for array in (x, dout))
    given_bias = torch.tensor(bias, requires_grad=True)
    expected = torch.softmax(0.5 * torch.tensor(x) + given_bias, dim=-1)
    (gradient,) = torch.autograd.grad(expected, given_bias, torch.tensor(dout))
    _, pullback = vjp(cupyattn.softmax, x, bias=bias, scale=0.5, wrt=("bias",))
    np.testing.assert_allclose(pullback(dout)[1]["bias"], gradient.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_torch_computes_the_same(name, masked):
    """With a mask, and causal: the first of six rows sees four of nine columns, the last all."""
    torch = pytest.importorskip("torch")
    x = RNG.standard_normal((6, 9))
    mask = RNG.random((6, 9)) < 0.8
    mask[:, 0] = True
    given, seen = torch.tensor(x, requires_grad=True), mask & np.tri(6, 9, 3, dtype=bool)
    scores = given.masked_fill(torch.tensor(~seen), -np.inf) if masked else given
    result = getattr(torch, name)(scores, dim=-1)
    expected = result.detach().numpy()
    dout = np.where(np.isfinite(expected), RNG.standard_normal(expected.shape), 0)
    (gradient,) = torch.autograd.grad(result, given, torch.tensor(dout))
    options = {"causal": True, "mask": mask} if masked else {}
    out, pullback = vjp(getattr(cupyattn, name), x, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(pullback(dout)[0], gradient.numpy(), rtol=1e-9, atol=1e-12)
