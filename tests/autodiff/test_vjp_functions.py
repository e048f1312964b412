"""vjp of functions that make one call of the library, and the table of rules that it uses."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import NUMPY, kernels_only

import cupyattn
from cupyattn import attention, attention_backward, softmax, softmax_backward, vjp
from cupyattn.runtime import differentiable as rules
from cupyattn.runtime.differentiable import differentiable
from cupyattn.testing import AttentionCase

PROBLEM = AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
Q, K, V = (x.astype(np.float32) for x in PROBLEM.arrays())
DOUT, DLSE = PROBLEM.gradients()
X = np.random.default_rng(0).standard_normal((3, 9), dtype=np.float32)
BIAS = PROBLEM.normal("bias", (5, 7)).astype(np.float32)


class Model:
    """A function that a user might write."""

    def __init__(self, start: int) -> None:
        self.start = start

    def attend(self, q: Any, k: Any, v: Any, *, scale: float) -> Any:
        assert q.shape[-1] == k.shape[-1] and q.ndim == 4 and q.dtype == np.float32
        return attention(q, k, v, causal=True, q_offset=self.start, softmax_scale=scale / q.ndim)


def causal(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, causal=True)


# Of causal attention, with more options.
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "partial": (partial(attention, causal=True), {}),
    "partial of a partial": (
        partial(partial(attention, causal=True), softmax_scale=0.3), {"softmax_scale": 0.3},
    ),
    "partial of a function": (partial(causal), {}),
    "function": (causal, {}),
    "lambda": (lambda *a: attention(*a, causal=True, q_offset=0), {"q_offset": 0}),
    "method": (partial(Model(1).attend, scale=2.0), {"q_offset": 1, "softmax_scale": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_make_one_call(name):
    assert_differentiated_as_its_call(*FUNCTIONS[name], NUMPY)


@pytest.mark.deep
@pytest.mark.parametrize(("dim", "dim_v"), [(24, 40), (8, 6)])
@kernels_only
def test_functions_that_make_one_call_of_kernels(side, dim, dim_v):
    problem = replace(PROBLEM, D=dim, Dv=dim_v)
    assert_differentiated_as_its_call(*FUNCTIONS["partial of a function"], side, problem)


def assert_differentiated_as_its_call(
    function: Callable[..., Any],
    options: dict[str, Any],
    side: Any,
    problem: AttentionCase = PROBLEM,
) -> None:
    arrays, dout = [side.put(x) for x in problem.arrays()], side.put(problem.gradients()[0])
    result, pullback = vjp(function, *arrays)
    wanted, expected = vjp(attention, *arrays, causal=True, **options)
    assert type(result) is type(wanted)
    assert_array_equal(side.get(result), side.get(wanted))
    for gradient, same in zip(
        pullback(dout, deterministic=True), expected(dout, deterministic=True), strict=True
    ):
        assert_array_equal(side.get(gradient), side.get(same))


def test_calls_without_the_arguments_are_constants():
    out, pullback = vjp(lambda q: attention(q, K, V, bias=softmax(BIAS)), Q)
    wanted, expected = vjp(attention, Q, K, V, bias=softmax(BIAS))
    assert_array_equal(out, wanted)
    assert_array_equal(pullback(DOUT)[0], expected(DOUT)[0])


def test_a_function_may_ask_which_library_an_array_is_of():
    def scaled(q):
        return attention(q, K, V, softmax_scale=0.5 if isinstance(q, np.ndarray) else 0.1)

    assert_array_equal(vjp(scaled, Q)[0], scaled(Q))


def test_partials_take_arrays_beforehand():
    """The positional arguments of a partial come before the arrays that vjp gets."""
    _, pullback = vjp(partial(attention, Q, K), V)
    assert_array_equal(pullback(DOUT)[0], vjp(attention, Q, K, V)[1](DOUT)[2])
    assert len(pullback(DOUT)) == 1


def test_some_of_the_arrays_in_another_order():
    _, pullback = vjp(lambda v, q: attention(q, K, v), V, Q)
    dv, dq = pullback(DOUT)
    expected = vjp(attention, Q, K, V)[1](DOUT)
    assert_array_equal(dq, expected[0])
    assert_array_equal(dv, expected[2])


def test_two_results_may_be_taken_apart_and_put_together():
    def both(q, k, v):
        out, lse = attention(q, k, v, return_lse=True)
        return out, lse

    (out, lse), pullback = vjp(both, Q, K, V)
    for same, wanted in zip((out, lse), attention(Q, K, V, return_lse=True), strict=True):
        assert_array_equal(same, wanted)
    expected = vjp(attention, Q, K, V, return_lse=True)[1]((DOUT, DLSE))
    for gradient, wanted in zip(pullback((DOUT, DLSE)), expected, strict=True):
        assert_array_equal(gradient, wanted)


def test_an_option_may_come_by_position_or_under_another_name():
    wanted = vjp(attention, Q, K, V, bias=BIAS, wrt=("bias",))[1](DOUT)[3]["bias"]
    _, pullback = vjp(lambda q, k, v, b: attention(q, k, v, bias=b), Q, K, V, BIAS)
    assert_array_equal(pullback(DOUT)[3], wanted)
    _, pullback = vjp(lambda q, *, b: attention(q, K, V, bias=b), Q, b=BIAS, wrt=("b",))
    dq, named = pullback(DOUT)
    assert dq.shape == Q.shape
    assert list(named) == ["b"]
    assert_array_equal(named["b"], wanted)


def test_an_option_may_be_in_a_partial():
    """If both have an option, the value passed to vjp is used, as in a call of the partial."""
    expected, pullback = vjp(attention, Q, K, V, bias=BIAS, wrt=("bias",))
    wanted = pullback(DOUT)[3]["bias"]
    for beforehand, options in ((BIAS, {}), (BIAS + 1, {"bias": BIAS})):
        given = partial(partial(attention, bias=beforehand), causal=False)
        out, pullback = vjp(given, Q, K, V, **options, wrt=("bias",))
        assert_array_equal(out, expected)
        *_, named = pullback(DOUT)
        assert_array_equal(named["bias"], wanted)


def test_an_entry_for_each_argument_by_position():
    """None for a mask, a number, a flag, and rotary's tables; the others are the gradients."""
    mask = np.tril(np.ones((5, 7), bool), 2)
    cos, sin = np.cos(np.ones((7, 4), np.float32)), np.sin(np.ones((7, 4), np.float32))

    def function(q, mask, scale, k, flag, v, tables):
        return attention(q, k, v, mask=mask, softmax_scale=scale, causal=flag, rotary=tables)

    _, pullback = vjp(function, Q, mask, 0.3, K, True, V, (cos, sin))
    dq, dmask, dscale, dk, dflag, dv, tables = pullback(DOUT)
    assert (dmask, dscale, dflag, tables) == (None, None, None, (None, None))
    expected = vjp(
        attention, Q, K, V, mask=mask, softmax_scale=0.3, causal=True, rotary=(cos, sin)
    )[1](DOUT)
    for gradient, wanted in zip((dq, dk, dv), expected, strict=True):
        assert_array_equal(gradient, wanted)


