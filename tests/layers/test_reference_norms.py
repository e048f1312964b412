"""The reference of the norms against scalar loops, finite differences and PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn
from cupyattn import LayerNormGrads, vjp

OPTIONS = st.fixed_dictionaries(
    {
        "centred": st.booleans(),
        "arrays": st.sets(st.sampled_from(("weight", "bias", "residual"))),
        "length": st.sampled_from((1, 2, 9, 33)),
        "rows": st.integers(1, 4),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def drawn(centred, arrays, length, rows, seed):
    """Arrays in float64 by name; what is not there is None."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, length), "dout": (rows, length)}
    shapes |= dict.fromkeys(("weight", "bias"), (length,))
    shapes |= dict.fromkeys(("residual", "dtotal"), (rows, length))
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    absent = {"weight", "bias", "residual"} - arrays | ({"bias"} if not centred else set())
    return found | dict.fromkeys(absent) | ({"dtotal": None} if "residual" in absent else {})


def call(centred, given_arrays, **options):
    """(out, sum or x), by the public functions."""
    positional = [given_arrays["x"], given_arrays["weight"]]
    if centred:
        positional.append(given_arrays["bias"])
    function = cupyattn.layer_norm if centred else cupyattn.rms_norm
    if not centred:
        options["weight_offset"] = 0.5
    residual = given_arrays["residual"]
    found = function(*positional, residual=residual, eps=0.01, **options)
    return found if residual is not None else (found, given_arrays["x"])


@given(OPTIONS)
def test_matches_scalar_loops(options):
    arrays = drawn(**options)
    out, total = call(options["centred"], arrays)
    offset = 0.0 if options["centred"] else 0.5
    for row, x in enumerate(arrays["x"]):
        items = [float(v) for v in x]
        if arrays["residual"] is not None:
            items = [a + float(b) for a, b in zip(items, arrays["residual"][row], strict=True)]
        np.testing.assert_allclose(total[row], items, rtol=1e-15)
        mean = math.fsum(items) / len(items) if options["centred"] else 0.0
        square = math.fsum((v - mean) ** 2 for v in items) / len(items)
        expected = [(v - mean) / math.sqrt(square + 0.01) for v in items]
        if arrays["weight"] is not None:
            expected = [v * (offset + w) for v, w in zip(expected, arrays["weight"], strict=True)]
        if arrays["bias"] is not None:
            expected = [v + b for v, b in zip(expected, arrays["bias"], strict=True)]
        np.testing.assert_allclose(out[row], expected, rtol=1e-12, atol=1e-12)


@given(OPTIONS)
def test_gradients_match_finite_differences(options):
    """Through vjp: with a residual the sum takes x's place in the backward, and dx serves both."""
    centred, arrays = options["centred"], drawn(**options)
    function = cupyattn.layer_norm if centred else cupyattn.rms_norm
    names = [name for name in ("x", "weight", "bias") if centred or name != "bias"]
    named = {"eps": 0.01} | ({} if centred else {"weight_offset": 0.5})
    wrt = () if arrays["residual"] is None else ("residual",)
    named |= {name: arrays[name] for name in wrt}
    result, pullback = vjp(function, *(arrays[name] for name in names), wrt=wrt, **named)
    out = result[0] if wrt else result
    assert out.shape == arrays["x"].shape
    found = pullback((arrays["dout"], arrays["dtotal"]) if wrt else arrays["dout"])
    gradients = dict(zip(names, found, strict=False)) | (found[-1] if wrt else {})

    def loss(name, step):
        moved = arrays | {name: arrays[name] + step}
        out, total = call(centred, moved)
        more = 0.0 if arrays["dtotal"] is None else (arrays["dtotal"] * total).sum()
        return (arrays["dout"] * out).sum() + more

    for name, gradient in gradients.items():
        if arrays[name] is None:
            assert gradient is None
            continue
        direction = np.random.default_rng(options["seed"]).standard_normal(arrays[name].shape)
        h = 1e-5
        difference = (loss(name, h * direction) - loss(name, -h * direction)) / (2 * h)
        derivative = (gradient * direction).sum()
        np.testing.assert_allclose(derivative, difference, rtol=1e-5, atol=1e-6 * arrays["x"].size)


