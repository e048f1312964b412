"""What `PagedKVCache.attend` makes of packed queries, over floats and integers alike."""

from __future__ import annotations

import numpy as np
import pytest
from support.search import mostly_deep

from cupyattn import PagedKVCache, attention, backend
from cupyattn.kernels.device.emulated import EmulatedDevice
from cupyattn.kv_cache import steps
from cupyattn.reference import dequantise

G, H, D = 2, 4, 8
DTYPES = ("float32", "int8", "int4")


def filled(dtype, lengths, seed=0, block_size=16):
    """A cache of sequences of random keys and values, and what was stored of them."""
    cache = PagedKVCache(1, 32, block_size, G, D, dtype=dtype, xp=np)
    sequences = [cache.allocator.add(list(range(length))) for length in lengths]
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, sum(lengths), G, D), dtype=np.float32)
    cache.append(0, k, v, cache.step_tables(sequences, lengths))
    return cache, sequences, rng


def stored(cache, sequence):
    """Keys and values of a sequence, as they are read back."""
    slots = [(block, slot) for block in sequence.block_ids for slot in range(16)][: len(sequence)]
    found = []
    for pool, scales in ((cache.k, cache.k_scales), (cache.v, cache.v_scales)):
        rows = np.stack([pool[0][place] for place in slots])
        if scales is not None:
            rows = dequantise(rows, np.stack([scales[0][place] for place in slots]))
        found.append(rows[None].astype(np.float32))
    return found


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (0, 2), (1, 3), (1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_queries_see_what_each_sequence_stores(dtype, counts):
    cache, sequences, rng = filled(dtype, (40, 21))
    tables = cache.step_tables(sequences, counts)
    q = rng.standard_normal((sum(counts), H, D), dtype=np.float32)
    slopes = np.array([0.5, 0.25, 0.125, 0.1], np.float32)
    options = {"causal": True, "window_size": (17, None), "softcap": 5.0, "alibi_slopes": slopes}
    given = np.full_like(q, 7), np.full((H, len(q)), 7, np.float32)
    for out in (None, given):
        found, lse = cache.attend(0, q, tables, return_lse=True, out=out, **options)
        alone = cache.attend(0, q, tables, out=None if out is None else out[0], **options)
        np.testing.assert_array_equal(alone, found)
        for (begin, end, _), sequence in zip(tables.spans(), sequences, strict=True):
            k, v = stored(cache, sequence)
            expected = attention(q[None, begin:end], k, v, return_lse=True, **options)
            np.testing.assert_allclose(found[begin:end], expected[0][0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lse[:, begin:end], expected[1][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found, given[0])
    np.testing.assert_array_equal(lse, given[1])


@pytest.mark.parametrize(
    ("counts", "calls"),
    [
        ((1, 1, 1), [(3, 1, H, D)]),
        ((1, 1, 7), [(2, 1, H, D), (9, H, D)]),
        ((1, 7, 1), [(1, 1, H, D), (9, H, D)]),
        ((7, 1, 1), [(9, H, D)]),
        ((0, 1, 1), [(2, H, D)]),
    ],
)
def test_sequences_that_generate_are_decoded_if_they_come_first(counts, calls, monkeypatch):
    cache, sequences, rng = filled("float32", (40, 21, 9))
    found, attend = [], steps.paged_attention

    def recorded(q, *arrays, **options):
        found.append(q.shape)
        return attend(q, *arrays, **options)

    monkeypatch.setattr(steps, "paged_attention", recorded)
    q = rng.standard_normal((sum(counts), H, D), dtype=np.float32)
    cache.attend(0, q, cache.step_tables(sequences, counts), causal=True)
    assert found == calls


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", mostly_deep(DTYPES, ["float32", "int4"]))
def test_both_calls_of_a_step_are_one_on_kernels(dtype):
    """Rows of the one call are not touched by the other; slopes of each sequence go with it."""
    lengths, counts = (40, 33, 21, 50), (1, 1, 20, 4)
    cache, sequences, rng = filled(dtype, lengths)
    tables = cache.step_tables(sequences, counts, max_batch=6, max_tokens=30)
    q = rng.standard_normal((sum(counts), H, D), dtype=np.float32)
    slopes = rng.random((6, H), dtype=np.float32)
    expected = cache.attend(0, q, tables, causal=True, return_lse=True, alibi_slopes=slopes)
    results = np.full_like(q, 7), np.full((H, len(q)), 7, np.float32)
    with backend("emulator"):
        cache.attend(0, q, tables, causal=True, return_lse=True, alibi_slopes=slopes, out=results)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5)


@pytest.mark.nvrtc
@pytest.mark.parametrize("counts", [(20, 4), (0, 20), (1, 20), (1, 1)])
def test_rows_behind_the_tokens_of_a_step_are_zeros(counts, monkeypatch):
    """Whatever stood in the memory that the results got, and in how many calls they are written."""
    cache, sequences, rng = filled("float32", (33, 21))
    tables = cache.step_tables(sequences, counts, max_batch=30, max_tokens=30)
    q = rng.standard_normal((27, H, D), dtype=np.float32)
    expected = cache.attend(0, q, tables, causal=True, return_lse=True)
    monkeypatch.setattr(
        EmulatedDevice, "empty", lambda self, shape, dtype: np.full(shape, 7, dtype)
    )
    with backend("emulator"):
        out, lse = cache.attend(0, q, tables, causal=True, return_lse=True)
        alone = cache.attend(0, q, tables, causal=True)
    np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(alone, out)
    assert not out[sum(counts) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_evicted_blocks_are_missed_where_they_are_seen(dtype):
    cache, (sequence,), rng = filled(dtype, (40,))
    sequence.evict_before(16)
    tables, q = cache.step_tables([sequence], 2), rng.standard_normal((2, H, D), dtype=np.float32)
    cache.attend(0, q, tables, causal=True, window_size=(22, None))
    for window in (None, (23, None)):
        with pytest.raises(ValueError, match=r"block_table\[0, 0\]"):
            cache.attend(0, q, tables, causal=True, window_size=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_fit_the_tables_is_refused(dtype):
    cache, sequences, _ = filled(dtype, (20, 5))
    other = filled(dtype, (20, 5))[0]
    tables, q = cache.step_tables(sequences, 2), np.zeros((4, H, D), np.float32)
    k = np.zeros((4, G, D), np.float32)
    with pytest.raises(ValueError, match=r"StepTables .* of another cache"):
        other.attend(0, q, tables)
    with pytest.raises(ValueError, match=r"StepTables .* of another cache"):
        other.append(0, k, k, tables)
    with pytest.raises(ValueError, match=r"q \(3, 4, 8\) has 3 tokens.*tables have 4"):
        cache.attend(0, q[:3], tables)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        cache.attend(0, q, tables, dropout_p=0.5, seed=1)


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (0, 2), (1, 1), (4, 4), (0, 0)])
def test_arrays_with_four_axes_have_the_new_tokens_of_each_sequence(counts):
    cache, sequences, _ = filled("float32", (20, 5))
    before = cache.k.copy()
    tables = cache.step_tables(sequences, counts, max_tokens=8, max_batch=3)
    message = rf"tokens of each sequence; .* have \[{counts[0]}, {counts[1]}\] new ones"
    for batch, each in ((2, 2), (2, 3)):
        q, k = np.zeros((batch, each, H, D), np.float32), np.ones((batch, each, G, D), np.float32)
        with pytest.raises(ValueError, match=rf"q \(.*\) has {each} {message}"):
            cache.attend(0, q, tables)
        with pytest.raises(ValueError, match=rf"k \(.*\) has {each} {message}"):
            cache.append(0, k, k, tables)
    assert (cache.k == before).all()


def test_arrays_with_four_axes_that_fit_the_step():
    """With rows that no sequence has, too; tables of no sequence yet have any number."""
    cache, sequences, rng = filled("float32", (20, 5))
    for batch in (2, 3):
        tables = cache.step_tables(sequences, 2, max_tokens=6, max_batch=3)
        q, k = (rng.standard_normal((batch, 2, heads, D), dtype=np.float32) for heads in (H, G))
        cache.append(0, k, k, tables)
        packed = cache.attend(0, q.reshape(-1, H, D), tables, causal=True)
        np.testing.assert_array_equal(cache.attend(0, q, tables, causal=True)[:2].ravel(),
                                      packed[:4].ravel())  # fmt: skip
        tables.update([])
        assert not cache.attend(0, q, tables).any()


def test_what_the_cache_and_its_tables_have_is_no_option():
    cache, sequences, _ = filled("int8", (20, 5))
    tables, q = cache.step_tables(sequences), np.zeros((2, 1, H, D), np.float32)
    for name in ("k_scales", "v_scales", "cu_seqlens_q", "max_seqlen_q"):
        with pytest.raises(TypeError, match=f"attend got {name} = None; .*; leave {name} out"):
            cache.attend(0, q, tables, **{name: None})


@pytest.mark.parametrize("shape", [(), (8,), (2, 8), (1, 1, 2, 2, 8)])
def test_arrays_of_other_axes_are_refused(shape):
    cache, sequences, _ = filled("float32", (20, 5))
    tables, array = cache.step_tables(sequences), np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"k is \(total, G, D\) or \(B, S, G, D\), 3 or 4 axes"):
        cache.append(0, array, array, tables)
    with pytest.raises(ValueError, match=r"q is \(total, H, D\) or \(B, Sq, H, D\), 3 or 4 axes"):
        cache.attend(0, array, tables)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_do_not_fit_are_refused_before_anything_is_written(dtype):
    cache, sequences, _ = filled(dtype, (20, 5))
    q = np.zeros((4, H, D), np.float32)
    for counts in ([3, 1], [1, 3]):
        tables = cache.step_tables(sequences, counts)
        with pytest.raises(TypeError, match="out is a"):
            cache.attend(0, q, tables, return_lse=True, out=np.zeros_like(q))
        with pytest.raises(TypeError, match="out is"):
            cache.attend(0, q, tables, out="x")
        short = np.full((3, H, D), 7, np.float32)
        with pytest.raises(ValueError, match=r"out (has shape|is float32) \(3, 4, 8\)"):
            cache.attend(0, q, tables, out=short)
        assert (short == 7).all()


def test_one_sequence_is_no_list():
    cache, (sequence,), _ = filled("float32", (5,))
    with pytest.raises(TypeError, match=r"pass \[sequence\]"):
        cache.step_tables(sequence)
