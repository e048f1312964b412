"""The quantised storage of caches and keys: formats, bounds, and numbers that are not finite."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, dtype_of
from support.search import examples, wider

import cupyattn
from cupyattn import PagedKVCache, QuantizedKeys, gather, quantize_keys, reference
from cupyattn.ops.attention import quantized_keys
from cupyattn.ops.attention.reference.quantised import (
    SAMPLES,
    key_centres,
    key_positions,
    quantized_keys_bound,
)
from cupyattn.ops.attention.reference.quantised import quantize_keys as quantize_keys_reference
from cupyattn.runtime.errors import RefusalError
from cupyattn.runtime.precision import U32
from cupyattn.testing import lay_out
from cupyattn.testing.arrays import VIEWS

LARGEST = np.finfo(np.float32).max
BITS = pytest.mark.parametrize("bits", [8, 4])


def drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    return (rng.standard_normal(shape) * sizes).astype(np.float32)


@BITS
@given(seed=st.integers(0, 2**16), half=st.integers(1, 40))
def test_values_are_within_the_bound(bits, seed, half):
    x = drawn(seed, (5, 2 * half))
    stored, scales = reference.quantise(x, bits)
    bound, scale_bound = reference.quantisation_bound(x, bits)
    found = reference.dequantise(stored, scales)
    assert reference.error_ratio(found, x, bound) <= 1
    largest = {8: 127, 4: 7}[bits]
    exact = np.abs(x.astype(float)).max(axis=1) / largest
    assert reference.error_ratio(scales, exact, scale_bound) <= 1
    integers = np.abs(found / np.where(scales, scales, 1)[:, None])
    assert integers.max() == largest
    assert np.all(integers.round() == integers.round(3))


@BITS
def test_a_value_is_at_most_half_a_scale_away_and_gets_so_far(bits):
    x = np.linspace(-1, 1, 20_000)[None]
    off = np.abs(reference.dequantise(*reference.quantise(x, bits)) - x).max()
    scale = 1 / {8: 127, 4: 7}[bits]
    assert 0.49 * scale < off <= reference.quantisation_bound(x, bits)[0].max() < 0.51 * scale


def test_nibbles():
    """Item 2 i is the low nibble of byte i."""
    stored, scales = reference.quantise(np.array([[7.0, -7.0, 1.0, 2.0]]), 4)
    assert scales == 1
    assert [hex(byte) for byte in stored[0]] == ["0x1f", "0xa9"]


@BITS
def test_ties_go_to_the_even_integer(bits):
    largest = {8: 127, 4: 7}[bits]
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, largest]])
    assert reference.dequantise(*reference.quantise(x, bits)).tolist() == [
        [0, 2, 2, 0, -2, largest]
    ]


@BITS
@pytest.mark.parametrize(
    ("first", "scale"), [(np.inf, np.inf), (-np.inf, np.inf), (np.nan, np.nan), (1e39, np.inf)]
)
def test_not_finite(bits, first, scale):
    stored, scales = reference.quantise(np.array([[first, 1.0], [127.0, -127.0]]), bits)
    assert np.array_equal(scales[:1], [scale], equal_nan=True)
    assert stored[0].tolist() == ([0, 0] if bits == 8 else [0x88])
    found = reference.dequantise(stored, scales)
    assert np.isnan(found[0]).all()
    assert np.allclose(found[1], [127, -127])


@BITS
@pytest.mark.parametrize("size", [0.0, 1e-45, 2.0**-127, 2.0**-125])
def test_what_is_too_small_is_zero(bits, size):
    stored, scales = reference.quantise(np.array([[size, -size]], np.float32), bits)
    assert not scales.any()
    assert not reference.dequantise(stored, scales).any()


@pytest.mark.parametrize(("dtype", "largest"), [("int8", np.inf), ("int4", LARGEST)])
def test_the_largest_number_of_float32(dtype, largest):
    """Its scale of 8 bits is rounded up, as append_kv says; the number before it is safe."""
    cache = PagedKVCache(1, 1, 16, 1, 2, dtype=dtype, xp=np)
    tables = cache.step_tables([cache.allocator.add([1, 2])], 2)
    k = np.array([[[LARGEST, -1]], [[np.nextafter(LARGEST, np.float32(0)), -1]]], np.float32)
    cache.append(0, k, -k, tables)
    found = gather(
        cache.k[0], cache.v[0], tables.block_table, tables.seqlens_k, max_seqlen_k=2,
        dtype="float32", **cache.scales(0),
    )  # fmt: skip
    for sign, tokens in zip((1, -1), found, strict=True):
        assert tokens[0, 0, 0, 0] == sign * largest
        assert np.isfinite(tokens[0, 1]).all()


def test_float16_is_wide_enough():
    """Its smallest number has a scale."""
    stored, scales = reference.quantise(np.array([[2.0**-24, 0.0]], np.float16), 8)
    assert stored.tolist() == [[127, 0]]
    assert scales > 0


def keys_of(*shape: int, seed: int = 0, dtype: str = "float16") -> np.ndarray:
    """Keys with a common offset, outliers, and keys of the size of a millionth."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal(shape, np.float32) * rng.choice([1, 1, 20], shape[-1])
    k[rng.random(shape[:-1]) < 0.1] *= 1e-6
    return (k + rng.choice([0, 7], shape[-1])).astype(dtype_of(dtype))


