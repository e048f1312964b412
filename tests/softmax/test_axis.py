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
    """Copy x so that the axis is contiguous."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, axis, -1)), -1, axis)


@everywhere
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, np.int64(1)])
def test_contiguous_axis_gives_the_softmax_along_it(side, axis):
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
        (X, 1.0, TypeError, "axis has type float; it must be an integer"),
        (X, True, TypeError, "axis has type bool"),
        (X[0, 0, 0], 0, ValueError, "x has no axes"),
    ],
)
def test_strided_axis_is_refused(side, x, axis, kind, message):
    with pytest.raises(kind, match=message):
        cupyattn.softmax(side.put(np.asarray(x)), axis=axis)


@everywhere
def test_out_with_a_strided_axis_is_refused(side):
    with pytest.raises(ValueError, match="axis 0 of out has a stride of"):
        cupyattn.softmax(side.put(turned(X, 0)), axis=0, out=side.put(np.zeros_like(X)))


def followed(call: Any, arrays: dict[str, np.ndarray], name: str, *, written: bool = False) -> Any:
    """Call again with an array that is made as the error says, and return the result."""
    with pytest.raises(ValueError, match=f"of {name} has a stride of") as refused:
        call(**arrays)
    fix = str(refused.value).split("; ")[-1]
    made = eval(re.search(r"numpy\..*, -?\d\)", fix)[0], {"numpy": np, **arrays})
    assert ("before the call" in fix) == written
    result = call(**{**arrays, name: made})
    assert (result is made) == written
    return result


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize(
    ("of_backward", "name"),
    [(False, "x"), (False, "out"), (True, "dout"), (True, "out"), (True, "grads")],
)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_arrays_made_as_the_error_says_are_accepted(function, of_backward, name, axis):
    """The caller keeps an array that is written, and its contents where gradients are added."""
    forward, backward = getattr(cupyattn, function), getattr(cupyattn, f"{function}_backward")

    def run_forward(x: Any, out: Any) -> Any:
        return forward(x, axis=axis, out=out)

    def run_backward(dout: Any, out: Any, grads: Any) -> Any:
        return backward(dout, out, grads=grads, accumulate=True, axis=axis)

    if of_backward:
        call, plain = run_backward, {"dout": X, "out": X[::-1], "grads": X[:, ::-1]}
    else:
        call, plain = run_forward, {"x": X, "out": np.zeros_like(X)}
    arrays = {each: turned(array, axis) for each, array in plain.items()}
    expected = call(**{each: array.copy(order="K") for each, array in arrays.items()})
    given = arrays | {name: plain[name].copy()}
    written = name == ("grads" if of_backward else "out")
    result = followed(call, given, name, written=written)
    np.testing.assert_array_equal(result, expected)


def test_a_pullback_copies_a_gradient_of_another_layout():
    x = turned(X, 1)
    _, pullback = cupyattn.vjp(cupyattn.softmax, x, axis=1)
    (dx,) = pullback(X)
    (expected,) = pullback(turned(X, 1))
    np.testing.assert_array_equal(dx, expected)


def test_missing_array_with_another_axis_is_refused():
    with pytest.raises(TypeError, match="x is None; it is not optional"):
        cupyattn.softmax(None, axis=0)
