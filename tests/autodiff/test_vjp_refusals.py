"""vjp of functions that are not one call of the library: each is refused, and says why."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.bad_input.every_function import every_function
from support.recording_device import device_array

import cupyattn
from cupyattn import (
    attention,
    checkpoint,
    grad,
    layer_norm,
    rms_norm,
    stop_gradient,
    vjp,
)
from cupyattn.runtime import differentiable as rules
from cupyattn.testing import AttentionCase

PROBLEM = AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
Q, K, V = (x.astype(np.float32) for x in PROBLEM.arrays())
DOUT = PROBLEM.gradients()[0]
BIAS = PROBLEM.normal("bias", (5, 7)).astype(np.float32)


@pytest.mark.parametrize("function", [3, []])
def test_an_object_that_cannot_be_called_is_refused(function):
    with pytest.raises(TypeError, match=r"an object of type .*, which cannot be called"):
        vjp(function, Q)


WITHOUT_BACKWARD = [
    call
    for call in every_function()
    if call.function.__name__ not in rules.names
    and any(x.dtype.kind == "f" for x in call.arrays.values() if isinstance(x, np.ndarray))
]


@pytest.mark.parametrize("call", WITHOUT_BACKWARD, ids=lambda call: call.function.__name__)
def test_functions_without_a_backward_are_named(call):
    """By themselves, in a partial and in a function of the caller's."""
    function, name = call.function, call.function.__name__
    arrays = tuple(call.arrays.values())
    for differentiated in (
        partial(function, **call.options),
        lambda *arrays: function(*arrays, **call.options),
    ):
        with pytest.raises(TypeError, match=f"calls {name}, which has no backward"):
            vjp(differentiated, *arrays)
    assert_nothing_is_recorded()


def assert_nothing_is_recorded() -> None:
    assert rules.recorder.get() is None
    assert isinstance(attention(Q, K, V), np.ndarray)


@pytest.mark.parametrize(
    "operation", ["list(np.asarray(q))", "copy.copy(q)", "pickle.dumps(q)", "q.data"]
)
def test_values_of_traced_arrays_are_refused(operation):
    with pytest.raises(TypeError, match=r"vjp of .* needs the values of a traced array"):
        vjp(lambda q: eval(operation, {"q": q, "copy": copy, "pickle": pickle, "np": np}), Q)


def test_functions_of_cupy_are_refused():
    """The arrays are described as CuPy's; there is no GPU, and no item is read."""
    cupy = pytest.importorskip("cupy")
    x = device_array(Q.shape, Q.dtype)
    for function in (cupy.asarray, cupy.asnumpy, lambda q: x.__setitem__(0, q)):
        with pytest.raises(TypeError):
            vjp(function, x)


@pytest.mark.parametrize("wrt", [("bias", "bias"), ("bias", "sinks", "bias")])
def test_wrt_that_names_an_option_twice(wrt):
    sinks = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"wrt names 'bias' 2 times; .*; leave out the others"):
        vjp(attention, Q, K, V, bias=BIAS, sinks=sinks, wrt=wrt)


def test_out_is_refused_inside_too():
    out = np.empty_like(DOUT)
    with pytest.raises(TypeError, match="vjp of attention with out="):
        vjp(lambda q: attention(q, K, V, out=out), Q)


def test_exceptions_of_the_function_are_its_own():
    def fails(q):
        attention(q, K, V)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vjp(fails, Q)
    assert_nothing_is_recorded()
    with pytest.raises(ValueError, match="k has shape"):
        vjp(lambda q: attention(q, K[..., :3], V), Q)
    assert_nothing_is_recorded()


@pytest.mark.parametrize(("function", "saved"), [(rms_norm, "rstd"), (layer_norm, "mean")])
def test_what_a_norm_saves_has_no_gradient(function, saved):
    """A gradient of it would be lost in silence."""
    x = np.ones((2, 3), np.float32)
    results, pullback = vjp(function, x, return_stats=True)
    of_saved = [np.ones(2, np.float32) for _ in results[1:]]
    assert len(pullback((x, *[None] * len(of_saved)))) == 1
    with pytest.raises(TypeError, match=f"was given d{saved}; .*not differentiated.*; pass None"):
        pullback((x, *of_saved))


X, Y = (np.random.default_rng(n).standard_normal((3, 4)) for n in (3, 4))


def written(x):
    x[0] = 1
    return x


def added(x):
    x += 1
    return x