def assert_equal_to_numpys(
    k: np.ndarray, found: QuantizedKeys, centre: Any, bounds: Any, used: Any = None
) -> None:
    """Centre, codes and scales, bit by bit."""
    if centre is None:
        centre = key_centres(k, bounds, used)
    codes, scales = quantize_keys_reference(k, centre, bounds)
    for got, want in ((found.centre, centre), (found.scales, scales), (found.codes, codes)):
        assert_array_equal(KERNELS.get(got), want)


HEAD_DIMS = wider((64, 20), (1, 8, 40, 72, 128, 200, 256))


@pytest.mark.nvrtc
@examples(12, deep=150)
@given(st.data())
def test_kernels_equal_numpy_bit_by_bit(data):
    dtype = data.draw(st.sampled_from(wider(("float16",), ("bfloat16", "float32"))), "dtype")
    packed = data.draw(st.booleans(), "packed")
    tokens = data.draw(st.sampled_from((1, 3, 4, 5, 33, 255, 257)), "tokens")
    shape = (tokens,) if packed else (data.draw(st.integers(1, 2), "B"), tokens)
    shape += (data.draw(st.integers(1, 3), "G"), data.draw(st.sampled_from(HEAD_DIMS), "D"))
    seed = data.draw(st.integers(0, 99), "seed")
    k = keys_of(*shape, seed=seed, dtype=dtype)
    rng = np.random.default_rng(seed)
    for value in (np.nan, np.inf):
        if rng.random() < 0.5:
            k[tuple(rng.integers(0, k.shape))] = value
    k = lay_out(k, data.draw(st.sampled_from(VIEWS), "view"))
    bounds = None
    if packed and data.draw(st.booleans(), "several"):
        bounds = np.sort(rng.integers(0, tokens + 1, rng.integers(2, 7)))
        bounds[0] = 0
        bounds = bounds.astype(data.draw(st.sampled_from((np.int32, np.int64))))
    batch = (*shape[:-3],) if not packed else () if bounds is None else (len(bounds) - 1,)
    centre = None
    if data.draw(st.booleans(), "given"):
        of_each = data.draw(st.booleans())
        centre = rng.standard_normal((*(batch if of_each else ()), *shape[-2:]), np.float32)
        if data.draw(st.booleans(), "sliced"):
            centre = lay_out(centre, "sliced")
    used = None
    if centre is None and data.draw(st.booleans(), "in use"):
        counts = np.full(batch or 1, tokens) if bounds is None else np.diff(bounds)
        used = rng.integers(0, counts + 1).astype(data.draw(st.sampled_from((np.int32, np.int64))))
        used = np.repeat(used, 2)[::2]  # each has a stride of two items
    with KERNELS.running():
        found = quantize_keys(
            KERNELS.put(k),
            centre=None if centre is None else KERNELS.put(centre),
            cu_seqlens=None if bounds is None else KERNELS.put(bounds),
            seqused_k=None if used is None else KERNELS.put(used),
        )
    assert_equal_to_numpys(k, found, centre, bounds, used)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padding", [np.nan, np.inf, 60_000])
