"""Weights into four and eight bits and out of them: kernels give the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, SENTINEL
from support.quantised_weights import LARGE, MADE, made_up, moved, weights
from support.search import deep, examples, wider
from support.strategies import dtype_of

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.ops.linear import quantised
from cupyattn.weight_formats import FORMATS, INT4_SMALLEST

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

BLOCKS = {"nf4": (32, 64, 512), "int4": (32, 64, 128), "int8": (32, None)}


def bits(array: np.ndarray) -> np.ndarray:
    """What tells one zero from the other; all NaN are alike."""
    found = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return found.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind == "f" else found


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert_array_equal(bits(found), bits(expected))


def assert_quantised(w: np.ndarray, kind: str, block_size: int | None) -> None:
    """Codes and scales are the reference's, whatever out is."""
    weight = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=block_size)
    assert (weight.format, weight.shape) == (kind, w.shape)
    codes, scales = reference.quantize(w.T, kind, weight.block_size)
    for _ in range(2):
        assert_array_equal(KERNELS.get(weight.codes), codes)
        assert_same_bits(KERNELS.get(weight.scales), scales)
        weight.codes[...], weight.scales[...] = 77, SENTINEL
        assert cupyattn.quantize(KERNELS.put(w), format=kind, out=weight) is weight


