"""Gradients of a softmax bias, and gradients that are added to given arrays."""

from __future__ import annotations

from collections.abc import Callable
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
from cupyattn import SoftmaxGrads, reference, vjp
from cupyattn.emulator import Report
from cupyattn.runtime.precision import precision_of


class BiasCase(NamedTuple):
    """Rows and a bias, whose axes are those of the rows where `varies` is true, else 1."""

    shape: tuple[int, ...]
    varies: tuple[bool, ...]
    dtype: str = "float32"
    bias_dtype: str = "float32"
    scale: float = 0.5
    logarithm: bool = False
    dropped: int = 0
    """1 if the bias lacks its leading axes of 1."""
    seed: int = 0

    @property
    def bias_shape(self) -> tuple[int, ...]:
        kept = [n if varies else 1 for n, varies in zip(self.shape, self.varies, strict=True)]
        while self.dropped and len(kept) > 1 and kept[0] == 1:
            kept = kept[1:]
        return tuple(kept)

    @property
    def name(self) -> str:
        return "log_softmax" if self.logarithm else "softmax"

    def arrays(self) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(self.seed)
        x, dout = (rng.standard_normal(self.shape).astype(dtype_of(self.dtype)) for _ in range(2))
        bias = rng.standard_normal(self.bias_shape).astype(dtype_of(self.bias_dtype))
        hidden = rng.random(self.bias_shape) < 0.1
        return x, np.where(hidden, -np.inf, bias).astype(bias.dtype), dout


def require_within_bounds(case: BiasCase) -> None:
    """Check dbias through vjp, and that dx has the bits of a call without it."""
    x, bias, dout = case.arrays()
    function = getattr(cupyattn, case.name)
    placed = [KERNELS.put(array) for array in (x, bias, dout)]
    options: dict[str, Any] = {"bias": placed[1], "scale": case.scale}
    out, pullback = vjp(function, placed[0], **options, wrt=("bias",))
    dx, more = pullback(placed[2])
    _, plain = vjp(function, placed[0], **options)
    assert_array_equal(KERNELS.get(dx), KERNELS.get(plain(placed[2])[0]))
    exact = getattr(reference, f"{case.name}_backward")
    error = getattr(reference, f"{case.name}_backward_bound")
    out = KERNELS.get(out)
    ds, terms = exact(dout, out), error(dout, out, dtype="float32")
    bound = reference.broadcast_sums_bound(ds, terms, bias.shape, dtype=case.bias_dtype)
    dbias = KERNELS.get(more["bias"])
    assert dbias.dtype == bias.dtype
    assert reference.error_ratio(dbias, reference.broadcast_sums(ds, bias.shape), bound) <= 1
    assert_array_equal(dbias, KERNELS.get(pullback(placed[2])[1]["bias"]))


@st.composite
def bias_cases(draw: st.DrawFn) -> BiasCase:
    rank = draw(st.integers(1, 4))
    length = draw(st.sampled_from((1, 7, 24, 33, 264)))
    return BiasCase(
        (*draw(st.lists(st.integers(0, 5), min_size=rank - 1, max_size=rank - 1)), length),
        tuple(draw(st.lists(st.booleans(), min_size=rank, max_size=rank))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from((1.0, 0.5, -2.0))),
        draw(st.booleans()),
        draw(st.integers(0, 1)),
        draw(st.integers(0, 2**32 - 1)),
    )


# Tests on NumPy come first: `kernels_run` stays active from its first use to the module's end.
def test_axis_may_be_a_numpy_integer():
    dx, dbias = cupyattn.softmax_backward(*BACK, axis=np.int64(-1), bias=BIAS)
    assert (dx.shape, dbias.shape) == (BACK[0].shape, BIAS.shape)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_vjp_of_a_bias_refuses_another_axis(name):
    """The gradient of x alone may run over any axis."""
    function = getattr(cupyattn, name)
    x, bias = np.ones((3, 8), np.float32).T, np.zeros((8, 1), np.float32)
    for ask in (
        lambda: vjp(function, x, axis=0, bias=bias, wrt=("bias",)),
        lambda: vjp(lambda b: function(x, axis=0, bias=b), bias),
    ):
        with pytest.raises(ValueError, match=r"axis = 0 with a bias; .*last axis; pass transposed"):
            ask()
    out, pullback = vjp(function, x, axis=0, bias=bias)
    assert pullback(out)[0].shape == x.shape
    _, pullback = vjp(function, x.T, axis=1, bias=bias.T, wrt=("bias",))
    assert pullback(out.T)[1]["bias"].shape == (1, 8)


