"""cross_entropy: kernels within the bounds of the reference, labels, large logits and refusals."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import DTYPES, EMULATED, KERNELS, dtype_of, everywhere, kernels_only, unchanged
from support.search import deep, examples

import cupyattn
from cupyattn import reference
from cupyattn.ops.losses.kernels import ReductionArrays, reduce_losses
from cupyattn.runtime.arrays import adopt

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

IGNORED = -100


class Problem(NamedTuple):
    """Logits and labels; a share of the labels is ignored."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    labels_dtype: str = "int32"
    smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    spread: float = 3.0
    seed: int = 0

    def logits(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return (rng.standard_normal(self.shape) * self.spread).astype(dtype_of(self.dtype))

    def labels(self) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 1])
        rows = self.shape[:-1]
        labels = rng.integers(0, self.shape[-1], rows).astype(self.labels_dtype)
        return np.where(rng.random(rows) < 0.3, IGNORED, labels).astype(self.labels_dtype)

    def options(self) -> dict[str, Any]:
        return {
            "label_smoothing": self.smoothing,
            "z_loss": self.z_loss,
            "reduction": self.reduction,
        }


def require_within_bounds(problem: Problem) -> None:
    logits, labels, options = problem.logits(), problem.labels(), problem.options()
    given_logits, given_labels = KERNELS.put(logits), KERNELS.put(labels)
    found = cupyattn.cross_entropy(given_logits, given_labels, return_lse=True, **options)
    loss, lse = (np.asarray(KERNELS.get(array)) for array in found)
    assert loss.dtype == lse.dtype == np.float32
    exact = reference.cross_entropy(logits, labels, **options)
    bounds = reference.cross_entropy_bound(logits, labels, **options)
    for result, expected, bound in zip((loss, lse), exact, bounds, strict=True):
        assert reference.error_ratio(result, expected, bound) <= 1
    if problem.shape[-1] < 100:
        without = cupyattn.cross_entropy(given_logits, given_labels, **options)
        assert_array_equal(KERNELS.get(without), loss)

    rng = np.random.default_rng([problem.seed, 2])
    dloss = np.asarray(rng.standard_normal(loss.shape), np.float32)
    dx = cupyattn.cross_entropy_backward(
        KERNELS.put(dloss), given_logits, given_labels, KERNELS.put(lse), **options
    )
    arguments = (dloss, logits, labels, lse)
    exact_dx = reference.cross_entropy_backward(*arguments, **options)
    bound = reference.cross_entropy_backward_bound(*arguments, dtype=problem.dtype, **options)
    assert reference.error_ratio(KERNELS.get(dx), exact_dx, bound) <= 1


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    vocabulary = draw(st.sampled_from((1, 24, 33, 128, 200, 1000)))
    return Problem(
        (*draw(st.lists(st.integers(0, 4), max_size=2)), vocabulary),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(("int32", "int64"))),
        draw(st.sampled_from((0.0, 0.1, 1.0))),
        draw(st.sampled_from((0.0, 1e-2))),
        draw(st.sampled_from(("mean", "sum", "none"))),
        draw(st.sampled_from((1.0, 30.0))),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.deep
@examples(7)
@given(problem=problems())
def test_within_bounds_of_the_reference(problem):
    require_within_bounds(problem)


@pytest.mark.parametrize(
    "problem",
    [
        Problem((2, 3, 24)),
        Problem((24,), reduction="sum", z_loss=1e-2),
        Problem((0, 24), reduction="none"),
        Problem((3, 33), "bfloat16", "int64", 0.1, 1e-2, "none", spread=30.0),
    ],
    ids=["bare", "one row", "no rows", "full"],
)
def test_bare_and_full_options_are_within_bounds(problem):
    require_within_bounds(problem)


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "smoothing"),
    [
        (20_000, "float16", 0.1),
        *deep((2048, "float16", 0.1), (2049, "bfloat16", 0.0)),
        *deep(*itertools.product((2047, 50_257), DTYPES, (0.0, 0.1))),
        *deep((16_384, "float32", 0.1), (128_256, "float16", 0.1), (128_256, "bfloat16", 0.0)),
        *deep((262_144, "float16", 0.0)),
    ],
)
def test_vocabularies(vocabulary, dtype, smoothing):
    require_within_bounds(
        Problem((3, vocabulary), dtype, "int64", smoothing, z_loss=1e-3, reduction="none")
    )


