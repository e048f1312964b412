"""The tape: derivatives of array operations and of whole functions, its memory, its refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.search import examples

import cupyattn
from cupyattn import (
    attention,
    autodiff,
    checkpoint,
    grad,
    stop_gradient,
    value_and_grad,
    vjp,
)

Function = Callable[..., Any]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def assert_is_derivative(function: Function, *arrays: np.ndarray, step: float = 1e-6) -> None:
    """Compare the gradient along a direction with a central difference."""
    out, pullback = vjp(function, *arrays)
    dout = normal(*out.shape, seed=1) if out.shape else np.float64(1.5)
    gradients = pullback(np.asarray(dout))
    directions = [normal(*x.shape, seed=2 + n) for n, x in enumerate(arrays)]
    above, below = (
        function(*[x + sign * step * d for x, d in zip(arrays, directions, strict=True)])
        for sign in (1, -1)
    )
    slope = ((above - below) * dout).sum() / (2 * step)
    found = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    assert [g.shape for g in gradients] == [x.shape for x in arrays]
    assert_allclose(found, slope, rtol=1e-5, atol=1e-6)


X, Y, P = normal(3, 4), normal(3, 4, seed=9), np.abs(normal(3, 4)) + 0.5
IDS = np.array([[0, 2, 0], [1, 1, 0]])
UNARY: dict[str, Function] = {
    "negative": lambda x: -x,
    "positive": lambda x: +x,
    "abs": abs,
    "exp": autodiff.exp,
    "log": lambda x: autodiff.log(x * x + 1),
    "sqrt": lambda x: autodiff.sqrt(x * x + 1),
    "tanh": autodiff.tanh,
    "square": autodiff.square,
    "sin": autodiff.sin,
    "cos": autodiff.cos,
    "log1p": lambda x: autodiff.log1p(x * x),
    "expm1": autodiff.expm1,
    "a power": lambda x: x**3,
    "the second power": lambda x: x**2,
    "no power": lambda x: x**0,
    "a power of an array": lambda x: (x * x + 1) ** np.array([0.5, 2, 0, -1]),
    "an exponent": lambda x: 2**x,
    "numbers": lambda x: 3 - 2 * x / 5 + 1 / (x * x + 1),
    "reshape": lambda x: x.reshape(2, 6) * np.arange(6),
    "transpose": lambda x: x.T @ X,
    "axes": lambda x: x.reshape(1, 3, 4).transpose(2, 0, 1) * normal(4, 1, 3),
    "swapaxes": lambda x: x.swapaxes(0, 1) * Y.T,
    "moveaxis": lambda x: np.moveaxis(x.reshape(3, 2, 2), 0, 2) * normal(2, 2, 3),
    "expand_dims": lambda x: autodiff.expand_dims(x, 1) * normal(3, 5, 4),
    "squeeze": lambda x: x[None].squeeze(0) * Y,
    "broadcast_to": lambda x: autodiff.broadcast_to(x[:, :1], (3, 4)) * Y,
    "sum": lambda x: x.sum() * x,
    "sum over axes": lambda x: x.sum(axis=(0, 1), keepdims=True) * x,
    "sum over rows": lambda x: x.sum(axis=-1) ** 2,
    "mean": lambda x: x.mean() + x.mean(axis=0, keepdims=True) * Y,
    "max": lambda x: x.max(axis=1) * 2 + x.max(),
    "min": lambda x: x.min(axis=0, keepdims=True) * Y,
    "concatenate": lambda x: autodiff.concatenate([x, Y, 2 * x], axis=1) * normal(3, 12),
    "stack": lambda x: autodiff.stack((x, Y, x * x), axis=1) * normal(3, 3, 4),
    "split": lambda x: np.subtract(*autodiff.split(x, 2, axis=1)) * normal(3, 2),
    "split, one part used": lambda x: autodiff.split(x, [1, 2])[1] * 2,
    "pad": lambda x: autodiff.pad(x, ((1, 0), (2, 1))) * normal(4, 7),
    "take": lambda x: autodiff.take(x, IDS, axis=1) * normal(3, 2, 3),
    "take flat": lambda x: autodiff.take(x, IDS) * normal(2, 3),
    "an index": lambda x: x[1] * x[-1, 2],
    "slices": lambda x: x[::-2, None, 1:] * normal(2, 1, 3),
    "an ellipsis": lambda x: x[..., 0] * 2,
    "slices that fill it": lambda x: x[:, 2:] * x[:, :2] + x[:, :2].T.sum(),
    "slices that overlap": lambda x: x[1:] * x[:2] - x[..., 1:3].sum() + x[1],
    "slices of two axes": lambda x: x[:, :2].sum() * x[:1].sum() + x[:, 2:].sum(),
    "integers": lambda x: x[IDS] * normal(2, 3, 4),
    "negative integers": lambda x: x[[-1, 2, 0]] * Y,
    "two arrays of integers": lambda x: x[IDS, IDS] * normal(2, 3),
    "integers after a slice": lambda x: x[:, [1, 1, 0]] * normal(3, 3),
    "booleans": lambda x: x[X > 0] * 3,
    "booleans of itself": lambda x: x[x > 0] * 3,
    "where": lambda x: autodiff.where(x > 0, x * x, 3 * x),
    "comparisons": lambda x: x * (x > 0) * ~(x > 1) + x * ((x < -1) | (x == 0)),
    "maximum": lambda x: autodiff.maximum(x, 0.1) * np.minimum(x, Y),
    "astype": lambda x: autodiff.astype(x, np.float64) * 2,
    "names of numpy's parameters": lambda x: (
        np.transpose(x, axes=(1, 0)) @ np.squeeze(x, axis=())
        + np.take(x, indices=[0, 1], axis=1).sum(0)[:1]
        + np.split(x, indices_or_sections=2, axis=1)[0].sum()
    ),
    "positional arguments of numpy": lambda x: (
        np.sum(x, 0, None, None, True) * np.max(x, -1, None, True)
    ),
    "a list of numbers": lambda x: x * [1.0, 2.0, 3.0, 4.0] + np.concatenate([x, [[1.0] * 4]])[:3],
    "a product with a list": lambda x: x @ [[1.0], [2.0], [3.0], [4.0]],
    "a generator": lambda x: autodiff.concatenate(each * 2 for each in (x, x)),
    "concatenate flattened": lambda x: autodiff.concatenate([x, x.T], axis=None) * np.arange(24),
    "tuples as an index": lambda x: x[(0, 0), :] * x[range(-1, 1)],
    "take by a tuple": lambda x: autodiff.take(x, (0, 0), 0) * 2,
    "no index": lambda x: x[[]].sum() + x * 2,
    "integers as a condition": lambda x: autodiff.where(np.array([0, 2, 1, 0]), x, 3 * x),
    "a condition of itself": lambda x: np.where(x, x * 2, 0),
    "a truth as a condition": lambda x: autodiff.where(True, x, 0),
    "a transposed result": lambda x: cupyattn.gelu(x).T * X.T,
    "a moved axis of a result": lambda x: np.moveaxis(cupyattn.softmax(x.reshape(3, 2, 2)), 0, 1),
    "floor of a constant": lambda x: x * np.floor(stop_gradient(x)),
    "an iteration": lambda x: sum(row * number for number, row in enumerate(x)),
    "itself": lambda x: x,
    "an array twice": lambda x: x @ x.T @ x,
    "no use": lambda x: Y,
    "zeros like it": lambda x: np.zeros_like(x) + x,
    "a constant": lambda x: stop_gradient(x) * 0 + x,
    "a copy": lambda x: x.copy() * 2,
    "ravel": lambda x: x.ravel() * np.arange(12),
    "argmax": lambda x: x[np.arange(3), x.argmax(axis=1)] * 2,
}


@pytest.mark.parametrize("name", UNARY)
def test_operations_have_the_derivatives_of_finite_differences(name):
    assert_is_derivative(UNARY[name], X)


@pytest.mark.parametrize("name", UNARY)
def test_operations_have_the_values_of_the_library(name):
    assert_array_equal(vjp(UNARY[name], X)[0], UNARY[name](X))


SHAPES = st.sampled_from([(), (1,), (4,), (3, 1), (1, 4), (3, 4), (2, 1, 4), (0, 4), (2, 3, 1)])
BINARY: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / (y * y + 1),
    "power": lambda x, y: (x * x + 0.5) ** y,
    "maximum": autodiff.maximum,
    "minimum": np.minimum,
    "where": lambda x, y: np.where(x > y, x, 2 * y),
}


@pytest.mark.parametrize("name", BINARY)
@given(shapes=st.tuples(SHAPES, SHAPES), seed=st.integers(0, 99))
def test_broadcasting_is_summed_back(name, shapes, seed):
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        return
    x, y = (normal(*shape, seed=seed + n) for n, shape in enumerate(shapes))
    assert_is_derivative(BINARY[name], x, y)
    assert_is_derivative(lambda x: BINARY[name](x, y), x)
    assert_is_derivative(lambda y: BINARY[name](x, y), y)


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((5, 3, 4), (4, 2)),
        ((3, 4), (5, 4, 2)), ((5, 3, 4), (4,)), ((4,), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)),
        ((0, 4), (4, 2)), ((3, 0), (0, 2)), ((2, 3, 0), (0,)),
    ],
)  # fmt: skip
def test_products_of_matrices(shapes):
    x, y = (normal(*shape, seed=n) for n, shape in enumerate(shapes))
    for function in (autodiff.matmul, lambda x, y: x @ y, np.matmul):
        assert_is_derivative(function, x, y)
    assert_is_derivative(lambda y: x @ y, y)
    assert_is_derivative(lambda x: x @ y, x)


SMALL = st.sampled_from([(), (1,), (4,), (1, 4), (3, 1), (3, 4)])


@given(shape=SMALL, other=SMALL, seed=st.integers(0, 99))
def test_arrays_that_are_broadcast_and_used_again(shape, other, seed):
    """The contributions to a gradient have different shapes before they are summed."""

    def function(x, y):
        z = x * 3 + y
        return (z * X).sum() + (x * x).sum() + x + (y - X).sum() * y.sum()

    assert_is_derivative(function, normal(*shape, seed=seed), normal(*other, seed=seed + 1))


def test_functions_may_change_their_containers():
    def swaps(w):
        w["a"], w["b"] = w["b"], w["a"]
        return w.pop("a") * 3 + w["b"] * 5

    w = {"a": X, "b": Y}
    (dw,) = vjp(swaps, w)[1](np.ones_like(X))
    assert_array_equal(dw["a"], np.full_like(X, 5))
    assert_array_equal(dw["b"], np.full_like(X, 3))
    assert w.keys() == {"a", "b"}

    def appends(arrays):
        arrays.append(arrays[0] * 2)
        return arrays.pop() + arrays.pop(0)

    ((dx, dy),) = vjp(appends, [X, Y])[1](np.ones_like(X))
    assert_array_equal(dx, np.full_like(X, 3))
    assert not dy.any()


def test_an_unused_branch_with_an_infinite_gradient_is_left_out():
    gradient = grad(lambda x: autodiff.sqrt(autodiff.where(x > 0, x, 0)).sum())
    with np.errstate(divide="ignore"):
        assert_array_equal(gradient(np.array([4.0, -1.0])), [0.25, 0.0])


def test_powers_at_the_edges():
    assert_array_equal(grad(lambda x: (x**0).sum())(np.array([0.0, np.inf])), [0, 0])
    base = np.array([2.0, 0.0, -1.0])
    with np.errstate(invalid="ignore"):
        gradient = grad(lambda y: (base**y).sum())(np.array([3.0, 2.0, 2.0]))
    assert_allclose(gradient, [8 * np.log(2), 0, np.nan])
    narrow = base[:1].astype(np.float16)
    found = grad(lambda y: (narrow**y).sum())(np.array([3.0]))
    assert_allclose(found, 8 * np.log(2), rtol=1e-12)


def test_a_mean_of_many_float16():
    x = np.ones(100_000, np.float16)
    gradient = grad(lambda x: x.mean() * np.float16(1024))(x)
    assert_allclose(gradient, 1024 / 1e5, rtol=1e-3)


def test_an_index_that_is_filled_again_keeps_its_values():
    def function(x):
        index, total = np.array([0]), 0
        for number in range(3):
            index[0] = number
            total = total + x[index] * (number + 1)
        return total.sum()

    assert_array_equal(grad(function)(np.ones(3)), [1, 2, 3])


@pytest.mark.parametrize("function", [lambda w: w.sum(), lambda w: (w.T @ X).sum(), lambda w: w.T])
def test_gradients_are_contiguous_and_can_be_written(function):
    out, pullback = vjp(function, X)
    (gradient,) = pullback(np.ones_like(out))
    assert gradient.flags.c_contiguous and gradient.flags.writeable
    gradient *= 2


def test_a_checkpoint_within_a_checkpoint():
    inner = checkpoint(lambda x: autodiff.tanh(x) * x)
    outer = checkpoint(lambda x, n: inner(x) * n + inner(x * 2))
    plain = grad(lambda x: ((np.tanh(x) * x) * 3 + np.tanh(2 * x) * 2 * x).sum())(X)
    assert_allclose(grad(lambda x: outer(x, 3).sum())(X), plain)


def test_results_of_a_call_may_be_unused():
    q = normal(1, 3, 1, 4)
    _, pullback = vjp(lambda q, k: (attention(q, k, k), q), q, q)
    dq, dk = pullback((None, q))
    assert_array_equal(dq, q)
    assert not dk.any()


def test_ties_share_the_gradient():
    x = np.array([[2.0, 1.0, 2.0], [3.0, 3.0, 3.0]])
    assert_allclose(grad(lambda x: x.max(axis=1).sum())(x), [[0.5, 0, 0.5], [1 / 3] * 3])
    assert_allclose(grad(lambda x: x.max())(x), [[0, 0, 0], [1 / 3] * 3])
    assert_allclose(grad(lambda x: autodiff.maximum(x, 2.0).sum())(x), [[0.5, 0, 0.5], [1, 1, 1]])


class Step(NamedTuple):
    """An operation of a random program: on the last array and maybe an earlier one."""

    name: str
    other: int


PROGRAM_STEPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda ns, x, y: x + y,
    "multiply": lambda ns, x, y: x * y,
    "divide": lambda ns, x, y: x / (1 + y * y),
    "subtract": lambda ns, x, y: 2 - x - y,
    "tanh": lambda ns, x, y: ns.tanh(x),
    "exp": lambda ns, x, y: ns.exp(-x * x),
    "log": lambda ns, x, y: ns.log(1 + x * x) + y,
    "sqrt": lambda ns, x, y: ns.sqrt(x * x + 0.5),
    "transpose": lambda ns, x, y: x.T @ y / 4,
    "matmul": lambda ns, x, y: x @ y / 4,
    "softmax": lambda ns, x, y: (
        ns.exp(x - x.max(axis=1, keepdims=True))
        / ns.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
    ),
    "mean": lambda ns, x, y: x - x.mean(axis=0) * y,
    "slice": lambda ns, x, y: ns.concatenate([x[1:], y[:1]]),
    "stack": lambda ns, x, y: ns.stack([x, y]).sum(axis=0),
    "where": lambda ns, x, y: ns.where(x > y, x, y * y),
    "take": lambda ns, x, y: ns.take(x, np.array([0, 3, 3, 1]), axis=1) + y,
    "maximum": lambda ns, x, y: ns.maximum(x, 0.3) + ns.minimum(y, 0.2),
    "reshape": lambda ns, x, y: x.reshape(2, 8).reshape(4, 4) ** 2 * 0.5 + y,
    "swap": lambda ns, x, y: x.swapaxes(0, 1) - y,
}
PROGRAMS = st.lists(
    st.builds(Step, st.sampled_from(sorted(PROGRAM_STEPS)), st.integers(0, 20)),
    min_size=2,
    max_size=12,
)


def run_program(program: list[Step], ns: Any, *arrays: Any) -> Any:
    """Run a program on arrays (4, 4); return a scalar."""
    known = list(arrays)
    for step in program:
        known.append(PROGRAM_STEPS[step.name](ns, known[-1], known[step.other % len(known)]))
    return (known[-1] * known[-1]).mean() + known[len(known) // 2].sum()


@given(program=PROGRAMS, seed=st.integers(0, 99))
def test_random_programs_have_the_derivatives_of_finite_differences(program, seed):
    arrays = normal(4, 4, seed=seed), normal(4, 4, seed=seed + 100)
    step = 1e-6
    value, gradients = value_and_grad(partial(run_program, program, autodiff), argnums=(0, 1))(
        *arrays
    )
    directions = normal(4, 4, seed=1), normal(4, 4, seed=2)
    above, below = (
        run_program(
            program, np, *[x + sign * step * d for x, d in zip(arrays, directions, strict=True)]
        )
        for sign in (1, -1)
    )
    slope = (above - below) / (2 * step)
    found = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    assert_allclose(found, slope, rtol=1e-3, atol=1e-3 * max(1.0, abs(value)))


@examples(300)
@given(program=PROGRAMS, seed=st.integers(0, 99))
def test_random_programs_have_the_derivatives_of_jax(program, seed):
    jax = pytest.importorskip("jax")
    arrays = normal(4, 4, seed=seed), normal(4, 4, seed=seed + 100)
    with jax.enable_x64(True):
        function = partial(run_program, program, jax.numpy)
        expected, wanted = jax.value_and_grad(function, argnums=(0, 1))(
            *map(jax.numpy.asarray, arrays)
        )
        expected, wanted = float(expected), [np.asarray(each) for each in wanted]
    value, gradients = value_and_grad(partial(run_program, program, autodiff), argnums=(0, 1))(
        *arrays
    )
    assert_allclose(value, expected, rtol=1e-9)
    for gradient, same in zip(gradients, wanted, strict=True):
        assert_allclose(gradient, same, rtol=1e-6, atol=1e-9 * max(1.0, np.abs(same).max()))
