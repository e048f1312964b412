"""vjp: the result is the call's, the pullback is the backward of just that call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import EmulatedArrays
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import AttentionProblem, attention_problems

import cupyattn
from cupyattn import AttentionGrads, attention, attention_backward, softmax, softmax_backward, vjp

PROBLEM = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6, drawn=(("causal", True),))


def assert_all_equal(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert_array_equal(left, right)


@given(problem=attention_problems(largest=20), return_lse=st.booleans(), use_lse=st.booleans())
def test_attention_is_its_forward_and_its_backward(problem, return_lse, use_lse):
    arrays, options = problem.arrays(), problem.options()
    dout, dlse = problem.gradients()
    result, pullback = vjp(attention, *arrays, **options, return_lse=return_lse)
    out, lse = attention(*arrays, **options, return_lse=True)
    assert_all_equal(result if return_lse else (result,), (out, lse)[: 1 + return_lse])

    given_gradients = (dout, dlse) if return_lse and use_lse else (dout,)
    expected = attention_backward(
        dout, *arrays, out, lse, **options, dlse=dlse if len(given_gradients) == 2 else None
    )
    assert_all_equal(pullback(*given_gradients), expected[:3])
    grads = pullback.backward(*given_gradients)
    assert isinstance(grads, AttentionGrads)
    assert_all_equal(grads, expected)


def test_softmax_is_its_forward_and_its_backward():
    x, dout = np.random.default_rng(0).standard_normal((2, 3, 9), dtype=np.float32)
    out, pullback = vjp(softmax, x)
    assert_array_equal(out, softmax(x))
    (dx,) = pullback(dout)
    assert_array_equal(dx, softmax_backward(dout, out))
    assert pullback(dout, dx=dx)[0] is dx


def test_gradients_are_those_of_finite_differences():
    q, k, v = (x.astype(np.float32) for x in PROBLEM.arrays())
    options = {"causal": True, "bias": PROBLEM.normal("bias", (5, 7))}
    dout, dlse = PROBLEM.gradients()
    _, pullback = vjp(attention, q, k, v, **options, return_lse=True)
    grads = pullback.backward(dout, dlse)
    rng = np.random.default_rng(0)
    moved = {"q": q, "k": k, "v": v, "bias": options["bias"]}
    for name, gradient in zip(moved, grads[:4], strict=True):
        direction, slopes = rng.standard_normal(gradient.shape), []
        for step in (1e-2, -1e-2):
            there = {**moved, name: (moved[name] + step * direction).astype(np.float32)}
            *arrays, bias = there.values()
            out, lse = attention(*arrays, causal=True, bias=bias, return_lse=True)
            slopes.append((out * dout).sum(dtype=float) + (lse * dlse).sum(dtype=float))
        slope = (slopes[0] - slopes[1]) / 2e-2
        assert_allclose((gradient * direction).sum(), slope, rtol=1e-2, atol=1e-2, err_msg=name)


def test_options_of_the_backward_go_through_the_pullback():
    arrays, (dout, _) = PROBLEM.arrays(), PROBLEM.gradients()
    _, pullback = vjp(attention, *arrays, causal=True)
    once = pullback(dout)
    total = AttentionGrads(*map(np.zeros_like, arrays), None, None)
    for _ in range(2):
        returned = pullback(dout, grads=total, accumulate=True)
    for gradient, target, first in zip(returned, total[:3], once, strict=True):
        assert gradient is target
        assert_allclose(gradient, 2 * first, rtol=1e-6)


@pytest.mark.nvrtc
def test_on_the_emulator_the_kernels_run():
    arrays, (dout, _) = PROBLEM.arrays(), PROBLEM.gradients()
    expected = vjp(attention, *arrays, causal=True)[1](dout)
    side = EmulatedArrays()
    with side.running():
        _, pullback = vjp(attention, *map(side.put, arrays), causal=True, implementation="naive")
        gradients = pullback(side.put(dout))
        with pytest.raises(NotImplementedError, match=r"'tiled'.*'naive'"):
            pullback(side.put(dout), implementation="tiled")
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


def test_what_has_no_backward_is_refused():
    x = np.zeros((1, 2), np.float32)
    for function in (np.exp, attention_backward, lambda y: softmax(y), 3, []):
        with pytest.raises(TypeError, match=r"vjp of .*; functions .* attention, softmax; pass"):
            vjp(function, x)


def test_out_is_refused():
    arrays = PROBLEM.arrays()
    out = attention(*arrays)
    for function, given_arrays in ((attention, arrays), (softmax, arrays[:1])):
        with pytest.raises(TypeError, match=r"vjp with out=; .*keeps the result.*; leave out"):
            vjp(function, *given_arrays, out=out)


def test_the_defaults_may_be_said():
    """As of any call; None that the backward does not know must not reach it."""
    arrays, (dout, _) = PROBLEM.arrays(), PROBLEM.gradients()
    _, pullback = vjp(attention, *arrays, out=None, workspace=None, mask=None)
    assert_all_equal(pullback(dout), vjp(attention, *arrays)[1](dout))
    x = np.random.default_rng(0).standard_normal((2, 3), dtype=np.float32)
    out, pullback = vjp(softmax, x, out=None)
    assert_array_equal(pullback(out)[0], softmax_backward(out, out))


def test_lse_alone_may_be_used():
    arrays, (dout, dlse) = PROBLEM.arrays(), PROBLEM.gradients()
    _, pullback = vjp(attention, *arrays, return_lse=True)
    assert_all_equal(pullback(None, dlse), pullback(np.zeros_like(dout), dlse))
    for nothing_used in ((None,), (None, None)):
        for gradient in pullback(*nothing_used):
            assert not gradient.any()
    _, pullback = vjp(attention, *arrays)
    with pytest.raises(TypeError, match=r"dout is None; "):
        pullback(None)


@pytest.mark.nvrtc
def test_lse_alone_may_be_used_on_the_emulator():
    arrays, (_, dlse) = PROBLEM.arrays(), PROBLEM.gradients()
    expected = vjp(attention, *arrays, return_lse=True)[1](None, dlse)
    with cupyattn.backend("emulator"):
        _, pullback = vjp(attention, *arrays, return_lse=True, implementation="naive")
        gradients = pullback(None, dlse)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("return_lse", "count"), [(False, 0), (False, 2), (True, 0), (True, 3)])
def test_a_gradient_for_each_result(return_lse, count):
    dout = PROBLEM.gradients()[0]
    _, pullback = vjp(attention, *PROBLEM.arrays(), return_lse=return_lse)
    with pytest.raises(TypeError, match=rf"given {count} gradients; the call had {1 + return_lse}"):
        pullback(*[dout] * count)


def test_errors_are_those_of_the_functions():
    q, k, v = PROBLEM.arrays()
    with pytest.raises(ValueError, match=r"k has shape"):
        vjp(attention, q, k[..., :3], v)
    with pytest.raises(TypeError, match=r"return_lse = 1; it is True or False"):
        vjp(attention, q, k, v, return_lse=1)
    _, pullback = cupyattn.vjp(attention, q, k, v)
    with pytest.raises(ValueError, match=r"dout has shape"):
        pullback(q)
