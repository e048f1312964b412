"""Scales in eight bits: kernels give the reference's bits, and products those of float32 scales."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, SENTINEL
from support.quantised_weights import made_up, moved, weights
from support.search import examples, mostly_deep

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.kernels.configs.linear import nested_scales
from cupyattn.ops.linear import quantised
from cupyattn.weight_formats import FORMATS, TABLE

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

NAMES = ("codes", "scales", "super_scales", "scale_table")


def as_bitsandbytes_rounds(weight: QuantizedWeight) -> np.ndarray:
    """Absmax of the blocks, one after the other: a product, then a sum, in float32."""
    assert weight.super_scales is not None
    assert weight.scale_table is not None
    found = np.empty(weight.scales.size, np.float32)
    for i, code in enumerate(weight.scales.reshape(-1)):
        span, offset = weight.super_scales[i // 64]
        found[i] = np.float32(weight.scale_table[code] * span) + offset
    return found.reshape(weight.scales.shape)


def with_floats(weight: QuantizedWeight) -> QuantizedWeight:
    absmax = as_bitsandbytes_rounds(weight)
    size, turned = weight.block_size, weight.transposed
    return QuantizedWeight("nf4", weight.codes, absmax, block_size=size, transposed=turned)


@examples(8, deep=40)
@given(
    block_size=st.sampled_from((32, 64)),
    blocks=st.integers(1, 5),
    outer=st.sampled_from((1, 2, 7, 33, 70)),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_and_numbers_are_the_references(block_size, blocks, outer, seed):
    """Groups that end with the last row, and within it; into new arrays and given ones."""
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
    on_host = QuantizedWeight("nf4_nested", *map(KERNELS.get, weight.arrays.values()),
                              block_size=block_size)  # fmt: skip
    with cupyattn.backend("reference"):
        assert_array_equal(found, cupyattn.dequantize(with_floats(on_host)))


@pytest.mark.parametrize(("outer", "blocks"), [(1, 3), (130, 1), (33, 5)])
def test_any_table_is_read_as_bitsandbytes_rounds(outer, blocks):
    """Blocks that are no whole words of codes, and nothing written behind the last."""
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


def test_what_is_subnormal_is_zero():
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
    ("rows", "transposed", "dtype"),
    mostly_deep(
        itertools.product([1, 20, 72], [False, True], ["float16", "float32"]),
        [(1, False, "float16"), (20, True, "float32"), (72, False, "float16")],
    ),
)
def test_products_are_those_of_float32_scales(rows, transposed, dtype):
    """Of few rows, of tiles, and in float32 arithmetic; forward and dx, with an activation."""
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
            cupyattn.linear(x, w, b, activation="gelu"),
            *cupyattn.linear_backward(dout, x, w, b, activation="gelu"),
            cupyattn.linear(x, w),
            cupyattn.linear_backward(dout, x, w).dx,
        )
        for w in pair
    )
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            assert_array_equal(KERNELS.get(one), KERNELS.get(other))
    assert float(abs(wanted[0]).max()) > 0.1


def test_a_group_that_is_not_finite_is_nan_and_the_others_are_as_they_were(monkeypatch):
    monkeypatch.setattr(quantised, "checks_values", lambda operands: False)
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


def test_a_group_whose_sum_overflows_is_finite():
    """Half of low and half of high are added; rounded, either may be further away.

    No CTA's share of groups is whole, and the last group is.
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


def test_absmax_are_near():
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


def test_tables_have_the_formats_numbers():
    form = FORMATS["nf4_nested"]
    assert form.group == nested_scales.GROUP
    assert nested_scales.TABLE == TABLE


def test_size():
    weight = cupyattn.quantize(np.ones((2560, 512), np.float16), format="nf4_nested")
    table = 256 * 4
    assert (weight.nbytes - table) * 8 / (2560 * 512) == 4 + 8 / 64 + 64 / 64**2


def test_rows_are_views_from_the_first_of_a_group_on():
    """Of three blocks a row a group begins with every 64th; any may be the last."""
    whole = cupyattn.quantize(KERNELS.put(weights(192, 140, "float16")), format="nf4_nested").T
    numbers = KERNELS.get(cupyattn.dequantize(whole))
    for rows in (slice(64, 139), slice(128, None), slice(0, 1)):
        part = whole[rows]
        assert_array_equal(KERNELS.get(cupyattn.dequantize(part)), numbers[rows])
        assert part.scale_table is whole.scale_table
    with pytest.raises(IndexError, match="slices of it begin at multiples of 64"):
        whole[3:10]
    cupyattn.quantize(KERNELS.put(np.zeros((192, 12), np.float16)), out=whole[128:].T,
                      format="nf4_nested")  # fmt: skip
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
def test_arrays_that_do_not_fit_are_refused(changed, message):
    weight = made_up("nf4_nested", 33, 128, 64)
    with pytest.raises(ValueError, match=message):
        QuantizedWeight("nf4_nested", **{**weight.arrays, **changed}, block_size=64)
    with pytest.raises(ValueError, match=r"scale_table is .*; of 'nf4' .* it is none"):
        QuantizedWeight("nf4", weight.codes, np.zeros((33, 2), np.float32),
                        scale_table=weight.scale_table, block_size=64)  # fmt: skip


def test_a_workspace_that_overlaps_is_refused():
    memory = KERNELS.put(np.zeros((64, 4), np.float32))
    with pytest.raises(ValueError, match="workspace overlaps w"):
        cupyattn.quantize(memory, format="nf4_nested", workspace=memory.reshape(-1)[:16])
    weight = moved(made_up("nf4_nested", 4, 64, 64), KERNELS.put)
    with pytest.raises(ValueError, match="out overlaps workspace"):
        cupyattn.dequantize(weight, out=memory, workspace=memory.reshape(-1)[:16])
