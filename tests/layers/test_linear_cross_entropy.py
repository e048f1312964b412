"""linear_cross_entropy: as cross_entropy of linear, in chunks, without all of the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS, everywhere
from support.dtypes import DTYPES, dtype_of
from support.search import deep, examples, wider

import cupyattn
from cupyattn import LinearCrossEntropyGrads, reference, vjp
from cupyattn.ops.plan import allot
from cupyattn.reference import error_ratio

RNG = np.random.default_rng(0)
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def problem(rows: tuple[int, ...], inner: int, vocabulary: int, dtype: str = "float64") -> Any:
    x = RNG.standard_normal((*rows, inner)).astype(dtype_of(dtype))
    w = (RNG.standard_normal((inner, vocabulary)) * inner**-0.5).astype(dtype_of(dtype))
    labels = RNG.integers(0, vocabulary, rows)
    return x, w, np.where(RNG.random(rows) < 0.2, -100, labels)


@pytest.mark.parametrize("logits_bytes", [1, 2 * 8 * 9, 2**28])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_give_what_all_logits_give(reduction, logits_bytes):
    x, w, labels = problem((2, 5), 4, 9)
    options: dict[str, Any] = {**OPTIONS, "reduction": reduction}
    expected = vjp(lambda z: cupyattn.cross_entropy(z, labels, **options), x @ w)
    loss, pullback = vjp(
        cupyattn.linear_cross_entropy, x, w, labels, **options, logits_bytes=logits_bytes
    )
    np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
    dloss = np.asarray(RNG.standard_normal(np.shape(loss)))
    (dlogits,) = expected[1](dloss)
    dx, dw, dlabels = pullback(dloss)
    assert dlabels is None
    np.testing.assert_allclose(dx, dlogits @ w.T, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dw, np.einsum("abk,abv->kv", x, dlogits), rtol=1e-9, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    x, w, labels = problem((7,), 4, 9)
    steps = RNG.standard_normal(x.shape), RNG.standard_normal(w.shape)
    (loss, lse), pullback = vjp(
        cupyattn.linear_cross_entropy, x, w, labels, **OPTIONS, logits_bytes=200, return_lse=True
    )
    dlse = RNG.standard_normal(lse.shape)
    dx, dw, _ = pullback((np.ones_like(loss), dlse))

    def total(step: float) -> float:
        moved = (array + step * change for array, change in zip((x, w), steps, strict=True))
        loss, lse = cupyattn.linear_cross_entropy(*moved, labels, **OPTIONS, return_lse=True)
        return float(loss + (lse * dlse).sum())

    difference = (total(1e-5) - total(-1e-5)) / 2e-5
    np.testing.assert_allclose((dx * steps[0]).sum() + (dw * steps[1]).sum(), difference, rtol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torch_says_the_same(reduction):
    torch = pytest.importorskip("torch")
    x, w, labels = problem((11,), 4, 9)
    given = [torch.tensor(array, requires_grad=True) for array in (x, w)]
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    expected = torch.nn.functional.cross_entropy(
        given[0] @ given[1], torch.tensor(labels), **options
    )
    loss, pullback = vjp(cupyattn.linear_cross_entropy, x, w, labels, logits_bytes=300, **options)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-12)
    dloss = np.asarray(RNG.standard_normal(np.shape(loss)))
    gradients = torch.autograd.grad(expected, given, torch.tensor(dloss))
    for found, right in zip(pullback(dloss)[:2], gradients, strict=True):
        np.testing.assert_allclose(found, right.numpy(), rtol=1e-9, atol=1e-12)


class Case(NamedTuple):
    """A problem whose rows come in about so many chunks."""

    rows: tuple[int, ...]
    inner: int
    vocabulary: int
    dtype: str = "float32"
    chunks: int = 3
    transposed: bool = False
    options: Mapping[str, Any] = MappingProxyType({**OPTIONS, "reduction": "none"})
    labels_dtype: str = "int64"
    seed: int = 0


def require_within_bounds(case: Case) -> None:
    """Losses, lse and gradients against the reference; the backward in chunks of its own."""
    rng = np.random.default_rng(case.seed)
    dtype, count = dtype_of(case.dtype), math.prod(case.rows)
    x = rng.standard_normal((*case.rows, case.inner)).astype(dtype)
    w = rng.standard_normal((case.inner, case.vocabulary)) * max(case.inner, 1) ** -0.5
    w = w.astype(dtype, order="F" if case.transposed else "C")
    labels = rng.integers(0, case.vocabulary, case.rows)
    labels = np.where(rng.random(case.rows) < 0.2, -100, labels).astype(case.labels_dtype)
    step = max(-(-count // case.chunks), 1)
    budget = step * case.vocabulary * dtype.itemsize
    on_device = [KERNELS.put(array) for array in (x, w, labels)]
    found = cupyattn.linear_cross_entropy(
        *on_device, **case.options, logits_bytes=budget, return_lse=True
    )
    loss, lse = map(KERNELS.get, found)
    exact = reference.linear_cross_entropy(x, w, labels, **case.options)
    each = {name: value for name, value in case.options.items() if name != "reduction"}
    bounds = reference.linear_cross_entropy_bound(x, w, labels, dtype=case.dtype, **each)
    if case.options["reduction"] == "none":
        assert error_ratio(loss, exact[0], bounds[0]) <= 1
    assert error_ratio(lse, exact[1], bounds[1]) <= 1

    dloss = np.asarray(rng.standard_normal(loss.shape), np.float32)
    grads = cupyattn.linear_cross_entropy_backward(
        KERNELS.put(dloss), *on_device, found[1], **case.options, logits_bytes=budget
    )
    counted = max(int((labels != -100).sum()), 1) if case.options["reduction"] == "mean" else 1
    dloss = np.broadcast_to((dloss / counted).astype(np.float32), case.rows)
    arguments = (dloss, x, w, labels, lse)
    exact_grads = reference.linear_cross_entropy_backward(*arguments, **each, reduction="none")
    bounds = reference.linear_cross_entropy_backward_bound(
        *arguments, dtype=case.dtype, chunks=-(-count // step), **each
    )
    for result, expected, bound in zip(grads, exact_grads, bounds, strict=True):
        assert error_ratio(KERNELS.get(result), expected, bound) <= 1


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("dtype", "transposed"), [("float32", False), ("float16", True), *deep(("bfloat16", True))]
)
def test_kernels_are_within_the_bounds(dtype, transposed):
    require_within_bounds(Case((70,), 24, 40, dtype, transposed=transposed))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    options = {
        "label_smoothing": draw(st.sampled_from((0.0, 0.1))),
        "z_loss": draw(st.sampled_from((0.0, 1e-2))),
        "reduction": draw(st.sampled_from(("mean", "sum", "none"))),
    }
    return Case(
        draw(st.sampled_from(((), (0,), (1,), (2, 3), (5, 1, 7), (16,), (17,), (33,), (70,)))),
        draw(st.sampled_from(wider((24,), (1, 8, 33, 72)))),
        draw(st.sampled_from(wider((40,), (1, 7, 33, 264)))),
        draw(st.sampled_from(wider(("float32",), DTYPES))),
        draw(st.integers(1, 4)),
        draw(st.booleans()),
        options,
        draw(st.sampled_from(("int32", "int64"))),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(6)
@given(case=cases())
def test_any_case_is_within_the_bounds(case):
    require_within_bounds(case)


@everywhere
@pytest.mark.parametrize("rows", [(), (0,), (3, 5)])
def test_results_are_written_in_place_and_added_to(side, rows):
    x, w, labels = problem(rows, 8, 16, "float32")
    given = [side.put(array) for array in (x, w, np.asarray(labels))]
    out = side.put(np.full((), 77, np.float32)), side.put(np.full(rows, 77, np.float32))
    found = cupyattn.linear_cross_entropy(*given, reduction="sum", return_lse=True, out=out)
    assert found[0] is out[0]
    assert found[1] is out[1]
    plain = cupyattn.linear_cross_entropy(*given, reduction="sum", return_lse=True)
    for result, expected in zip(out, plain, strict=True):
        np.testing.assert_array_equal(side.get(result), side.get(expected))

    arguments = (side.put(np.ones((), np.float32)), *given, out[1])
    options: dict[str, Any] = {"reduction": "sum", "logits_bytes": 4 * 16 * 2}
    expected = cupyattn.linear_cross_entropy_backward(*arguments, **options)
    start = np.full(x.shape, 3, np.float32), np.full(w.shape, 4, np.float32)
    for accumulate in (False, True):
        grads = LinearCrossEntropyGrads(*(side.put(array.copy()) for array in start))
        result = cupyattn.linear_cross_entropy_backward(
            *arguments, **options, grads=grads, accumulate=accumulate
        )
        assert result.dx is grads.dx
        assert result.dw is grads.dw
        for gradient, plain_one, first in zip(result, expected, start, strict=True):
            wanted = side.get(plain_one) + (first if accumulate else 0)
            np.testing.assert_allclose(side.get(gradient), wanted, rtol=1e-5, atol=1e-5)


@everywhere
@pytest.mark.parametrize("rows", [(), (0,), (2, 3)])
def test_without_features_all_logits_are_zero(side, rows):
    x, w, labels = (
        np.zeros((*rows, 0), np.float32),
        np.zeros((0, 5), np.float32),
        np.zeros(rows, int),
    )
    given = [side.put(array) for array in (x, w, labels)]
    options: dict[str, Any] = {"reduction": "none", "logits_bytes": 4 * 5 * 4}
    loss, lse = cupyattn.linear_cross_entropy(*given, **options, return_lse=True)
    for found in (loss, lse):
        np.testing.assert_allclose(side.get(found), np.full(rows, np.log(5)), rtol=1e-6)
    dloss = side.put(np.ones(rows, np.float32))
    grads = cupyattn.linear_cross_entropy_backward(dloss, *given, lse, **options)
    assert [gradient.shape for gradient in grads] == [x.shape, w.shape]


@everywhere
def test_scalars_of_numpy_are_arrays_without_axes(side):
    x, w = side.put(np.ones(3, np.float32)), side.put(np.zeros((3, 4), np.float32))
    if not isinstance(x, np.ndarray):
        pytest.skip("NumPy's scalars go with NumPy's arrays")
    loss, lse = cupyattn.linear_cross_entropy(x, w, np.int32(3), return_lse=True)
    found = cupyattn.linear_cross_entropy_backward(
        np.float32(1024), x, w, np.int64(3), lse * 1, dlse=np.float32(0)
    )
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
    expected = np.outer(np.ones(3), [256, 256, 256, -768])
    np.testing.assert_allclose(found.dw, expected, rtol=1e-6)
    _, pullback = vjp(cupyattn.linear_cross_entropy, x, w, np.int32(3))
    np.testing.assert_array_equal(pullback(np.float32(1024))[1], found.dw)


def test_the_logits_are_never_all_there(monkeypatch):
    """Nothing larger than the chunk is made, beside the results."""
    from cupyattn.functional.layers import logit_chunks

    x, w, labels = problem((1000,), 4, 64, "float32")
    made: list[int] = []

    def noted(*given: Any) -> Any:
        scratch = allot(*given)
        made.append(sum(array.nbytes for array in scratch.values()))
        return scratch

    monkeypatch.setattr(logit_chunks, "allot", noted)
    loss, lse = cupyattn.linear_cross_entropy(x, w, labels, logits_bytes=2**16, return_lse=True)
    cupyattn.linear_cross_entropy_backward(
        np.ones_like(loss), x, w, labels, lse, logits_bytes=2**15
    )
    assert made == [2**16 + 4 * 1000, 2**15 + 4]  # 256 and 128 rows, and the losses or dloss


X, W, LABELS = np.zeros((2, 3, 4), np.float32), np.zeros((4, 8), np.float32), np.zeros((2, 3), int)
REFUSED = {
    "w of another width": ({"w": W[:3]}, {}, ValueError, "last axis of x"),
    "labels of another shape": ({"labels": LABELS[0]}, {}, ValueError, r"labels has shape \(3,\)"),
    "labels of floats": ({"labels": X[..., 0]}, {}, TypeError, "labels has dtype float32"),
    "no labels": ({"labels": None}, {}, TypeError, "labels is None"),
    "no memory": ({}, {"logits_bytes": 0}, ValueError, "logits_bytes = 0"),
    "memory in floats": ({}, {"logits_bytes": 1e9}, TypeError, "logits_bytes is 1000000000.0"),
    "smoothing": ({}, {"label_smoothing": -0.1}, ValueError, "label_smoothing = -0.1"),
    "reduction": ({}, {"reduction": "max"}, ValueError, "reduction = 'max'"),
    "a label beyond": ({"labels": LABELS + 8}, {}, ValueError, r"labels\[0, 0\] = 8"),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(side, name):
    changes, options, kind, message = REFUSED[name]
    if name == "a label beyond" and not isinstance(side.put(X), np.ndarray):
        pytest.skip("labels on a GPU are looked at with checks alone")
    arrays: dict[str, Any] = {"x": X, "w": W, "labels": LABELS, **changes}
    given = [None if array is None else side.put(array) for array in arrays.values()]
    with pytest.raises(kind, match=message):
        cupyattn.linear_cross_entropy(*given, **options)
    dloss, lse = side.put(np.ones((), np.float32)), side.put(np.zeros((2, 3), np.float32))
    with pytest.raises(kind, match=message):
        cupyattn.linear_cross_entropy_backward(dloss, *given, lse, **options)


@everywhere
def test_targets_that_do_not_fit_are_refused(side):
    given = [side.put(array) for array in (X, W, LABELS)]
    dloss, lse = side.put(np.ones((), np.float32)), side.put(np.zeros((2, 3), np.float32))
    backward = cupyattn.linear_cross_entropy_backward
    strided = side.put(np.zeros((2, 6), np.float32))[:, :3]
    with pytest.raises(ValueError, match=r"out has strides .*contiguous in C order"):
        cupyattn.linear_cross_entropy(*given, reduction="none", out=strided)
    with pytest.raises(TypeError, match="grads is a tuple; it is a LinearCrossEntropyGrads"):
        backward(dloss, *given, lse, grads=(None, None))
    with pytest.raises(ValueError, match="accumulate=True without grads"):
        backward(dloss, *given, lse, accumulate=True)
    with pytest.raises(ValueError, match=r"lse has shape \(2,\)"):
        backward(dloss, *given, lse[:, 0])
    with pytest.raises(ValueError, match=r"dloss has shape \(2, 3\)"):
        backward(lse, *given, lse)
    uneven = side.put(np.zeros((2, 4, 4), np.float32))[:, :3]
    with pytest.raises(ValueError, match=r"grads\.dx has strides .*evenly"):
        backward(dloss, *given, lse, grads=LinearCrossEntropyGrads(dx=uneven))
