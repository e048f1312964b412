"""The quantised storage of caches: its format, its bound, and numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import PagedKVCache, gather, reference

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
