"""linear_cross_entropy in chunks, and the workspaces of both losses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import DTYPES, KERNELS, dtype_of, everywhere
from support.recording_device import device_array
from support.search import deep, examples

import cupyattn
from cupyattn import LinearCrossEntropyGrads, reference, vjp
from cupyattn.reference import error_ratio
from cupyattn.runtime.plan import allot

RNG = np.random.default_rng(0)
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def problem(rows: tuple[int, ...], inner: int, vocabulary: int, dtype: str = "float64") -> Any:
    x = RNG.standard_normal((*rows, inner)).astype(dtype_of(dtype))
    w = (RNG.standard_normal((inner, vocabulary)) * inner**-0.5).astype(dtype_of(dtype))
    labels = RNG.integers(0, vocabulary, rows)
    return x, w, np.where(RNG.random(rows) < 0.2, -100, labels)


# Tests on NumPy come first: `kernels_run` stays active from its first use to the module's end.
def test_scalars_of_numpy_are_arrays_without_axes():
    x, w = np.ones(3, np.float32), np.zeros((3, 4), np.float32)
    loss, lse = cupyattn.linear_cross_entropy(x, w, np.int32(3), return_lse=True)
    found = cupyattn.linear_cross_entropy_backward(
        np.float32(1024), x, w, np.int64(3), lse * 1, dlse=np.float32(0)
    )
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
    expected = np.outer(np.ones(3), [256, 256, 256, -768])
    np.testing.assert_allclose(found.dw, expected, rtol=1e-6)
    _, pullback = vjp(cupyattn.linear_cross_entropy, x, w, np.int32(3))
    np.testing.assert_array_equal(pullback(np.float32(1024))[1], found.dw)


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


def test_gradients_match_finite_differences():
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


class Case(NamedTuple):
    """A problem whose rows are processed in about `chunks` chunks."""

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
    """Compare losses, lse and gradients with the reference."""
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
def test_fixed_problems_are_within_the_bounds(dtype, transposed):
    require_within_bounds(Case((70,), 24, 40, dtype, transposed=transposed))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
def test_no_rows_give_zero_gradients_of_the_mean():
    x, w, labels = problem((0,), 24, 40, "float32")
    given = [KERNELS.put(array) for array in (x, w, labels)]
    _, lse = cupyattn.linear_cross_entropy(*given, return_lse=True)
    dloss = KERNELS.put(np.ones((), np.float32))
    dx, dw = cupyattn.linear_cross_entropy_backward(dloss, *given, lse)
    assert dx.shape == (0, 24)
    assert not KERNELS.get(dw).any()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    options = {
        "label_smoothing": draw(st.sampled_from((0.0, 0.1))),
        "z_loss": draw(st.sampled_from((0.0, 1e-2))),
        "reduction": draw(st.sampled_from(("mean", "sum", "none"))),
    }
    return Case(
        draw(st.sampled_from(((), (0,), (1,), (2, 3), (5, 1, 7), (16,), (17,), (33,), (70,)))),
        draw(st.sampled_from((1, 8, 24, 33, 72))),
        draw(st.sampled_from((1, 7, 33, 40, 264))),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 4)),
        draw(st.booleans()),
        options,
        draw(st.sampled_from(("int32", "int64"))),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(6)
@given(case=cases())
def test_drawn_problems_are_within_the_bounds(case):
    require_within_bounds(case)


@everywhere
@pytest.mark.parametrize("rows", [(0,), (3, 5), *deep(((),))])
def test_results_are_written_in_place_and_accumulate(side, rows):
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
@pytest.mark.parametrize("rows", [(), *deep(((0,),), ((2, 3),))])
def test_no_features_give_zero_logits(side, rows):
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


def test_scratch_memory_is_at_most_one_chunk(monkeypatch):
    """Only the results are larger than a chunk of logits."""
    from cupyattn.ops.losses import api_linear

    x, w, labels = problem((1000,), 4, 64, "float32")
    made: list[int] = []

    def noted(*given: Any) -> Any:
        scratch = allot(*given)
        made.append(sum(array.nbytes for array in scratch))
        return scratch

    monkeypatch.setattr(api_linear, "allot", noted)
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
def test_bad_inputs_and_options_are_refused(side, name):
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
def test_bad_outputs_are_refused(side):
    given = [side.put(array) for array in (X, W, LABELS)]
    dloss, lse = side.put(np.ones((), np.float32)), side.put(np.zeros((2, 3), np.float32))
    backward = cupyattn.linear_cross_entropy_backward
    strided = side.put(np.zeros((2, 6), np.float32))[:, :3]
    with pytest.raises(ValueError, match=r"out has strides .*contiguous in C order"):
        cupyattn.linear_cross_entropy(*given, reduction="none", out=strided)
    with pytest.raises(TypeError, match=r"out has type numpy\.float32; .*read that"):
        cupyattn.linear_cross_entropy(*given, out=np.float32(0))
    with pytest.raises(TypeError, match="grads has type tuple; it must be a LinearCross"):
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


def test_cross_entropy_with_out_and_workspace_allocates_nothing(recorder):
    """The workspace holds the losses of rows, or the gradient of one loss."""
    f32 = np.float32
    logits, labels = device_array((5, 60, 40)), device_array((5, 60), int)
    lse, one, out = device_array((5, 60), f32), device_array((), f32), device_array((), f32)
    forward = partial(cupyattn.cross_entropy, logits, labels, return_lse=True, out=(out, lse))
    backward = partial(cupyattn.cross_entropy_backward, one, logits, labels, lse, dlogits=logits)
    for call, needed in ((forward, 4 * 300), (backward, 4)):
        with pytest.raises(ValueError, match=rf"workspace has {needed - 1} bytes; .* {needed},"):
            call(workspace=device_array((needed - 1,), np.uint8))
        assert not recorder.started
        workspace = device_array((needed,), np.uint8)
        call(workspace=workspace)
        assert recorder.allocated == []
        assert len(recorder.started) == 2
        launched = {
            array.data.ptr
            for _, _, given in recorder.started
            for array in given[:9]
            if hasattr(array, "data") and hasattr(array.data, "ptr")
        }
        assert workspace.data.ptr in launched
        recorder.launches.clear()
    for call in (forward, backward):
        with pytest.raises(ValueError, match=r"lse overlaps workspace|workspace overlaps lse"):
            call(workspace=lse)
    forward(reduction="none", out=(device_array((5, 60), f32), lse), workspace=device_array((0,)))
    assert recorder.allocated == []


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_a_workspace_gives_the_same_bits(side, reduction):
    logits = side.put(np.random.default_rng(0).standard_normal((7, 40)).astype(np.float32))
    labels = side.put(np.array([3, -100, 0, 39, 5, 5, 1]))
    room = side.put(np.full(64, 255, np.uint8))
    loss, lse = cupyattn.cross_entropy(logits, labels, reduction=reduction, return_lse=True)
    found = cupyattn.cross_entropy(logits, labels, reduction=reduction, workspace=room)
    assert_array_equal(side.get(found), side.get(loss))
    given = (loss, logits, labels, lse)
    expected = cupyattn.cross_entropy_backward(*given, reduction=reduction)
    found = cupyattn.cross_entropy_backward(*given, reduction=reduction, workspace=room)
    assert_array_equal(side.get(found), side.get(expected))


@everywhere
def test_chunks_with_a_workspace_give_the_same_bits(side):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((50, 8), (8, 16)))
    labels = rng.integers(0, 16, 50)
    given = [side.put(array) for array in (x, w, labels)]
    dloss = side.put(np.ones((), np.float32))
    room = {"logits_bytes": 25 * 64, "workspace": side.put(np.full(2**16, 255, np.uint8))}
    expected = cupyattn.linear_cross_entropy(*given, return_lse=True)
    found = cupyattn.linear_cross_entropy(*given, return_lse=True, **room)
    plain = cupyattn.linear_cross_entropy_backward(dloss, *given, expected[1], logits_bytes=25 * 64)
    grads = cupyattn.linear_cross_entropy_backward(dloss, *given, expected[1], **room)
    for result, wanted in zip((*found, *grads), (*expected, *plain), strict=True):
        assert_array_equal(side.get(result), side.get(wanted))


def test_the_logits_of_chunks_are_in_the_workspace(recorder):
    """A skinny last chunk, and split products on tensor cores, need separate scratch memory."""
    x, w, labels = device_array((1000, 512)), device_array((512, 520)), device_array((1000,), int)
    f32 = np.float32
    lse, dloss, out = device_array((1000,), f32), device_array((), f32), device_array((), f32)
    grads = LinearCrossEntropyGrads(device_array(x.shape), device_array(w.shape))
    calls = (
        (cupyattn.linear_cross_entropy, (x, w, labels), {"return_lse": True, "out": (out, lse)}),
        (cupyattn.linear_cross_entropy_backward, (dloss, x, w, labels, lse), {"grads": grads}),
    )
    for function, arrays, options in calls:
        options |= {"logits_bytes": 2 * 520 * 384}
        with pytest.raises(ValueError, match=r"workspace has 16 bytes; .* needs \d+") as refused:
            function(*arrays, **options, workspace=device_array((16,), np.uint8))
        needed = int(re.findall(r"needs (\d+)", str(refused.value))[0])
        assert needed >= 2 * 520 * 384
        assert not recorder.started
        function(*arrays, **options, workspace=device_array((needed,), np.uint8))
        assert len(recorder.started) > 6
        assert recorder.allocated == []
        recorder.launches.clear()


def test_workspace_that_overlaps_an_array_is_refused(recorder):
    x, w, labels = device_array((10, 8)), device_array((8, 16)), device_array((10,), int)
    with pytest.raises(ValueError, match="workspace overlaps x in memory"):
        cupyattn.linear_cross_entropy(x, w, labels, workspace=x)
    lse, dloss = device_array((10,), np.float32), device_array((), np.float32)
    given = (dloss, x, w, labels, lse)
    with pytest.raises(ValueError, match="workspace overlaps lse in memory"):
        cupyattn.linear_cross_entropy_backward(*given, workspace=lse)
    with pytest.raises(ValueError, match=r"grads\.dx overlaps x in memory"):
        cupyattn.linear_cross_entropy_backward(*given, grads=LinearCrossEntropyGrads(x))
    assert recorder.did_nothing