def test_infinities_of_both_signs_give_nan():
    """NumPy does not warn."""
    there = np.full((1, 2), np.inf, np.float32)
    dout = np.array([[-np.inf, 0]], np.float32)
    found = cupyattn.softmax_backward(
        dout, np.array([[1, 0]], np.float32), grads=there, accumulate=True
    )
    assert np.isnan(found).any()


def test_pullback_accumulates():
    x, dout = np.random.default_rng(0).standard_normal((2, 3, 8))
    _, pullback = vjp(cupyattn.log_softmax, x)
    (once,) = pullback(dout)
    total = once.copy()
    pullback(dout, grads=total, accumulate=True)
    np.testing.assert_allclose(total, 2 * once)


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(11)
@given(case=bias_cases())
def test_drawn_bias_gradient_is_within_its_bound(case):
    require_within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    "case",
    [
        BiasCase((2, 3, 70, 520), (False, True, False, True), "float16"),
        BiasCase((130, 40), (False, True), "float16"),  # whose rows are split across CTAs
        BiasCase((4, 9, 33), (True, False, True)),  # scalar loads
        BiasCase((0, 24), (True, True)),
        BiasCase((24,), (True,), scale=1.0),
        BiasCase((1, 3, 24), (False, False, False), scale=-2.0, dropped=1),
        BiasCase((4, 9, 256), (True, False, True), "float16"),  # of columns that fill a CTA
        *deep((BiasCase((3000, 264), (False, True), "float16", "bfloat16"),)),
        *deep((BiasCase((2, 3, 2, 3, 40), (True, False, True, False, True), "bfloat16"),)),
    ],
)
def test_many_rows_and_axes_are_within_the_bound(case):
    require_within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("logarithm", [False, True])
def test_rows_of_different_strides_give_dbias_within_its_bound(logarithm):
    """dout is contiguous; rows of out are apart, with NaN between them, and some items hidden."""
    name = "log_softmax" if logarithm else "softmax"
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 3, 100, 2, 40), np.float32).astype(np.float16)
    out = np.full((3, 101, 2, 48), np.nan, np.float16)[:, :100, :, :40]
    out[...] = getattr(reference, name)(x, mask=rng.random(x.shape) < 0.9)
    bias = np.zeros((3, 1, 2, 40), np.float32)
    backward = getattr(cupyattn, f"{name}_backward")
    found = backward(*map(KERNELS.put, (dout, out)), bias=KERNELS.put(bias)).dbias
    ds = getattr(reference, f"{name}_backward")(dout, out)
    error = getattr(reference, f"{name}_backward_bound")(dout, out, dtype="float32")
    bound = reference.broadcast_sums_bound(ds, error, bias.shape, dtype="float32")
    right = reference.broadcast_sums(ds, bias.shape)
    assert reference.error_ratio(KERNELS.get(found), right, bound) <= 1


@everywhere
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_given_grads_and_workspace_are_used(side, scale):
    rng = np.random.default_rng(0)
    x, dout = (side.put(rng.standard_normal((4, 6, 24)).astype(np.float16)) for _ in range(2))
    bias = side.put(rng.standard_normal((6, 24)).astype(np.float32))
    out = cupyattn.softmax(x, bias=bias, scale=scale)
    expected = cupyattn.softmax_backward(dout, out, bias=bias, scale=scale)
    wide = side.put(np.full((4, 6, 32), 7, np.float16))
    grads = SoftmaxGrads(wide[..., :24], side.put(np.full((6, 24), 7, np.float32)))
    room = side.put(np.full(2**16, 255, np.uint8))
    found = cupyattn.softmax_backward(
        dout, out, bias=bias, scale=scale, grads=grads, workspace=room
    )
    assert found.dx is grads.dx
    assert found.dbias is grads.dbias
    for result, wanted in zip(found, expected, strict=True):
        assert_array_equal(side.get(result), side.get(wanted))
    assert (side.get(wide)[..., 24:] == 7).all()


