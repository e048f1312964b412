"""vjp of functions that make one call of the library: partials, lambdas, what users write."""

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
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import NUMPY, kernels_only
from support.search import deep
from support.strategies import AttentionProblem

from cupyattn import attention, attention_backward, softmax, softmax_backward, vjp

PROBLEM = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6)
Q, K, V = (x.astype(np.float32) for x in PROBLEM.arrays())
DOUT, DLSE = PROBLEM.gradients()
X = np.random.default_rng(0).standard_normal((3, 9), dtype=np.float32)
BIAS = PROBLEM.normal("bias", (5, 7)).astype(np.float32)


class Model:
    """What users write."""

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


@pytest.mark.parametrize(("dim", "dim_v"), [(24, 40), *deep((8, 6))])  # first what others compile
@kernels_only
def test_functions_that_make_one_call_of_kernels(side, dim, dim_v):
    problem = replace(PROBLEM, D=dim, Dv=dim_v)
    assert_differentiated_as_its_call(*FUNCTIONS["partial of a function"], side, problem)


def assert_differentiated_as_its_call(
    function: Callable[..., Any],
    options: dict[str, Any],
    side: Any,
    problem: AttentionProblem = PROBLEM,
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
    """What a partial holds by position stands before the arrays that vjp is given."""
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
    """Of a name that vjp is given too, vjp's counts, as in a call of the partial."""
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


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_live_no_longer_than_they_are_used(fails):
    """Not until the garbage collector comes: on a GPU they are most of the memory."""

    def function(y):
        out = softmax(y)
        return 3 if fails else out

    x = X.copy()
    alive = [weakref.ref(x)]
    gc.disable()
    try:
        if fails:
            with pytest.raises(TypeError, match="returns something else"):
                vjp(function, x)
        else:
            out, pullback = vjp(function, x)
            alive.append(weakref.ref(out))
            pullback(out)
            del out, pullback
        del x
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
        with pytest.raises(TypeError, match="vjp of exp"):
            vjp(np.exp, x)
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
