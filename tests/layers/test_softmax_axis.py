"""softmax over another axis than the last: the same numbers, in the arrays that were given."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.devices import everywhere

import cupyattn
from cupyattn import reference

X = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)


def turned(x: np.ndarray, axis: int) -> np.ndarray:
    """The same items, with that axis contiguous."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, axis, -1)), -1, axis)


@everywhere
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, np.int64(1)])
def test_the_axis_that_is_contiguous(side, axis):
    x, dout = side.put(turned(X, axis)), side.put(turned(X[::-1], axis))
    target = side.put(turned(np.zeros_like(X), axis))
    expected = np.moveaxis(reference.softmax(np.moveaxis(X, axis, -1)), -1, axis)
    out = cupyattn.softmax(x, axis=axis, out=target)
    assert out is target
    np.testing.assert_allclose(side.get(out), expected, atol=1e-6)
    np.testing.assert_allclose(side.get(cupyattn.softmax(x, axis=axis)), expected, atol=1e-6)
    dx = cupyattn.softmax_backward(dout, out, axis=axis)
    inner = (expected * X[::-1]).sum(axis=axis, keepdims=True)
    np.testing.assert_allclose(side.get(dx), expected * (X[::-1] - inner), atol=1e-6)


@everywhere
@pytest.mark.parametrize(
    ("x", "axis", "kind", "message"),
    [
        (X, 0, ValueError, r"axis 0 of x has a stride of 192 bytes; .* 4 bytes an item"),
        (X, 3, ValueError, r"axis = 3 of x with 3 axes; it is at least -3 and below 3"),
        (X, 1.0, TypeError, "axis is a float; it is an integer"),
        (X, True, TypeError, "axis is a bool"),
        (X[0, 0, 0], 0, ValueError, "x has no axes"),
    ],
)
def test_other_axes_are_refused(side, x, axis, kind, message):
    with pytest.raises(kind, match=message):
        cupyattn.softmax(side.put(np.asarray(x)), axis=axis)


@everywhere
def test_the_result_has_to_be_contiguous_along_it_too(side):
    with pytest.raises(ValueError, match="axis 0 of out has a stride of"):
        cupyattn.softmax(side.put(turned(X, 0)), axis=0, out=side.put(np.zeros_like(X)))


AXES = [0, 1, -2, np.int64(1)]


def followed(call: Any, arrays: dict[str, np.ndarray], name: str, *, written: bool = False) -> Any:
    """What a call returns once an array is made as its error says: that, if it is written."""
    with pytest.raises(ValueError, match=f"of {name} has a stride of") as refused:
        call(**arrays)
    fix = str(refused.value).split("; ")[-1]
    made = eval(re.search(r"numpy\..*, -?\d\)", fix)[0], {"numpy": np, **arrays})
    assert ("before the call" in fix) == written
    result = call(**{**arrays, name: made})
    assert (result is made) == written
    return result


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("function", [cupyattn.softmax, cupyattn.log_softmax])
@pytest.mark.parametrize("name", ["x", "out"])
def test_what_the_error_says_to_pass_is_taken(function, name, axis):
    """With the same axis, and what is written is an array that the caller has."""
    arrays = {"x": turned(X, axis), "out": turned(np.zeros_like(X), axis), name: X.copy()}

    def call(x: Any, out: Any) -> Any:
        return function(x, axis=axis, out=out)

    result = followed(call, arrays, name, written=name == "out")
    expected = function(turned(X, axis), axis=axis)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    "function", [cupyattn.softmax_backward, cupyattn.log_softmax_backward], ids=["plain", "log"]
)
@pytest.mark.parametrize("name", ["dout", "out", "grads"])
def test_what_the_error_of_a_backward_says_to_pass_is_taken(function, name, axis):
    """The contents of grads, which are added to, are kept."""
    plain = {"dout": X, "out": X[::-1], "grads": X[:, ::-1]}
    arrays = {each: turned(array, axis) for each, array in plain.items()}

    def call(dout: Any, out: Any, grads: Any) -> Any:
        return function(dout, out, grads=grads, accumulate=True, axis=axis)

    expected = call(arrays["dout"], arrays["out"], arrays["grads"].copy(order="K"))
    result = followed(call, arrays | {name: plain[name].copy()}, name, written=name == "grads")
    np.testing.assert_array_equal(result, expected)


def test_what_the_error_of_a_pullback_says_to_pass_is_taken():
    x = turned(X, 1)
    _, pullback = cupyattn.vjp(cupyattn.softmax, x, axis=1)
    (dx,) = followed(lambda dout: pullback(dout), {"dout": X}, "dout")
    (expected,) = pullback(turned(X, 1))
    np.testing.assert_array_equal(dx, expected)