def test_one_array_in_several_places_has_a_gradient_for_each():
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 8), dtype=np.float32)
    out, pullback = vjp(attention, q, q, q)
    expected = attention_backward(out, q, q, q, *attention(q, q, q, return_lse=True))
    for gradient, wanted in zip(pullback(out), expected[:3], strict=True):
        assert_array_equal(gradient, wanted)


def test_vjp_within_is_of_its_own_arrays():
    """An inner vjp of constants neither disturbs nor is disturbed."""
    found = []

    def function(q):
        found.append(vjp(attention, Q, K, V)[1](DOUT))
        return attention(q, K, V)

    _, pullback = vjp(function, Q)
    assert_array_equal(pullback(DOUT)[0], found[0][0])


def test_arrays_live_no_longer_than_they_are_used():
    """Not until the garbage collector comes: on a GPU they are most of the memory."""
    x = X.copy()
    alive = [weakref.ref(x)]
    gc.disable()
    try:
        out, pullback = vjp(lambda y: softmax(y), x)
        alive.append(weakref.ref(out))
        pullback(out)
        del x, out, pullback
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_threads_at_once():
    """Each has its own call; calls outside of vjp are recorded by none."""

    def work(seed: int) -> bool:
        x = np.random.default_rng(seed).standard_normal((3, 9), dtype=np.float32)
        for _ in range(20):
            out, pullback = vjp(lambda y: softmax(y), x)
            plain = softmax(x)
            assert isinstance(plain, np.ndarray)
            assert_array_equal(out, plain)
            assert_array_equal(pullback(x)[0], softmax_backward(x, plain))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_tasks_at_once():
    async def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((3, 9), dtype=np.float32)
        out, pullback = vjp(softmax, x)
        await asyncio.sleep(0)
        assert_array_equal(pullback(x)[0], softmax_backward(x, out))
        with pytest.raises(TypeError, match="vjp of cumsum"):
            vjp(np.cumsum, x)
        await asyncio.sleep(0)
        assert isinstance(softmax(x), np.ndarray)

    async def main() -> None:
        await asyncio.gather(*map(work, range(8)))

    asyncio.run(main())