def test_the_gradient_of_a_residual_is_that_of_x():
    x, residual, dout = np.random.default_rng(0).standard_normal((3, 4, 8))
    (_, total), pullback = vjp(cupyattn.layer_norm, x, residual=residual, wrt=("residual",))
    dx, more = pullback((dout, None))
    assert more["residual"] is dx
    stats = cupyattn.layer_norm(x, residual=residual, return_stats=True)[2:]
    expected = cupyattn.layer_norm_backward(dout, total, None, *stats)
    np.testing.assert_array_equal(dx, expected.dx)
    dx, _ = pullback((None, dout))  # the sum alone
    np.testing.assert_array_equal(dx, dout)
    (_, again, mean, rstd), _ = vjp(cupyattn.layer_norm, x, residual=residual, return_stats=True)
    assert mean.shape == rstd.shape == (4,)
    np.testing.assert_array_equal(again, total)


def test_statistics_are_those_of_the_rounded_sum():
    """1 + 2^-11 is 1 in float16: the sum has no variance left."""
    x = np.ones((1, 4), np.float16)
    residual = np.array([[2.0**-11, 0, 2.0**-12, 0]], np.float16)
    out, total, mean, rstd = cupyattn.layer_norm(x, residual=residual, return_stats=True)
    assert (total == 1).all()
    assert not out.any()
    assert mean[0] == 1
    assert rstd[0] == np.float32(1e-5**-0.5)


def test_against_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 5, 33))
    weight, bias = rng.standard_normal((2, 33))
    tensors = [torch.tensor(array, requires_grad=True) for array in (x, weight, bias)]
    theirs = torch.nn.functional.layer_norm(tensors[0], (33,), *tensors[1:], eps=1e-5)
    theirs.backward(torch.tensor(dout))
    out, mean, rstd = cupyattn.layer_norm(x, weight, bias, return_stats=True)
    np.testing.assert_allclose(out, theirs.detach(), rtol=1e-12, atol=1e-12)
    grads = cupyattn.layer_norm_backward(dout, x, weight, mean, rstd, bias=bias)
    for mine, tensor in zip(grads, tensors, strict=True):
        np.testing.assert_allclose(mine, tensor.grad, rtol=1e-10, atol=1e-10)


def test_rms_norm_against_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x, dout, weight = *rng.standard_normal((2, 5, 33)), rng.standard_normal(33)
    tensors = [torch.tensor(array, requires_grad=True) for array in (x, weight)]
    theirs = torch.nn.functional.rms_norm(tensors[0], (33,), tensors[1], eps=1e-6)
    theirs.backward(torch.tensor(dout))
    out, rstd = cupyattn.rms_norm(x, weight, return_stats=True)
    np.testing.assert_allclose(out, theirs.detach(), rtol=1e-12, atol=1e-12)
    for mine, tensor in zip(
        cupyattn.rms_norm_backward(dout, x, weight, rstd), tensors, strict=True
    ):
        np.testing.assert_allclose(mine, tensor.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_into_arrays_that_are_given(accumulate):
    x, dout = np.random.default_rng(0).standard_normal((2, 3, 4))
    weight = np.ones(4)
    _, mean, rstd = cupyattn.layer_norm(x, weight, return_stats=True)
    plain = cupyattn.layer_norm_backward(dout, x, weight, mean, rstd)
    given_grads = LayerNormGrads(np.full((3, 4), 5.0), np.full(4, 5.0))
    found = cupyattn.layer_norm_backward(
        dout, x, weight, mean, rstd, grads=given_grads, accumulate=accumulate
    )
    assert found.dx is given_grads.dx
    assert found.dbias is None
    np.testing.assert_allclose(found.dx, plain.dx + 5 * accumulate)
    np.testing.assert_allclose(found.dweight, plain.dweight + 5 * accumulate)
