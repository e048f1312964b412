"""vjp of functions that are not one call of the library: each is refused, and says why."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import numpy as np
import pytest
from support.bad_input.every_function import every_function
from support.recording_device import device_array
from support.strategies import AttentionProblem

from cupyattn import attention, layer_norm, rms_norm, vjp
from cupyattn.runtime import differentiable as rules

PROBLEM = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
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
    """Of CuPy arrays without a GPU: their items are nowhere."""
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
