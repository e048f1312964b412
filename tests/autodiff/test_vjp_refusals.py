"""vjp of functions that are not one call of the library: each is refused, and says why."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.bad_input.every_function import every_function
from support.recording_device import device_array
from support.strategies import AttentionProblem

from cupyattn import attention, layer_norm, rms_norm, softmax, softmax_backward, vjp
from cupyattn.runtime import differentiable as rules

PROBLEM = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
Q, K, V = (x.astype(np.float32) for x in PROBLEM.arrays())
DOUT = PROBLEM.gradients()[0]
BIAS = PROBLEM.normal("bias", (5, 7)).astype(np.float32)
REFUSED = (
    r"; a function passes its arguments on as they are, to one call of .*attention, .*softmax.*, "
    r"and returns its result; do other computations outside"
)


def another_call(q):
    softmax(q)
    return attention(q, K, V)


def returns_nothing(q):
    attention(q, K, V)


def half_inside(q):
    out = attention(q, K, V)
    out *= 0.5
    return out


def written_to(q):
    q[...] = 0
    return attention(q, K, V)


def caught(q):
    try:
        q * 2
    except TypeError:
        return attention(Q, K, V)


def caught_and_passed_on(q):
    with suppress(TypeError):
        q = q * 2
    return attention(q, K, V)


def inside_another(q):
    return vjp(attention, q, K, V)[0]


def constant_of_another(q, k):
    """The inner vjp would take the outer's q for a constant."""
    out, _ = vjp(lambda v: attention(q, K, v), V)
    return attention(Q, k, out)


