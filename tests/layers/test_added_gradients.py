"""`accumulate=`: gradients of softmax's family and of cross-entropy, added to what is there.

The sum is rounded once: its bound is that of a float32 gradient, and the rounding of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.devices import everywhere
from support.dtypes import dtype_of
from support.search import deep

import cupyattn
from cupyattn import SoftmaxGrads, reference, vjp
from cupyattn.reference.attention.bounds import precision_of


class Case(NamedTuple):
    """A backward with the arrays that it takes by position and its options."""

    backward: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    options: dict[str, Any]
    exact: np.ndarray
    error: np.ndarray
    """Of a float32 gradient."""
    grads: str = "grads"

    def ratio(self, found: np.ndarray, there: np.ndarray) -> float:
        total = there.astype(np.float64) + self.exact
        bound = self.error + precision_of(found.dtype).store(np.abs(total) + self.error)
        return reference.error_ratio(found, total, bound)


def softmax_case(shape: tuple[int, ...], dtype: str, name: str = "softmax") -> Case:
    x, dout = np.random.default_rng(0).standard_normal((2, *shape)).astype(dtype_of(dtype))
    out = getattr(cupyattn, name)(x)
    exact = getattr(reference, f"{name}_backward")
    error = getattr(reference, f"{name}_backward_bound")
    return Case(
        getattr(cupyattn, f"{name}_backward"), (dout, out), {"scale": -0.75},
        exact(dout, out, scale=-0.75), error(dout, out, dtype="float32", scale=-0.75),
    )  # fmt: skip


def log_softmax_case(shape: tuple[int, ...], dtype: str) -> Case:
    return softmax_case(shape, dtype, "log_softmax")


def logsumexp_case(shape: tuple[int, ...], dtype: str) -> Case:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(dtype_of(dtype))
    dout = rng.standard_normal(shape[:-1]).astype(np.float32)
    options = {"scale": 0.5, "mask": rng.random(shape[-1]) < 0.8, "causal": True}
    out = cupyattn.logsumexp(x, **options)
    return Case(
        cupyattn.logsumexp_backward, (dout, x, out), options,
        reference.logsumexp_backward(dout, x, out, **options),
        reference.logsumexp_backward_bound(dout, x, out, dtype="float32", **options),
    )  # fmt: skip


def cross_entropy_case(shape: tuple[int, ...], dtype: str) -> Case:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(shape).astype(dtype_of(dtype))
    labels = rng.integers(0, shape[-1], shape[:-1])
    labels[..., 1] = -100
    options = {"label_smoothing": 0.1, "reduction": "mean"}
    loss, lse = cupyattn.cross_entropy(logits, labels, return_lse=True, **options)
    arrays = np.full_like(loss, 50), logits, labels, lse
    return Case(
        cupyattn.cross_entropy_backward, arrays, options,
        reference.cross_entropy_backward(*arrays, **options),
        reference.cross_entropy_backward_bound(*arrays, dtype="float32", **options),
        "dlogits",
    )  # fmt: skip


CASES: dict[str, Callable[[tuple[int, ...], str], Case]] = {
    "softmax": softmax_case,
    "log_softmax": log_softmax_case,
    "logsumexp": logsumexp_case,
    "cross_entropy": cross_entropy_case,
}


@everywhere
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 24), "float16"),
        *deep(((3, 1029), "float32"), ((2, 20_000), "bfloat16"), ((5, 4096), "float16")),
    ],
)
def test_a_gradient_is_added_to_what_is_there(side, name, shape, dtype):
    """Of rows that lie apart, whose gaps stay as they are."""
    case = CASES[name](shape, dtype)
    there = np.random.default_rng(1).standard_normal(shape).astype(dtype_of(dtype))
    wide = np.full((*shape[:-1], shape[-1] + 8), 7, there.dtype)
    wide[..., : shape[-1]] = there
    wide = side.put(wide)
    target = wide[..., : shape[-1]]
    options = {key: side.put(v) if key == "mask" else v for key, v in case.options.items()}
    given = {case.grads: target, "accumulate": True}
    found = case.backward(*map(side.put, case.arrays), **options, **given)
    assert found is target
    assert case.ratio(side.get(found), there) <= 1
    assert (side.get(wide)[..., shape[-1] :] == 7).all()


@everywhere
@pytest.mark.parametrize("axis", [0, 1])
def test_along_any_axis(side, axis):
    case = softmax_case((3, 24), "float32")
    there = np.ones((3, 24), np.float32)
    arrays = [side.put(np.moveaxis(array, -1, axis)) for array in (*case.arrays, there.copy())]
    found = case.backward(*arrays[:2], axis=axis, **case.options, grads=arrays[2], accumulate=True)
    assert found is arrays[2]
    assert case.ratio(np.moveaxis(side.get(found), axis, -1), there) <= 1


@everywhere
@pytest.mark.parametrize("scale", [1.0, -0.5])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_with_a_bias_both_are_added_to(side, name, scale):
    """And a new one, where one is not given, starts from nothing."""
    rng = np.random.default_rng(0)
    x, dout = (side.put(a) for a in rng.standard_normal((2, 4, 6, 24), np.float32))
    bias = side.put(np.zeros((6, 24), np.float32))
    out = getattr(cupyattn, name)(x, bias=bias, scale=scale)
    backward = getattr(cupyattn, f"{name}_backward")
    options = {"bias": bias, "scale": scale}
    plain = [side.get(array) for array in backward(dout, out, **options)]
    for given in ((True, True), (True, False), (False, True)):
        start = [np.full_like(array, 3) for array in plain]
        grads = SoftmaxGrads(
            *(side.put(s) if g else None for s, g in zip(start, given, strict=True))
        )
        found = backward(dout, out, **options, grads=grads, accumulate=True)
        for array, target, alone, was in zip(found, grads, plain, given, strict=True):
            assert array is target or not was
            np.testing.assert_allclose(side.get(array), alone + 3 * was, rtol=1e-6, atol=1e-6)
    one = side.put(np.full((6, 1), 3, np.float32))  # a bias that is one number for all columns
    grads = SoftmaxGrads(None, one)
    found = backward(dout, out, bias=one + 0, scale=scale, grads=grads, accumulate=True)
    np.testing.assert_allclose(side.get(found.dbias), 3, atol=1e-5)


@everywhere
def test_no_rows_leave_what_is_there(side):
    none, bias = side.put(np.zeros((0, 8), np.float32)), side.put(np.full(8, 3, np.float32))
    grads = SoftmaxGrads(None, bias)
    found = cupyattn.softmax_backward(none, none, bias=bias + 0, grads=grads, accumulate=True)
    assert (side.get(found.dbias) == 3).all()


def test_infinities_of_both_signs_give_nan():
    """Quietly, as on a GPU."""
    there = np.full((1, 2), np.inf, np.float32)
    dout = np.array([[-np.inf, 0]], np.float32)
    found = cupyattn.softmax_backward(
        dout, np.array([[1, 0]], np.float32), grads=there, accumulate=True
    )
    assert np.isnan(found).any()


def test_a_pullback_adds():
    x, dout = np.random.default_rng(0).standard_normal((2, 3, 8))
    _, pullback = vjp(cupyattn.log_softmax, x)
    (once,) = pullback(dout)
    total = once.copy()
    pullback(dout, grads=total, accumulate=True)
    np.testing.assert_allclose(total, 2 * once)


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_nothing_to_add_to_is_refused(side, name):
    case = CASES[name]((2, 3, 24), "float32")
    arrays = [side.put(array) for array in case.arrays]
    with pytest.raises(ValueError, match=f"accumulate=True without {case.grads}; it adds to what"):
        case.backward(*arrays, accumulate=True)
    with pytest.raises(TypeError, match="accumulate = 2"):
        case.backward(*arrays, **{case.grads: side.put(np.zeros((2, 3, 24)))}, accumulate=2)


@everywhere
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"accumulate": True}, ValueError, "accumulate=True without grads; .*SoftmaxGrads"),
        ({"accumulate": 1}, TypeError, "accumulate = 1"),
    ],
)
def test_with_a_bias_too(side, options, kind, message):
    x, bias = side.put(np.zeros((2, 8), np.float32)), side.put(np.zeros(8, np.float32))
    with pytest.raises(kind, match=message):
        cupyattn.softmax_backward(x, x, bias=bias, **options)


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logits_are_no_gradient_to_add_to(side, reduction):
    case = cross_entropy_case((2, 3, 24), "float32")
    dloss, logits, labels, lse = (side.put(array) for array in case.arrays)
    before = side.get(logits)
    with pytest.raises(ValueError, match="dlogits overlaps logits in memory"):
        cupyattn.cross_entropy_backward(
            dloss, logits, labels, lse, reduction=reduction, dlogits=logits, accumulate=True
        )
    np.testing.assert_array_equal(side.get(logits), before)
