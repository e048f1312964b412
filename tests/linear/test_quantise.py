"""Weights in four and eight bits, with float and nested scales: the bits of the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, SENTINEL, dtype_of
from support.quantised_weights import LARGE, MADE, made_up, moved, weights
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.ops.linear import kernels_quantised
from cupyattn.ops.linear.weight_formats import FORMATS, INT4_SMALLEST

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

BLOCKS = {"nf4": (32, 64, 512), "int4": (32, 64, 128), "int8": (32, None)}


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bits of the items, which differ for 0 and -0. All NaN become one."""
    found = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return found.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind == "f" else found


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert_array_equal(bits(found), bits(expected))


def assert_quantised(w: np.ndarray, kind: str, block_size: int | None) -> None:
    """Compare codes and scales with the reference, in new arrays and in a given out."""
    weight = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=block_size)
    assert (weight.format, weight.shape) == (kind, w.shape)
    codes, scales = reference.quantize(w.T, kind, weight.block_size)
    for _ in range(2):
        assert_array_equal(KERNELS.get(weight.codes), codes)
        assert_same_bits(KERNELS.get(weight.scales), scales)
        weight.codes[...], weight.scales[...] = 77, SENTINEL
        assert cupyattn.quantize(KERNELS.put(w), format=kind, out=weight) is weight


