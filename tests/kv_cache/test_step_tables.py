"""The tables of a step: what they hold, that they stay in place, what they refuse."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recording_device import device_array

from cupyattn import BlockAllocator, PagedKVCache
from cupyattn.kv_cache import StepTables
from cupyattn.kv_cache import tables as tables_module

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
    with pytest.raises(ValueError, match="the 9 new tokens of sequence 0 stand in blocks that are"):
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
    """What is not new is written by nobody."""
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
    """As an update with one token more, on the same arrays."""
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