def test_padding_does_not_change_codes_of_keys_in_use(padding, packed):
    """Keys after those in use get codes and scales as other keys with this centre do."""
    k, used = keys_of(2, 300, 2, 8), np.array([280, 0])
    k[0, 280:] = k[1] = padding
    keys = (
        quantize_keys(k.reshape(600, 2, 8), cu_seqlens=np.array([0, 300, 600]), seqused_k=used)
        if packed
        else quantize_keys(k, seqused_k=used)
    )
    alone = quantize_keys(k[:1, :280])
    assert_array_equal(keys.centre, np.concatenate([alone.centre, np.zeros((1, 2, 8))]))
    every = quantize_keys(k, centre=keys.centre)
    assert_array_equal(every.codes[:1, :280], alone.codes)
    assert_array_equal(every.scales[:1, :280], alone.scales)
    assert_array_equal(keys.codes, every.codes.reshape(keys.shape))
    assert_array_equal(keys.scales, every.scales.reshape(keys.shape[:-1]))


@pytest.mark.nvrtc
def test_kernels_clamp_keys_in_use(monkeypatch):
    monkeypatch.setattr(quantized_keys, "checks_values", lambda operands: False)
    k, used = keys_of(3, 6, 2, 64), np.array([-3, 7, 2**40])
    with KERNELS.running():
        keys = quantize_keys(KERNELS.put(k), seqused_k=KERNELS.put(used))
    assert_equal_to_numpys(k, keys, None, None, np.array([0, 6, 6]))


# dtype, D, R/2, interleaved, dtype of the tables: each is a kernel.
ROTATIONS = wider(
    (
        ("float16", 64, 24, False, "float32"), ("float16", 20, 7, True, "float16"),
        ("float32", 64, 32, False, "float32"),
    ),
    (
        ("float16", 128, 64, False, "float16"), ("float16", 64, 16, True, "float32"),
        ("bfloat16", 256, 128, False, "bfloat16"), ("float32", 80, 20, False, "float32"),
        ("float16", 40, 20, True, "float16"), ("float32", 9, 2, False, "float32"),
    ),
)  # fmt: skip
POSITIONS = 300


