"""The references of linear and of quantised weights, and the arrays that they refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from support.linear_problems import ACTIVATIONS, GATED
from support.quantised_weights import LARGE, MADE, made_up, number, weights

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.ops.linear.reference import NF4_CODEBOOK, NF4_THRESHOLDS
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.reference import error_ratio

RNG = np.random.default_rng(5)


def arrays(activation, rows=6, inner=9, outer=7):
    width = outer * (2 if activation in GATED else 1)
    shapes = (rows, inner), (inner, width), (width,), (rows, outer), (rows, outer)
    return [RNG.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("saved", [False, True])
def test_gradients_match_finite_differences(activation, saved):
    x, w, b, residual, dout = arrays(activation)
    call = partial(cupyattn.linear, activation=activation)
    out, z = call(x, w, b, residual=residual, return_preactivation=True)
    assert out.shape == dout.shape
    grads = cupyattn.linear_backward(
        dout, x, w, b, activation=activation, preactivation=z if saved else None
    )
    step = 1e-6
    for index, gradient in enumerate(grads):
        direction = RNG.standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [x, w, b]
            moved[index] = moved[index] + sign * step * direction
            ends.append((dout * call(*moved, residual=residual)).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(slope - (gradient * direction).sum()) < 1e-6 * max(abs(slope), 1)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "swiglu"])
def test_float32_is_computed_in_float32_within_the_bound(activation):
    x, w, b, residual, dout = (a.astype(np.float32) for a in arrays(activation, 33, 200, 40))
    out = cupyattn.linear(x, w, b, residual=residual, activation=activation)
    exact = [a.astype(np.float64) for a in (x, w, b, residual)]
    expected, _ = reference.linear(*exact, activation=activation)
    bound, _ = reference.linear_bound(x, w, b, residual, activation=activation, dtype="float32")
    assert 0 < error_ratio(out, expected, bound) <= 1  # in float64 it would be rounded once
    grads = cupyattn.linear_backward(dout, x, w, b, activation=activation)
    exact = [a.astype(np.float64) for a in (dout, x, w, b)]
    expected_grads = reference.linear_backward(*exact, activation=activation)
    bounds = reference.linear_backward_bound(dout, x, w, b, activation=activation, dtype="float32")
    for each in zip(grads, expected_grads, bounds, strict=True):
        assert error_ratio(*each) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_bounds_reject_the_other_gelu_and_a_dropped_term(dtype, activation):
    x, w, b, _, dout = (a.astype(dtype) for a in arrays(activation, 8, 40, 16))
    exact = [a.astype(np.float64) for a in (x, w, b)]
    bound, z_bound = reference.linear_bound(x, w, b, activation=activation, dtype=dtype)
    expected, z = reference.linear(*exact, activation=activation)
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "silu": "gelu"}[activation]
    assert error_ratio(reference.linear(*exact, activation=other)[0], expected, bound) > 1
    dropped = reference.linear(exact[0][:, :-1], exact[1][:-1], exact[2], activation=activation)
    assert error_ratio(dropped[0], expected, bound) > 10
    assert error_ratio(dropped[1], z, z_bound) > 10
    exact = [dout.astype(np.float64), *exact]
    bounds = reference.linear_backward_bound(dout, x, w, b, activation=activation, dtype=dtype)
    right = reference.linear_backward(*exact, activation=activation)
    wrong = reference.linear_backward(*exact, activation=other)
    if dtype == "float32" or activation == "silu":  # a rounded z hides the two gelus' difference
        assert max(map(error_ratio, wrong, right, bounds)) > 1
    short = reference.linear_backward(
        exact[0][:-1], exact[1][:-1], *exact[2:], activation=activation
    )
    assert error_ratio(short.dw, right.dw, bounds.dw) > 10
    assert error_ratio(short.db, right.db, bounds.db) > 10


def test_gated_activations_match_their_halves():
    x, w, b, _, _ = arrays("swiglu")
    gate, up = (cupyattn.linear(x, w[:, half], b[half]) for half in (slice(7), slice(7, None)))
    swiglu = cupyattn.linear(x, w, b, activation="swiglu")
    np.testing.assert_allclose(swiglu, gate / (1 + np.exp(-gate)) * up)
    geglu = cupyattn.linear(x, w, b, activation="geglu")
    np.testing.assert_allclose(geglu, cupyattn.linear(x, w[:, :7], b[:7], activation="gelu") * up)


def test_gelu_tanh_is_its_formula_and_near_gelu():
    x, w, b, _, _ = arrays("gelu")
    z = x @ w + b
    tanh = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    np.testing.assert_allclose(cupyattn.linear_gelu(x, w, b), tanh, rtol=1e-10, atol=1e-14)
    exact = cupyattn.linear_gelu(x, w, b, approximate="none")
    assert 0 < np.abs(exact - tanh).max() < 1e-3


# What bitsandbytes' kernels compare x / absmax with, as its sources have them (csrc/kernels.cu).
BITSANDBYTES = [
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544,
    -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
    0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683,
    0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
]  # fmt: skip


def test_thresholds_are_those_of_bitsandbytes():
    assert np.array_equal(NF4_THRESHOLDS, np.array(BITSANDBYTES, np.float32))


def test_codebook_is_that_of_the_paper():
    """Quantiles of the normal distribution, scaled to 1, eight on the side of 0 and above it."""
    from statistics import NormalDist

    normal, offset = NormalDist(), 0.9677083
    above = [normal.inv_cdf(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-normal.inv_cdf(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    expected = np.sort([*above, 0.0, *below]) / max(above)
    np.testing.assert_allclose(NF4_CODEBOOK, expected, atol=3e-7)


def test_codes_of_float16_are_those_of_bitsandbytes():
    """It takes x * (1 / absmax) where we divide: for every pair of significands the same code.

    float16 has 11 bits, bfloat16 8 of them; powers of two change neither. A threshold lies in one
    binade, so that only a few x of it are close.
    """
    absmax = np.arange(1024, 2048, dtype=np.float32)
    reciprocal = np.float32(1) / absmax
    for threshold in NF4_THRESHOLDS:
        exponent = np.float32(2.0) ** np.floor(np.log2(np.abs(threshold)))
        nearest = np.rint(threshold * absmax / exponent * 2)
        for step in range(-2, 3):
            x = (nearest + step) * exponent / 2
            ours = NF4_THRESHOLDS.searchsorted(x / absmax, side="left")
            assert np.array_equal(ours, NF4_THRESHOLDS.searchsorted(x * reciprocal, side="left"))


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_numbers_match_the_format(kind):
    """Numbers are exact, then rounded once to float32."""
    weight = made_up(kind, 3, 512, 512 if kind == "int8" else 32)
    found = cupyattn.dequantize(weight)
    for n in range(3):
        for k in range(0, 512, 7):
            exact = number(weight, k, n, NF4_CODEBOOK)
            assert found[k, n] == np.float32(float(exact)), (k, n)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_codes_are_the_nearest(kind, dtype):
    """No weight is farther away than half a step, except for rounding."""
    w = weights(256, 21, dtype, large=LARGE.get(kind, 1e36))
    wide = w.astype(np.float64)
    weight = cupyattn.quantize(w, format=kind, block_size=64)
    found = cupyattn.dequantize(weight, dtype="float64")
    blocks = wide.reshape(4, 64, 21)
    if kind == "nf4":
        scale = np.abs(blocks).max(axis=1, keepdims=True)
        step = scale * np.abs(np.diff(NF4_CODEBOOK)).max() / 2
        distances = np.abs(NF4_CODEBOOK.astype(np.float64) * scale[..., None] - blocks[..., None])
        best = distances.min(axis=-1)
        assert (np.abs(found.reshape(blocks.shape) - blocks) <= best + 1e-6 * scale).all()
    elif kind == "int8":
        step = np.abs(blocks).max(axis=1, keepdims=True) / 127 / 2
    else:
        low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
        # The zero is rounded: what it moves the range by is cut at its ends.
        step = (high - low)[:, None] / 15 + 2.0**-25
    error = np.abs(found.reshape(blocks.shape) - blocks)
    assert (error <= step * (1 + 2.0**-9) + 2.0**-126).all()


def test_zeros_stay_zeros():
    for kind in MADE:
        weight = cupyattn.quantize(np.zeros((128, 2), np.float32), format=kind)
        found = cupyattn.dequantize(weight)
        assert not found.any()
        assert not np.signbit(found).any()


@pytest.mark.parametrize("kind", MADE)
def test_zeros_and_the_largest_weights_of_nf4_are_exact(kind):
    w = weights(128, 9, "float16")
    found = cupyattn.dequantize(cupyattn.quantize(w, format=kind, block_size=32))
    assert (found[w == 0] == 0).all()
    if kind == "nf4":
        largest = np.abs(w.reshape(4, 32, 9)).max(axis=1)
        assert np.array_equal(np.abs(found.reshape(4, 32, 9)).max(axis=1), largest)


def test_quantising_twice_gives_the_same_codes():
    """Weights that a format can represent are exact."""
    for kind in ("nf4", "int8"):
        weight = cupyattn.quantize(weights(128, 8)[:, 3:4], format=kind, block_size=32)
        again = cupyattn.quantize(cupyattn.dequantize(weight), format=kind, block_size=32)
        assert np.array_equal(weight.codes, again.codes)


def test_sizes():
    w = np.zeros((4096, 16), np.float16)
    for kind, bits in {"nf4": 4.5, "int4": 4.25, "int8": 8 + 32 / 4096}.items():
        assert cupyattn.quantize(w, format=kind).nbytes * 8 / w.size == bits


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "K no multiple of the block": ({"w": np.zeros((100, 4), np.float32)}, ValueError, "K is a"),
    "K no multiple of 32": (
        {"w": np.zeros((40, 4), np.float32), "format": "int8"}, ValueError, "multiple of it and of",
    ),
    "no K": ({"w": np.zeros((0, 4), np.float32)}, ValueError, "pad K with zeros"),
    "no N": ({"w": np.zeros((64, 0), np.float32)}, ValueError, "N is at least 1"),
    "a block that is no power of two": ({"block_size": 96}, ValueError, "a power of two"),
    "a block that is too small": ({"block_size": 16}, ValueError, "a power of two from 32 to 4096"),
    "a block that is too large": (
        {"block_size": 256, "format": "int4", "w": np.zeros((256, 4), np.float32)}, ValueError,
        "a power of two from 32 to 128",
    ),
    "a block of half": ({"block_size": 64.0}, TypeError, r"block_size is 64\.0"),
    "a format of files": ({"format": "q4_k"}, ValueError, "weights are quantised to 'nf4'"),
    "no format": ({"format": None}, TypeError, "format = None"),
    "integers": ({"w": np.zeros((64, 4), np.int32)}, TypeError, "allowed are float16"),
    "float64": ({"w": np.zeros((64, 4))}, TypeError, "allowed are float16"),
    "one axis": ({"w": np.zeros(64, np.float32)}, ValueError, r"w is \(K, N\)"),
    "NaN": ({"w": np.full((64, 4), np.nan, np.float32)}, ValueError, "weights are finite"),
    "no array": ({"w": None}, TypeError, "w is None"),
    "an out that is none": ({"out": np.zeros((64, 4))}, TypeError, "out is .*a QuantizedWeight"),
    "an out of another shape": (
        {"out": made_up("nf4", 5, 64, 64)}, ValueError, r"the result is nf4 \(64, 4\)",
    ),
    "a transposed out": ({"out": made_up("nf4", 4, 64, 64).T}, ValueError, "pass out.T"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_quantize_refuses(name):
    changed, kind, message = REFUSED[name]
    given = {"w": np.zeros((192, 4), np.float32)[:64], **changed}
    cupyattn.quantize(np.zeros((192, 4), np.float32)[:64], block_size=64)  # which is remembered
    with pytest.raises(kind, match=message):
        cupyattn.quantize(given.pop("w"), **given)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"dtype": "int8"}, TypeError, "dtype = 'int8'"),
        ({"out": np.zeros((4, 64), np.float32)}, ValueError, r"the result is float32 \(64, 4\)"),
        ({"out": np.zeros((64, 4), np.float16), "dtype": "float32"}, TypeError, "the result is"),
        (
            {"out": np.broadcast_to(np.zeros(4, np.float32), (64, 4))}, ValueError, "one item",
        ),
    ],
)  # fmt: skip
def test_dequantize_refuses(options, kind, message):
    with pytest.raises(kind, match=message):
        cupyattn.dequantize(made_up("nf4", 4, 64, 64), **options)


def test_an_out_that_overlaps_the_weight_is_refused():
    memory = np.zeros(144, np.uint8)
    scales = memory[:4].view(np.float32).reshape(1, 1)
    weight = QuantizedWeight("nf4", np.zeros((1, 16), np.uint8), scales, block_size=32)
    with pytest.raises(ValueError, match="out overlaps scales"):
        cupyattn.dequantize(weight, out=memory[:128].view(np.float32).reshape(32, 1))


def test_an_out_within_w_is_refused():
    w = np.zeros((64, 4), np.float32)
    codes = w.reshape(-1)[:32].view(np.uint8).reshape(4, 32)
    out = QuantizedWeight("nf4", codes, np.zeros((4, 1), np.float32), block_size=64)
    with pytest.raises(ValueError, match=r"out\.codes overlaps w"):
        cupyattn.quantize(w, out=out)
    codes = np.zeros((4, 32), np.uint8)
    codes.flags.writeable = False
    out = QuantizedWeight("nf4", codes, np.zeros((4, 1), np.float32), block_size=64)
    with pytest.raises(ValueError, match=r"out\.codes is read-only"):
        cupyattn.quantize(w, out=out)


def test_dequantize_refuses_an_array():
    with pytest.raises(TypeError, match="it is a QuantizedWeight"):
        cupyattn.dequantize(np.zeros((4, 32), np.uint8))  # type: ignore[arg-type]


def test_reference_names_the_missing_array():
    weight = made_up("q4_k", 2, 256, 32)
    with pytest.raises(ValueError, match="super_scales"):
        reference.dequantize("q4_k", weight.codes, weight.scales, None, 32)


def parts(**changed: Any) -> dict[str, Any]:
    return {
        "format": "nf4", "codes": np.zeros((4, 64), np.uint8),
        "scales": np.zeros((4, 2), np.float32), "block_size": 64, **changed,
    }  # fmt: skip


WRONG_PARTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no format": ({"format": "nf5"}, ValueError, "formats are 'nf4'"),
    "a format that is no word": ({"format": 4}, TypeError, "formats are 'nf4'"),
    "no codes": ({"codes": None}, TypeError, "codes is None"),
    "no scales": ({"scales": None}, TypeError, "scales is None"),
    "signed codes": ({"codes": np.zeros((4, 64), np.int8)}, ValueError, r"it is uint8 \(4, 64\)"),
    "codes in one row": ({"codes": np.zeros(64, np.uint8)}, ValueError, "codes have shape"),
    "no rows": ({"codes": np.zeros((0, 64), np.uint8)}, ValueError, "codes have shape"),
    "scales of fewer rows": (
        {"scales": np.zeros((3, 2), np.float32)}, ValueError, r"scales is float32 \(3, 2\)",
    ),
    "scales that are apart": (
        {"scales": np.zeros((4, 4), np.float32)[:, ::2]}, ValueError, "in C order",
    ),
    "codes that are apart": ({"codes": np.zeros((4, 80), np.uint8)[:, :64]}, ValueError, "strides"),
    "blocks that do not fit": ({"block_size": 96}, ValueError, "block_size = 96"),
    "what the format has not": (
        {"super_scales": np.zeros((4, 1, 2), np.float16)}, ValueError, "it is none",
    ),
    "what the format has": (
        {"format": "q4_k", "codes": np.zeros((4, 128), np.uint8),
         "scales": np.zeros((4, 8, 2), np.uint8), "block_size": 32}, ValueError, "no super_scales",
    ),
    "codes amid 16 bytes": (
        {"codes": np.zeros(4 * 64 + 16, np.uint8)[1:257].reshape(4, 64)}, ValueError, "beyond",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_bad_parts_are_refused(name):
    changed, kind, message = WRONG_PARTS[name]
    with pytest.raises(kind, match=message):
        QuantizedWeight(**parts(**changed))


def test_quantized_weight_has_shape_size_and_slices():
    weight = QuantizedWeight(**parts())
    assert (weight.shape, weight.ndim, len(weight), weight.nbytes) == ((128, 4), 2, 128, 288)
    other = weight.T
    assert (other.shape, len(other), other.codes is weight.codes) == ((4, 128), 4, True)
    assert other.T.shape == weight.shape
    rows = other[1:3]
    assert rows.codes.base is weight.codes
    assert (rows.shape, rows.block_size, rows.format) == ((2, 128), 64, "nf4")
    assert repr(rows) == "<QuantizedWeight nf4 (2, 128), blocks of 64, 144 bytes>"
    with pytest.raises(AttributeError):
        weight.codes = weight.codes  # type: ignore[misc]


@pytest.mark.parametrize("rows", [slice(0, 0), slice(None, None, 2), 1, (slice(1), slice(1)), None])
def test_other_indices_than_slices_of_rows_are_refused(rows):
    with pytest.raises(IndexError, match="by step 1"):
        made_up("nf4", 4, 64, 64).T[rows]


@pytest.mark.parametrize(
    "call",
    [
        np.asarray,
        np.from_dlpack,
        np.sum,
        lambda w: np.ones((2, 128)) @ w,
        lambda w: np.float16(2) * w,
        cupyattn.quantize,
        lambda w: cupyattn.linear(w, w),
    ],
)
def test_quantized_weight_is_refused_as_an_array(call):
    """It is not iterable either, so NumPy and loops cannot take it for an empty sequence."""
    with pytest.raises(TypeError, match=r"<QuantizedWeight .* as an array; .*; make numbers of it"):
        call(QuantizedWeight(**parts()))
    with pytest.raises(TypeError, match="not iterable"):
        list(QuantizedWeight(**parts()))


def test_columns_are_not_sliced():
    with pytest.raises(IndexError, match="transpose a weight"):
        made_up("nf4", 4, 64, 64)[:2]


@pytest.mark.parametrize("size", [np.int64(64), np.uint8(64)])
def test_blocks_of_a_numpy_integer(size):
    weight = cupyattn.quantize(np.ones((128, 4), np.float32))
    again = QuantizedWeight("nf4", weight.codes, weight.scales, block_size=size)
    assert again.blocks == weight.blocks and type(again.block_size) is int
