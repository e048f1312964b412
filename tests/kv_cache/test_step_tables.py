"""Steps of a cache: their tables, and attention over packed queries."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recording_device import device_array
from support.search import deep, mostly_deep

from cupyattn import BlockAllocator, PagedKVCache, attention, backend
from cupyattn.kv_cache import StepTables, steps
from cupyattn.kv_cache import tables as tables_module
from cupyattn.reference import dequantise
from cupyattn.runtime.device.emulated import EmulatedDevice

NAMES = ("block_table", "seqlens_k", "cu_seqlens_q", "slot_mapping", "positions")


def small_cache(**options):
    sizes = {"num_blocks": 40, "block_size": 16, "num_kv_heads": 1, "head_dim": 2}
    return PagedKVCache(1, dtype="float32", xp=np, **{**sizes, **options})


@given(
    lengths=st.lists(st.integers(0, 70), max_size=6), seed=st.integers(0, 2**16), room=st.booleans()
)
def test_the_tables(lengths, seed, room):
    """By hand, token by token; more room than is needed is marked as unused."""
    rng = np.random.default_rng(seed)
    cache = small_cache()
    held = [cache.allocator.allocate() for _ in range(5)]
    sequences = [cache.allocator.add([0] * length) for length in lengths]
    for block in held:
        cache.allocator.free(block)
    counts = [int(rng.integers(0, length + 1)) for length in lengths]
    more = {"max_batch": 7, "max_blocks": 6, "max_tokens": 430} if room else {}
    tables = cache.step_tables(sequences, counts, **more)
    if not room:
        assert tables.seqlens_k.shape == (len(lengths),)
        assert tables.block_table.shape[1] == max((-(-n // 16) for n in lengths), default=0)
        assert tables.slot_mapping.shape == (sum(counts),)
    for name in NAMES:
        array = getattr(tables, name)
        assert array.dtype == np.int32
        assert array.ctypes.data % 16 == tables.block_table.ctypes.data % 16
        assert array.flags.c_contiguous
    at = 0
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        ids = sequence.block_ids.tolist()
        assert tables.block_table[row].tolist() == ids + [-1] * (
            tables.block_table.shape[1] - len(ids)
        )
        assert tables.seqlens_k[row] == len(sequence)
        assert tables.cu_seqlens_q[row] == at
        for position in range(len(sequence) - count, len(sequence)):
            assert tables.positions[at] == position
            assert tables.slot_mapping[at] == ids[position // 16] * 16 + position % 16
            at += 1
    assert (tables.cu_seqlens_q[len(lengths) :] == at).all()
    assert (tables.block_table[len(lengths) :] == -1).all()
    assert not tables.seqlens_k[len(lengths) :].any()
    assert (tables.slot_mapping[at:] == -1).all()
    assert not tables.positions[at:].any()
    assert (tables.num_sequences, tables.num_tokens) == (len(lengths), sum(counts))
    assert tables.max_seqlen_q == max(counts, default=0)


def test_each_table_alone():
    cache = small_cache()
    sequences = [cache.allocator.add([0] * 17), cache.allocator.add([0] * 3)]
    assert cache.block_table(sequences).tolist() == [[0, 1], [2, -1]]
    assert cache.seqlens_k(sequences).tolist() == [17, 3]
    assert cache.slot_mapping(sequences).tolist() == [16, 34]
    assert cache.slot_mapping(sequences, [2, 1]).tolist() == [15, 16, 34]
    assert cache.step_tables(sequences).positions.tolist() == [16, 2]


def test_an_update_is_in_place():
    cache = small_cache()
    sequences = [cache.allocator.add([0] * n) for n in (40, 3, 16)]
    tables = cache.step_tables(sequences)
    before = {name: getattr(tables, name) for name in NAMES}
    sequences[1].append([5])
    tables.update(sequences[1:], [1, 0])
    for name, array in before.items():
        assert getattr(tables, name) is array
    assert before["seqlens_k"].tolist() == [4, 16, 0]
    assert before["block_table"].tolist() == [[3, -1, -1], [4, -1, -1], [-1, -1, -1]]
    assert before["slot_mapping"].tolist() == [51, -1, -1]
    assert before["cu_seqlens_q"].tolist() == [0, 1, 1, 1]
    assert "2 sequences and 1 new tokens, with room for 3 of 3 blocks and 3 tokens" in repr(tables)


def test_evicted_blocks_stand_as_unused():
    cache = small_cache()
    sequence = cache.allocator.add([0] * 40)
    sequence.evict_before(33)
    assert cache.block_table([sequence]).tolist() == [[-1, -1, 2]]
    assert cache.slot_mapping([sequence], 8).tolist() == list(range(32, 40))
    with pytest.raises(ValueError, match="the 9 new tokens of sequence 0 are in blocks that are"):
        cache.slot_mapping([sequence], 9)


def freed(cache):
    sequence = cache.allocator.add([1])
    sequence.free()
    return [sequence]


def swapped(cache):
    sequence = cache.allocator.add([1])
    sequence.swap_out()
    return [sequence]


def forked(cache):
    sequence = cache.allocator.add([1] * 3)
    return [sequence, sequence.fork()]


@pytest.mark.parametrize(
    ("sequences", "new_tokens", "kind", "passed"),
    [
        (lambda cache: [BlockAllocator(4, 16).add([1])], 1, ValueError, "of another allocator"),
        (freed, 1, ValueError, "the sequence is freed"),
        (swapped, 1, ValueError, "the sequence is swapped out"),
        (
            lambda cache: [cache.allocator.add([1])] * 2,
            1,
            ValueError,
            "0 and 1 have a new token in",
        ),
        (forked, 1, ValueError, "sequences 0 and 1 have a new token in one slot, 50; "),
        (lambda cache: iter([cache.allocator.add([1])]), 1, TypeError, "of a batch are a list"),
        (lambda cache: [[1, 2]], 1, TypeError, r"got \[1, 2\] among the sequences"),
        (lambda cache: [cache.allocator.add([1])], 2, ValueError, "2 new tokens of sequence 0"),
        (lambda cache: [cache.allocator.add([1])], [1, 1], ValueError, "2 numbers of new tokens"),
        (lambda cache: [cache.allocator.add([1])], [-1], ValueError, "new_tokens = -1"),
        (lambda cache: [cache.allocator.add([1])], [1.0], TypeError, "new_tokens = 1.0"),
        (lambda cache: [cache.allocator.add([1])], {0: 1}, TypeError, r"new_tokens = {0: 1}"),
        (lambda cache: [cache.allocator.add([1])], np.ones(()), TypeError, "new_tokens = "),
        (lambda cache: [cache.allocator.add([1])] * 3, 0, ValueError, "3 sequences; .*room for 2"),
        (lambda cache: [cache.allocator.add([1] * 33)], 1, ValueError, "3 blocks of a sequence"),
        (lambda cache: [cache.allocator.add([1] * 9)], 9, ValueError, "9 new tokens; .*room for 4"),
    ],
)
def test_what_does_not_fit_is_refused(sequences, new_tokens, kind, passed):
    """The tables are as before."""
    cache = small_cache(num_host_blocks=4)
    there = [cache.allocator.add([0] * n) for n in (20, 4)]
    tables = cache.step_tables(there, 2)
    before = [getattr(tables, name).tolist() for name in NAMES]
    with pytest.raises(kind, match=passed):
        tables.update(sequences(cache), new_tokens)
    assert [getattr(tables, name).tolist() for name in NAMES] == before
    assert (tables.num_sequences, tables.num_tokens, tables.max_seqlen_q) == (2, 4, 2)
    tables.update(there, 2)
    assert [getattr(tables, name).tolist() for name in NAMES] == before


def test_a_sequence_may_be_read_twice():
    """Only new tokens are written."""
    cache = small_cache()
    sequence = cache.allocator.add([0] * 20)
    assert cache.block_table([sequence, sequence.fork(), sequence]).tolist() == [[0, 1]] * 3
    assert cache.step_tables([sequence, sequence.fork()], [1, 0]).slot_mapping.tolist() == [19]


@pytest.mark.parametrize("name", ["max_batch", "max_blocks", "max_tokens"])
def test_too_little_room_is_refused(name):
    cache = small_cache()
    with pytest.raises(ValueError, match=f"{name} = 0; allowed is"):
        cache.step_tables([cache.allocator.add([1])], **{name: 0})


def test_tables_advance_within_blocks():
    """The result is that of an update with one token more, on the same arrays."""
    cache = small_cache()
    sequences = [cache.allocator.add([0] * length) for length in (17, 3, 30)]
    tables = cache.step_tables(sequences, max_batch=4, max_blocks=3, max_tokens=5)
    arrays = [getattr(tables, name) for name in NAMES]
    for _ in range(2):
        tables.advance()
        for sequence in sequences:
            sequence.append([1])
        grown = cache.step_tables(sequences, max_batch=4, max_blocks=3, max_tokens=5)
        for name, array in zip(NAMES, arrays, strict=True):
            assert getattr(tables, name) is array
            np.testing.assert_array_equal(array, getattr(grown, name))
        assert tables.spans() == grown.spans()
    tables.update(sequences[:1])
    tables.advance()
    assert tables.seqlens_k.tolist() == [20, 0, 0, 0]
    assert tables.slot_mapping.tolist() == [int(tables.block_table[0, 1]) * 16 + 3, -1, -1, -1, -1]


def test_the_tables_stay_in_place_on_a_gpu(recorder, monkeypatch):
    """One upload a step, into the same memory, and launches that differ in nothing: so a graph that
    captured a step runs the next one.
    """
    uploads = []
    monkeypatch.setattr(
        tables_module,
        "upload",
        lambda xp, target, staged: uploads.append((target.data.ptr, target.nbytes, staged.copy())),
    )
    xp = SimpleNamespace(__name__="cupy", zeros=device_array)
    cache = PagedKVCache(2, 40, 16, 2, 64, dtype="float16", xp=xp)
    sequences = [cache.allocator.add([0] * n) for n in (40, 3, 16)]
    tables = cache.step_tables(sequences, max_batch=4, max_blocks=8, max_tokens=4)
    assert len(uploads) == 2, "empty tables, then those of the sequences"
    q, out = (device_array((4, 1, 8, 64)) for _ in range(2))
    k, v = (device_array((4, 1, 2, 64)) for _ in range(2))
    rotary = tuple(device_array((100, 32), np.float32) for _ in range(2))
    workspace = device_array((2**22,), np.uint8)

    def places(argument):
        return getattr(getattr(argument, "data", None), "ptr", argument)

    def step():
        for layer in range(2):
            cache.append(layer, k, v, tables, q=q, rotary=rotary)
            cache.attend(layer, q, tables, out=out, workspace=workspace)
        launches = [
            (each.specialisation, each.grid, [places(a) for a in each.arguments])
            for each in recorder.started
        ]
        recorder.started.clear()
        return repr(launches)

    first = step()
    assert first.count("entry='attention_decode") >= 2
    assert first.count("entry='append_kv") == 2
    for sequence in sequences:
        sequence.append([1] * 14)
    sequences.pop().free()
    tables.update(sequences)
    assert step() == first
    assert not recorder.allocated
    assert len(uploads) == 3
    assert len({place[:2] for place in uploads}) == 1
    assert not np.array_equal(uploads[1][2], uploads[2][2])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_tables_are_neither_copied_nor_pickled(how):
    cache = small_cache()
    with pytest.raises(TypeError, match=r"StepTables was to be copied .*; make others by step_"):
        how(cache.step_tables([cache.allocator.add([1])]))


def test_tables_are_of_an_allocator():
    with pytest.raises(TypeError, match=r"as an allocator; .*; call the step_tables of the cache"):
        StepTables(small_cache(), np, max_batch=1, max_blocks=1, max_tokens=1)


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
@pytest.mark.parametrize("dtype", mostly_deep(DTYPES, ["float32"]))
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
@pytest.mark.parametrize("counts", [(1, 20), *deep(((0, 20),), ((20, 4),), ((1, 1),))])
def test_rows_behind_the_tokens_of_a_step_are_zeros(counts, monkeypatch):
    """Results do not depend on old contents of their memory, nor on the number of calls."""
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
        with pytest.raises(TypeError, match="out has type"):
            cache.attend(0, q, tables, return_lse=True, out=np.zeros_like(q))
        with pytest.raises(TypeError, match="out has type"):
            cache.attend(0, q, tables, out="x")
        short = np.full((3, H, D), 7, np.float32)
        with pytest.raises(ValueError, match=r"out (has shape|is float32) \(3, 4, 8\)"):
            cache.attend(0, q, tables, out=short)
        assert (short == 7).all()


def test_one_sequence_is_no_list():
    cache, (sequence,), _ = filled("float32", (5,))
    with pytest.raises(TypeError, match=r"pass \[sequence\]"):
        cache.step_tables(sequence)