@pytest.mark.nvrtc
@examples(10, deep=120)
@given(st.data())
def test_rotated_keys_are_within_bounds(data):
    """Also the centre, the mean of rotated keys, and queries, which are rotated in place."""
    dtype, dim, half, interleaved, table = data.draw(st.sampled_from(ROTATIONS), "kind")
    packed = data.draw(st.booleans(), "packed")
    tokens, seed = (
        data.draw(st.sampled_from((1, 5, 33, 290)), "tokens"),
        data.draw(st.integers(0, 99)),
    )
    rng = np.random.default_rng(seed)
    lead = (tokens,) if packed else (2, tokens)
    k = lay_out(keys_of(*lead, 2, dim, seed=seed, dtype=dtype), data.draw(st.sampled_from(VIEWS)))
    q = keys_of(*lead, 3, dim, seed=seed + 1, dtype=dtype)
    bounds = np.array([0, tokens // 3, tokens]) if packed and data.draw(st.booleans()) else None
    tables = cupyattn.rope_tables(POSITIONS, 2 * half, dtype=table)
    tables = lay_out(tables[0], "padded"), tables[1]  # each has its own stride
    positions = rng.integers(0, POSITIONS, lead) if data.draw(st.booleans(), "positions") else None
    places = np.broadcast_to(
        key_positions(k.shape, bounds) if positions is None else positions, lead
    )
    given = rng.standard_normal((2, dim), np.float32) if data.draw(st.booleans(), "given") else None
    there = [None if x is None else KERNELS.put(x) for x in (k, q, given, bounds, positions)]
    with KERNELS.running():
        found = quantize_keys(
            there[0], q=there[1], centre=there[2], cu_seqlens=there[3], positions=there[4],
            rotary=cupyattn.Rotary(*map(KERNELS.put, tables), interleaved),
        )  # fmt: skip
    keys = QuantizedKeys(*map(KERNELS.get, (found.codes, found.scales, found.centre)))
    options = {"interleaved": interleaved}

    def of(x: np.ndarray, function: Any, **more: Any) -> np.ndarray:
        several = x if x.ndim == 4 else x[None]
        at = places if x.ndim == 4 else places[None]
        return function(several, *tables, at, **options, **more).reshape(x.shape)

    rotated = of(k, reference.rope)
    off = of(k, reference.rope_bound, dtype="float32")
    centre = of_rows(keys, k, bounds)
    values = reference.dequantise(keys.codes, keys.scales) + centre
    assert reference.error_ratio(values, rotated, quantized_keys_bound(k, keys.scales) + off) <= 1
    largest = np.abs(rotated - centre).max(axis=-1) / 127
    within = off.max(axis=-1) / 127 + 4 * U32 * largest + 2.0**-106
    assert reference.error_ratio(keys.scales, largest, within) <= 1
    if given is None:
        exact = key_centres(rotated.astype(np.float32), bounds)
        sizes = key_centres(np.abs(rotated).astype(np.float32) * 20 * np.float32(U32), bounds)
        sizes += key_centres(off.astype(np.float32), bounds)
        assert reference.error_ratio(keys.centre, exact, 1.01 * sizes) <= 1
    turned = of(q, reference.rope_bound, dtype=dtype)
    assert reference.error_ratio(KERNELS.get(there[1]), of(q, reference.rope), turned) <= 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("length", [1, 64, 400])
def test_kernels_write_into_views(length):
    """The codes, scales and centres of one layer of a larger array, and of a pool of blocks."""
    k = keys_of(2, length, 2, 64)
    codes = KERNELS.put(np.zeros((2, 3, 2, length, 64), np.int8).swapaxes(2, 3)[:, 1])
    scales = KERNELS.put(np.zeros((2, 3, 2, length), np.float32).swapaxes(2, 3)[:, 1])
    centre = KERNELS.put(np.zeros((2, 3, 2, 65), np.float32)[:, 1, :, :64])
    keys = QuantizedKeys(codes, scales, centre)
    with KERNELS.running():
        assert quantize_keys(KERNELS.put(k), out=keys) is keys
    assert_equal_to_numpys(k, keys, None, None)


@pytest.mark.nvrtc
def test_positions_outside_of_the_tables_give_keys_that_are_not_finite(monkeypatch):
    monkeypatch.setattr(quantized_keys, "checks_values", lambda operands: False)
    k = KERNELS.put(keys_of(1, 6, 2, 64))
    positions = KERNELS.put(np.array([[0, 1, -1, 2, 3, 4]]))
    tables = tuple(KERNELS.put(table) for table in cupyattn.rope_tables(3, 64))
    with KERNELS.running():
        keys = quantize_keys(k, rotary=tables, positions=positions)
    assert_array_equal(np.isnan(KERNELS.get(keys.scales))[0, :, 0], [0, 0, 1, 0, 1, 1])
    assert np.isfinite(KERNELS.get(keys.centre)).all()


def test_rotated_keys_on_numpy_are_those_of_rope():
    k = keys_of(2, 9, 2, 16, dtype="float32")
    tables, q = cupyattn.rope_tables(9, 16), k.copy()
    found = quantize_keys(k, rotary=tables, q=q)
    want = quantize_keys(cupyattn.rope(k, *tables))
    assert np.abs(found.codes.astype(int) - want.codes).max() <= 1
    np.testing.assert_allclose(found.centre, want.centre, atol=1e-6)
    assert_array_equal(q, cupyattn.rope(k, *tables))


@pytest.mark.nvrtc
def test_a_given_centre_saves_a_launch():
    k, centre = np.zeros((1, 9, 2, 64), np.float16), np.zeros((2, 64), np.float32)
    both = cupyattn.explain(quantize_keys, k)
    assert [launch.kernel for launch in both.launches] == ["key_centres", "quantize_keys"]
    (only,) = cupyattn.explain(quantize_keys, k, centre=centre).launches
    assert only.kernel == "quantize_keys"


def of_rows(keys: QuantizedKeys, k: np.ndarray, cu_seqlens: Any = None) -> np.ndarray:
    """The centre of each key, (..., G, D)."""
    centre = keys.centre
    if centre.ndim == 2:
        return np.broadcast_to(centre, k.shape)
    if cu_seqlens is None:
        return np.broadcast_to(centre[:, None], k.shape)
    return np.repeat(centre, np.diff(cu_seqlens), axis=0)


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(("float16", "bfloat16", "float32")),
    layout=st.sampled_from(("dense", "packed", "one")),
)
def test_keys_are_within_the_bound_of_their_codes(seed, dtype, layout):
    rng = np.random.default_rng(seed)
    shape = (*rng.integers(1, 9, 1 if layout != "dense" else 2), 2, rng.integers(1, 40))
    k, bounds = keys_of(*shape, seed=seed, dtype=dtype), None
    if layout == "packed":
        bounds = np.sort(rng.integers(0, len(k) + 1, 4))
        bounds[[0, -1]] = 0, len(k)
    keys = quantize_keys(k, cu_seqlens=bounds)
    values = reference.dequantise(keys.codes, keys.scales) + of_rows(keys, k, bounds)
    exact = np.asarray(k, np.float64)
    assert reference.error_ratio(values, exact, quantized_keys_bound(k, keys.scales)) <= 1
    differences = exact - of_rows(keys, k, bounds)
    largest = np.abs(differences).max(axis=-1) / 127
    assert reference.error_ratio(keys.scales, largest, 3 * U32 * largest + 2.0**-106) <= 1
    assert_array_equal(np.abs(keys.codes).max(axis=-1), np.where(largest > 2.0**-107, 127, 0))


def test_a_code_is_half_a_scale_away_and_no_more():
    k = np.linspace(-1, 1, 256, dtype=np.float32).reshape(1, 1, 1, 256)
    keys = quantize_keys(k, centre=np.full((1, 256), 0.125, np.float32))
    off = np.abs(keys.codes * keys.scales[..., None].astype(float) + 0.125 - k).max()
    bound = quantized_keys_bound(k, keys.scales).max()
    assert 0.48 * keys.scales.item() < off <= bound < 0.501 * keys.scales.item()


@pytest.mark.parametrize("length", [1, 31, SAMPLES, SAMPLES + 1, 5 * SAMPLES])
def test_the_centre_is_the_mean_of_evenly_spaced_keys(length):
    k = keys_of(length, 2, 3, dtype="float32")
    sampled = k[:: -(-length // SAMPLES)].astype(np.float64)
    exact = sampled.mean(axis=0)
    # 8 sums within a part, 2 and 8 of parts, and the quotient
    bound = 20 * U32 * np.abs(sampled).mean(axis=0)
    assert reference.error_ratio(quantize_keys(k).centre, exact, bound) <= 1
    if length > SAMPLES:
        assert reference.error_ratio(quantize_keys(k).centre, k.mean(axis=0), bound) > 1


def test_each_sequence_has_its_own_centre():
    k, bounds = keys_of(9, 2, 8), np.array([0, 4, 4, 9])
    keys = quantize_keys(k, cu_seqlens=bounds)
    assert not keys.centre[1].any()
    for b, (begin, end) in enumerate(((0, 4), (4, 4), (4, 9))):
        alone = quantize_keys(k[None, begin:end])
        assert_array_equal(alone.centre[0], keys.centre[b])
        assert_array_equal(alone.codes[0], keys.codes[begin:end])
        assert_array_equal(alone.scales[0], keys.scales[begin:end])


def test_one_sequence_without_an_axis_of_its_own():
    k = keys_of(5, 2, 8)
    one, dense = quantize_keys(k), quantize_keys(k[None])
    assert one.centre.shape == (2, 8)
    assert_array_equal(one.centre, dense.centre[0])
    assert_array_equal(one.codes, dense.codes[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_key_that_is_not_finite_has_no_scale_and_spares_the_others(value):
    k = keys_of(1, 5, 2, 8)
    k[0, 2, 1, 3] = value
    keys = quantize_keys(k)
    assert np.isfinite(keys.centre).all()
    hit = np.zeros((1, 5, 2), bool)
    hit[0, 2, 1] = True
    assert_array_equal(np.isnan(keys.scales), hit)
    assert not keys.codes[hit].any()


def test_special_keys():
    k = np.zeros((5, 1, 4), np.float32)
    k[1:, 0, 2] = 2.0**-101, -(2.0**-100), 3e38, -3e38
    keys = quantize_keys(k, centre=np.zeros((1, 4), np.float32))
    least = np.float32(2.0**-126)
    assert keys.scales[:2].tolist() == [[least], [least]]
    assert keys.codes[:, 0, 2].tolist() == [0, 0, -127, 127, -127]
    far = quantize_keys(k, centre=np.full((1, 4), -3e38, np.float32))
    assert np.isnan(far.scales[3])
    assert np.isfinite(far.scales[[0, 1, 2, 4]]).all()
    assert quantize_keys(np.full((4, 1, 4), 3e38, np.float32)).centre.tolist() == [[0] * 4]


def test_differences_halfway_between_codes_round_to_even():
    k = np.float32([127, 0.5, 1.5, 2.5, -0.5, -1.5]).reshape(1, 1, 6) + 1
    keys = quantize_keys(k, centre=np.ones((1, 6), np.float32))
    assert keys.codes.ravel().tolist() == [127, 0, 2, 2, 0, -2]


def test_later_keys_share_the_centre_and_are_written_in_place():
    k = keys_of(2, 6, 2, 8)
    whole = quantize_keys(k)
    assert_array_equal(quantize_keys(k, out=whole).codes, whole.codes)
    codes, scales = np.zeros((2, 9, 2, 8), np.int8), np.zeros((2, 9, 2), np.float32)
    centre = np.zeros((2, 2, 8), np.float32)
    first = QuantizedKeys(codes[:, :6], scales[:, :6], centre)
    assert quantize_keys(k, out=first) is first
    assert_array_equal(codes[:, :6], whole.codes)
    assert_array_equal(centre, whole.centre)
    later = QuantizedKeys(codes[:, 6:], scales[:, 6:], centre)
    quantize_keys(k[:, :3], centre=centre, out=later)
    assert_array_equal(codes[:, 6:], whole.codes[:, :3])
    assert_array_equal(scales[:, 6:], whole.scales[:, :3])
    assert_array_equal(centre, whole.centre)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8), (3, 0, 8)])
def test_no_keys(shape):
    keys = quantize_keys(np.zeros(shape, np.float16))
    assert keys.codes.shape == shape
    assert keys.scales.shape == shape[:-1]
    assert not keys.centre.any()
    assert keys.centre.shape == (*shape[: len(shape) - 3], *shape[-2:])


def test_the_record_of_keys():
    keys = quantize_keys(keys_of(1, 5, 2, 8))
    assert (keys.shape, keys.ndim, len(keys), keys.nbytes) == ((1, 5, 2, 8), 4, 1, 80 + 40 + 64)
    assert "QuantizedKeys" in keys._repr_html_()
    with pytest.raises(TypeError, match="not iterable"):
        iter(keys)


K = keys_of(2, 3, 2, 8)
PACKED = keys_of(6, 2, 8)
CODES, SCALES = np.zeros((2, 3, 2, 8), np.int8), np.zeros((2, 3, 2), np.float32)
CENTRE = np.zeros((2, 8), np.float32)
TABLES, IDS = np.ones((5, 4), np.float32), np.zeros((2, 3), int)
ODD = np.zeros(2 * 3 * 2 * 8 + 1, np.int8)[1:].reshape(CODES.shape)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: quantize_keys(K.astype(float)), TypeError, "k has dtype float64"),
        (lambda: quantize_keys(K[0, 0]), ValueError, "(B, S, G, D), or packed (total, G, D)"),
        (lambda: quantize_keys(np.zeros((1, 1, 257), np.float16)), ValueError, "D = 257"),
        (lambda: quantize_keys(K[..., :0]), ValueError, "D = 0"),
        (lambda: quantize_keys(K[..., ::2]), ValueError, "the last axis must be contiguous"),
        (lambda: quantize_keys(K, centre=CENTRE.astype(float)), TypeError, "centre has dtype"),
        (lambda: quantize_keys(K, centre=CENTRE[:1]), ValueError, "it is (2, 8) or (2, 2, 8)"),
        (lambda: quantize_keys(K, centre=np.zeros((3, 2, 8), np.float32)), ValueError, "(3, 2, 8)"),
        (lambda: quantize_keys(K, cu_seqlens=np.array([0, 3])), ValueError, "leave it out"),
        (lambda: quantize_keys(PACKED, cu_seqlens=np.array([0])), ValueError, "at least one"),
        (lambda: quantize_keys(PACKED, cu_seqlens=np.array([[0, 6]])), ValueError, "(1, 2)"),
        (lambda: quantize_keys(PACKED, cu_seqlens=np.array([0, 7])), ValueError, "the rows of k"),
        (lambda: quantize_keys(PACKED, cu_seqlens=np.array([0.0, 6])), TypeError, "cu_seqlens has"),
        (
            lambda: quantize_keys(PACKED, centre=np.zeros((2, 2, 8), np.float32)),
            ValueError,
            "pass cu_seqlens too",
        ),
        (
            lambda: quantize_keys(K, centre=CENTRE, seqused_k=np.array([1, 2])),
            ValueError,
            "seqused_k was given with centre",
        ),
        (lambda: quantize_keys(K, seqused_k=np.array([1])), ValueError, "one of each sequence"),
        (lambda: quantize_keys(K, seqused_k=np.array([1.0, 2])), TypeError, "seqused_k has"),
        (lambda: quantize_keys(K, seqused_k=2), TypeError, "of shape (B,)"),
        (lambda: quantize_keys(K, seqused_k=np.array([1, 4])), ValueError, "values from 1 to 4"),
        (lambda: quantize_keys(K, seqused_k=np.array([-1, 3])), ValueError, "values from -1 to 3"),
        (lambda: quantize_keys(PACKED, seqused_k=np.array([1, 2])), ValueError, "seqused_k has"),
        (lambda: quantize_keys(K, q=K), ValueError, "q was given without rotary"),
        (lambda: quantize_keys(K, positions=IDS), ValueError, "positions was given without"),
        (lambda: quantize_keys(K, rotary=(TABLES, 1)), TypeError, "sin has type"),
        (lambda: quantize_keys(K, rotary=2 * (TABLES[:2],)), ValueError, "has 3 keys"),
        (lambda: quantize_keys(K, rotary=2 * (TABLES[:, :1],), q=PACKED), ValueError, "B, S, H, D"),
        (lambda: quantize_keys(K, rotary=2 * (TABLES,), q=K[:1].copy()), ValueError, "k's tokens"),
        (lambda: quantize_keys(K, rotary=2 * (TABLES,), q=K[..., :4]), ValueError, "tokens and D"),
        (
            lambda: quantize_keys(K, rotary=2 * (TABLES,), positions=IDS + 5),
            ValueError,
            "rotary's tables have rows 0 to 4",
        ),
        (lambda: quantize_keys(K, rotary=2 * (TABLES,), positions=IDS[0]), ValueError, "(B, S) or"),
        (lambda: quantize_keys(K, rotary=2 * (TABLES,), q=K), ValueError, "q overlaps k"),
        (lambda: quantize_keys(K, out=CODES), TypeError, "it is QuantizedKeys"),
        (
            lambda: quantize_keys(K[:1], out=QuantizedKeys(CODES, SCALES, CENTRE)),
            ValueError,
            "out.codes has shape (2, 3, 2, 8)",
        ),
        (
            lambda: quantize_keys(K, out=QuantizedKeys(CODES, SCALES, CENTRE)),
            ValueError,
            "out.centre has shape (2, 8)",
        ),
        (
            lambda: quantize_keys(K, centre=CENTRE, out=QuantizedKeys(CODES, SCALES, CENTRE + 1)),
            ValueError,
            "centre is not out.centre",
        ),
        (
            lambda: QuantizedKeys(CODES.astype(np.uint8), SCALES, CENTRE),
            TypeError,
            "codes has dtype uint8",
        ),
        (lambda: QuantizedKeys(CODES, SCALES.astype(float), CENTRE), TypeError, "scales has dtype"),
        (lambda: QuantizedKeys(CODES, SCALES[:1], CENTRE), ValueError, "scales has shape"),
        (lambda: QuantizedKeys(CODES, SCALES, None), TypeError, "centre is None"),
        (lambda: QuantizedKeys(ODD, SCALES, CENTRE), ValueError, "a multiple of 8 bytes, gcd"),
        (lambda: np.asarray(quantize_keys(K)), RefusalError, "in the place of k"),
        (lambda: np.from_dlpack(quantize_keys(K)), RefusalError, ".codes, .scales and .centre"),
    ],
)
def test_refusals_of_keys_say_what_to_pass(call, kind, says):
    with cupyattn.backend("reference"), pytest.raises(kind, match=re.escape(says)):
        call()
