"""Many query tokens over caches of integers: against the reference on them, within their bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packed import PackedProblem
from support.paged import on_emulator, on_kernels
from support.prompts import BLOCK_SIZES, CHUNK, EVERY_OPTION, packed_prompts, prompts
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.kernels.configs.tables import pairs
from cupyattn.reference.kv_cache.quantisation import dequantise

pytestmark = pytest.mark.nvrtc

BITS = (8, 4)
# Of the feed's forms: several passes of a tile's groups, passes that cross groups, float32's.
KERNELS = wider(
    (("float16", 64), ("float16", 40), ("float32", 24)),
    (
        ("float16", 128), ("float16", 80), ("float16", 96), ("float16", 160), ("float16", 192),
        ("float16", 256), ("float16", 34), ("bfloat16", 72), ("bfloat16", 2), ("float32", 130),
        ("float32", 256),
    ),
)  # fmt: skip


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data())
@examples(4)
def test_within_the_bound_of_the_integers(bits: int, data: st.DataObject):
    """For any lengths, table and block size; unused slots hold anything, with scales of NaN."""
    problem = data.draw(prompts(KERNELS, bits))
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data())
@examples(6)
def test_packed_queries_are_a_loop_over_sequences(bits: int, data: st.DataObject):
    """Any number of queries a sequence; rows behind the last one stay as they are."""
    problem = data.draw(packed_prompts(KERNELS, bits))
    arrays = problem.arrays()
    total = arrays[0].shape[0]
    out = np.full(arrays[0].shape, 7, arrays[0].dtype)
    lse = np.full((problem.heads, total), 7, np.float32)
    with cupyattn.backend("emulator"):
        problem.on_arrays(arrays, out=(out, lse))
    assert problem.ratio(out, lse, arrays) <= 1
    assert (out[problem.bounds[-1] :] == 7).all()
    assert (lse[:, problem.bounds[-1] :] == 7).all()


EACH_IN_BLOCKS_OF_48 = [*itertools.product(KERNELS, BITS, [48])]
IN_BLOCKS = [*dict.fromkeys((*EACH_IN_BLOCKS_OF_48, *pairs(KERNELS, BITS, BLOCK_SIZES)))]


@pytest.mark.parametrize(
    ("kernel", "bits", "block_size"), mostly_deep(IN_BLOCKS, EACH_IN_BLOCKS_OF_48), ids=str
)
def test_scales_that_are_powers_of_two_lose_nothing(kernel, bits, block_size):
    """Every integer times its scale is a float of q's dtype, and the bound that of such a cache."""
    dtype, head_dim = kernel
    problem = replace(CHUNK, dtype=dtype, D=head_dim, bits=bits, block_size=block_size)
    q, k, v, table, lengths, *scales = problem.arrays()
    powers = [np.exp2(np.round(np.log2(each))).astype(np.float32) for each in scales]
    found = on_emulator(problem, (q, k, v, table, lengths, *powers))
    floats = [dequantise(*each).astype(q.dtype) for each in zip((k, v), powers, strict=True)]
    arrays = (q, *floats, table, lengths)
    kept = replace(problem, bits=None)
    assert kept.ratio(*found, arrays) <= 1
    if dtype != "float16":  # whose tiles have as many keys
        assert all(map(np.array_equal, found, on_emulator(kept, arrays)))


@pytest.mark.parametrize("bits", mostly_deep(BITS, [8]))
@pytest.mark.parametrize("dtype", mostly_deep(["float16", "float32"], ["float16"]))
def test_every_option(dtype, bits):
    problem = replace(CHUNK, dtype=dtype, bits=bits, options=EVERY_OPTION)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize(
    ("dtype", "bits"),
    mostly_deep(itertools.product(["float16", "float32"], BITS), [("float16", 8), ("float32", 4)]),
)
def test_rows_that_are_not_aligned_are_read_byte_by_byte(dtype, bits):
    """Nor is anything read behind the last, which is no whole vector."""
    problem = replace(CHUNK, dtype=dtype, bits=bits, D=23 if bits == 8 else 22)
    q, k, v, *others = arrays = problem.arrays(order=2)
    odd = np.zeros((2, k.size + 1), k.dtype)[:, 1:].reshape(2, *k.shape)
    odd[0], odd[1] = k, v
    assert problem.ratio(*on_kernels(problem, (q, *odd, *others)), arrays) <= 1


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 8), *deep(("float32", 4), ("float16", 8))])
def test_nothing_is_read_behind_rows_that_end_within_a_tile(dtype, bits):
    """Of aligned rows too: behind the last one the array ends."""
    problem = replace(CHUNK, dtype=dtype, bits=bits, D=20 if dtype == "float32" else 24)
    q, k, v, *others = arrays = problem.arrays(order=2)
    pair = np.stack([k, v])
    assert problem.ratio(*on_kernels(problem, (q, *pair, *others)), arrays) <= 1