def test_more_rows_than_threads_give_their_mean():
    """The reduction has 1,024 threads; some rows are ignored."""
    require_within_bounds(Problem((1100, 8)))


@everywhere
def test_large_logits_lose_no_digits(side):
    logits = side.put(np.array([[1e4, -1e4, 1e4 - 1], [3e38, 0.0, -3e38]], np.float32))
    labels = side.put(np.array([2, 0], np.int32))
    losses, lse = cupyattn.cross_entropy(logits, labels, reduction="none", return_lse=True)
    np.testing.assert_allclose(side.get(losses), [1 + np.log1p(np.exp(-1)), 0], rtol=1e-6)
    dx = cupyattn.cross_entropy_backward(losses, logits, labels, lse, reduction="none")
    assert np.isfinite(side.get(dx)).all()


@everywhere
@pytest.mark.parametrize("vocabulary", [8, 64, 200])
def test_equal_large_negative_logits_give_the_loss_of_a_uniform_guess(side, vocabulary):
    """With any larger number as the maximum, every exponential is 0; short rows are one vector."""
    logits = side.put(np.full((3, vocabulary), -2000, np.float16))
    labels = side.put(np.zeros(3, np.int32))
    loss = side.get(cupyattn.cross_entropy(logits, labels, reduction="none"))
    np.testing.assert_allclose(loss, np.full(3, np.log(vocabulary)), atol=2e-4)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
def test_smoothed_row_whose_sum_overflows_gives_minus_infinity():
    """The documentation names this result."""
    logits = KERNELS.put(np.full((1, 4), 1e38, np.float32))
    labels = KERNELS.put(np.zeros(1, np.int32))
    loss = cupyattn.cross_entropy(logits, labels, label_smoothing=0.1)
    assert KERNELS.get(loss) == -np.inf


@everywhere
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_nan_and_infinity_affect_only_their_row(side, odd):
    logits = np.zeros((4, 40), np.float32)
    logits[1, 7], logits[2] = odd, -np.inf
    logits[3, 5] = -np.inf
    labels = side.put(np.arange(4, dtype=np.int32))
    found = cupyattn.cross_entropy(side.put(logits), labels, reduction="none", return_lse=True)
    losses, lse = map(side.get, found)
    assert_array_equal(np.isnan(losses), [False, True, True, False])
    assert lse[2] == -np.inf
    ones = side.put(np.ones(4, np.float32))
    dx = cupyattn.cross_entropy_backward(ones, side.put(logits), labels, found[1], reduction="none")
    dx = side.get(dx)
    assert np.isfinite(dx[[0, 3]]).all()
    assert dx[3, 5] == 0


@everywhere
def test_all_rows_ignored_give_nan_mean_and_zero_gradients(side):
    """The mean of no losses is NaN. Gradients are zero for any dloss."""
    logits = side.put(np.full((3, 8), np.nan, np.float32))
    labels = side.put(np.full(3, IGNORED, np.int32))
    loss, lse = cupyattn.cross_entropy(logits, labels, return_lse=True)
    assert np.isnan(side.get(loss))
    assert side.get(cupyattn.cross_entropy(logits, labels, reduction="sum")) == 0
    dx = cupyattn.cross_entropy_backward(loss, logits, labels, lse)
    assert (side.get(dx) == 0).all()