@examples(17, deep=200)
@given(
    kind=st.sampled_from(MADE),
    dtype=st.sampled_from(wider(("float16", "float32"), ("bfloat16",))),
    choice=st.integers(0, 2),
    groups=st.integers(1, 3),
    outer=st.sampled_from((1, 2, 7, 33, 40)),
    along_k=st.booleans(),
    apart=st.sampled_from([(0, 0, 1), (8, 8, 1), (1, 2, 1), (0, 0, 3)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_and_scales(kind, dtype, choice, groups, outer, along_k, apart, seed):
    """Blocks of every kind, on rows and on columns, at starts of vectors and elsewhere."""
    block_size = BLOCKS[kind][choice % len(BLOCKS[kind])]
    inner = (block_size or 288) * groups
    start, padding, step = apart
    w = weights(
        inner,
        outer,
        dtype,
        along_k=along_k,
        start=start,
        padding=padding,
        step=step,
        seed=seed,
        large=LARGE.get(kind, 1e36),
    )
    assert_quantised(w, kind, block_size)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("dtype", ["float16", *deep("bfloat16", "float32")])
def test_widths_of_models(kind, dtype):
    """576 and 2560 are no multiples of 128 or no powers of two; blocks as they are by default."""
    w = weights(640 if kind == "int4" else 576, 3, dtype, large=LARGE.get(kind, 1e36))
    assert_quantised(w, kind, None)


@pytest.mark.parametrize("block_size", [128, 256, 1024, *deep(2048, 4096)])
def test_long_blocks(block_size):
    assert_quantised(weights(4096, 3, "float16"), "nf4", block_size)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan_and_the_others_are_as_they_were(
    kind, wrong, monkeypatch
):
    monkeypatch.setattr(quantised, "checks_values", lambda operands: False)
    w = weights(128, 40, "float16")
    whole = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=32)
    w[70, 8] = wrong
    assert_quantised(w, kind, 32)
    broken = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=32)
    before, after = (KERNELS.get(cupyattn.dequantize(each)) for each in (whole, broken))
    assert np.isnan(after[64:96, 8]).all()
    after[64:96, 8] = before[64:96, 8]
    assert_same_bits(after, before)


def test_a_scale_beyond_float16_is_refused_and_nan_where_nobody_looks(monkeypatch):
    """15 steps of 65504 are the most that a block spans; what is next to it is as it was."""
    w = np.ones((64, 3), np.float32)
    w[:2, 1] = -7.5 * 65504, 7.5 * 65504
    assert_quantised(w, "int4", 32)
    w[0, 1] *= 1.01
    with pytest.raises(ValueError, match=r"a block of w spans 987473, .*; take 'nf4' or 'int8'"):
        cupyattn.quantize(w, format="int4", block_size=32)
    cupyattn.quantize(np.abs(w), format="int4", block_size=32)
    monkeypatch.setattr(quantised, "checks_values", lambda operands: False)
    assert_quantised(w, "int4", 32)
    weight = cupyattn.quantize(KERNELS.put(w), format="int4", block_size=32)
    nan = np.isnan(KERNELS.get(cupyattn.dequantize(weight)))
    assert nan[:32, 1].all()
    assert nan.sum() == 32


def test_a_scale_below_float16_is_zero():
    """A step of 2^-25 is half of float16's least number, and is rounded to the even one: 0."""
    w = np.zeros((64, 3), np.float32)
    w[3, :2] = np.multiply(INT4_SMALLEST, [1, 1.001])
    w[5, 2] = -w[3, 1]
    assert_quantised(w, "int4", 32)
    weight = cupyattn.quantize(KERNELS.put(w), format="int4", block_size=32)
    found = KERNELS.get(cupyattn.dequantize(weight))
    assert not found[:, 0].any()
    assert np.count_nonzero(found[:, 1]) == np.count_nonzero(found[:, 2]) == 1


@examples(17, deep=200)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(wider(("float16", "float32"), ("bfloat16",))),
    groups=st.integers(1, 3),
    outer=st.sampled_from((1, 2, 7, 33, 40)),
    transposed=st.booleans(),
    apart=st.sampled_from([None, (0, 0, 1), (8, 8, 1), (1, 2, 1), (0, 0, 3)]),
    along_k=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_numbers(kind, dtype, groups, outer, transposed, apart, along_k, seed):
    """New results, and views of any strides, around which nothing is written."""
    inner = {"nf4": 64, "int4": 128, "int8": 288, "q4_k": 256}.get(kind, 32) * groups
    block_size = {"nf4": 64, "int4": 128, "int8": inner}.get(kind, 32)
    weight = made_up(kind, outer, inner, block_size, seed=seed)
    weight = weight.T if transposed else weight
    kept = dtype_of(dtype)
    expected = cupyattn_on_cpu(weight, kept)
    given = moved(weight, KERNELS.put)
    if apart is None:
        out = cupyattn.dequantize(given, dtype=dtype)
        assert (out if transposed else out.T).flags.c_contiguous
        assert_same_bits(KERNELS.get(out), expected)
        return
    start, padding, step = apart
    rows, columns = (outer, inner) if along_k else (inner, outer)
    room = KERNELS.put(np.full((rows, start + columns * step + padding), SENTINEL, kept))
    view = room[:, start : start + columns * step : step]
    out = view if along_k == transposed else view.T
    assert cupyattn.dequantize(given, out=out) is out
    assert_same_bits(KERNELS.get(out), expected)
    view[...] = SENTINEL
    assert (KERNELS.get(room) == np.array(SENTINEL, kept)).all(), "written outside the view"


def cupyattn_on_cpu(weight: QuantizedWeight, dtype: np.dtype) -> np.ndarray:
    """By the public function, from NumPy's arrays."""
    with cupyattn.backend("reference"):
        return cupyattn.dequantize(weight, dtype=dtype)


@pytest.mark.parametrize("kind", MADE)
def test_rows_of_a_weight_are_views(kind):
    w = weights(96, 40, "float16")
    whole = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=32).T
    part = whole[7:20]
    assert (part.shape, len(part)) == ((13, 96), 13)
    assert_array_equal(
        KERNELS.get(cupyattn.dequantize(part)), KERNELS.get(cupyattn.dequantize(whole))[7:20]
    )
    cupyattn.quantize(KERNELS.put(np.zeros((96, 13), np.float16)), format=kind, out=part.T)
    found = KERNELS.get(cupyattn.dequantize(whole))
    assert not found[7:20].any()
    assert found[:7].any()


def test_tiny_scales_are_flushed_alike():
    """Products below 2^-126, and scales that are."""
    weight = made_up("nf4", 4, 64, 32)
    weight.scales[...] = np.float32(2.0) ** np.array(
        [[-127, -126], [-125, -124], [-122, 0], [-149, 0]]
    )
    expected = cupyattn_on_cpu(weight, np.dtype(np.float32))
    assert (np.abs(expected[expected != 0]) >= 2.0**-126).all()
    out = cupyattn.dequantize(moved(weight, KERNELS.put))
    assert_array_equal(KERNELS.get(out), expected)


@pytest.mark.skipif(KERNELS.xp is not np, reason="counted by the emulator")
@pytest.mark.parametrize("kind", MADE)
def test_every_sector_is_needed(kind):
    from cupyattn.emulator import Report

    w = weights(256, 64, "float16").T.copy().T
    report = Report()
    with cupyattn.backend("emulator", report=report):
        weight = cupyattn.quantize(w, format=kind, block_size=128)
        cupyattn.dequantize(weight, dtype="float16")
    assert report.sector_efficiency >= 0.95
    assert report.bank_conflict_ways <= 1.0