@pytest.mark.parametrize("bits", BITS)
def test_views_of_a_pool_of_layers_without_copies(bits):
    """Layers, K and V in one array, heads before slots; scales of all heads side by side."""
    problem = replace(CHUNK, G=2, bits=bits, block_size=32)
    q, k, v, table, lengths, *scales = problem.arrays()
    expected = on_emulator(problem, (q, k, v, table, lengths, *scales))
    blocks, size, heads, width = k.shape
    pool = np.full((2, blocks, 3, heads, size, width), 77, k.dtype)
    pool[:, :, 1] = np.stack((k, v)).swapaxes(2, 3)
    together = np.full((2, blocks, size, heads), np.nan, np.float32)
    together[:] = scales
    views = pool[:, :, 1].swapaxes(2, 3)
    found = on_emulator(problem, (q, *views, table, lengths, *together))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_caches_or_scales_that_are_not_alike_are_decoded():
    problem = replace(CHUNK, bits=8)
    q, k, v, table, lengths, k_scales, v_scales = arrays = problem.arrays()
    wide = np.full((*v_scales.shape, 2), np.nan, np.float32)
    wide[..., 1] = v_scales
    found = on_emulator(problem, (q, k, v, table, lengths, k_scales, wide[..., 1]))
    assert problem.ratio(*found, arrays) <= 1
    packed = PackedProblem(**vars(problem), queries=(40, 3))
    q, *_ = packed.arrays()
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match=r"k_scales has strides .*, v_scales has strides .*alike"),
    ):
        packed.on_arrays((q, k, v, table, lengths, k_scales, wide[..., 1]))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", mostly_deep(["float16", "bfloat16"], ["float16"]))
def test_scales_down_to_the_least(dtype, bits):
    """V as small as float16 keeps it, and smaller: rounded, and never NaN."""
    problem = replace(CHUNK, dtype=dtype, bits=bits)
    arrays = problem.arrays()
    for which, powers in ((5, (-30, 2)), (6, (-40, 2))):
        drawn = np.random.default_rng(3).integers(*powers, arrays[which].shape)
        arrays[which][...] *= np.exp2(drawn).astype(np.float32)
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize(("which", "value"), [(5, np.nan), (6, np.nan), (6, np.inf)])
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_scales_that_are_not_finite_stay_in_their_sequence(dtype, which, value):
    problem = replace(CHUNK, dtype=dtype, bits=4)
    arrays = problem.arrays()
    arrays[which][arrays[3][1, 0], 0] = value  # a token of sequence 1
    out, _ = on_kernels(problem, arrays)
    assert not np.isfinite(out[1]).all()
    assert np.isfinite(out[0]).all()


def test_a_chunk_is_near_what_decoding_makes_of_it():
    """The same integers, multiplied as such or made floats first."""
    problem = replace(CHUNK, bits=8)
    q, *others = problem.arrays()
    whole, _ = on_kernels(problem, (q, *others))
    last, _ = on_kernels(problem, (q[:, -1:], *others))
    assert np.allclose(whole[:, -1:], last, atol=4e-3)


def test_the_bound_of_prompts_holds_for_floats_that_are_rounded():
    """In NumPy: keys and values rounded as the kernel does, everything else exact."""
    problem = replace(CHUNK, bits=8)
    q, k, v, table, lengths, k_scales, v_scales = arrays = problem.arrays()
    rounded = []
    for stored, scales in ((k, k_scales), (v, v_scales)):
        unit = np.float16(scales * 64)[..., None]
        rounded.append((stored / np.float16(64)).astype(np.float16) * unit)
    exact = reference.paged_attention(q, *rounded, table, lengths, **problem.keywords())
    assert 0 < problem.ratio(*exact, arrays) <= 1
