"""Many query tokens over a paged cache: the dense forward's results, wherever blocks lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from support.packed import PackedProblem
from support.paged import PagedProblem, on_emulator, on_kernels
from support.prompts import CHUNK, EVERY_OPTION, packed_prompts, prompts
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn.reference.attention.paged import gathered

pytestmark = pytest.mark.nvrtc

# Of the feed's forms: four passes of a tile's groups, one group a tile, passes that cross groups.
HEAD_DIMS = wider(
    (("float16", 64), ("float16", 40), ("float32", 24)),
    (
        ("float16", 128), ("float16", 80), ("float16", 96), ("float16", 160), ("float16", 192),
        ("float16", 256), ("float16", 33), ("bfloat16", 72), ("float32", 130), ("float32", 256),
    ),
)  # fmt: skip


@given(problem=prompts(HEAD_DIMS))
@examples(8)
def test_paged_is_dense(problem: PagedProblem):
    """Within the dense bounds, for any lengths, table and block size: also more queries than keys.

    What is not used holds NaN, and entries that may not be read are wild.
    """
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@given(problem=packed_prompts(HEAD_DIMS))
@examples(8)
def test_packed_queries_are_a_loop_over_sequences(problem: PackedProblem):
    """Any number of queries a sequence, none too; rows behind the last one stay as they are."""
    arrays = problem.arrays()
    total = arrays[0].shape[0]
    out = np.full(arrays[0].shape, 7, arrays[0].dtype)
    lse = np.full((problem.heads, total), 7, np.float32)
    with cupyattn.backend("emulator"):
        cupyattn.paged_attention(
            *arrays, cu_seqlens_q=problem.bounds, max_seqlen_q=problem.Sq, return_lse=True,
            out=(out, lse), **problem.keywords(),
        )  # fmt: skip
    assert problem.ratio(out, lse, arrays) <= 1
    assert (out[problem.bounds[-1] :] == 7).all()
    assert (lse[:, problem.bounds[-1] :] == 7).all()


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("float32", 24)])
def test_packed_queries_of_several_tiles(dtype, head_dim):
    problem = PackedProblem(
        lengths=(150, 20, 70), Sq=150, queries=(150, 20, 65), G=1, group=1, D=head_dim, dtype=dtype
    )
    arrays = problem.arrays()
    assert problem.ratio(*problem.call(arrays), arrays) <= 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        *((*each, 32) for each in HEAD_DIMS),
        *deep(*((*each, 48) for each in HEAD_DIMS)),
        *deep(*((*each, size) for each in HEAD_DIMS[:3] for size in (16, 64, 80, 128, 256))),
    ],
)
def test_the_bits_are_those_of_dense_attention(dtype, head_dim, block_size):
    """The same kernel in the same order: nothing but addresses differs."""
    problem = replace(CHUNK, dtype=dtype, D=head_dim, block_size=block_size)
    q, k, v, table, lengths = arrays = problem.arrays()
    out, lse = on_emulator(problem, arrays)
    keys, values = (gathered(cache, table, lengths) for cache in (k, v))
    with cupyattn.backend("emulator"):
        dense, dense_lse = cupyattn.attention(
            q, keys, values, causal=True, seqused_k=lengths, return_lse=True
        )
    assert np.array_equal(out, dense)
    assert np.array_equal(lse, dense_lse)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    mostly_deep([("float16", 64), ("float32", 24), ("bfloat16", 72)], [("float16", 64)]),
)
def test_every_option(dtype, head_dim):
    problem = replace(CHUNK, dtype=dtype, D=head_dim, options=EVERY_OPTION)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_any_place_in_the_pool_gives_the_same_bits():
    first = on_kernels(CHUNK, CHUNK.arrays())
    again = on_kernels(CHUNK, CHUNK.arrays(1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_slopes_of_each_sequence():
    problem = PackedProblem(
        lengths=(70, 0, 40), Sq=33, queries=(33, 0, 20), G=1, group=2, D=64, dtype="float16"
    )
    arrays = problem.arrays()
    slopes = np.random.default_rng(3).standard_normal((3, 2)).astype(np.float32)
    out, lse = problem.call(arrays, alibi_slopes=slopes)
    for b, (rows, own) in zip((0, 2), problem.sequences(arrays), strict=True):
        alone, alone_lse = on_kernels(problem, own, alibi_slopes=slopes[b : b + 1])
        assert np.array_equal(out[rows], alone[0])
        assert np.array_equal(lse[:, rows], alone_lse[0])


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_rows_before_the_first_sequence_belong_to_none(backend):
    """So that another call may write them."""
    problem = PackedProblem(**vars(CHUNK), queries=(20, 3))
    q, *others = problem.arrays()
    behind = np.concatenate([np.full_like(q[:5], np.nan), q])
    out = np.full_like(behind, 7)
    lse = np.full((problem.heads, len(behind)), 7, np.float32)
    with cupyattn.backend(backend):
        expected, expected_lse = problem.on_arrays((q, *others))
        problem.on_arrays((behind, *others), cu_seqlens_q=problem.bounds + 5, out=(out, lse))
    assert (out[:5] == 7).all()
    assert (lse[:, :5] == 7).all()
    assert np.array_equal(out[5:], expected)
    assert np.array_equal(lse[:, 5:], expected_lse)


def test_more_than_32_sequences_find_their_rows():
    """Warps look through the lengths 32 at a time."""
    queries = tuple(17 if b % 5 == 3 else 0 for b in range(70))
    problem = PackedProblem(
        lengths=(20,) * 70, Sq=17, queries=queries, G=1, group=1, D=64, dtype="float16"
    )
    arrays = problem.arrays()
    assert problem.ratio(*problem.call(arrays), arrays) <= 1


def test_views_of_a_pool_of_layers_without_copies():
    """Layers, K and V in one array, q a slice of packed qkv, the table a slice of a wider one."""
    q, k, v, table, lengths = arrays = CHUNK.arrays()
    expected = on_emulator(CHUNK, arrays)
    pool = np.full((k.shape[0], 3, 2, *k.shape[1:]), np.nan, k.dtype)
    pool[:, 1, 0], pool[:, 1, 1] = k, v
    qkv = np.full((*q.shape[:2], 3, *q.shape[2:]), np.nan, q.dtype)
    qkv[:, :, 1] = q
    wide = np.full((2 * table.shape[0], 2 * table.shape[1]), -7, np.int32)
    wide[::2, ::2] = table
    views = qkv[:, :, 1], pool[:, 1, 0], pool[:, 1, 1], wide[::2, ::2], lengths.astype(np.int64)
    found = on_emulator(CHUNK, views)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_caches_that_are_not_alike_are_decoded():
    q, k, v, table, lengths = arrays = CHUNK.arrays()
    wide = np.full((*k.shape[:2], 3, *k.shape[2:]), np.nan, k.dtype)
    wide[:, :, 1] = v
    found = on_emulator(CHUNK, (q, k, wide[:, :, 1], table, lengths))
    assert CHUNK.ratio(*found, arrays) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_are_not_aligned_are_read_item_by_item(dtype):
    problem = replace(CHUNK, dtype=dtype, D=24)
    q, k, v, table, lengths = arrays = problem.arrays()
    odd = np.zeros((2, k.size + 1), k.dtype)[:, 1:].reshape(2, *k.shape)
    odd[0], odd[1] = k, v
    assert problem.ratio(*on_kernels(problem, (q, *odd, table, lengths)), arrays) <= 1


def test_a_group_of_keys_that_takes_several_passes():
    problem = replace(CHUNK, lengths=(70,), Sq=17, group=1, D=256)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_nan_in_use_stays_in_its_sequence():
    q, k, v, table, lengths = CHUNK.arrays()
    v[table[1, 0], 0] = np.nan
    out, _ = on_kernels(CHUNK, (q, k, v, table, lengths))
    assert np.isnan(out[1]).all()
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