ESCAPED: list[Any] = []


def escapes(x):
    ESCAPED.append(x)
    return x * 2


REFUSALS: dict[str, tuple[Callable[..., Any], str]] = {
    "a write": (written, r"traced array \(test_vjp_refusals.py, line \d+\).*y = x \+ 1"),
    "an addition in place": (added, "writes to a traced array"),
    "float": (lambda x: float(x.sum()), r"needs the values of a traced array \(float\)"),
    "a condition": (lambda x: x if x.sum() > 0 else -x, r"values of a traced array \(bool\)"),
    "item": (lambda x: x.sum().item(), r"values of a traced array \(item\)"),
    "another function": (np.cumsum, "calls numpy.cumsum, which has no derivative here"),
    "another ufunc": (np.floor, "calls numpy.floor, which has no derivative"),
    "a reduction of a ufunc": (np.multiply.reduce, "calls numpy.multiply.reduce"),
    "an option": (lambda x: np.sum(x, where=X > 0), "calls numpy.sum with arguments"),
    "an option of a ufunc": (lambda x: np.exp(x, where=X > 0), "calls numpy.exp with where"),
    "out=": (lambda x: np.add(x, 1, out=np.empty_like(X)), "passes out= to numpy.add"),
    "out= of a function": (lambda x: np.sum(x, out=np.empty(())), "passes out= to numpy.sum"),
    "a conversion": (np.asarray, "needs the values of a traced array"),
    "an array of it": (lambda x: np.array([x, x]), "needs the values of a traced array"),
    "an index": (lambda x: X[x], "needs the values of a traced array"),
    "a differentiable index": (lambda x: x[x], r"values of a traced array \(it is an index\)"),
    "a written array": (lambda x: X.copy().__setitem__(0, x), "needs the values"),
    "a function without a backward": (
        lambda x: cupyattn.softmax_backward(x, x), "calls softmax_backward, which has no backward",
    ),
    "a remainder": (lambda x: x % 2, r"values of a traced array \(mod\)"),
    "out= of the library": (
        lambda x: cupyattn.gelu(x, out=x), "passes a traced array as out= to gelu",
    ),
    "out= of a call of constants": (
        lambda x: cupyattn.gelu(X.copy(), out=x), "passes a traced array as out= to gelu",
    ),
    "another container": (lambda x: deque([x * 2]), "returns deque, in which vjp does not find"),
    "complex numbers": (lambda x: abs(x * 1j), "makes an array of complex128"),
    "where of a condition": (np.where, "calls numpy.where with a condition alone"),
    "arguments that are not supported": (
        lambda x: np.sum(x, initial=3), "calls numpy.sum with arguments that are not supported",
    ),
    "an order": (lambda x: x.reshape(4, 3, order="F"), "passes order='F'"),
    "a write in a checkpoint": (
        lambda x: checkpoint(added)(x), "writes to a traced array",
    ),
    "a computed argument in a checkpoint": (
        lambda x: checkpoint(lambda q, s: attention(q, q, q, alibi_slopes=s))(
            x.reshape(1, 3, 1, 4), x[0, :1] * 2
        ),
        "passes a computed array to <lambda>, where it is alibi_slopes of attention",
    ),
    "a computed argument without a gradient": (
        lambda x: attention(x.reshape(1, 3, 1, 4), *[X.reshape(1, 3, 1, 4)] * 2,
                            alibi_slopes=x[0, :1] * 2),
        "passes a computed array that is alibi_slopes of attention, which has gradients of",
    ),
    "vjp within": (lambda x: grad(lambda x: x.sum())(x), "calls vjp on a traced array"),
    "an error caught": (lambda x: _caught(x), "writes to a traced array"),
    "a captured array in a checkpoint": (
        lambda x: checkpoint(lambda y: y * x)(x), "uses a traced array that a checkpointed",
    ),
    "another mode of pad": (lambda x: np.pad(x, 1, mode="edge"), "pad with mode='edge'"),
}  # fmt: skip


def _caught(x):
    with suppress(TypeError):
        x[0] = 1
    return x * 2


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_derivative_is_refused(name):
    function, message = REFUSALS[name]
    before = X.copy()
    with pytest.raises(TypeError, match=message):
        vjp(function, X)
    assert_array_equal(X, before)
    assert isinstance(cupyattn.gelu(X), np.ndarray)