@examples(6, deep=200)
@given(
    kind=st.sampled_from(MADE),
    dtype=st.sampled_from(wider(("float16",), ("float32", "bfloat16"))),
    choice=st.integers(0, 2),
    groups=st.integers(1, 3),
    outer=st.sampled_from((1, 2, 7, 33, 40)),
    along_k=st.booleans(),
    apart=st.sampled_from([(0, 0, 1), (8, 8, 1), (1, 2, 1), (0, 0, 3)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_and_scales(kind, dtype, choice, groups, outer, along_k, apart, seed):
    """Blocks lie along rows and columns, at starts of vectors and elsewhere."""
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
    """576 and 640 are no powers of two. Blocks have their default size."""
    w = weights(640 if kind == "int4" else 576, 3, dtype, large=LARGE.get(kind, 1e36))
    assert_quantised(w, kind, None)


@pytest.mark.parametrize("block_size", [128, 256, 1024, *deep(2048, 4096)])
def test_long_blocks(block_size):
    assert_quantised(weights(4096, 3, "float16"), "nf4", block_size)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_non_finite_block_is_nan_and_the_others_are_unchanged(kind, wrong, monkeypatch):
    monkeypatch.setattr(kernels_quantised, "checks_values", lambda operands: False)
    w = weights(128, 40, "float16")
    whole = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=32)
    w[70, 8] = wrong
    assert_quantised(w, kind, 32)
    broken = cupyattn.quantize(KERNELS.put(w), format=kind, block_size=32)
    before, after = (KERNELS.get(cupyattn.dequantize(each)) for each in (whole, broken))
    assert np.isnan(after[64:96, 8]).all()
    after[64:96, 8] = before[64:96, 8]
    assert_same_bits(after, before)


def test_scale_beyond_float16_is_refused_or_nan_without_checks(monkeypatch):
    """A block spans at most 15 steps of 65504. Other blocks are unchanged."""
    w = np.ones((64, 3), np.float32)
    w[:2, 1] = -7.5 * 65504, 7.5 * 65504
    assert_quantised(w, "int4", 32)
    w[0, 1] *= 1.01
    with pytest.raises(ValueError, match=r"a block of w spans 987473, .*; take 'nf4' or 'int8'"):
        cupyattn.quantize(w, format="int4", block_size=32)
    cupyattn.quantize(np.abs(w), format="int4", block_size=32)
    monkeypatch.setattr(kernels_quantised, "checks_values", lambda operands: False)
    assert_quantised(w, "int4", 32)
    weight = cupyattn.quantize(KERNELS.put(w), format="int4", block_size=32)
    nan = np.isnan(KERNELS.get(cupyattn.dequantize(weight)))
    assert nan[:32, 1].all()
    assert nan.sum() == 32


def test_scale_below_float16_is_zero():
    """A step of 2^-25 is half of float16's least number, and is rounded to the even one: 0."""
    w = np.zeros((64, 3), np.float32)
    w[3, :2] = np.multiply(INT4_SMALLEST, [1, 1.001])
    w[5, 2] = -w[3, 1]
    assert_quantised(w, "int4", 32)
    weight = cupyattn.quantize(KERNELS.put(w), format="int4", block_size=32)
    found = KERNELS.get(cupyattn.dequantize(weight))
    assert not found[:, 0].any()
    assert np.count_nonzero(found[:, 1]) == np.count_nonzero(found[:, 2]) == 1


@examples(6, deep=200)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(wider(("float16",), ("float32", "bfloat16"))),
    groups=st.integers(1, 3),
    outer=st.sampled_from((1, 2, 7, 33, 40)),
    transposed=st.booleans(),
    apart=st.sampled_from([None, (0, 0, 1), (8, 8, 1), (1, 2, 1), (0, 0, 3)]),
    along_k=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_dequantised_numbers_are_those_of_the_reference(
    kind, dtype, groups, outer, transposed, apart, along_k, seed
):
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
    """Dequantise with the reference."""
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
    """Products and scales below 2^-126 are flushed."""
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


NAMES = ("codes", "scales", "super_scales", "scale_table")


def as_bitsandbytes_rounds(weight: QuantizedWeight) -> np.ndarray:
    """Compute the absmax of each block as a product and a sum, both rounded to float32."""
    assert weight.super_scales is not None
    assert weight.scale_table is not None
    found = np.empty(weight.scales.size, np.float32)
    for i, code in enumerate(weight.scales.reshape(-1)):
        span, offset = weight.super_scales[i // 64]
        found[i] = np.float32(weight.scale_table[code] * span) + offset
    return found.reshape(weight.scales.shape)


def with_floats(weight: QuantizedWeight) -> QuantizedWeight:
    absmax = as_bitsandbytes_rounds(weight)
    size, transposed = weight.block_size, weight.transposed
    return QuantizedWeight("nf4", weight.codes, absmax, block_size=size, transposed=transposed)


@examples(3, deep=40)
@given(
    block_size=st.sampled_from((32, 64)),
    blocks=st.integers(1, 5),
    outer=st.sampled_from((1, 2, 7, 33, 70)),
    seed=st.integers(0, 2**32 - 1),
)
def test_nested_codes_and_numbers_are_those_of_the_reference(block_size, blocks, outer, seed):
    """Groups end within a row or with the last one. Arrays are new or given."""
    w = weights(block_size * blocks, outer, "float16", seed=seed)
    given = KERNELS.put(w)
    weight = cupyattn.quantize(given, format="nf4_nested", block_size=block_size)
    plain = cupyattn.quantize(given, format="nf4", block_size=block_size)
    expected = reference.nest_scales(KERNELS.get(plain.scales))
    for _ in range(2):
        assert_array_equal(KERNELS.get(weight.codes), KERNELS.get(plain.codes))
        for name, wanted in zip(NAMES[1:], expected, strict=True):
            assert_array_equal(KERNELS.get(getattr(weight, name)), wanted, err_msg=name)
        for array in weight.arrays.values():
            array[...] = 77
        room = KERNELS.put(np.zeros(blocks * outer, np.float32))
        made = cupyattn.quantize(given, format="nf4_nested", out=weight, workspace=room)
        assert made is weight
    found = KERNELS.get(cupyattn.dequantize(weight))
    on_host = QuantizedWeight(
        "nf4_nested", *map(KERNELS.get, weight.arrays.values()), block_size=block_size
    )
    with cupyattn.backend("reference"):
        assert_array_equal(found, cupyattn.dequantize(with_floats(on_host)))


@pytest.mark.parametrize(("outer", "blocks"), [(1, 3), (130, 1), (33, 5)])
def test_nested_scales_are_rounded_as_bitsandbytes_rounds(outer, blocks):
    """Nothing is written after the last block."""
    weight = made_up("nf4_nested", outer, 64 * blocks, 64, seed=outer)
    assert weight.scale_table is not None
    assert weight.super_scales is not None
    weight.scales.reshape(-1)[::2] += np.uint8(190)
    with cupyattn.backend("reference"):
        expected = cupyattn.dequantize(with_floats(weight))
        assert_array_equal(cupyattn.dequantize(weight), expected)
    room = KERNELS.put(np.full(outer * blocks + 3, SENTINEL, np.float32))
    given = moved(weight, KERNELS.put)
    found = cupyattn.dequantize(given, workspace=room[: outer * blocks])
    assert_array_equal(KERNELS.get(found), expected)
    kept = KERNELS.get(room)
    assert (kept[-3:] == np.float32(SENTINEL)).all()
    assert_array_equal(kept[:-3], as_bitsandbytes_rounds(weight).reshape(-1))


def test_subnormal_nested_numbers_are_zero():
    weight = made_up("nf4_nested", 4, 64, 64)
    assert weight.super_scales is not None
    assert weight.scale_table is not None
    weight.scale_table[:] = np.float32(0.5)
    weight.super_scales[:] = np.float32(2.0**-126), np.float32(2.0**-126)
    with cupyattn.backend("reference"):
        expected = cupyattn.dequantize(weight)
    assert expected.max() == np.float32(2.0**-126)
    assert_array_equal(KERNELS.get(cupyattn.dequantize(moved(weight, KERNELS.put))), expected)


@pytest.mark.parametrize(
    ("rows", "transposed", "dtype", "activation"),
    mostly_deep(
        itertools.product([1, 20, 72], [False, True], ["float16", "float32"], [None, "gelu"]),
        [(1, False, "float16", None)],
    ),
)
def test_products_of_nested_scales_equal_those_of_float32_scales(
    rows, transposed, dtype, activation
):
    """Results and gradients are equal bit for bit."""
    nested = made_up("nf4_nested", 72, 192, 64, seed=3)
    plain = with_floats(nested)
    pair = [moved(w.T if transposed else w, KERNELS.put) for w in (nested, plain)]
    rng = np.random.default_rng(rows)
    inner, outer = nested.shape[::-1] if transposed else nested.shape
    x = KERNELS.put((rng.standard_normal((rows, inner)) / 8).astype(dtype))
    dout = KERNELS.put((rng.standard_normal((rows, outer)) / 8).astype(dtype))
    b = KERNELS.put(rng.standard_normal(outer).astype(dtype))
    found, wanted = (
        (
            cupyattn.linear(x, w, b, activation=activation),
            *cupyattn.linear_backward(dout, x, w, b, activation=activation),
        )
        for w in pair
    )
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            assert_array_equal(KERNELS.get(one), KERNELS.get(other))
    assert float(abs(wanted[0]).max()) > 0.1


def test_non_finite_group_is_nan_and_the_others_are_unchanged(monkeypatch):
    monkeypatch.setattr(kernels_quantised, "checks_values", lambda operands: False)
    w = weights(64, 200, "float16")
    whole = cupyattn.quantize(KERNELS.put(w), format="nf4_nested")
    w[5, 70] = np.nan
    broken = cupyattn.quantize(KERNELS.put(w), format="nf4_nested")
    before, after = (KERNELS.get(cupyattn.dequantize(each)) for each in (whole, broken))
    assert np.isnan(after[:, 70]).all()
    nan = np.isnan(KERNELS.get(broken.super_scales)).all(axis=-1)
    assert nan.tolist() == [False, True, False, False]
    assert_array_equal(after[:, :64], before[:, :64])
    assert_array_equal(after[:, 128:], before[:, 128:])


def test_group_whose_sum_overflows_is_finite():
    """Half of the lowest and half of the highest absmax are added without overflow.

    The CTAs' ranges do not end with a group, but the last group is whole.
    """
    rng = np.random.default_rng(1)
    w = np.clip(rng.uniform(-6e38, 6e38, (64, 192)) * rng.random(192), -3e38, 3e38)
    w = w.astype(np.float32)
    with cupyattn.backend("reference"):
        expected = cupyattn.quantize(w, format="nf4_nested")
        numbers = cupyattn.dequantize(expected)
    made = cupyattn.quantize(KERNELS.put(w), format="nf4_nested")
    for name, array in expected.arrays.items():
        assert_array_equal(KERNELS.get(made.arrays[name]), array, err_msg=name)
    assert np.isfinite(numbers).all() and numbers.max() == np.float32(3e38)


def test_nested_absmax_is_within_half_a_step():
    """A step is 1/255 of what a group spans; a group without any difference is exact."""
    rng = np.random.default_rng(0)
    absmax = rng.uniform(0.1, 3, (13, 10)).astype(np.float32)
    absmax.reshape(-1)[64:128] = 0.75
    made = reference.nest_scales(absmax)
    found = reference.expand_scales(*made).reshape(-1)
    assert (found[64:128] == 0.75).all()
    spans = np.ptp(absmax.reshape(-1)[:64]), np.ptp(absmax.reshape(-1)[128:])
    errors = np.abs(found - absmax.reshape(-1))
    assert errors[:64].max() <= spans[0] / 510 * 1.001
    assert errors[128:].max() <= spans[1] / 510 * 1.001
    assert errors[:64].max() > spans[0] / 1020


def test_nested_weight_has_the_documented_size():
    weight = cupyattn.quantize(np.ones((2560, 512), np.float16), format="nf4_nested")
    table = 256 * 4
    assert (weight.nbytes - table) * 8 / (2560 * 512) == 4 + 8 / 64 + 64 / 64**2


def test_slices_of_rows_start_at_whole_groups():
    """With three blocks per row, a group starts at every 64th row. A slice may end anywhere."""
    whole = cupyattn.quantize(KERNELS.put(weights(192, 140, "float16")), format="nf4_nested").T
    numbers = KERNELS.get(cupyattn.dequantize(whole))
    for rows in (slice(64, 139), slice(128, None), slice(0, 1)):
        part = whole[rows]
        assert_array_equal(KERNELS.get(cupyattn.dequantize(part)), numbers[rows])
        assert part.scale_table is whole.scale_table
    with pytest.raises(IndexError, match="slices of it begin at multiples of 64"):
        whole[3:10]
    cupyattn.quantize(
        KERNELS.put(np.zeros((192, 12), np.float16)), out=whole[128:].T, format="nf4_nested"
    )
    found = KERNELS.get(cupyattn.dequantize(whole))
    assert not found[128:].any()
    assert_array_equal(found[:128], numbers[:128])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale_table": None}, "no scale_table"),
        ({"super_scales": np.zeros((3, 2), np.float32)}, r"it is float32 \(2, 2\) in C order"),
        ({"super_scales": np.zeros((2, 2), np.float16)}, r"it is float32 \(2, 2\) in C order"),
        ({"scales": np.zeros((33, 2), np.float32)}, r"it is uint8 \(33, 2\)"),
    ],
)
def test_bad_nested_arrays_are_refused(changed, message):
    weight = made_up("nf4_nested", 33, 128, 64)
    with pytest.raises(ValueError, match=message):
        QuantizedWeight("nf4_nested", **{**weight.arrays, **changed}, block_size=64)
    with pytest.raises(ValueError, match=r"scale_table is .*; of 'nf4' .* it is none"):
        QuantizedWeight(
            "nf4",
            weight.codes,
            np.zeros((33, 2), np.float32),
            scale_table=weight.scale_table,
            block_size=64,
        )


def test_overlapping_workspace_is_refused():
    memory = KERNELS.put(np.zeros((64, 4), np.float32))
    with pytest.raises(ValueError, match="workspace overlaps w"):
        cupyattn.quantize(memory, format="nf4_nested", workspace=memory.reshape(-1)[:16])
    weight = moved(made_up("nf4_nested", 4, 64, 64), KERNELS.put)
    with pytest.raises(ValueError, match="out overlaps workspace"):
        cupyattn.dequantize(weight, out=memory, workspace=memory.reshape(-1)[:16])
