"""Whole functions: a transformer block, checkpoints, custom rules, structures, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import EMULATED, NUMPY, everywhere

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


X, Y = normal(3, 4), normal(3, 4, seed=9)
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
        ValueError, match=r"backward of clipped returned an array of shape \(4,\) as"
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


def test_operations_without_a_result_keep_nothing():
    def function(x):
        unused = autodiff.exp(x)
        _ = unused * unused
        return x * 2

    _, pullback = vjp(function, normal(N, 1))
    assert bytes_of(pullback) < 64
