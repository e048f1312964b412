"""Many query tokens over paged caches of floats and of integers: within the dense bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS
from support.forward_runs import in_float32
from support.paged import PackedProblem, PagedProblem, on_emulator, on_kernels
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.reference.cache_formats import dequantise
from cupyattn.ops.attention.reference.paged import gathered
from cupyattn.runtime.tables import pairs

pytestmark = pytest.mark.nvrtc

# Forms of the tile loader: several passes of a tile's groups, passes that cross groups, float32's.
FLOATS = wider(
    (("float16", 64), ("float16", 33), ("float32", 24)),
    (
        ("float16", 40), ("float16", 128), ("float16", 80), ("float16", 96), ("float16", 160),
        ("float16", 192), ("float16", 256), ("bfloat16", 72), ("float32", 130), ("float32", 256),
        ("float16", 260), ("float16", 512), ("float32", 500), ("bfloat16", 320),
    ),
)  # fmt: skip
_MORE_INTEGERS = (
    ("float16", 128), ("float16", 80), ("float16", 96), ("float16", 160), ("float16", 192),
    ("float16", 256), ("float16", 34), ("bfloat16", 72), ("bfloat16", 2), ("float32", 130),
    ("float32", 256), ("float16", 384), ("float32", 300), ("bfloat16", 512),
)  # fmt: skip
INTEGERS = {
    8: wider((("float16", 64), ("float16", 40)), (("float32", 24), *_MORE_INTEGERS)),
    4: wider((("float16", 64), ("float32", 24)), (("float16", 40), *_MORE_INTEGERS)),
}
BITS = (8, 4)
BLOCK_SIZES = (16, 32, 48, 64, 80, 128, 256)
# No tokens, the ends of a group and of a tile, and several tiles.
LENGTHS = (0, 1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 130, 200)
WINDOWS = (None, (0, 0), (15, 0), (16, 2), (40, 0), (100, None))
CHUNK = PagedProblem(
    lengths=(150, 64), Sq=40, G=1, group=2, D=64, dtype="float16", options=(("causal", True),)
)
EVERY_OPTION = (
    *(("causal", True), ("alibi_slopes", True), ("softcap", 5.0), ("sinks", True)),
    ("window_size", (37, None)),
)


@st.composite
def prompts(draw, bits=None):
    """Draw calls of the kernels above, whose queries are a batch."""
    dtype, head_dim = draw(st.sampled_from(INTEGERS[bits] if bits else FLOATS))
    options = [("causal", draw(st.booleans()))]
    if (window := draw(st.sampled_from(WINDOWS))) is not None:
        options.append(("window_size", window))
    return PagedProblem(
        lengths=tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3))),
        Sq=draw(st.sampled_from((17, 33, 130))),
        G=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 2)),
        D=head_dim,
        dtype=dtype,
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        options=tuple(options),
        seed=draw(st.integers(0, 2**16)),
        bits=bits,
    )


@st.composite
def packed_prompts(draw, bits=None):
    """Draw such calls whose queries are packed: any number of them a sequence."""
    plain = draw(prompts(bits))
    most = draw(st.sampled_from((1, 16, 40, 130)))
    queries = tuple(draw(st.integers(0, min(most, length))) for length in plain.lengths)
    fields = {**vars(plain), "Sq": most, "queries": queries}
    return PackedProblem(**fields, spare=draw(st.sampled_from((0, 3))))


@pytest.mark.parametrize("bits", [None, *BITS])
@given(data=st.data())
@examples(3)
def test_results_are_within_the_dense_bounds(bits, data):
    """For any lengths, table and block size, and more queries than keys.

    Unused slots hold NaN, or integers with scales of NaN; unused table entries are out of range.
    """
    problem = data.draw(prompts(bits))
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("bits", [None, *BITS])
@given(data=st.data())
@examples(3)
def test_packed_queries_are_a_loop_over_sequences(bits, data):
    """Any number of queries a sequence, also none; rows after the last one are not written."""
    problem = data.draw(packed_prompts(bits))
    arrays = problem.arrays()
    total = arrays[0].shape[0]
    out = np.full(arrays[0].shape, 7, arrays[0].dtype)
    lse = np.full((problem.heads, total), 7, np.float32)
    with cupyattn.backend("emulator"):
        problem.on_arrays(arrays, out=(out, lse))
    assert problem.ratio(out, lse, arrays) <= 1
    assert (out[problem.bounds[-1] :] == 7).all()
    assert (lse[:, problem.bounds[-1] :] == 7).all()


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), *deep(("float32", 24))])
def test_packed_queries_of_several_tiles(dtype, head_dim):
    problem = PackedProblem(
        lengths=(150, 20, 70), Sq=150, queries=(150, 20, 65), G=1, group=1, D=head_dim, dtype=dtype
    )
    arrays = problem.arrays()
    assert problem.ratio(*problem.call(arrays), arrays) <= 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        ("float32", 24, 32),
        *deep(
            *((*each, 32) for each in FLOATS if each != ("float32", 24)),
            *((*each, 48) for each in FLOATS),
            *((*each, size) for each in FLOATS[:3] for size in (16, 64, 80, 128, 256)),
        ),
    ],
)  # fmt: skip
def test_the_bits_are_those_of_dense_attention(dtype, head_dim, block_size):
    """One kernel computes both in one order: only addresses differ.

    In wide heads loads stand between the products, at other places over a cache. The emulator adds
    products with nothing between them at once, so sums of other numbers of them round differently.
    """
    problem = replace(CHUNK, dtype=dtype, D=head_dim, block_size=block_size)
    q, k, v, table, lengths = arrays = problem.arrays()
    found = on_emulator(problem, arrays)
    keys, values = (gathered(cache, table, lengths) for cache in (k, v))
    with cupyattn.backend("emulator"):
        dense = cupyattn.attention(
            q, keys, values, causal=True, seqused_k=lengths, return_lse=True
        )  # fmt: skip
    if head_dim > 256:
        np.testing.assert_allclose(found[0], dense[0], rtol=2**-9, atol=1e-4)
        np.testing.assert_allclose(found[1], dense[1], atol=1e-5)
    else:
        assert all(map(np.array_equal, found, dense))


IN_BLOCKS_OF_48 = [(kernel, bits, 48) for bits in BITS for kernel in INTEGERS[bits]]


@pytest.mark.parametrize(
    ("kernel", "bits", "block_size"),
    mostly_deep(
        dict.fromkeys((*IN_BLOCKS_OF_48, *pairs(INTEGERS[8], BITS, BLOCK_SIZES))),
        [(("float16", 40), 8, 48), (("float32", 24), 4, 48)],
    ),
    ids=str,
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
    if in_float32(dtype, KERNELS.device.traits.native):  # whose tiles have as many keys
        assert all(map(np.array_equal, found, on_emulator(kept, arrays)))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "bits"),
    [
        ("float16", 64, None),
        *deep(
            ("float16", 64, 8), ("float32", 24, None), ("bfloat16", 72, None), ("float16", 64, 4),
            ("float32", 64, 8), ("float32", 64, 4),
        ),
    ],
)  # fmt: skip
def test_every_option(dtype, head_dim, bits):
    problem = replace(CHUNK, dtype=dtype, D=head_dim, bits=bits, options=EVERY_OPTION)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_any_place_in_the_pool_gives_the_same_bits():
    first, again = (on_kernels(CHUNK, CHUNK.arrays(order)) for order in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_slopes_of_each_sequence():
    problem = PackedProblem(
        lengths=(70, 0, 40), Sq=33, queries=(33, 0, 20), G=1, group=2, D=64, dtype="float16",
        options=EVERY_OPTION,
    )  # fmt: skip
    arrays = problem.arrays()
    slopes = np.random.default_rng(3).standard_normal((3, 2)).astype(np.float32)
    out, lse = problem.call(arrays, alibi_slopes=slopes)
    for b, (rows, own) in zip((0, 2), problem.sequences(arrays), strict=True):
        alone, alone_lse = on_kernels(problem, own, alibi_slopes=slopes[b : b + 1])
        assert np.array_equal(out[rows], alone[0])
        assert np.array_equal(lse[:, rows], alone_lse[0])


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_rows_before_the_first_sequence_are_not_written(backend):
    """Another call may write them."""
    problem = PackedProblem(**vars(CHUNK), queries=(20, 3))
    q, *others = problem.arrays()
    wide = np.concatenate([np.full_like(q[:5], np.nan), q])
    out = np.full_like(wide, 7)
    lse = np.full((problem.heads, len(wide)), 7, np.float32)
    with cupyattn.backend(backend):
        expected, expected_lse = problem.on_arrays((q, *others))
        problem.on_arrays((wide, *others), cu_seqlens_q=problem.bounds + 5, out=(out, lse))
    assert (out[:5] == 7).all() and (lse[:, :5] == 7).all()
    assert np.array_equal(out[5:], expected)
    assert np.array_equal(lse[:, 5:], expected_lse)


def test_more_than_32_sequences_find_their_rows():
    """Warps search the lengths of 32 sequences at a time."""
    queries = tuple(17 if b % 5 == 3 else 0 for b in range(70))
    problem = PackedProblem(
        lengths=(20,) * 70, Sq=17, queries=queries, G=1, group=1, D=64, dtype="float16"
    )
    arrays = problem.arrays()
    assert problem.ratio(*problem.call(arrays), arrays) <= 1


@pytest.mark.parametrize("bits", [None, 8, *deep(4)])
def test_views_of_a_pool_of_layers_are_used_without_copies(bits):
    """Layers, K and V share one array, heads before slots; q and the table are slices."""
    problem = replace(CHUNK, G=2, bits=bits, block_size=32)
    q, k, v, table, lengths, *scales = arrays = problem.arrays()
    expected = on_emulator(problem, arrays)
    blocks, size, heads, width = k.shape
    pool = np.full((2, blocks, 3, heads, size, width), 77 if bits else np.nan, k.dtype)
    pool[:, :, 1] = np.stack((k, v)).swapaxes(2, 3)
    qkv = np.full((*q.shape[:2], 3, *q.shape[2:]), np.nan, q.dtype)
    qkv[:, :, 1] = q
    wide = np.full((2 * table.shape[0], 2 * table.shape[1]), -7, np.int32)
    wide[::2, ::2] = table
    together = np.full((len(scales), blocks, size, heads), np.nan, np.float32)
    for each, own in zip(together, scales, strict=True):
        each[...] = own
    views = qkv[:, :, 1], *pool[:, :, 1].swapaxes(2, 3), wide[::2, ::2], lengths.astype(np.int64)
    found = on_emulator(problem, (*views, *together))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", [8, *deep(None)])
def test_caches_or_scales_that_are_not_alike_are_decoded(bits):
    problem = replace(CHUNK, bits=bits)
    arrays = problem.arrays()
    last = arrays[-1] if bits else arrays[2]
    wide = np.full((*last.shape, 2) if bits else (*last.shape[:2], 3, *last.shape[2:]), np.nan,
                   last.dtype)  # fmt: skip
    view = wide[..., 1] if bits else wide[:, :, 1]
    view[...] = last
    given = (*arrays[:-1], view) if bits else (*arrays[:2], view, *arrays[3:])
    assert problem.ratio(*on_emulator(problem, given), arrays) <= 1
    if bits:
        packed = PackedProblem(**vars(problem), queries=(40, 3))
        says = r"k_scales has strides .*, v_scales has strides .*alike"
        with cupyattn.backend("emulator"), pytest.raises(ValueError, match=says):
            packed.on_arrays((packed.arrays()[0], *given[1:]))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "bits"),
    [
        ("float16", 33, None), ("float16", 23, 8),
        *deep(
            ("float16", 24, None), ("float32", 24, None), ("float32", 22, 4), ("float16", 22, 4),
            ("float32", 23, 8),
        ),
    ],
)  # fmt: skip
def test_rows_that_are_not_aligned_are_read_item_by_item(dtype, head_dim, bits):
    """Nor is anything read after the last row, which is no whole vector."""
    problem = replace(CHUNK, dtype=dtype, bits=bits, D=head_dim)
    q, k, v, *others = arrays = problem.arrays(order=2)
    odd = np.zeros((2, k.size + 1), k.dtype)[:, 1:].reshape(2, *k.shape)
    odd[0], odd[1] = k, v
    assert problem.ratio(*on_kernels(problem, (q, *odd, *others)), arrays) <= 1


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 8), *deep(("float32", 4), ("float32", 8))])
def test_nothing_is_read_after_rows_that_end_within_a_tile(dtype, bits):
    """Aligned rows too: the array ends after the last one."""
    problem = replace(CHUNK, dtype=dtype, bits=bits, D=20 if dtype == "float32" else 40)
    q, k, v, *others = arrays = problem.arrays(order=2)
    pair = np.stack([k, v])
    assert problem.ratio(*on_kernels(problem, (q, *pair, *others)), arrays) <= 1


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float16", 8), *deep(("float16", 4), ("bfloat16", 8))]
)
def test_scales_down_to_the_least(dtype, bits):
    """V is as small as float16 represents, and smaller: rounded, and never NaN."""
    problem = replace(CHUNK, dtype=dtype, bits=bits)
    arrays = problem.arrays()
    for which, powers in ((5, (-30, 2)), (6, (-40, 2))):
        drawn = np.random.default_rng(3).integers(*powers, arrays[which].shape)
        arrays[which][...] *= np.exp2(drawn).astype(np.float32)
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.deep
def test_a_group_of_keys_that_takes_several_passes():
    problem = replace(CHUNK, lengths=(70,), Sq=17, group=1, D=256)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize(
    ("bits", "which", "value"), [(None, 2, np.nan), (8, 5, np.nan), (8, 6, np.nan), (8, 6, np.inf)]
)
def test_numbers_that_are_not_finite_stay_in_their_sequence(bits, which, value):
    problem = replace(CHUNK, bits=bits)
    arrays = problem.arrays()
    arrays[which][arrays[3][1, 0], 0] = value  # V, or a scale, of a token of sequence 1
    out, _ = on_kernels(problem, arrays)
    assert not np.isfinite(out[1]).all()
    assert np.isfinite(out[0]).all()


def test_an_evicted_block_right_before_the_window_is_not_read():
    problem = replace(CHUNK, lengths=(150,), Sq=70, block_size=32)
    problem = replace(problem, options=(("window_size", (80 - 32, None)),))
    q, k, v, table, lengths = arrays = problem.arrays()
    expected = on_kernels(problem, arrays)
    evicted = table.copy()
    evicted[0, 0] = -1
    found = on_kernels(problem, (q, k, v, evicted, lengths))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_chunk_after_another_is_the_whole_prompt():
    """Causal rows do not depend on where the prompt is cut."""
    whole = replace(CHUNK, lengths=(150,), Sq=150)
    q, k, v, table, _ = arrays = whole.arrays()
    out, _ = on_kernels(whole, arrays)
    for begin, end in ((0, 70), (70, 150)):
        part = q[:, begin:end], k, v, table, np.array([end], np.int32)
        chunk, _ = on_kernels(whole, part)
        assert np.allclose(chunk, out[:, begin:end], atol=2e-3)


def test_a_chunk_of_integers_is_near_what_decoding_computes():
    """One multiplies the integers, the other converts them to floats first."""
    problem = replace(CHUNK, bits=8)
    q, *others = problem.arrays()
    whole, _ = on_kernels(problem, (q, *others))
    last, _ = on_kernels(problem, (q[:, -1:], *others))
    assert np.allclose(whole[:, -1:], last, atol=4e-3)


def test_the_bound_holds_for_dequantised_floats_that_are_rounded():
    """In NumPy: keys and values rounded as the kernel does, everything else exact."""
    problem = replace(CHUNK, bits=8)
    q, k, v, table, lengths, k_scales, v_scales = arrays = problem.arrays()
    rounded = []
    for stored, scales in ((k, k_scales), (v, v_scales)):
        unit = np.float16(scales * 64)[..., None]
        rounded.append((stored / np.float16(64)).astype(np.float16) * unit)
    exact = reference.paged_attention(q, *rounded, table, lengths, **problem.keywords())
    assert 0 < problem.ratio(*exact, arrays) <= 1