def test_an_escaped_array_is_refused():
    vjp(escapes, X)
    with pytest.raises(TypeError, match="uses a traced array after its function has returned"):
        ESCAPED[-1] * 2
    with pytest.raises(TypeError, match="uses a traced array after its function"):
        vjp(lambda x: x + ESCAPED[-1], X)


def test_an_array_of_an_outer_vjp_is_refused():
    def outer(x):
        return vjp(lambda y: y * x, Y)[0]

    with pytest.raises(TypeError, match="mixes traced arrays of two vjp"):
        vjp(outer, X)
    with pytest.raises(TypeError, match="returns a traced array of "):
        vjp(lambda x: vjp(lambda y: x, Y)[0], X)


def test_gradients_of_another_form_are_refused():
    _, pullback = vjp(lambda x: {"a": x * 2, "b": (x, x)}, X)
    for wrong in (X, [X], {"a": X}, {"a": X, "b": X}, {"a": X, "b": (X,)}, {"a": (X,), "b": None}):
        with pytest.raises(TypeError, match=r"pass one a dictionary of 'a', 'b' of gradients"):
            pullback(wrong)
    _, pullback = vjp(lambda x: x * 2, X)
    with pytest.raises(ValueError, match=r"dout has shape \(4, 3\) .*; the result has shape"):
        pullback(X.T)
    with pytest.raises(TypeError, match=r"dout has shape .* and dtype float32"):
        pullback(X.astype(np.float32))
    with pytest.raises(TypeError, match="dout is None"):
        pullback(None)
    with pytest.raises(TypeError, match="was given deterministic; options of a backward reach"):
        pullback(X, deterministic=True)
    assert_array_equal(vjp(lambda x: x.sum(), X)[1](2)[0], np.full_like(X, 2))


def test_complex_arrays_are_refused():
    with pytest.raises(TypeError, match="an array of complex128; gradients are of"):
        vjp(lambda x: x, X * 1j)


def test_an_argument_used_with_and_without_a_gradient_is_refused():
    q = np.random.default_rng(0).standard_normal((1, 3, 1, 4))

    def function(q, slopes):
        return attention(q, q, q, alibi_slopes=slopes) * slopes

    with pytest.raises(TypeError, match="uses an argument that is alibi_slopes of attention"):
        vjp(function, q, np.ones(1))
    kept = vjp(lambda q, s: attention(q, q, q, alibi_slopes=stop_gradient(s)) * s, q, np.ones(1))
    assert kept[1](q)[1].shape == (1,)


def test_an_argument_without_a_gradient_that_is_returned_is_refused():
    q = np.random.default_rng(0).standard_normal((1, 3, 1, 4))
    with pytest.raises(TypeError, match="uses an argument that is alibi_slopes of attention"):
        vjp(lambda q, s: (attention(q, q, q, alibi_slopes=s), s), q, np.ones(1))


@pytest.mark.parametrize("argnums", [[0, 1], 2, -3, "x"])
def test_argnums_that_are_refused(argnums):
    with pytest.raises(TypeError, match="argnums"):
        grad(lambda x, y: (x * y).sum(), argnums=argnums)(X, Y)


def test_a_number_has_no_gradient():
    with pytest.raises(TypeError, match="argument 0 of <lambda> has no gradient"):
        grad(lambda x: (x * X).sum())(2.0)


@pytest.mark.parametrize("kind", [np.matrix, np.ma.MaskedArray])
def test_subclasses_with_other_operators_are_refused(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = kind(X)
    with pytest.raises(TypeError, match="arguments are plain arrays"):
        vjp(lambda x: x * 2, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: cupyattn.matmul(a, a) * x,
        lambda x, a: cupyattn.matmul((100 * x).astype(np.int8), a).astype(np.float32),
        lambda x, a: x if cupyattn.matmul(a, a).any() else -x,
    ],
)
def test_products_of_int8_are_refused(function):
    """The gradients that it gave were None or zero. The product itself is a constant."""
    x, a = np.ones((2, 2), np.float32), np.ones((2, 2), np.int8)
    with pytest.raises(
        TypeError, match=r"multiplies int8 .*integers have no gradients.*before vjp"
    ):
        cupyattn.vjp(function, x, a)
    product = cupyattn.matmul(a, a).astype(np.float32)
    out, pullback = cupyattn.vjp(lambda x: product * x, x)
    np.testing.assert_array_equal(out, np.full((2, 2), 2))
    np.testing.assert_array_equal(pullback(x)[0], np.full((2, 2), 2))