@everywhere
def test_gradient_overwrites_the_logits(side):
    problem = Problem((3, 5, 40), reduction="none")
    logits, labels = side.put(problem.logits()), side.put(problem.labels())
    losses, lse = cupyattn.cross_entropy(logits, labels, reduction="none", return_lse=True)
    with unchanged(labels, lse, losses):
        expected = cupyattn.cross_entropy_backward(losses, logits, labels, lse, reduction="none")
        found = cupyattn.cross_entropy_backward(
            losses, logits, labels, lse, reduction="none", dlogits=logits
        )
    assert found is logits
    assert_array_equal(side.get(found), side.get(expected))
    with pytest.raises(ValueError, match="dlogits overlaps logits"):
        cupyattn.cross_entropy_backward(
            losses[1:], logits[1:], labels[1:], lse[1:], reduction="none", dlogits=logits[:-1]
        )


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_views_are_read_and_written_in_place(side, reduction):
    wide = np.random.default_rng(0).standard_normal((4, 6, 48)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 40, (6, 4))
    logits, label_view = side.put(wide)[:, ::2, :40], side.put(labels).T[:, ::2]
    copies = np.ascontiguousarray(wide[:, ::2, :40]), np.ascontiguousarray(labels.T[:, ::2])
    loss_shape = () if reduction == "mean" else (4, 3)
    out = side.put(np.full(loss_shape, 77, np.float32)), side.put(np.full((4, 3), 77, np.float32))
    found = cupyattn.cross_entropy(
        logits, label_view, reduction=reduction, return_lse=True, out=out
    )
    assert found[0] is out[0]
    assert found[1] is out[1]
    expected, lse = reference.cross_entropy(*copies, reduction=reduction)
    np.testing.assert_allclose(side.get(out[0]), expected, rtol=1e-5)
    np.testing.assert_allclose(side.get(out[1]), lse, rtol=1e-5)
    dloss = side.put(np.ones(loss_shape, np.float32))
    dx = cupyattn.cross_entropy_backward(dloss, logits, label_view, out[1], reduction=reduction)
    exact = reference.cross_entropy_backward(np.ones(loss_shape), *copies, lse, reduction=reduction)
    np.testing.assert_allclose(side.get(dx), exact, atol=1e-6)


@everywhere
def test_gradient_of_lse_is_added_in_ignored_rows_too(side):
    """An ignored row has no other gradient."""
    logits = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    labels = side.put(np.array([3, IGNORED], np.int32))
    _, lse = cupyattn.cross_entropy(side.put(logits), labels, return_lse=True)
    zero, dlse = side.put(np.zeros((), np.float32)), side.put(np.array([1, 2], np.float32))
    dx = cupyattn.cross_entropy_backward(zero, side.put(logits), labels, lse, dlse=dlse)
    expected = reference.softmax(logits) * [[1], [2]]
    np.testing.assert_allclose(side.get(dx), expected, rtol=1e-5)


@everywhere
def test_scalars_of_numpy_are_arrays_without_axes(side):
    """`loss * 1024` is such a scalar. Python numbers and float64 scalars are refused."""
    logits = side.put(np.zeros(4, np.float32))
    if not isinstance(logits, np.ndarray):
        pytest.skip("NumPy's scalars go with NumPy's arrays")
    loss, lse = cupyattn.cross_entropy(logits, np.int32(3), return_lse=True)
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
    scaled, dlse = loss * 1024, np.float32(4)
    assert isinstance(scaled, np.float32)
    for reduction in ("mean", "sum", "none"):
        found = cupyattn.cross_entropy_backward(
            scaled, logits, np.int64(3), lse * 1, reduction=reduction, dlse=dlse
        )
        expected = scaled * np.array([0.25, 0.25, 0.25, -0.75]) + 1
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(TypeError, match=r"dloss has type builtins\.float"):
        cupyattn.cross_entropy_backward(1.0, logits, np.int32(3), lse)
    with pytest.raises(TypeError, match="dloss has dtype float64"):
        cupyattn.cross_entropy_backward(np.float64(1), logits, np.int32(3), lse)
    with pytest.raises(ValueError, match=r"labels has shape \(\)"):
        cupyattn.cross_entropy(logits[None], np.int32(3))


@pytest.mark.parametrize(
    ("label", "where", "backward"),
    [(8, r"labels\[1, 2\] = 8", False), (-1, r"labels\[1, 2\] = -1", True)],
)
@everywhere
def test_error_names_the_first_label_out_of_range(label, where, backward, side):
    labels = np.zeros((2, 3), np.int64)
    labels[1, 2] = label
    labels[0, 1] = IGNORED
    given = side.put(np.zeros((2, 3, 8), np.float32)), side.put(labels)
    one, lse = side.put(np.ones((), np.float32)), side.put(np.zeros((2, 3), np.float32))
    call = partial(cupyattn.cross_entropy, *given)
    if backward:
        call = partial(cupyattn.cross_entropy_backward, one, *given, lse)
    with (
        cupyattn.backend(checks=True),
        pytest.raises(ValueError, match=f"{where}; .*0 and below 8"),
    ):
        call()


