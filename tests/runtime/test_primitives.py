"""The primitives of cuda_src/common, each tested by its own small kernel (probes.cu)."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import DTYPES, Probe, dtype_of

from cupyattn import reference
from cupyattn.ops.attention.structs import (
    ATTENTION_PARAMS,
    ATTENTION_STRUCT,
    BACKWARD_PARAMS,
    BACKWARD_STRUCT,
    UNBOUNDED,
)
from cupyattn.reference import attention_keep, philox4x32_10
from cupyattn.runtime.spec import Pointer, Scalar
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.structs import elements_struct, rows_struct

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector", [True, False])
def test_conversions_and_base_2_functions(dtype, vector):
    """Every 16-bit pattern, and as many of the 32-bit ones."""
    if dtype == "float32":
        bits = np.random.default_rng(0).integers(0, 2**32, 65_536, np.uint32)
    else:
        bits = np.arange(65_536, dtype=np.uint16)
    x = bits.view(dtype_of(dtype))
    wide = x.astype(np.float32)
    wide[np.abs(wide) < 2.0**-126] = 0  # kernels flush float32 subnormals
    vec = vector_items(dtype) if vector else 1
    probe = Probe(
        "numeric",
        Pointer("x", const=True),
        *(Pointer(name) for name in ("float", "rounded", "ex2", "lg2")),
        Scalar("count", INT32),
        DTYPE=dtype,
        VEC=vec,
    )
    outputs = (np.zeros_like(wide), np.zeros_like(x), np.zeros_like(wide), np.zeros_like(wide))
    as_float, rounded, ex2, lg2 = probe.run(x.size // 128 // vec, x, *outputs, x.size)

    with np.errstate(all="ignore"):
        as_float[np.abs(as_float) < 2.0**-126] = 0  # a copy need not be arithmetic
        assert_array_equal(as_float, wide)
        product = np.float32(1.0009765625) * wide
        product[np.abs(product) < 2.0**-126] = 0
        assert_array_equal(rounded.astype(np.float32), product.astype(x.dtype).astype(np.float32))
        exact_ex2 = np.exp2(wide.astype(np.float64))
        exact_ex2[exact_ex2 < 2.0**-126] = 0
        exact_ex2[exact_ex2 > np.finfo(np.float32).max] = np.inf
        # 2^-22 relative from the function, and the flush of results at the edge of subnormal.
        assert_allclose(ex2, exact_ex2, rtol=2.0**-21, atol=2.0**-126)
        exact_lg2 = np.log2(wide.astype(np.float64))
        assert_allclose(lg2, exact_lg2, rtol=2.0**-21, atol=2.0**-21)


def test_packed_float16():
    """Every finite float16 from 0 on, midpoints, numbers just below midpoints, and NaN."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([halves, middle, np.nextafter(middle, np.float32(0))])
    x = np.append(x, np.full(256 + -x.size % 256, np.nan, np.float32))
    names = ("halves", "shifted", "with_nan", "masked")
    probe = Probe("pack", Pointer("x", const=True), *map(Pointer, names))
    outputs = [np.zeros(x.size // 2, np.uint32) for _ in names]
    results = probe.run(x.size // 256, x, *outputs)
    plain, shifted, with_nan, masked = (result.view(np.float16) for result in results)

    assert_array_equal(plain, x.astype(np.float16))
    assert_array_equal(masked[1::2], plain[1::2])
    assert not masked[::2].any()
    normal, flushed = x >= 2.0**-14, x < 2.0**-14 * (1 - 2.0**-12)
    steps = 2 ** (np.floor(np.log2(x[normal].astype(np.float64))) - 10)  # between float16 there
    ties_away = np.floor(x[normal] / steps + 0.5) * steps
    for packed in (shifted, with_nan):
        assert_array_equal(packed[normal], ties_away)
        assert not packed[flushed].any()
    assert np.isnan(with_nan[np.isnan(x)]).all()


@pytest.mark.parametrize("threads", [32, 128, 1024])
def test_reductions(threads):
    ctas = 3
    x = np.random.default_rng(threads).standard_normal((ctas, threads)).astype(np.float32)
    outputs = [np.zeros_like(x) for _ in range(4)]
    probe = Probe(
        "reduce",
        Pointer("x", const=True),
        *(Pointer(name) for name in ("warp_sum", "part_max", "cta_sum", "cta_max")),
        threads=threads,
    )
    warp_sum, part_max, cta_sum, cta_max = probe.run(ctas, x, *outputs)

    def over(parts: int, function: Any) -> np.ndarray:
        grouped = x.astype(np.float64).reshape(ctas, -1, parts)
        result = np.broadcast_to(function(grouped, axis=2, keepdims=True), grouped.shape)
        return result.reshape(x.shape)

    tolerance = threads * 2.0**-23
    assert_allclose(warp_sum, over(32, np.sum), rtol=0, atol=tolerance)
    assert_array_equal(part_max, over(8, np.max))
    assert_allclose(cta_sum, over(threads, np.sum), rtol=0, atol=tolerance)
    assert_array_equal(cta_max, over(threads, np.max))
    assert len(np.unique(cta_sum)) == ctas, "every thread gets the same sum"


@pytest.mark.parametrize(("unit", "base"), [("Unit::kNatural", np.e), ("Unit::kLog2", 2.0)])
def test_online_softmax(unit, base):
    rng = np.random.default_rng(1)
    rows, length = 200, 37
    scores = (rng.standard_normal((rows, length)) * 8).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[:10] = -np.inf
    scores[10:20, :9] = -np.inf  # a first tile without keys
    scores[20] = np.arange(length) * 10  # every tile raises the maximum
    values = rng.standard_normal((rows, length)).astype(np.float32)
    probe = Probe(
        "online_softmax",
        Pointer("scores", const=True),
        Pointer("values", const=True),
        Pointer("out"),
        Pointer("lse"),
        Scalar("rows", INT32),
        Scalar("length", INT32),
        UNIT=unit,
        TILE=8,
    )
    empty = np.zeros(rows, np.float32)
    out, lse = probe.run(2, scores, values, empty, empty.copy(), rows, length)

    natural = scores.astype(np.float64) * np.log(base)
    p = reference.softmax(natural)
    assert_allclose(out, (p * values).sum(axis=1), rtol=1e-5, atol=1e-5)
    assert not out[:10].any()
    with np.errstate(divide="ignore"):
        assert_allclose(lse, np.log(np.exp(natural).sum(axis=1)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("keys", [0, 1, 20])
@pytest.mark.parametrize("q_offset", [-(10**12), -25, 0, 3, 10**12])
def test_key_window(keys, q_offset):
    rows = np.array([0, 1, 5, 7, 19, 20, 23, 24, 2**30 - 1], np.int32)
    begin = np.full(rows.size, -7, np.int32)
    probe = Probe(
        "mask",
        Pointer("rows", const=True),
        Pointer("begin"),
        Pointer("end"),
        Scalar("count", INT32),
        *(Scalar(name, INT64) for name in ("q_offset", "left", "right")),
        Scalar("keys", INT32),
    )
    for left, right in product((0, 3, 10**12, UNBOUNDED), (0, 5, 10**12, UNBOUNDED)):
        window = rows.size, q_offset, left, right, keys
        first, last = probe.run(1, rows, begin, begin.copy(), *window)
        for row, start, stop in zip(rows.tolist(), first, last, strict=True):
            position = row + q_offset
            seen = [j for j in range(keys) if position - left <= j <= position + right]
            assert list(range(start, stop)) == seen, window
            assert 0 <= start <= keys
            assert 0 <= stop <= keys


def test_distances_of_far_positions_are_integers_rounded_once():
    """A float32 holds 24 bits: with a sum of rounded parts ALiBi would lose digits that count."""
    rng = np.random.default_rng(0)
    near, far = rng.integers(-(2**12), 2**12, 500), rng.integers(-(2**40), 2**40, 500)
    edges = np.repeat([2**24, -(2**24), 2**31, 2**39], 125) + rng.integers(-300, 300, 500)
    distances = np.concatenate([near, far, edges])
    rows, keys = rng.integers(0, 128, (2, distances.size), np.int32)
    probe = Probe(
        "distance",
        *(Pointer(name, const=True) for name in ("distances", "rows", "keys")),
        Pointer("result"),
        Scalar("count", INT32),
        ATTENTION_PARAMS_BYTES=ATTENTION_PARAMS.itemsize,
    )
    count = distances.size
    zeros = np.zeros(count, np.float32)
    (found,) = probe.run(-(-count // 128), distances, rows, keys, zeros, count)
    assert_array_equal(found, (distances + rows - keys).astype(np.float32))


@pytest.mark.parametrize("offsets", [None, np.array([-9, 3, 7, 12, 20], np.int32)])
def test_query_offset_is_a_number_plus_an_array(offsets):
    """Values of the array outside its bounds are clamped."""
    batch, sq, sk = 5, 4, 12
    used = np.array([0, 3, 7, 12, 20], np.int32)
    params = np.zeros((), ATTENTION_PARAMS)
    params["sq"], params["sk"] = sq, sk
    params["q_offset"], params["offset_least"], params["offset_most"] = -sq, 0, sk
    params["left"] = UNBOUNDED
    params["seqused_k"] = params["q_offsets"] = (1, 0)
    probe = Probe(
        "query_offset",
        *(Pointer(name, const=True, optional=True) for name in ("q_offsets", "seqused_k")),
        *(Pointer(name) for name in ("offset", "behind")),
        ATTENTION_STRUCT,
        threads=1,
    )
    zeros = np.zeros(batch, np.int64), np.zeros(batch, np.int32)
    offset, behind = probe.run(batch, offsets, used, *zeros, params)
    expected = np.zeros(batch) if offsets is None else np.clip(offsets, 0, sk)
    assert_array_equal(offset, expected - sq)
    assert_array_equal(behind, np.minimum(expected, np.minimum(used, sk)))


def test_philox_is_the_reference():
    rng = np.random.default_rng(2)
    count, seed = 1000, 0xDEADBEEF_12345678
    counters = rng.integers(0, 2**32, (count, 4), np.uint32)
    key = (0x01234567, 0xFEDCBA98)
    probe = Probe(
        "philox",
        Pointer("counters", const=True),
        Pointer("words"),
        Pointer("fields"),
        Scalar("count", INT32),
        Scalar("key_lo", np.dtype(np.uint32)),
        Scalar("key_hi", np.dtype(np.uint32)),
        Scalar("seed", np.dtype(np.uint64)),
    )
    fields = np.zeros(count, np.uint32)
    words, fields = probe.run(8, counters, np.zeros_like(counters), fields, count, *key, seed)

    expected = reference.philox4x32_10(tuple(counters.T), key)
    assert_array_equal(words.T, expected)
    at = np.arange(count)
    for p in (0.1, 0.5, 0.9):
        keep = [
            reference.attention_keep(seed, p, n % 3, n % 5, np.array([n // 97]), np.array([n % 97]))
            for n in at.tolist()
        ]
        keep = np.ravel(keep)
        assert_array_equal(fields >= round(65536 * p), keep)


ACTIVATIONS = {"gelu": "Gelu", "gelu_tanh": "GeluTanh", "silu": "Silu", "relu": "Relu"}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_and_their_derivatives(kind):
    """Errors are within their bounds, on a dense grid and up to both ends of float32."""
    far = np.geomspace(2.0**-126, 3e38, 1000)
    edges = [0, -0.0, np.inf, -np.inf, np.nan]
    x = np.concatenate([np.linspace(-15, 15, 6001), np.linspace(-120, 120, 2001), far, -far, edges])
    x = x.astype(np.float32)
    outputs = Pointer("value"), Pointer("derivative")
    probe = Probe(
        "activations",
        Pointer("x", const=True),
        *outputs,
        Scalar("count", INT32),
        ACTIVATION=ACTIVATIONS[kind],
    )
    value, derivative = probe.run(-(-x.size // 128), x, *np.zeros((2, x.size), np.float32), x.size)
    error = reference.activation_error(x, kind)
    assert reference.error_ratio(value, reference.activation(x, kind), error) <= 1
    error = reference.derivative_error(x, kind)
    assert reference.error_ratio(derivative, reference.activation_derivative(x, kind), error) <= 1


def test_attention_params_are_read_by_the_names_they_were_written_by():
    params = np.zeros((), ATTENTION_PARAMS)
    expected = []
    for name in ("q", "k", "v", "out", "lse"):
        params[name] = tuple(len(expected) + i + 1 for i in range(3))
        expected += params[name].tolist()
    for name in ("q_offsets", "seqused_k"):
        params[name] = tuple(len(expected) + i + 1 for i in range(2))
        expected += params[name].tolist()
    names = ATTENTION_PARAMS.names
    for name in (
        *names[names.index("q_offset") : names.index("scale_log2")],
        *names[names.index("together") :],
    ):
        params[name] = len(expected) + 1
        expected.append(len(expected) + 1)
    params["scale_log2"], params["softmax_scale"] = 0.625, 0.375
    probe = Probe("params", Pointer("fields"), Pointer("scales"), ATTENTION_STRUCT, threads=1)
    fields = np.zeros(len(expected), np.int64)
    fields, scales = probe.run(1, fields, np.zeros(2, np.float32), params)

    assert fields.tolist() == expected
    assert scales.tolist() == [0.625, 0.375]


def test_backward_params_are_read_by_the_names_they_were_written_by():
    params = np.zeros((), BACKWARD_PARAMS)
    params["attention"]["heads"] = 1
    expected = [1]
    for name in ("dout", "dlse", "dq", "dk", "dv", "dbias"):
        width = len(BACKWARD_PARAMS[name].names)
        params[name] = tuple(len(expected) + i + 1 for i in range(width))
        expected += params[name].tolist()
    for name in BACKWARD_PARAMS.names[BACKWARD_PARAMS.names.index("dsinks_stride") : -1]:
        params[name] = len(expected) + 1
        expected.append(len(expected) + 1)
    params["scale"] = 0.625
    probe = Probe(
        "backward_params", Pointer("fields"), Pointer("scale"), BACKWARD_STRUCT, threads=1
    )
    fields = np.zeros(len(expected), np.int64)
    fields, scale = probe.run(1, fields, np.zeros(1, np.float32), params)

    assert fields.tolist() == expected
    assert scale == 0.625


@pytest.mark.parametrize(
    ("probe", "struct", "after_strides"),
    [
        ("rows_params", rows_struct(2), {"rows": 24, "length": 9}),
        (
            "elements_params",
            elements_struct(2),
            {"offsets": (3, 500), "length": 9, "rows": 24, "units": 2},
        ),
    ],
)
def test_params_give_each_row_its_offset(probe, struct, after_strides):
    shape, params = (2, 3, 1, 4), np.zeros((), struct.dtype)
    params["shape"] = shape
    params["strides"] = [(1000, 100, 10, 1), (-7, 0, 5, 70)]
    for name, value in after_strides.items():
        params[name] = value
    expected = [*shape, *params["strides"].ravel(), *np.hstack([*after_strides.values()])]
    pointers = Pointer("fields"), Pointer("offsets")
    kernel = Probe(probe, *pointers, struct, threads=1, ARRAYS=2)
    outputs = np.zeros(len(expected), np.int64), np.zeros((2, 24), np.int64)
    fields, offsets = kernel.run(1, *outputs, params)

    assert fields.tolist() == expected
    index = np.indices(shape).reshape(4, -1).T
    assert_array_equal(offsets, (index @ params["strides"].T + after_strides.get("offsets", 0)).T)


# Random123's published known answers for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = (
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert tuple(int(word) for word in philox4x32_10(counter, key)) == words


def test_counters_broadcast():
    i, j = np.arange(3)[:, None], np.arange(5)
    words = philox4x32_10((j, i, 7, 9), (1, 2))
    assert all(word.shape == (3, 5) and word.dtype == np.uint32 for word in words)
    alone = philox4x32_10((4, 2, 7, 9), (1, 2))
    assert [int(word[2, 4]) for word in words] == [int(word) for word in alone]


def test_eight_scores_share_a_counter():
    """Keys 2c, 2c+1 of each eight of 32 keys hold the eight fields of counter c, low half first."""
    seed, b, h, i = 0x123456789ABCDEF0, 1, 2, 3
    c = 2
    words = philox4x32_10((4 * 1 + c, i, h, b), (0x9ABCDEF0, 0x12345678))
    fields = [int(half) for word in words for half in (word & 0xFFFF, word >> 16)]
    keys = [32 + 8 * eight + 2 * c + low for eight in range(4) for low in range(2)]
    for p in (0.25, 0.5, 0.9):
        keep = attention_keep(seed, p, b, h, [i], keys)
        assert keep.tolist() == [[field >= round(65536 * p) for field in fields]]


def test_keep_does_not_depend_on_which_scores_are_asked_for():
    whole = attention_keep(5, 0.3, 0, 1, np.arange(20), np.arange(100))
    part = attention_keep(5, 0.3, 0, 1, np.arange(7, 20), np.arange(33, 90))
    np.testing.assert_array_equal(part, whole[7:, 33:90])
    assert attention_keep(5, 0.3, 0, 1, np.arange(0), np.arange(9)).shape == (0, 9)
    assert attention_keep(5, 0.3, 0, 1, np.arange(9), np.arange(0)).shape == (9, 0)


def test_keep_is_random():
    """The kept fraction is 1 - p within six standard deviations; seed, b, h, i and j all matter."""
    n, p = 256, 0.2
    index = np.arange(n)
    keep = attention_keep(2**64 - 1, p, 0, 0, index, index)
    assert abs(keep.mean() - (1 - p)) < 6 * np.sqrt(p * (1 - p)) / n
    others = [
        attention_keep(2**64 - 2, p, 0, 0, index, index),
        attention_keep(2**32 - 1, p, 0, 0, index, index),
        attention_keep(2**64 - 1, p, 1, 0, index, index),
        attention_keep(2**64 - 1, p, 0, 1, index, index),
        attention_keep(2**64 - 1, p, 0, 0, index + 1, index),
        attention_keep(2**64 - 1, p, 0, 0, index, index + 1),
    ]
    same_by_chance = p**2 + (1 - p) ** 2
    for other in others:
        assert abs((keep == other).mean() - same_by_chance) < 0.02
    assert attention_keep(0, 0.0, 0, 0, index, index).all()
