"""Rotary position embedding: the kernel within its bound of the reference, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import KERNELS, everywhere
from support.dtypes import DTYPES, dtype_of
from support.recording_device import device_array
from support.search import examples, wider
from support.strategies import lay_out

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.layers import rope as ops

LENGTH = 40
VIEWS = ("contiguous", "packed", "transposed", "sliced", "reversed")


def arrays(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype_of(dtype)) for shape in shapes]


def tables(pairs: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    return cupyattn.rope_tables(LENGTH, 2 * pairs, dtype=dtype)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(14)
@given(
    case=st.sampled_from(
        wider(
            (("float16", False), ("float16", True), ("float32", False)),
            [(dtype, interleaved) for dtype in DTYPES for interleaved in (False, True)],
        )
    ),
    batch=st.integers(1, 2),
    length=st.sampled_from((1, 5, 33)),
    heads=st.sampled_from(((1, 1), (4, 2), (5, 3), (8, 1))),
    dim=st.sampled_from(((16, 8), (24, 8), (24, 4), (17, 5), (33, 16), (8, 0), (10, 5))),
    positions=st.sampled_from((None, "S", "B S")),
    inverse=st.booleans(),
    view=st.sampled_from(VIEWS),
    seed=st.integers(0, 9),
)
def test_within_bounds(case, batch, length, heads, dim, positions, inverse, view, seed):
    (dtype, interleaved), (dim, pairs) = case, dim
    shapes = [(batch, length, count, dim) for count in heads]
    q, k = arrays(seed, dtype, *shapes)
    cos, sin = tables(pairs)
    at, options = np.arange(length), {"interleaved": interleaved, "inverse": inverse}
    if positions:
        shape = (length,) if positions == "S" else (batch, length)
        at = np.random.default_rng(seed).integers(0, LENGTH, shape)
        options["positions"] = KERNELS.put(at)
    placed = tuple(KERNELS.put(lay_out(x, view)) for x in (q, k))
    found = cupyattn.rope(placed, KERNELS.put(cos), KERNELS.put(sin), **options)
    turn = -sin if inverse else sin
    for x, out in zip((q, k), found, strict=True):
        exact = reference.rope(x, cos, turn, at, interleaved=interleaved)
        bound = reference.rope_bound(x, cos, turn, at, dtype=dtype, interleaved=interleaved)
        assert reference.error_ratio(KERNELS.get(out), exact, bound) <= 1


@everywhere
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (24, 4), (13, 5)])
def test_in_place_and_backward(side, interleaved, dim, pairs):
    q, k, dq, dk, there = arrays(0, "float32", *[(2, 6, 3, dim)] * 5)
    cos, sin = (side.put(table) for table in tables(pairs))
    options = {"interleaved": interleaved}
    turned = [side.get(x) for x in cupyattn.rope((side.put(q), side.put(k)), cos, sin, **options)]
    x = side.put(q.copy()), side.put(k.copy())
    found = cupyattn.rope(x, cos, sin, out=x, **options)
    assert found[0] is x[0] and found[1] is x[1]
    for array, expected in zip(found, turned, strict=True):
        assert_array_equal(side.get(array), expected)
    back = cupyattn.rope(found, cos, sin, inverse=True, **options)
    assert_allclose(side.get(back[0]), q, atol=2e-6)

    gradients = cupyattn.rope_backward((side.put(dq), side.put(dk)), cos, sin, **options)
    for gradient, x, out, dout in zip(gradients, (q, k), turned, (dq, dk), strict=True):
        inner, outer = (
            (side.get(gradient).astype(float) * x).sum(),
            (out.astype(float) * dout).sum(),
        )
        assert_allclose(inner, outer, rtol=1e-4)
    into = side.put(there.copy())
    once = side.get(cupyattn.rope_backward(side.put(dq), cos, sin, **options))
    added = cupyattn.rope_backward(side.put(dq), cos, sin, grads=into, accumulate=True, **options)
    assert added is into
    assert_allclose(side.get(added), there + once, rtol=1e-5, atol=1e-6)


def test_interleaved_is_half_split_of_permuted_features():
    (x,) = arrays(1, "float64", (1, 4, 2, 10))
    cos, sin = tables(4, "float64")
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    with cupyattn.backend("reference"):
        half = cupyattn.rope(np.ascontiguousarray(x[..., order]), cos, sin)
        assert_allclose(cupyattn.rope(x, cos, sin, interleaved=True)[..., order], half)


@everywhere
def test_vjp(side):
    q, k, dq, dk = (side.put(x) for x in arrays(2, "float32", *[(1, 3, 2, 8)] * 4))
    cos, sin = (side.put(table) for table in tables(4))
    _, pullback = cupyattn.vjp(cupyattn.rope, (q, k), cos, sin, interleaved=True)
    (first, second), dcos, dsin = pullback((dq, dk))
    expected = cupyattn.rope_backward((dq, dk), cos, sin, interleaved=True)
    assert_array_equal(side.get(first), side.get(expected[0]))
    assert_array_equal(side.get(second), side.get(expected[1]))
    assert dcos is None and dsin is None
    (first, second), _, _ = pullback((dq, None))
    assert_array_equal(side.get(first), side.get(expected[0]))
    assert not side.get(second).any()
    for wrong in (dq, (dq,), (dq, dk, dk)):
        with pytest.raises(TypeError, match="the pullback of rope was given"):
            pullback(wrong)
    _, pullback = cupyattn.vjp(lambda x: cupyattn.rope(x, cos, sin), q)
    (dx,) = pullback(dq)
    assert_array_equal(side.get(dx), side.get(cupyattn.rope_backward(dq, cos, sin)))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions_without_a_row_give_nan_and_are_not_read(monkeypatch, interleaved, dtype):
    """As a GPU does where nobody asked for checks of values."""
    monkeypatch.setattr(ops, "checks_values", lambda operands: False)
    (x,) = arrays(3, "float16", (2, 3, 4, 24))
    cos, sin = tables(8)
    positions = np.array([[0, -1, 5], [LENGTH, LENGTH - 1, 2**31 - 1]], dtype)
    options = {"positions": KERNELS.put(positions), "interleaved": interleaved}
    out = KERNELS.get(cupyattn.rope(*map(KERNELS.put, (x, cos, sin)), **options))
    outside = (positions < 0) | (positions >= LENGTH)
    assert np.isnan(out[outside][..., :16]).all()
    assert_array_equal(out[..., 16:], x[..., 16:])
    kept = np.where(outside, 0, positions)
    expected = reference.rope(x, cos, sin, kept, interleaved=interleaved)
    assert_allclose(out[~outside], expected[~outside], atol=4e-3)


@pytest.mark.nvrtc
def test_extremes():
    """What is only copied stays as it is; infinities are those of the formula."""
    x = np.zeros((1, 2, 1, 12), np.float16)
    x[0, :, 0] = [4e4, 4e4, 1, np.inf, 4e4, -4e4, 0, 2, np.inf, -np.inf, np.nan, -0.0]
    cos, sin = tables(4)
    with cupyattn.backend("emulator"):
        out = cupyattn.rope(x, cos, sin)
    exact = reference.rope(x, cos, sin, np.arange(2))
    bound = reference.rope_bound(x, cos, sin, np.arange(2), dtype="float16")
    assert reference.error_ratio(out, exact, bound) <= 1
    assert out[..., 8:].tobytes() == x[..., 8:].tobytes()


@pytest.mark.nvrtc
@pytest.mark.parametrize("interleaved", [False, True])
def test_whole_sectors_of_q_and_k(interleaved):
    """Of the tables a thread of float16 pairs reads 32 bytes in two pieces, the second from L1."""
    report = Report()
    q, k = arrays(0, "float16", (1, 8, 8, 64), (1, 8, 2, 64))
    with cupyattn.backend("emulator", report=report):
        cupyattn.rope((q, k), *tables(32), interleaved=interleaved)
    assert report.sector_efficiency == (1.0 if interleaved else 23 / 26)
    wasteful = {a.instruction.location[1] for a in report.accesses if a.efficiency < 1}
    assert len(wasteful) == (0 if interleaved else 1)  # the line that reads tables


def test_one_launch_for_q_and_k(recorder):
    q, k = device_array((2, 5, 8, 64)), device_array((2, 5, 2, 64))
    cos, sin = device_array((9, 32), np.float32), device_array((9, 32), np.float32)
    cupyattn.rope((q, k), cos, sin)
    cupyattn.rope((q, k), cos, sin, out=(q, k))
    ((first, grid, arguments), (_, _, again)) = recorder.started
    params = arguments[-1]
    assert dict(first.macros)["VEC"] == 8
    assert params["groups"].tolist() == [4, 1]
    assert (params["slots"], params["tokens"]) == (4, 10)
    assert grid == (2, 1, 1)
    assert arguments[0] is q and arguments[1] is k and again[5] is q and again[6] is k


def bad(**changes):
    call = {
        "x": np.zeros((2, 3, 4, 8), np.float32),
        "cos": np.zeros((5, 4), np.float32),
        "sin": np.zeros((5, 4), np.float32),
    }
    return {**call, **changes}


F32 = np.float32


@everywhere
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"x": np.zeros((3, 4, 8), F32)}, ValueError, r"x has shape \(3, 4, 8\); x is \(B, S, H"),
        ({"x": np.zeros((2, 6, 4, 8), F32)}, ValueError, "S = 6 tokens.*cos and sin have 5 rows"),
        ({"x": np.zeros((2, 3, 4, 6), F32)}, ValueError, "cos has 4 columns, which rotate 8 feat"),
        ({"x": np.zeros((2, 3, 4, 8), int)}, TypeError, "x has dtype int64"),
        ({"x": None}, TypeError, "x is None"),
        ({"x": np.zeros((2, 3, 4, 16), F32)[..., ::2]}, ValueError, "x has strides"),
        ({"cos": np.zeros((4, 4), F32)}, ValueError, r"sin has shape \(5, 4\); sin is shaped like"),
        ({"cos": np.zeros((5, 4), np.float16)}, TypeError, "share one dtype"),
        ({"cos": np.zeros(5, F32)}, ValueError, "cos has shape"),
        ({"positions": np.array([0, 1])}, ValueError, r"positions has shape \(2,\); it is \(S,\)"),
        ({"positions": np.zeros((3, 2), int)}, ValueError, r"positions has shape \(3, 2\)"),
        ({"positions": np.zeros(3, F32)}, TypeError, "positions has dtype float32"),
        ({"interleaved": 1}, TypeError, "interleaved = 1"),
        ({"inverse": None}, TypeError, "inverse = None"),
        ({"out": np.zeros((2, 3, 4, 7), F32)}, ValueError, "out is float32"),
        ({"out": (None, None)}, TypeError, "out"),
    ],
)
def test_bad_input(side, changes, kind, message):
    call = {
        name: side.put(value) if isinstance(value, np.ndarray) else value
        for name, value in bad(**changes).items()
    }
    with pytest.raises(kind, match=message):
        cupyattn.rope(call.pop("x"), call.pop("cos"), call.pop("sin"), **call)


@everywhere
def test_bad_pairs(side):
    x, cos, sin = (side.put(a) for a in bad().values())
    other = side.put(np.zeros((2, 3, 1, 6), F32))
    for pair, kind, message in (
        ((x,), TypeError, "x is a tuple of 1; it is one array, or a tuple of two"),
        ((x, other), ValueError, r"x\[1\] has shape"),
        ((x, x), ValueError, r"out\[0\] overlaps x\[1\]"),
    ):
        with pytest.raises(kind, match=message):
            cupyattn.rope(pair, cos, sin, out=pair if len(pair) == 2 else None)
    with pytest.raises(TypeError, match="out is a list"):
        cupyattn.rope((x, x), cos, sin, out=[x, x])
    q = side.put(np.zeros((2, 3, 4, 8), F32))
    with pytest.raises(ValueError, match=r"out\[0\] overlaps x\[1\]"):
        cupyattn.rope((x, q), cos, sin, out=(q, None))
    with pytest.raises(ValueError, match="accumulate=True without grads"):
        cupyattn.rope_backward(x, cos, sin, accumulate=True)


def values_are_checked(side):
    return cupyattn.backend(checks=True)


@everywhere
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 2], [3, 5, -1]], r"positions\[1, 1\] is 5; cos and sin have rows 0 to 4"),
        ([0, 1, -1], r"positions\[2\] is -1"),
    ],
)
def test_the_first_position_without_a_row_is_named(side, positions, message):
    x, cos, sin = (side.put(a) for a in bad().values())
    with values_are_checked(side), pytest.raises(ValueError, match=message):
        cupyattn.rope(x, cos, sin, positions=side.put(np.array(positions)))


@everywhere
@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)])
def test_empty(side, shape):
    _, cos, sin = (side.put(a) for a in bad().values())
    x = side.put(np.zeros(shape, F32))
    assert cupyattn.rope(x, cos, sin).shape == shape
    assert cupyattn.rope((x, x), cos, sin)[1].shape == shape
