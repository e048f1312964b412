"""The NumPy linear: gradients by finite differences, float32 within its bound, bounds that bite."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.linear_problems import ACTIVATIONS, GATED

import cupyattn
from cupyattn import reference
from cupyattn.reference import error_ratio

RNG = np.random.default_rng(5)


def arrays(activation, rows=6, inner=9, outer=7):
    width = outer * (2 if activation in GATED else 1)
    shapes = (rows, inner), (inner, width), (width,), (rows, outer), (rows, outer)
    return [RNG.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("saved", [False, True])
def test_gradients_are_those_of_finite_differences(activation, saved):
    x, w, b, residual, dout = arrays(activation)
    call = partial(cupyattn.linear, activation=activation)
    out, z = call(x, w, b, residual=residual, return_preactivation=True)
    assert out.shape == dout.shape
    grads = cupyattn.linear_backward(
        dout, x, w, b, activation=activation, preactivation=z if saved else None
    )
    step = 1e-6
    for index, gradient in enumerate(grads):
        direction = RNG.standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [x, w, b]
            moved[index] = moved[index] + sign * step * direction
            ends.append((dout * call(*moved, residual=residual)).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(slope - (gradient * direction).sum()) < 1e-6 * max(abs(slope), 1)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "swiglu"])
def test_float32_is_computed_in_float32_within_the_bound(activation):
    x, w, b, residual, dout = (a.astype(np.float32) for a in arrays(activation, 33, 200, 40))
    out = cupyattn.linear(x, w, b, residual=residual, activation=activation)
    exact = [a.astype(np.float64) for a in (x, w, b, residual)]
    expected, _ = reference.linear(*exact, activation=activation)
    bound, _ = reference.linear_bound(x, w, b, residual, activation=activation, dtype="float32")
    assert 0 < error_ratio(out, expected, bound) <= 1  # in float64 it would be rounded once
    grads = cupyattn.linear_backward(dout, x, w, b, activation=activation)
    exact = [a.astype(np.float64) for a in (dout, x, w, b)]
    expected_grads = reference.linear_backward(*exact, activation=activation)
    bounds = reference.linear_backward_bound(dout, x, w, b, activation=activation, dtype="float32")
    for each in zip(grads, expected_grads, bounds, strict=True):
        assert error_ratio(*each) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_bounds_tell_the_two_gelus_and_a_dropped_term_apart(dtype, activation):
    x, w, b, _, dout = (a.astype(dtype) for a in arrays(activation, 8, 40, 16))
    exact = [a.astype(np.float64) for a in (x, w, b)]
    bound, z_bound = reference.linear_bound(x, w, b, activation=activation, dtype=dtype)
    expected, z = reference.linear(*exact, activation=activation)
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "silu": "gelu"}[activation]
    assert error_ratio(reference.linear(*exact, activation=other)[0], expected, bound) > 1
    dropped = reference.linear(exact[0][:, :-1], exact[1][:-1], exact[2], activation=activation)
    assert error_ratio(dropped[0], expected, bound) > 10
    assert error_ratio(dropped[1], z, z_bound) > 10
    exact = [dout.astype(np.float64), *exact]
    bounds = reference.linear_backward_bound(dout, x, w, b, activation=activation, dtype=dtype)
    right = reference.linear_backward(*exact, activation=activation)
    wrong = reference.linear_backward(*exact, activation=other)
    if dtype == "float32" or activation == "silu":  # a rounded z hides the two gelus' difference
        assert max(map(error_ratio, wrong, right, bounds)) > 1
    short = reference.linear_backward(
        exact[0][:-1], exact[1][:-1], *exact[2:], activation=activation
    )
    assert error_ratio(short.dw, right.dw, bounds.dw) > 10
    assert error_ratio(short.db, right.db, bounds.db) > 10


def test_gated_activations_are_what_they_are_made_of():
    x, w, b, _, _ = arrays("swiglu")
    gate, up = (cupyattn.linear(x, w[:, half], b[half]) for half in (slice(7), slice(7, None)))
    swiglu = cupyattn.linear(x, w, b, activation="swiglu")
    np.testing.assert_allclose(swiglu, gate / (1 + np.exp(-gate)) * up)
    geglu = cupyattn.linear(x, w, b, activation="geglu")
    np.testing.assert_allclose(geglu, cupyattn.linear(x, w[:, :7], b[:7], activation="gelu") * up)


def test_gelu_tanh_is_its_formula_and_near_gelu():
    x, w, b, _, _ = arrays("gelu")
    z = x @ w + b
    tanh = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    np.testing.assert_allclose(cupyattn.linear_gelu(x, w, b), tanh, rtol=1e-10, atol=1e-14)
    exact = cupyattn.linear_gelu(x, w, b, approximate="none")
    assert 0 < np.abs(exact - tanh).max() < 1e-3
