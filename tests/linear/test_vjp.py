"""`vjp` of linear: what it saves, and the gradients of all that a call may have."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import cupyattn
from cupyattn import LinearGrads, linear, linear_backward, linear_gelu, linear_gelu_backward, vjp

RNG = np.random.default_rng(0)
X, DOUT = RNG.standard_normal((2, 5, 4), dtype=np.float32)
W = RNG.standard_normal((4, 4), dtype=np.float32)
B = RNG.standard_normal(4, dtype=np.float32)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_pullback_gives_what_the_backward_does(activation):
    out, pullback = vjp(linear, X, W, B, activation=activation)
    assert_array_equal(out, linear(X, W, B, activation=activation))
    _, z = linear(X, W, B, activation=activation, return_preactivation=True)
    expected = linear_backward(DOUT, X, W, B, activation=activation, preactivation=z)
    for gradient, right in zip(pullback(DOUT), expected, strict=True):
        assert_array_equal(gradient, right)


def test_a_residual_by_name():
    out, pullback = vjp(linear, X, W, residual=X, activation="relu", wrt=("residual",))
    dx, dw, more = pullback(DOUT)
    assert_array_equal(more["residual"], DOUT)
    assert dx.shape == X.shape
    assert dw.shape == W.shape
    assert out.shape == DOUT.shape


def test_the_preactivation_is_a_result_without_a_gradient():
    (out, z), pullback = vjp(linear, X, W, activation="relu", return_preactivation=True)
    assert_array_equal(out, np.maximum(z, 0))
    dx, _ = pullback((DOUT, None))
    assert dx.shape == X.shape
    with pytest.raises(TypeError, match=r"preactivation was given; .* has no gradient; pass None"):
        pullback((DOUT, DOUT))


def test_gradients_into_arrays_and_added_up():
    _, pullback = vjp(linear_gelu, X, W, B, approximate="none")
    grads = LinearGrads(*map(np.zeros_like, (X, W, B)))
    once = pullback(DOUT, grads=grads)
    assert once[1] is grads.dw
    kept = grads.dw.copy()
    pullback(DOUT, grads=grads, accumulate=True)
    np.testing.assert_allclose(grads.dw, 2 * kept, rtol=1e-6)
    expected = linear_gelu_backward(DOUT, X, W, B, approximate="none")
    np.testing.assert_allclose(kept, expected.dw, rtol=1e-5)


def test_of_a_part_of_the_arrays():
    out, pullback = vjp(lambda w: cupyattn.linear(X, w, B), W)
    (dw,) = pullback(DOUT)
    np.testing.assert_allclose(dw, X.T @ DOUT, rtol=1e-5)
    assert out.shape == DOUT.shape


@pytest.mark.parametrize(
    "activation", [None, "gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu"]
)
def test_torch_says_the_same(activation):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    gated = activation in ("swiglu", "geglu")
    x, residual, dout = RNG.standard_normal((3, 2, 5, 6))
    weight, b = RNG.standard_normal((12 if gated else 6, 6)), RNG.standard_normal(6 + 6 * gated)
    given = [torch.tensor(array, requires_grad=True) for array in (x, weight, b, residual)]
    z = functional.linear(*given[:3])
    act = {
        None: lambda z: z,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
        "swiglu": lambda z: functional.silu(z[..., :6]) * z[..., 6:],
        "geglu": lambda z: functional.gelu(z[..., :6]) * z[..., 6:],
    }[activation]
    expected = act(z) + given[3]
    options = {"activation": activation, "residual": residual, "wrt": ("residual",)}
    out, pullback = vjp(linear, x, weight.T, b, **options)
    assert_allclose(out, expected.detach().numpy(), rtol=1e-9, atol=1e-12)
    dx, dw, db, more = pullback(dout)
    gradients = torch.autograd.grad(expected, given, torch.tensor(dout))
    for found, right in zip((dx, dw.T, db, more["residual"]), gradients, strict=True):
        assert_allclose(found, right.numpy(), rtol=1e-9, atol=1e-12)