def test_a_public_function_is_what_it_was():
    assert pickle.loads(pickle.dumps(attention)) is attention
    assert attention.__module__ == "cupyattn"
    assert "causal" in inspect.signature(attention).parameters
    assert attention.__doc__.startswith("Attend")


def scaled(pair, weight=None, /, *, factor=1.0, stats=False, workspace=None):
    """Two results for a tuple of two arrays; one more for the backward."""
    a, b = pair
    results = factor * a * b, a + b
    return (*results, np.exp(a)) if stats else results


class ScaledGrads(NamedTuple):
    dpair: Any = None
    dweight: Any = None


GIVEN: list[dict[str, Any]] = []


def scaled_backward(
    dout, dtotal, pair, weight=None, /, *, exp, dexp=0, factor=1.0, grads=None, workspace=None
):
    GIVEN.append({"weight": weight, "workspace": workspace, "grads": grads, "dexp": dexp})
    a, b = pair
    assert_array_equal(exp, np.exp(a))
    return ScaledGrads((factor * b * dout + dtotal, factor * a * dout + dtotal))


@pytest.fixture
def scaled_function(monkeypatch):
    monkeypatch.setattr(rules, "names", [*rules.names])
    return differentiable(
        lambda: scaled_backward,
        results=("out", "total"),
        saved=("exp",),
        saved_by="stats",
        gradients=ScaledGrads._fields,
    )(scaled)


@pytest.mark.parametrize("stats", [False, True])
def test_a_rule_with_a_tuple_of_arrays_and_several_results(scaled_function, stats):
    """As a rotary embedding of (q, k), or a norm with a residual and statistics, will have it."""
    a, b, dout, dtotal = np.random.default_rng(0).standard_normal((4, 3, 5))
    results, pullback = vjp(scaled_function, (a, b), factor=3.0, stats=stats, workspace=a)
    assert len(results) == 2 + stats
    ((da, db),) = pullback((dout, dtotal, None)[: 2 + stats])
    assert_allclose(da, 3 * b * dout + dtotal)
    assert_allclose(db, 3 * a * dout + dtotal)
    dexp = None if stats else 0  # given as None, not as zeros: the backward has a default
    assert GIVEN[-1] == {"weight": None, "workspace": None, "grads": None, "dexp": dexp}
    ((da, _),) = pullback((None, dtotal, None)[: 2 + stats], grads=1)
    assert_allclose(da, dtotal)
    assert GIVEN[-1]["grads"] == 1

    results, pullback = vjp(lambda b, a: scaled_function((a, b), None), b, a)
    db, da = pullback((dout, dtotal))
    assert_allclose(da, b * dout + dtotal)
    assert_allclose(db, a * dout + dtotal)


def negated(x, /):
    return -x[0][0] if isinstance(x, tuple) else -x


@pytest.fixture
def negated_function(monkeypatch):
    monkeypatch.setattr(rules, "names", [*rules.names])
    return differentiable(lambda: lambda dout, /: -dout, gradients=("dx",))(negated)


def test_too_many_arguments_are_the_functions_error(negated_function):
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        vjp(negated_function, X, 3)


BY_ITSELF = {"matmul"}
"""Functions without a public backward: their gradients are calls of the function."""


def test_every_public_backward_has_a_rule():
    backwards = {name for name in cupyattn.__all__ if name.endswith("_backward")}
    assert {name.removesuffix("_backward") for name in backwards} == set(rules.names) - BY_ITSELF


@pytest.mark.parametrize("name", rules.names)
def test_every_rule_finds_what_its_backward_takes(name):
    found = []
    token = rules.recorder.set(lambda rule, args, options: found.append(rule))
    try:
        getattr(cupyattn, name)()
    finally:
        rules.recorder.reset(token)
    (rule,) = found
    if name not in BY_ITSELF:
        assert inspect.unwrap(rule.backward) is getattr(cupyattn, f"{name}_backward")
    results = {*rule.results, *rule.saved}
    known = {*rule.parameters, *results, *(f"d{result}" for result in results)}
    assert rule.required <= known
    assert {gradient[1:] for gradient in rule.gradients} <= set(rule.parameters)
    assert rule.saved_by is None or rule.saved_by in rule.parameters
    assert rule.backward_options or name in BY_ITSELF
