"""How dw lies where it is made: as w does, so that an optimizer's arrays may be of either order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.devices import everywhere
from support.linear_problems import LinearCase, exact
from support.search import deep

import cupyattn
from cupyattn import LinearCrossEntropyGrads, LinearGrads, reference
from cupyattn.reference import error_ratio

CASE = LinearCase((70,), 24, 40, turned=True)
CASES = [
    CASE,
    replace(CASE, turned=False),
    replace(CASE, dtype="float16", activation="swiglu"),
    replace(CASE, dtype="float16", turned=False),
    replace(CASE, view="odd"),
    replace(CASE, dtype="float16", M=(0,)),
    *deep(replace(CASE, dtype="float16"), replace(CASE, dtype="bfloat16", activation="gelu")),
]


def strides(array: Any, *, turned: bool) -> tuple[int, int]:
    """Those of a new array of the shape, in C order or the transpose of one that is."""
    rows, columns = array.shape
    item = array.dtype.itemsize
    return (item, rows * item) if turned else (columns * item, item)


def ratio(dw: Any, case: LinearCase, arrays: Any) -> float:
    """The largest error of dw over its bound."""
    expected = reference.linear_backward(*map(exact, arrays), activation=case.activation).dw
    bound = reference.linear_backward_bound(*arrays, dtype=case.dtype, activation=case.activation)
    return error_ratio(dw, expected, bound.dw)


@everywhere
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dw_lies_as_w_does(side, case):
    x, w, b = case.inputs()
    dout = case.normal("dout", *case.M, case.N)
    given = [side.put(array) for array in (dout, x, w, b)]
    dw = cupyattn.linear_backward(*given, activation=case.activation).dw
    assert dw.shape == w.shape
    assert dw.dtype == w.dtype
    assert dw.strides == strides(dw, turned=case.turned)
    assert ratio(side.get(dw), case, (dout, x, w, b)) <= 1


@everywhere
@pytest.mark.parametrize("turned", [False, True])
def test_an_array_that_is_given_stays_as_it_is(side, turned):
    """Though w lies the other way round. A dw that is made beside a given dx lies as w does."""
    case = replace(CASE, turned=turned)
    x, w, b = case.inputs()
    dout = case.normal("dout", 70, 40)
    given = [side.put(array) for array in (dout, x, w, b)]
    plain = cupyattn.linear_backward(*given)
    other = side.put(np.full(w.shape, 7, np.float32, order="C" if turned else "F"))
    found = cupyattn.linear_backward(*given, grads=LinearGrads(dw=other))
    assert found.dw is other
    assert other.strides == strides(other, turned=not turned)
    assert ratio(side.get(other), case, (dout, x, w, b)) <= 1
    dx = LinearGrads(dx=side.put(np.zeros_like(x)))
    added = cupyattn.linear_backward(*given, grads=dx, accumulate=True)
    assert added.dw.strides == strides(w, turned=turned)
    np.testing.assert_array_equal(side.get(added.dw), side.get(plain.dw))


@everywhere
@pytest.mark.parametrize("shape", [(1, 40), (24, 1), (1, 1), (0, 40), (24, 0)])
def test_one_row_or_column_is_in_c_order(side, shape):
    inner, outer = shape
    x, dout = np.ones((3, inner), np.float32), np.ones((3, outer), np.float32)
    for w in (np.ones(shape, np.float32), np.ones(shape[::-1], np.float32).T):
        dw = cupyattn.linear_backward(*map(side.put, (dout, x, w))).dw
        assert dw.flags.c_contiguous
        assert dw.T.flags.c_contiguous
        assert (side.get(dw) == 3).all()


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_kept_as_rows_of_outputs_are_optimised(side, dtype):
    """`weight` (N, K), as torch keeps it: linear takes weight.T, AdamW weight and dw.T."""
    case = replace(CASE, dtype=dtype)
    x, w, b = case.inputs()
    weight = side.put(np.ascontiguousarray(w.T))
    given = side.put(x), weight.T, side.put(b)
    out, pullback = cupyattn.vjp(cupyattn.linear, *given)
    dout = side.put(case.normal("dout", 70, 40))
    _, of_linear, _ = pullback(dout)
    (loss, lse), labels = _loss(side, given)
    of_loss = cupyattn.linear_cross_entropy_backward(
        loss, *given[:2], labels, lse, reduction="sum", logits_bytes=30 * 40 * 4
    ).dw
    of_gelu = cupyattn.linear_gelu_backward(dout, *given).dw
    assert out.shape == dout.shape
    for dw in (of_linear, of_gelu, of_loss):
        assert dw.T.flags.c_contiguous
        m, v = (side.put(np.zeros(weight.shape, np.float32)) for _ in range(2))
        before = side.get(weight).copy()
        cupyattn.adamw_step(
            weight, dw.T, m, v, step=1, lr=0.125, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.0
        )
        # The first step is lr long, against the sign of the gradient; items below 8 are rounded.
        wanted = -0.125 * np.sign(side.get(dw).T)
        rounding = 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(side.get(weight) - before, wanted, rtol=0, atol=rounding)


def _loss(side, given):
    labels = side.put(np.arange(70) % 40)
    loss, lse = cupyattn.linear_cross_entropy(*given[:2], labels, reduction="sum", return_lse=True)
    return (side.put(np.ones_like(side.get(loss))), lse), labels


@everywhere
def test_cross_entropy_adds_to_a_dw_that_is_given(side):
    x, w, _ = CASE.inputs()
    given = side.put(x), side.put(w)
    (dloss, lse), labels = _loss(side, given)
    plain, into = (
        cupyattn.linear_cross_entropy_backward(
            dloss, *given, labels, lse, reduction="sum", logits_bytes=30 * 40 * 4, grads=grads
        )
        for grads in (None, LinearCrossEntropyGrads(dw=side.put(np.zeros(w.shape, np.float32))))
    )
    assert plain.dw.strides == strides(w, turned=True)
    assert into.dw.strides == strides(w, turned=False)
    np.testing.assert_allclose(side.get(plain.dw), side.get(into.dw), rtol=1e-5, atol=1e-5)