REFUSALS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "a number": (3, (Q,), "an object of type int, which cannot be called"),
    "a list": ([], (Q,), "an object of type list, which cannot be called"),
    "NumPy's": (np.exp, (Q,), "exp, which uses argument 0 itself"),
    "NumPy's sum": (np.sum, (Q,), "sum, which uses argument 0 itself"),
    "NumPy's concatenate": (
        lambda q: np.concatenate([q, q]), (Q,), "uses argument 0 itself",
    ),
    "NumPy's zeros_like": (lambda q: np.zeros_like(q), (Q,), "uses argument 0 itself"),
    "NumPy's array": (lambda q: np.array(q), (Q,), "uses argument 0 itself"),
    "in a list": (lambda q: np.asarray([q]), (Q,), "uses argument 0 itself"),
    "a backward": (
        lambda d: softmax_backward(d, d), (Q,), "calls softmax_backward, which has no backward",
    ),
    "a product after a backward": (
        lambda d: softmax_backward(d * 2, d), (Q,), "uses argument 0 itself",
    ),
    "no call": (lambda q: Q, (Q,), "makes no such call with its arguments"),
    "a call without the argument": (
        lambda q: attention(Q, K, V), (Q,), "makes no such call with its arguments",
    ),
    "the argument returned": (lambda q: q, (Q,), "makes no such call with its arguments"),
    "computes before": (lambda q: attention(q * 2, K, V), (Q,), "uses argument 0 itself"),
    "computes from the left": (lambda q: attention(2 * q, K, V), (Q,), "uses argument 0 itself"),
    "adds to an array": (lambda k: attention(Q, K + k, V), (K,), "uses argument 0 itself"),
    "a view": (lambda q: attention(q[:, :2], K, V), (Q,), "uses argument 0 itself"),
    "a method": (lambda q: attention(q.copy(), K, V), (Q,), "uses argument 0 itself"),
    "asks for a value": (lambda q: attention(q, K, V) if q.any() else q, (Q,), "uses argument 0"),
    "a truth": (lambda q: attention(q, K, V) if q else q, (Q,), "uses argument 0 itself"),
    "a comparison": (lambda q: q == 0 or attention(q, K, V), (Q,), "uses argument 0 itself"),
    "written to": (written_to, (Q,), "written_to, which uses argument 0 itself"),
    "computes after": (
        lambda q: attention(q, K, V) * 2, (Q,), "uses the result out itself",
    ),
    "computes in place": (half_inside, (Q,), "half_inside, which uses the result out itself"),
    "NumPy after": (lambda q: np.tanh(attention(q, K, V)), (Q,), "uses the result out itself"),
    "one of two results": (
        lambda q: attention(q, K, V, return_lse=True)[0], (Q,),
        "returns something else than attention returned",
    ),
    "results swapped": (
        lambda q: attention(q, K, V, return_lse=True)[::-1], (Q,), "returns something else",
    ),
    "results in a list": (
        lambda q: list(attention(q, K, V, return_lse=True)), (Q,), "returns something else",
    ),
    "more results": (lambda q: (attention(q, K, V), 3), (Q,), "returns something else"),
    "nothing": (returns_nothing, (Q,), "returns something else"),
    "two calls": (another_call, (Q,), "calls softmax and then attention"),
    "a chain": (lambda q: softmax(attention(q, K, V)), (Q,), "calls attention and then softmax"),
    "an argument twice": (
        lambda x: attention(x, x, x), (Q,), "passes argument 0 on as q and as k",
    ),
    "an argument unused": (
        lambda q, k: attention(q, K, V), (Q, K), "does not pass argument 1 on",
    ),
    "an error caught": (caught, (Q,), "uses argument 0 itself"),
    "an error caught, and on": (caught_and_passed_on, (Q,), "uses argument 0 itself"),
    "vjp within": (inside_another, (Q,), "uses argument 0 itself"),
    "a constant of another vjp": (constant_of_another, (Q, K), "uses argument 0 itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_other_functions_are_refused(name):
    function, arrays, said = REFUSALS[name]
    before = [x.tobytes() for x in (Q, K, V)]
    with pytest.raises(TypeError, match=rf"^vjp of .*{said}.*{REFUSED}"):
        vjp(function, *arrays)
    assert [x.tobytes() for x in (Q, K, V)] == before
    assert_nothing_is_recorded()


WITHOUT_BACKWARD = [
    call
    for call in every_function()
    if call.function.__name__ not in (*rules.names, "dequantize")  # which takes no array
]


@pytest.mark.parametrize("call", WITHOUT_BACKWARD, ids=lambda call: call.function.__name__)
def test_functions_without_a_backward_are_told_so(call):
    """By themselves, in a partial and in a function of the caller's."""
    function, name = call.function, call.function.__name__
    arrays = tuple(call.arrays.values())
    with pytest.raises(TypeError, match=rf"^vjp of {name}, which has no backward{REFUSED}"):
        vjp(partial(function, **call.options), *arrays)
    with pytest.raises(TypeError, match=rf"which calls {name}, which has no backward{REFUSED}"):
        vjp(lambda *arrays: function(*arrays, **call.options), *arrays)
    assert_nothing_is_recorded()


def assert_nothing_is_recorded() -> None:
    assert rules.recorder.get() is None
    assert isinstance(attention(Q, K, V), np.ndarray)


@pytest.mark.parametrize("operation", ["-q", "abs(q)", "q @ q", "q > 1", "len(q)", "float(q)",
                                       "list(q)", "q.T", "q.sum()", "hasattr(q, 'data')",
                                       "1 / q", "copy.copy(q)", "pickle.dumps(q)"])  # fmt: skip
def test_stand_ins_refuse_every_operation(operation):
    with pytest.raises(TypeError, match=r"vjp of .* uses argument 0 itself"):
        vjp(lambda q: eval(operation, {"q": q, "copy": copy, "pickle": pickle}), Q)


def test_stand_ins_refuse_cupy():
    """CuPy arrays too, without a GPU: no code reads their items."""
    cupy = pytest.importorskip("cupy")
    x = device_array(Q.shape, Q.dtype)
    for function in (
        cupy.exp,
        cupy.asarray,
        cupy.asnumpy,
        cupy.sum,
        lambda q: x + q,
        lambda q: q + x,
        lambda q: x.__setitem__(0, q),
        lambda q: cupy.transpose(q, (0, 2, 1, 3)),
    ):
        with pytest.raises(TypeError, match=r"vjp of .* uses argument 0 itself"):
            vjp(function, x)


def test_stand_ins_tell_their_name():
    said = []

    def function(q, k):
        out = attention(q, k, V)
        said.extend(map(repr, (q, out)))
        assert out.shape == DOUT.shape
        return out

    vjp(function, Q, K)
    assert said == ["<argument 0 of function>", "<the result out of function>"]


def test_wrt_of_an_option_that_is_not_passed_on():
    with pytest.raises(TypeError, match="which does not pass bias on"):
        vjp(lambda q, *, bias: attention(q, K, V), Q, bias=BIAS, wrt=("bias",))


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


@pytest.mark.parametrize(("function", "saved"), [(rms_norm, "rstd"), (layer_norm, "mean, drstd")])
def test_what_a_norm_saves_has_no_gradient(function, saved):
    """A gradient of it would be lost in silence."""
    x = np.ones((2, 3), np.float32)
    results, pullback = vjp(function, x, return_stats=True)
    of_saved = [np.ones(2, np.float32) for _ in results[1:]]
    assert len(pullback((x, *[None] * len(of_saved)))) == 1
    with pytest.raises(TypeError, match=f"was given d{saved}; .*not differentiated.*; pass None"):
        pullback((x, *of_saved))
