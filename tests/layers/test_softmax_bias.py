"""The gradient of a bias of softmax and its logarithm: within its bound, in one order, refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, everywhere
from support.dtypes import DTYPES, dtype_of
from support.recording_device import device_array
from support.search import deep, examples, wider

import cupyattn
from cupyattn import SoftmaxGrads, reference, vjp
from cupyattn.arrays import adopt
from cupyattn.emulator import Checks, Report
from cupyattn.kernels.device.emulated import EmulatedDevice
from cupyattn.ops.layers.softmax_dbias import softmax_dbias


class Case(NamedTuple):
    """Rows and a bias, which has the axes of the rows where `varies` says so, and 1 elsewhere."""

    shape: tuple[int, ...]
    varies: tuple[bool, ...]
    dtype: str = "float32"
    bias_dtype: str = "float32"
    scale: float = 0.5
    logarithm: bool = False
    dropped: int = 0
    """Leading axes of 1 that the bias has not at all."""
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


def require_within_bounds(case: Case) -> None:
    """dbias through vjp, of terms that are float32 whatever x is; and dx as it is without."""
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
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 4))
    length = draw(st.sampled_from(wider((24, 33), (1, 7, 264))))
    return Case(
        (*draw(st.lists(st.integers(0, 5), min_size=rank - 1, max_size=rank - 1)), length),
        tuple(draw(st.lists(st.booleans(), min_size=rank, max_size=rank))),
        draw(st.sampled_from(wider(("float32",), DTYPES))),
        draw(st.sampled_from(wider(("float32",), DTYPES))),
        draw(st.sampled_from((1.0, 0.5, -2.0))),
        draw(st.booleans()),
        draw(st.integers(0, 1)),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(11)
@given(case=cases())
def test_any_bias_is_within_its_bound(case):
    require_within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3, 70, 520), (False, True, False, True), "float16"),
        Case((4, 9, 256), (True, False, True), "float16"),  # of columns that fill a CTA
        *deep((Case((3000, 264), (False, True), "float16", "bfloat16"),)),
        *deep((Case((2, 3, 2, 3, 40), (True, False, True, False, True), "bfloat16"),)),
    ],
)
def test_many_rows_and_axes_are_within_the_bound(case):
    require_within_bounds(case)


@everywhere
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gradients_are_written_where_they_are_wanted(side, scale):
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


def test_with_grads_and_a_workspace_nothing_is_allocated(recorder):
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
        {"grads": SoftmaxGrads(BACK[0] + 1)}, TypeError, "grads is a SoftmaxGrads, and bias is N",
    ),
    "an array alone": ({"bias": BIAS, "grads": BACK[0] + 1}, TypeError, "it is a SoftmaxGrads of"),
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
    "a scale": ({"bias": BIAS, "scale": "2"}, TypeError, "scale is"),
    "a workspace": ({"bias": BIAS, "workspace": np.zeros((4, 4))[:, 1:]}, ValueError, "workspace"),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(side, name):
    options, kind, message = REFUSED[name]

    def put(value: Any) -> Any:
        if isinstance(value, SoftmaxGrads):
            return SoftmaxGrads(*map(put, value))
        return side.put(value) if isinstance(value, np.ndarray) else value

    with pytest.raises(kind, match=message):
        cupyattn.softmax_backward(
            *map(side.put, BACK), **{key: put(value) for key, value in options.items()}
        )


def test_an_axis_may_be_an_integer_of_numpy():
    dx, dbias = cupyattn.softmax_backward(*BACK, axis=np.int64(-1), bias=BIAS)
    assert (dx.shape, dbias.shape) == (BACK[0].shape, BIAS.shape)


@pytest.mark.nvrtc
def test_whole_sectors_and_no_bank_conflicts():
    """16 bytes a load; each item is read once, and a partial sum for each column is written."""
    x, like = np.zeros((3, 64, 512), np.float16), np.zeros((3, 1, 512), np.float32)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.softmax_backward(x, x, bias=like)
    loads = [a for a in report.accesses if a.instruction.opcode.startswith("ld.global")]
    # dout and out, by each of two kernels
    assert sum(a.instruction.opcode.endswith("v4.u32") for a in loads) >= 4
    assert report.sector_efficiency == 1.0
    assert report.bank_conflict_ways == 1.0


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_out_with_gaps_and_hidden_columns_is_within_the_bound(name):
    """Terms are float32: to round them to float16 before they are summed is beyond the bound."""
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 3, 200, 2, 40), np.float32).astype(np.float16)
    out = np.full((3, 201, 2, 48), np.nan, np.float16)[:, :200, :, :40]
    out[...] = getattr(reference, name)(x, mask=rng.random(x.shape) < 0.9)
    given, y = dout.astype(np.float32), out.astype(np.float32)
    kept = np.where(np.isneginf(y), 0, given) if name == "log_softmax" else y * given
    row_sum, bias = kept.sum(axis=-1, dtype=np.float32), np.zeros((3, 1, 2, 40), np.float32)
    operands = adopt({"dout": dout, "out": out, "row_sum": row_sum, "bias": bias})
    found = softmax_dbias(EmulatedDevice(Checks.all()), operands, logarithm=name == "log_softmax")
    ds = getattr(reference, f"{name}_backward")(dout, out)
    error = getattr(reference, f"{name}_backward_bound")(dout, out, dtype="float32")
    bound = reference.broadcast_sums_bound(ds, error, bias.shape, dtype="float32")
    exact = reference.broadcast_sums(ds, bias.shape)
    assert 0 < reference.error_ratio(found, exact, bound) <= 1
    rounded = reference.broadcast_sums(ds.astype(np.float16).astype(np.float64), bias.shape)
    assert reference.error_ratio(rounded, exact, bound) > 1


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_vjp_refuses_another_axis_at_once(name):
    """Where x alone is differentiated, any axis will do, and the last may be counted from 0."""
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
