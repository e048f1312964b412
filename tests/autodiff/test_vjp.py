"""vjp: the result is the call's, the pullback is the backward of just that call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import CUPY, EMULATED, NUMPY, EmulatedArrays, placed
from support.strategies import attention_problems

import cupyattn
from cupyattn import AttentionGrads, attention, attention_backward, softmax, softmax_backward, vjp
from cupyattn.testing import AttentionCase

EMULATED_DEEP = (pytest.mark.deep, pytest.mark.nvrtc)
PROBLEM = AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6, options=(("causal", True),))


def assert_all_equal(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert_array_equal(left, right)


@given(problem=attention_problems(largest=20), return_lse=st.booleans(), use_lse=st.booleans())
def test_attention_is_its_forward_and_its_backward(problem, return_lse, use_lse):
    arrays, options = problem.arrays(), problem.keywords()
    dout, dlse = problem.gradients()
    result, pullback = vjp(attention, *arrays, **options, return_lse=return_lse)
    out, lse = attention(*arrays, **options, return_lse=True)
    assert_all_equal(result if return_lse else (result,), (out, lse)[: 1 + return_lse])

    used = dlse if return_lse and use_lse else None
    expected = attention_backward(dout, *arrays, out, lse, **options, dlse=used)
    assert_all_equal(pullback((dout, used) if return_lse else dout), expected[:3])


def test_softmax_is_its_forward_and_its_backward():
    x, dout = np.random.default_rng(0).standard_normal((2, 3, 9), dtype=np.float32)
    out, pullback = vjp(softmax, x)
    assert_array_equal(out, softmax(x))
    (dx,) = pullback(dout)
    assert_array_equal(dx, softmax_backward(dout, out))
    assert pullback(dout, grads=dx)[0] is dx


def test_the_axis_of_softmax_is_that_of_its_backward():
    x, dout = np.random.default_rng(0).standard_normal((2, 9, 3), dtype=np.float32)
    expected = vjp(softmax, x)[1](dout)[0].T
    (dx,) = vjp(softmax, x.T, axis=0)[1](dout.T)
    assert_array_equal(dx, expected)
    with pytest.raises(TypeError, match="was given axis"):
        vjp(softmax, x)[1](dout, axis=0)


def test_gradients_are_those_of_finite_differences():
    q, k, v = (x.astype(np.float32) for x in PROBLEM.arrays())
    options = {"causal": True, "bias": PROBLEM.normal("bias", (5, 7))}
    dout, dlse = PROBLEM.gradients()
    _, pullback = vjp(attention, q, k, v, **options, wrt=("bias",), return_lse=True)
    *grads, named = pullback((dout, dlse))
    grads.append(named["bias"])
    rng = np.random.default_rng(0)
    moved = {"q": q, "k": k, "v": v, "bias": options["bias"]}
    for name, gradient in zip(moved, grads, strict=True):
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
    once = pullback(dout, deterministic=True)
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
        with pytest.raises(NotImplementedError, match=r"'tiled'.*pass implementation='flash'"):
            pullback(side.put(dout), implementation="tiled")
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


def test_out_is_refused():
    arrays = PROBLEM.arrays()
    out = attention(*arrays)
    for function, given_arrays in ((attention, arrays), (softmax, arrays[:1])):
        with pytest.raises(TypeError, match=r"vjp of .* with out=; .*keeps the result.*; leave"):
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
    assert_all_equal(pullback((None, dlse)), pullback((np.zeros_like(dout), dlse)))
    for gradient in pullback((None, None)):
        assert not gradient.any()
    _, pullback = vjp(attention, *arrays)
    with pytest.raises(TypeError, match=r"dout is None; "):
        pullback(None)


@pytest.mark.nvrtc
def test_lse_alone_may_be_used_on_the_emulator():
    arrays, (_, dlse) = PROBLEM.arrays(), PROBLEM.gradients()
    expected = vjp(attention, *arrays, return_lse=True)[1]((None, dlse))
    with cupyattn.backend("emulator"):
        _, pullback = vjp(attention, *arrays, return_lse=True, implementation="naive")
        gradients = pullback((None, dlse))
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_pullback_takes_one_argument(return_lse, count):
    _, pullback = vjp(attention, *PROBLEM.arrays(), return_lse=return_lse)
    with pytest.raises(TypeError, match=rf"attention was given {count} arguments; .*; pass .*dout"):
        pullback(*PROBLEM.gradients()[:count])


def test_the_pullback_takes_what_the_call_returned():
    arrays, (dout, dlse) = PROBLEM.arrays(), PROBLEM.gradients()
    _, pullback = vjp(attention, *arrays)
    for wrong in ((dout,), (dout, dlse), ()):
        with pytest.raises(
            TypeError, match=r"given a tuple of \d; the function returned out; pass dout"
        ):
            pullback(wrong)
    _, pullback = vjp(attention, *arrays, return_lse=True)
    for wrong, form in (
        (dout, "one ndarray"),
        ([dout, dlse], "one list"),
        (None, "one NoneType"),
        ((dout,), "a tuple of 1"),
        ((dout, dlse, dlse), "a tuple of 3"),
    ):
        with pytest.raises(
            TypeError,
            match=rf"given {form}; the function returned out and lse; pass one .* \(dout, dlse\)",
        ):
            pullback(wrong)


def test_errors_are_those_of_the_functions():
    q, k, v = PROBLEM.arrays()
    with pytest.raises(ValueError, match=r"k has shape"):
        vjp(attention, q, k[..., :3], v)
    with pytest.raises(TypeError, match=r"return_lse = 1; it is True or False"):
        vjp(attention, q, k, v, return_lse=1)
    _, pullback = cupyattn.vjp(attention, q, k, v)
    with pytest.raises(ValueError, match=r"dout has shape"):
        pullback(q)


@pytest.mark.parametrize(
    "option",
    [
        {"causal": True}, {"seed": 3}, {"dropout_p": 0.5}, {"softmax_scale": 1.0},
        {"bias": np.zeros((5, 7), np.float32)}, {"return_lse": True}, {"dlse": None},
        {"out": None}, {"nonsense": 1},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_the_pullback_takes_the_backwards_own_options_alone(option):
    """Another causal= or seed= would differentiate another call than the one that was made."""
    _, pullback = vjp(attention, *PROBLEM.arrays(), dropout_p=0.5, seed=2)
    (name,) = option
    with pytest.raises(
        TypeError,
        match=rf"the pullback of attention was given {name}; it takes .*, deterministic, "
        r"implementation, grads, accumulate, workspace; give vjp those of the call",
    ):
        pullback(PROBLEM.gradients()[0], **option)


def test_the_pullback_of_softmax_takes_no_others_either():
    x = np.zeros((2, 3), np.float32)
    _, pullback = vjp(softmax, x)
    with pytest.raises(
        TypeError,
        match=r"pullback of softmax was given out; it takes .*, grads, accumulate, workspace; ",
    ):
        pullback(x, out=x)


def options_with_gradients() -> dict[str, Any]:
    return {"bias": PROBLEM.normal("bias", (4, 1, 7)), "sinks": PROBLEM.normal("sinks", (4,))}


@pytest.mark.parametrize(
    ("side", "dim", "dim_v"),
    [
        (NUMPY, 24, 40),
        pytest.param(CUPY, 24, 40, marks=pytest.mark.gpu),
        *(pytest.param(EMULATED, *dims, marks=EMULATED_DEEP) for dims in ((24, 40), (8, 6))),
    ],
    indirect=["side"],
)
def test_options_get_their_gradients_by_name(side, dim, dim_v):
    options = {name: a.astype(np.float32) for name, a in options_with_gradients().items()}
    problem = replace(PROBLEM, D=dim, Dv=dim_v)
    arrays, dout = [x.astype(np.float32) for x in problem.arrays()], problem.gradients()[0]
    out, lse = attention(*map(side.put, arrays), **placed_all(side, options), return_lse=True)
    expected = attention_backward(
        side.put(dout), *map(side.put, arrays), out, lse, **placed_all(side, options),
        deterministic=True,
    )  # fmt: skip
    for wrt in ((), ("bias",), ("sinks", "bias")):
        result, pullback = vjp(
            attention, *map(side.put, arrays), **placed_all(side, options), wrt=wrt
        )
        assert_array_equal(side.get(result), side.get(out))
        gradients = pullback(side.put(dout), deterministic=True)
        assert len(gradients) == 3 + bool(wrt)
        for gradient, wanted in zip(gradients[:3], expected[:3], strict=True):
            assert_array_equal(side.get(gradient), side.get(wanted))
        if wrt:
            assert tuple(gradients[3]) == wrt
            for name, gradient in gradients[3].items():
                wanted = getattr(expected, f"d{name}")
                assert gradient.shape == options[name].shape
                assert_array_equal(side.get(gradient), side.get(wanted))


def placed_all(side: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: placed(side, value) for name, value in options.items()}


@pytest.mark.parametrize(
    ("wrt", "options", "message"),
    [
        ("bias", {}, r"wrt has type str; it must be a tuple of names.*; pass wrt=\(.bias.,\)"),
        (([],), {}, "wrt has type tuple with items that are no names; it must be a tuple of names"),
        (("bias",), {}, r"wrt names 'bias', which was not given; .* arrays; give vjp an array"),
        (("bias",), {"bias": None}, r"wrt names 'bias', which has type NoneType; "),
        (("causal",), {"causal": True}, r"wrt names 'causal', which has type bool; "),
        (("mask",), {"mask": np.ones((5, 7), bool)},
         r"'mask', which has no gradient .its dtype is bool.; .*; leave it out"),
        (("rotary",), {"rotary": (np.ones((7, 4), np.float32), np.zeros((7, 4), np.float32))},
         r"'rotary', which is rotary of attention, which has gradients of q, k, v, bias, sinks; "),
    ],
)  # fmt: skip
def test_wrt_that_is_refused(wrt, options, message):
    with pytest.raises(TypeError, match=message):
        vjp(attention, *PROBLEM.arrays(), **options, wrt=wrt)