@kernels_only
@pytest.mark.parametrize("label", [-1, 8, 2**31 - 1, -(2**31)])
def test_unchecked_label_out_of_range_gives_nan_in_its_row_alone(side, label, monkeypatch):
    """The emulator's checks find any read outside the logits."""
    monkeypatch.setattr("cupyattn.runtime.rows.checks_values", lambda _: False)
    logits = side.put(np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32))
    labels = side.put(np.array([1, label, IGNORED], np.int32))
    losses, lse = cupyattn.cross_entropy(logits, labels, reduction="none", return_lse=True)
    assert_array_equal(np.isnan(side.get(losses)), [False, True, False])
    ones = side.put(np.ones(3, np.float32))
    dx = side.get(cupyattn.cross_entropy_backward(ones, logits, labels, lse, reduction="none"))
    assert_array_equal(np.isnan(dx).all(axis=1), [False, True, False])
    assert np.isfinite(dx[[0, 2]]).all()
    assert np.isnan(side.get(cupyattn.cross_entropy(logits, labels)))


def test_two_runs_give_the_same_bits():
    problem = Problem((1100, 8))
    with EMULATED.running():
        first, second = (
            cupyattn.cross_entropy(problem.logits(), problem.labels()) for _ in range(2)
        )
    assert first.tobytes() == second.tobytes()