def test_grads_and_workspace_make_allocations_unnecessary(recorder):
    dout, bias = device_array((4, 600, 24)), device_array((600, 24), np.float32)
    grads = SoftmaxGrads(device_array((4, 600, 24)), device_array((600, 24), np.float32))
    out, sums, rows = device_array((4, 600, 24)), 4 * 600 * 24, 4 * 4 * 600
    needed = sums + -(-rows // 256) * 256  # the row sums begin a piece of 256 bytes
    for scale in (1.0, 0.5):
        call = {"bias": bias, "scale": scale, "grads": grads}
        with pytest.raises(ValueError, match=rf"workspace has 16 bytes; .* needs {needed},"):
            cupyattn.softmax_backward(dout, out, **call, workspace=device_array((16,), np.uint8))
        assert not recorder.started
        room = device_array((needed,), np.uint8)
        cupyattn.softmax_backward(dout, out, **call, workspace=room)
        assert recorder.allocated == []
        recorder.launches.clear()


BACK: tuple[Any, ...] = (np.zeros((2, 3, 8), np.float32), np.zeros((2, 3, 8), np.float32))
BIAS = np.zeros((3, 8), np.float32)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an axis": ({"bias": BIAS, "axis": 1}, ValueError, "axis = 1 with a bias; .*last axis"),
    "a shape": ({"bias": BIAS[:2]}, ValueError, r"bias has shape \(2, 8\); it broadcasts"),
    "a dtype": ({"bias": BIAS.astype(int)}, TypeError, "bias has dtype int64"),
    "both without a bias": (
        {"grads": SoftmaxGrads(BACK[0] + 1)}, TypeError, "grads has type SoftmaxGrads, and",
    ),
    "an array alone": ({"bias": BIAS, "grads": BACK[0] + 1}, TypeError, "must be a SoftmaxGrads"),
    "dbias": (
        {"bias": BIAS, "grads": SoftmaxGrads(dbias=BIAS[0])}, ValueError, r"grads\.dbias is float",
    ),
    "dx": (
        {"bias": BIAS, "grads": SoftmaxGrads(np.zeros((2, 3, 8)))}, TypeError, r"grads\.dx is",
    ),
    "lines apart": (
        {"bias": BIAS, "grads": SoftmaxGrads(dbias=np.zeros((3, 9), np.float32)[:, :8])},
        ValueError, r"grads\.dbias has strides .*contiguous in C order",
    ),
    "a scale": ({"bias": BIAS, "scale": "2"}, TypeError, "scale has type"),
    "a workspace": ({"bias": BIAS, "workspace": np.zeros((4, 4))[:, 1:]}, ValueError, "workspace"),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_of_softmax_backward(side, name):
    options, kind, message = REFUSED[name]

    def put(value: Any) -> Any:
        if isinstance(value, SoftmaxGrads):
            return SoftmaxGrads(*map(put, value))
        return side.put(value) if isinstance(value, np.ndarray) else value

    with pytest.raises(kind, match=message):
        cupyattn.softmax_backward(
            *map(side.put, BACK), **{key: put(value) for key, value in options.items()}
        )


@pytest.mark.nvrtc
def test_whole_sectors_and_no_bank_conflicts():
    """dout and out are read once by each of two kernels, 16 bytes per load."""
    x, like = np.zeros((3, 64, 512), np.float16), np.zeros((3, 1, 512), np.float32)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.softmax_backward(x, x, bias=like)
    loads = [a for a in report.accesses if a.instruction.opcode.startswith("ld.global")]
    # dout and out, by each of two kernels
    assert sum(a.instruction.opcode.endswith("v4.u32") for a in loads) >= 4
    assert report.sector_efficiency == 1.0
    assert report.bank_conflict_ways == 1.0


class BackwardCase(NamedTuple):
    """A backward with the arrays that it takes by position and its options."""

    backward: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    options: dict[str, Any]
    exact: np.ndarray
    error: np.ndarray
    """Error bound of a float32 gradient."""
    grads: str = "grads"

    def ratio(self, found: np.ndarray, there: np.ndarray) -> float:
        total = there.astype(np.float64) + self.exact
        bound = self.error + precision_of(found.dtype).store(np.abs(total) + self.error)
        return reference.error_ratio(found, total, bound)


def softmax_case(shape: tuple[int, ...], dtype: str, name: str = "softmax") -> BackwardCase:
    x, dout = np.random.default_rng(0).standard_normal((2, *shape)).astype(dtype_of(dtype))
    with cupyattn.backend("reference"):
        out = getattr(cupyattn, name)(x)
    exact = getattr(reference, f"{name}_backward")
    error = getattr(reference, f"{name}_backward_bound")
    return BackwardCase(
        getattr(cupyattn, f"{name}_backward"), (dout, out), {"scale": -0.75},
        exact(dout, out, scale=-0.75), error(dout, out, dtype="float32", scale=-0.75),
    )  # fmt: skip


def log_softmax_case(shape: tuple[int, ...], dtype: str) -> BackwardCase:
    return softmax_case(shape, dtype, "log_softmax")


def logsumexp_case(shape: tuple[int, ...], dtype: str) -> BackwardCase:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(dtype_of(dtype))
    dout = rng.standard_normal(shape[:-1]).astype(np.float32)
    options = {"scale": 0.5, "mask": rng.random(shape[-1]) < 0.8, "causal": True}
    with cupyattn.backend("reference"):
        out = cupyattn.logsumexp(x, **options)
    return BackwardCase(
        cupyattn.logsumexp_backward, (dout, x, out), options,
        reference.logsumexp_backward(dout, x, out, **options),
        reference.logsumexp_backward_bound(dout, x, out, dtype="float32", **options),
    )  # fmt: skip


def cross_entropy_case(shape: tuple[int, ...], dtype: str) -> BackwardCase:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(shape).astype(dtype_of(dtype))
    labels = rng.integers(0, shape[-1], shape[:-1])
    labels[..., 1] = -100
    options = {"label_smoothing": 0.1, "reduction": "mean"}
    with cupyattn.backend("reference"):
        loss, lse = cupyattn.cross_entropy(logits, labels, return_lse=True, **options)
    arrays = np.full_like(loss, 50), logits, labels, lse
    return BackwardCase(
        cupyattn.cross_entropy_backward, arrays, options,
        reference.cross_entropy_backward(*arrays, **options),
        reference.cross_entropy_backward_bound(*arrays, dtype="float32", **options),
        "dlogits",
    )  # fmt: skip


CASES: dict[str, Callable[[tuple[int, ...], str], BackwardCase]] = {
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
def test_gradient_accumulates_in_strided_rows(side, name, shape, dtype):
    """Rows are apart, and the gaps between them keep their contents."""
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
def test_gradient_accumulates_along_any_axis(side, axis):
    case = softmax_case((3, 24), "float32")
    there = np.ones((3, 24), np.float32)
    arrays = [side.put(np.moveaxis(array, -1, axis)) for array in (*case.arrays, there.copy())]
    found = case.backward(*arrays[:2], axis=axis, **case.options, grads=arrays[2], accumulate=True)
    assert found is arrays[2]
    assert case.ratio(np.moveaxis(side.get(found), axis, -1), there) <= 1


@everywhere
@pytest.mark.parametrize("scale", [1.0, -0.5])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_dx_and_dbias_accumulate(side, name, scale):
    """A gradient that is not given starts at zero."""
    rng = np.random.default_rng(0)
    x, dout = (side.put(a) for a in rng.standard_normal((2, 4, 6, 24), np.float32))
    bias = side.put(np.zeros((6, 24), np.float32))
    out = getattr(cupyattn, name)(x, bias=bias, scale=scale)
    backward = getattr(cupyattn, f"{name}_backward")
    options = {"bias": bias, "scale": scale}
    plain = [side.get(array) for array in backward(dout, out, **options)]
    for present in ((True, True), (True, False), (False, True)):
        start = [np.full_like(array, 3) for array in plain]
        grads = SoftmaxGrads(
            *(side.put(s) if g else None for s, g in zip(start, present, strict=True))
        )
        found = backward(dout, out, **options, grads=grads, accumulate=True)
        for array, target, alone, was in zip(found, grads, plain, present, strict=True):
            assert array is target or not was
            np.testing.assert_allclose(side.get(array), alone + 3 * was, rtol=1e-6, atol=1e-6)
    one = side.put(np.full((6, 1), 3, np.float32))  # a bias that is one number for all columns
    grads = SoftmaxGrads(None, one)
    found = backward(dout, out, bias=one + 0, scale=scale, grads=grads, accumulate=True)
    np.testing.assert_allclose(side.get(found.dbias), 3, atol=1e-5)


@everywhere
def test_no_rows_leave_dbias_unchanged(side):
    none, bias = side.put(np.zeros((0, 8), np.float32)), side.put(np.full(8, 3, np.float32))
    grads = SoftmaxGrads(None, bias)
    found = cupyattn.softmax_backward(none, none, bias=bias + 0, grads=grads, accumulate=True)
    assert (side.get(found.dbias) == 3).all()


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_accumulate_without_grads_is_refused(side, name):
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
def test_accumulate_with_a_bias_and_without_grads_is_refused(side, options, kind, message):
    x, bias = side.put(np.zeros((2, 8), np.float32)), side.put(np.zeros(8, np.float32))
    with pytest.raises(kind, match=message):
        cupyattn.softmax_backward(x, x, bias=bias, **options)


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulate_into_the_logits_is_refused(side, reduction):
    case = cross_entropy_case((2, 3, 24), "float32")
    dloss, logits, labels, lse = (side.put(array) for array in case.arrays)
    before = side.get(logits)
    with pytest.raises(ValueError, match="dlogits overlaps logits in memory"):
        cupyattn.cross_entropy_backward(
            dloss, logits, labels, lse, reduction=reduction, dlogits=logits, accumulate=True
        )
    np.testing.assert_array_equal(side.get(logits), before)
