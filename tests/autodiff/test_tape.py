"""The tape: derivatives of array operations and of whole functions, its memory, its refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import EMULATED, NUMPY, everywhere
from support.search import examples

import cupyattn
from cupyattn import (
    attention,
    autodiff,
    checkpoint,
    custom_vjp,
    embedding,
    grad,
    linear,
    linear_cross_entropy,
    rms_norm,
    rope,
    rope_tables,
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


B, S, E, H, G, D, F = 2, 6, 32, 4, 2, 8, 24
WEIGHTS = {"norm": (E,), "qkv": (E, (H + 2 * G) * D), "mix": (H * D, E)}
WEIGHTS |= {"norm_2": (E,), "gate_up": (E, 2 * F), "down": (F, E)}


def weights(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {
        name: (normal(*shape, seed=n) / shape[0] ** 0.5).astype(dtype)
        for n, (name, shape) in enumerate(WEIGHTS.items())
    }


def block(x: Any, w: dict[str, Any], *, tables: Any) -> Any:
    """A pre-norm transformer block."""
    qkv = linear(rms_norm(x, w["norm"]), w["qkv"]).reshape(*x.shape[:2], H + 2 * G, D)
    q, k = rope((qkv[:, :, :H], qkv[:, :, H : H + G]), *tables)
    heads = attention(q, k, qkv[:, :, H + G :], causal=True)
    y = linear(heads.reshape(*x.shape[:2], H * D), w["mix"], residual=x)
    inner = linear(rms_norm(y, w["norm_2"]), w["gate_up"], activation="swiglu")
    return linear(inner, w["down"], residual=y)


def chained(x: Any, w: dict[str, Any], dout: Any, *, tables: Any, xp: Any) -> Any:
    """The gradients of the block by the pullbacks of its calls."""
    h, of_norm = vjp(rms_norm, x, w["norm"])
    qkv, of_qkv = vjp(linear, h, w["qkv"])
    heads = qkv.reshape(*x.shape[:2], H + 2 * G, D)
    (q, k), of_rope = vjp(rope, (heads[:, :, :H], heads[:, :, H : H + G]), *tables)
    seen, of_attention = vjp(attention, q, k, heads[:, :, H + G :], causal=True)
    y, of_mix = vjp(linear, seen.reshape(*x.shape[:2], H * D), w["mix"], residual=x)
    h, of_norm_2 = vjp(rms_norm, y, w["norm_2"])
    inner, of_gate_up = vjp(linear, h, w["gate_up"], activation="swiglu")
    _, of_down = vjp(linear, inner, w["down"], residual=y)
    dw = {}
    dh, dw["down"] = of_down(dout)
    dh, dw["gate_up"] = of_gate_up(dh)
    dy, dw["norm_2"] = of_norm_2(dh)
    dy = dy + dout
    dseen, dw["mix"] = of_mix(dy)
    dq, dk, dv = of_attention(dseen.reshape(seen.shape), deterministic=True)
    (dq, dk), _, _ = of_rope((dq, dk))
    dqkv = xp.concatenate((dq, dk, dv), axis=2).reshape(qkv.shape)
    dh, dw["qkv"] = of_qkv(dqkv)
    dx, dw["norm"] = of_norm(dh)
    return dx + dy, dw


@everywhere
def test_a_transformer_block_has_the_gradients_of_its_calls(side):
    x, dout = (normal(B, S, E, seed=n).astype(np.float32) for n in (50, 51))
    w = {name: side.put(value) for name, value in weights().items()}
    tables = tuple(side.put(np.asarray(table)) for table in rope_tables(S, D))
    out, pullback = vjp(block, side.put(x), w, tables=tables)
    dx, dw = pullback(side.put(dout))
    assert dw.keys() == w.keys()
    xp = np if side is NUMPY or side is EMULATED else side.xp
    wanted, named = chained(side.put(x), w, side.put(dout), tables=tables, xp=xp)
    assert_allclose(side.get(out), side.get(block(side.put(x), w, tables=tables)))
    assert_allclose(side.get(dx), side.get(wanted), rtol=1e-4, atol=1e-4)
    for name in w:
        assert_allclose(side.get(dw[name]), side.get(named[name]), rtol=1e-4, atol=1e-4)


def test_a_checkpointed_block_has_the_same_gradients_and_keeps_its_arguments_only():
    x, w = normal(B, S, E).astype(np.float32), weights()
    tables = tuple(np.asarray(table) for table in rope_tables(S, D))
    plain = partial(block, tables=tables)
    out, pullback = vjp(plain, x, w)
    same, recomputed = vjp(checkpoint(plain), x, w)
    assert_array_equal(out, same)
    for gradient, wanted in zip(_flat(recomputed(out)), _flat(pullback(out)), strict=True):
        assert_array_equal(gradient, wanted)
    del pullback, out
    kept = bytes_of(recomputed)
    assert kept <= x.nbytes + sum(each.nbytes for each in w.values()) + sum(
        t.nbytes for t in tables
    )


def _flat(gradients: Any) -> list[np.ndarray]:
    dx, dw = gradients
    return [dx, *dw.values()]


def bytes_of(root: object) -> int:
    """Bytes of the arrays that an object refers to, directly or not."""
    seen: dict[int, object] = {}
    waiting, total = [root], 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type) or type(each).__name__ == "module":
            continue
        seen[id(each)] = each
        if isinstance(each, np.ndarray):
            base = each if each.base is None else each.base
            if id(base) not in seen or base is each:
                total += each.nbytes if base is each else getattr(base, "nbytes", each.nbytes)
            seen[id(base)] = base
            continue
        if callable(each) and hasattr(each, "__globals__"):
            cells = [cell.cell_contents for cell in each.__closure__ or ()]
            waiting += [*cells, each.__defaults__]
            continue
        waiting += gc.get_referents(each)
    return total


N = 1000
BIG = normal(N, 1)
KEPT: dict[str, tuple[Function, int]] = {
    "a sum of arrays": (lambda x: x + 1 - x, 0),
    "a product with a number": (lambda x: 2 * x / 3, 0),
    "a product with a constant": (lambda x: x * BIG, 1),
    "a square": (lambda x: x * x, 1),
    "exp": (autodiff.exp, 1),  # its result
    "a chain": (lambda x: autodiff.tanh(autodiff.exp(x + 1)), 2),
    "reductions and views": (lambda x: x.reshape(10, -1).T.sum(axis=0)[2:], 0),
    "gelu": (lambda x: cupyattn.gelu(x), 1),
    "linear without activation": (lambda x: linear(x, np.ones((1, 1))), 1),
    "softmax": (lambda x: cupyattn.softmax(x), 1),  # its result
}


@pytest.mark.parametrize("name", KEPT)
def test_the_tape_keeps_what_backwards_need(name):
    function, arrays = KEPT[name]
    x = normal(N, 1)
    _, pullback = vjp(function, x)
    assert bytes_of(pullback) <= arrays * N * 8 + 64


def test_arrays_die_with_the_pullback():
    x = normal(5, 5)
    died = []

    def function(x):
        y = autodiff.exp(x)
        died.append(weakref.ref(y._value))
        return cupyattn.softmax(y)

    gc.disable()
    try:
        out, pullback = vjp(function, x)
        pullback(out)
        assert died[0]() is not None
        del pullback, out
        assert died[0]() is None
    finally:
        gc.enable()


def test_structures_of_arguments_and_results():
    class Pair(NamedTuple):
        a: Any
        b: Any

    def function(pair, names, lists, flag):
        return {"sum": pair.a + names["c"], "rest": [lists[0] * 2, (pair.b, flag)]}

    arrays = [normal(2, seed=n) for n in range(4)]
    given = Pair(arrays[0], arrays[1]), {"c": arrays[2], "n": 3}, [arrays[3]], True
    result, pullback = vjp(function, *given)
    assert result["rest"][1][1] is True
    dpair, dnames, dlists, dflag = pullback({"sum": arrays[0], "rest": [arrays[1], None]})
    assert isinstance(dpair, Pair)
    assert_array_equal(dpair.a, arrays[0])
    assert_array_equal(dpair.b, np.zeros(2))
    assert_array_equal(dnames["c"], arrays[0])
    assert_array_equal(dlists[0], 2 * arrays[1])
    assert dnames["n"] is None and dflag is None


def test_integers_and_booleans_have_no_gradients():
    table, ids, mask = normal(5, 3), np.array([1, 1, 4]), np.array([True, False, True])
    _, pullback = vjp(lambda t, i, m: np.where(m[:, None], embedding(t, i), 0), table, ids, mask)
    dtable, dids, dmask = pullback(np.ones((3, 3)))
    assert dids is None and dmask is None
    assert_array_equal(dtable[:, 0], [0, 1, 0, 0, 1])


def test_16_bit_gradients_are_added_in_float32():
    x = np.full(1, 1.0, np.float16)

    def function(x):
        return sum([x * np.float16(c) for c in (2048.0, 1.0, 1.0, -2048.0)])

    _, pullback = vjp(function, x)
    assert pullback(np.ones(1, np.float16))[0].dtype == np.float16
    assert pullback(np.ones(1, np.float16))[0] == 2.0  # 2048 + 1 is 2048 in float16
    wide = grad(lambda x: autodiff.broadcast_to(x, (4097,)).sum(axis=0)[()])
    assert grad(lambda x: (autodiff.broadcast_to(x, (1000,)) * np.float16(0.1)).sum())(
        np.array(1.0, np.float16)
    ) == np.float16(np.float32(np.float16(0.1)) * 1000)
    assert wide(np.array(1.0, np.float16)) == 4097 // 2 * 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_gradients_have_the_dtypes_of_their_arrays(dtype):
    x, y = normal(3).astype(dtype), normal(3).astype(np.float64)
    _, pullback = vjp(lambda x, y: x * y, x, y)
    assert [g.dtype for g in pullback(np.ones(3))] == [dtype, np.float64]


def test_value_and_grad_with_more_results():
    function = value_and_grad(lambda x, y: ((x * y).sum(), {"y": y}), argnums=(1, 0), has_aux=True)
    (value, aux), (dy, dx) = function(X, Y)
    assert value == (X * Y).sum() and aux["y"] is not None
    assert_array_equal(dy, X)
    assert_array_equal(dx, Y)
    with pytest.raises(TypeError, match=r"returned an array of shape .3, 4.; the gradient is"):
        grad(lambda x: x)(X)
    with pytest.raises(TypeError, match="returned an object of type int"):
        grad(lambda x: 3)(X)


def test_custom_vjp():
    @custom_vjp
    def clipped(x, y):
        return np.clip(x, -1, 1) * y, 3

    with pytest.raises(TypeError, match="calls clipped, which has no backward yet"):
        vjp(lambda x: clipped(x, x)[0], X)
    clipped.defvjp(
        lambda x, y: ((np.clip(x, -1, 1) * y, 3), (x, y)),
        lambda kept, dout: (dout[0] * kept[1] * 7, None),
    )
    assert_array_equal(clipped(X, Y)[0], np.clip(X, -1, 1) * Y)
    out, pullback = vjp(lambda x, y: clipped(x, y)[0] * 2, X, Y)
    dx, dy = pullback(np.ones_like(out))
    assert_array_equal(dx, 14 * Y)
    assert not dy.any()
    clipped.defvjp(lambda x, y: ((x, 3), None), lambda kept, dout: (dout[0][0], None))
    with pytest.raises(
        ValueError, match=r"backward of clipped returned a gradient of shape \(4,\)"
    ):
        vjp(lambda x: clipped(x, x)[0], X)[1](X)


def test_stop_gradient_of_a_structure():
    def function(x):
        kept = stop_gradient({"x": x, "n": 3})
        return kept["x"] * x * kept["n"]

    assert_array_equal(vjp(function, X)[1](np.ones_like(X))[0], 3 * X)
    assert stop_gradient(X) is X


def test_a_language_model_learns():
    """Twenty lines: embedding, attention, a loss, and a step of gradient descent."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 9, (2, 12))
    w = {"table": rng.standard_normal((9, 16), dtype=np.float32) / 4}
    w |= {"qkv": rng.standard_normal((16, 48), dtype=np.float32) / 4}
    w |= {"head": rng.standard_normal((16, 9), dtype=np.float32) / 4}

    @value_and_grad
    def loss(w, tokens):
        x = embedding(w["table"], tokens[:, :-1])
        q, k, v = autodiff.split(linear(rms_norm(x), w["qkv"]).reshape(2, 11, 6, 8), 3, axis=2)
        x = x + attention(q, k, v, causal=True).reshape(2, 11, 16)
        return linear_cross_entropy(rms_norm(x), w["head"], tokens[:, 1:])

    losses = []
    for _ in range(40):
        value, dw = loss(w, tokens)
        losses.append(float(value))
        w = {name: w[name] - 0.5 * dw[name] for name in w}
    assert losses[-1] < 0.2 * losses[0]


def test_a_padding_mask():
    """A non-causal block: padded keys get no gradient."""
    x, counts = normal(2, 5, 2, 4), np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)

    def function(x):
        out = attention(x, x, x, mask=counts[:, None, None])
        return (out * counts[..., None, None]).sum()

    gradient = grad(function)(x)
    assert not gradient[1, 2:].any() and gradient[1, :2].any()