LOGITS, LABELS = np.zeros((2, 3, 8), np.float32), np.zeros((2, 3), np.int32)
REFUSED = {
    "logits of integers": ({"logits": LABELS}, TypeError, "logits has dtype int32"),
    "labels of floats": ({"labels": LOGITS[..., 0]}, TypeError, "labels has dtype float32"),
    "labels of another shape": ({"labels": LABELS[:1]}, ValueError, r"labels has shape \(1, 3\)"),
    "one-hot labels": ({"labels": LOGITS.astype("i4")}, ValueError, r"labels has shape \(2, 3, 8"),
    "no labels": ({"labels": None}, TypeError, "labels is None"),
    "strided classes": ({"logits": LOGITS[:, :, ::2]}, ValueError, "last axis must be contiguous"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, r"label_smoothing = 1.5; it is at least 0"),
    "smoothing NaN": ({"label_smoothing": np.nan}, ValueError, "label_smoothing = nan"),
    "z": ({"z_loss": "1"}, TypeError, "z_loss has type str"),
    "z below 0": ({"z_loss": -1e-3}, ValueError, "z_loss = -0.001"),
    "reduction": ({"reduction": "average"}, ValueError, "reduction = 'average'; allowed"),
    "reduction None": ({"reduction": None}, ValueError, "reduction = None"),
    "ignore_index": ({"ignore_index": 0.5}, TypeError, "ignore_index is 0.5"),
    "ignore_index large": ({"ignore_index": 2**63}, ValueError, "64 bits"),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", REFUSED)
def test_bad_inputs_and_options_are_refused(side, name):
    changes, kind, message = REFUSED[name]
    options = dict(changes)
    arrays = [
        options.pop(key, default) for key, default in (("logits", LOGITS), ("labels", LABELS))
    ]
    logits, labels = (None if array is None else side.put(array) for array in arrays)
    with pytest.raises(kind, match=message):
        cupyattn.cross_entropy(logits, labels, **options)
    dloss, lse = side.put(np.ones((), np.float32)), side.put(np.zeros((2, 3), np.float32))
    with pytest.raises(kind, match=message):
        cupyattn.cross_entropy_backward(dloss, logits, labels, lse, **options)


@everywhere
def test_bad_out_and_dloss_are_refused(side):
    logits, labels = side.put(LOGITS), side.put(LABELS)
    lse = side.put(np.zeros((2, 3), np.float32))
    one = side.put(np.zeros(1, np.float32))
    with pytest.raises(TypeError, match=r"out has type .*array; with return_lse it must be"):
        cupyattn.cross_entropy(logits, labels, return_lse=True, out=lse)
    with pytest.raises(ValueError, match=r"out is float32 \(1,\); the result is float32 \(\)"):
        cupyattn.cross_entropy(logits, labels, out=one)
    with pytest.raises(ValueError, match="out overlaps logits"):
        cupyattn.cross_entropy(logits, labels, out=logits.reshape(-1)[3:4].reshape(()))
    for reduction in ("mean", "none"):
        with pytest.raises(TypeError, match=r"out has type numpy\.float32; .*read that"):
            cupyattn.cross_entropy(logits, labels, out=np.float32(0), reduction=reduction)
    with pytest.raises(ValueError, match=r"dloss has shape \(1,\)"):
        cupyattn.cross_entropy_backward(one, logits, labels, lse)
    with pytest.raises(ValueError, match=r"dloss has shape \(1,\)"):
        cupyattn.cross_entropy_backward(one, logits, labels, lse, reduction="none")
    half = side.put(np.zeros((), np.float16))
    with pytest.raises(TypeError, match="dloss has dtype float16"):
        cupyattn.cross_entropy_backward(half, logits, labels, lse)


LARGE = (1e7, 3e8, 1e30)


def lowered_lse(lse: np.ndarray) -> np.ndarray:
    """Return the next float32 below lse, which rounding may give."""
    return np.nextafter(lse.astype(np.float32), np.float32(-np.inf))


@pytest.mark.parametrize("large", LARGE)
def test_cross_entropy_gradient_of_large_logits_is_at_most_dloss(large):
    logits = np.float32([[large, large, 0, -large], [-large, -large, -large, -large]])
    labels = np.array([1, 2], np.int32)
    lse = lowered_lse(logits.max(-1))
    dloss = np.ones(2, np.float32)
    arrays = [KERNELS.put(each) for each in (dloss, logits, labels, lse)]
    found = KERNELS.get(cupyattn.cross_entropy_backward(*arrays, reduction="none"))
    assert (np.abs(found) <= 1).all()
    exact = reference.cross_entropy_backward(dloss, logits, labels, lse, reduction="none")
    bound = reference.cross_entropy_backward_bound(
        dloss, logits, labels, lse, dtype="float32", reduction="none"
    )
    assert np.isfinite(bound).all()
    assert reference.error_ratio(found, exact, bound) <= 1


@pytest.mark.parametrize("large", LARGE)
def test_logsumexp_gradient_of_large_scores_is_at_most_dout(large):
    x = np.float32([[large, large, 0, -large], [-large, -large, -large, -large]])
    out, dout = lowered_lse(x.max(-1)), np.ones(2, np.float32)
    arrays = [KERNELS.put(each) for each in (dout, x, out)]
    found = KERNELS.get(cupyattn.logsumexp_backward(*arrays))
    assert (found >= 0).all()
    assert (found <= 1).all()
    exact = reference.logsumexp_backward(dout, x, out)
    bound = reference.logsumexp_backward_bound(dout, x, out, dtype="float32")
    assert np.isfinite(bound).all()
    assert reference.error_ratio(found, exact, bound) <= 1


@everywhere
def test_nan_logits_give_nan_gradients(side):
    logits, labels = np.float32([[np.nan, 1], [0, 1]]), np.zeros(2, np.int32)
    lse = np.float32([np.nan, 1.3])
    with side.running():
        arrays = map(side.put, (np.ones(2, np.float32), logits, labels, lse))
        found = side.get(cupyattn.cross_entropy_backward(*arrays, reduction="none"))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_mean_of_eight_million_rows_is_exact():
    """A thread counts 8,191 labels: 13 bits of one half of its counter and one of the other."""
    labels = np.zeros(8191 * 1024 + 5, np.int32)
    labels[[0, 77, -1]] = IGNORED
    dloss = np.asarray(len(labels) - 3, np.float32)
    placed = adopt(ReductionArrays(dloss=KERNELS.put(dloss), labels=KERNELS.put(labels)))
    assert KERNELS.get(reduce_losses(KERNELS.device, placed, IGNORED, mean=True)) == 1
