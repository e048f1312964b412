"""The paged cache: sequences read what was written, whatever is shared, copied and swapped."""

from __future__ import annotations

import ctypes
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_contents import (
    BASE,
    CACHE_DTYPES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    KnownCache,
    keys_and_values,
)
from support.devices import CUPY, KERNELS, NUMPY
from support.dtypes import dtype_of
from support.search import examples, mostly_deep

import cupyattn
from cupyattn import Copy, OutOfBlocksError, PagedKVCache
from cupyattn.kv_cache import steps, storage

DTYPES = pytest.mark.parametrize("dtype", CACHE_DTYPES)


def random_step(known: KnownCache, rng: random.Random, living: list, step: int) -> None:
    """Add, append, fork, truncate, swap, evict or free; then write what is new."""
    cache, allocator = known.cache, known.allocator
    here = [each for each in living if not each.is_swapped]
    what = rng.choice(["add", "append", "append", "fork", "truncate", "swap", "evict", "free"])
    if what == "add" or not here:
        tokens = [rng.randrange(2) for _ in range(rng.choice((1, 16, 33, 50)))]
        sequence = allocator.add(tokens)
        living.append(sequence)
        known.tokens[id(sequence)] = tokens
        known.write([sequence], [len(tokens) - sequence.num_cached_tokens])
        return
    sequence = rng.choice(here)
    if what == "append":
        new = [[step] * rng.choice((1, 1, 17)) for _ in here]
        copies: list[Copy] = []
        grown = []
        try:
            for each, tokens in zip(here, new, strict=True):
                copies += each.append(tokens)
                known.tokens[id(each)] = known.tokens[id(each)] + tokens
                grown.append(len(tokens))
        finally:
            cache.copy(copies)
            known.write(here[: len(grown)], grown)
    elif what == "fork":
        other = sequence.fork()
        living.append(other)
        known.tokens[id(other)] = list(known.tokens[id(sequence)])
    elif what == "truncate" and -1 not in sequence.block_ids:
        kept = rng.randint(0, len(sequence))
        sequence.truncate(kept)
        known.tokens[id(sequence)] = known.tokens[id(sequence)][:kept]
    elif what == "swap":
        cache.copy_to_host(sequence.swap_out())
        if rng.random() < 0.7:  # another may use the blocks meanwhile
            other = allocator.add([step, step])
            known.tokens[id(other)] = [step, step]
            known.write([other], [2])
            other.free()
            cache.copy_from_host(sequence.swap_in())
    elif what == "evict":
        sequence.evict_before(rng.randint(0, max(0, len(sequence) - 1)))
    elif what == "free":
        sequence.free()
        living.remove(sequence)


def trial(dtype, seed, steps=25, **where):
    """Random operations on one cache; every sequence is read after each."""
    rng = random.Random(seed)
    known = KnownCache(
        dtype, prefix_caching=rng.random() < 0.7, num_host_blocks=rng.choice((2, 30)), **where
    )
    living: list[cupyattn.Sequence] = []
    for step in range(2, 2 + steps):
        try:
            random_step(known, rng, living, step)
        except OutOfBlocksError:
            for sequence in living[: len(living) // 2 + 1]:
                sequence.free()
            del living[: len(living) // 2 + 1]
        known.allocator.check()
        known.require_contents([each for each in living if not each.is_swapped])
    for sequence in living:
        if sequence.is_swapped:
            try:
                known.cache.copy_from_host(sequence.swap_in())
            except OutOfBlocksError:
                continue
            known.require_contents([sequence])


@DTYPES
@given(seed=st.integers(0, 2**32))
@examples(6)
def test_sequences_read_what_they_wrote(dtype, seed):
    trial(dtype, seed)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", mostly_deep(CACHE_DTYPES, ["bfloat16", "int4"]))
def test_the_kernels_write_it_too(dtype):
    """On a GPU if there is one, otherwise on the emulator."""
    with KERNELS.running():
        for seed in range(3):
            trial(dtype, seed, steps=12, side=KERNELS, xp=KERNELS.xp)


def test_a_copy_too_few_is_found(monkeypatch):
    """The search above can fail."""
    copy = PagedKVCache.copy

    def of_keys_alone(self, copies):
        v = self.v.copy()
        copy(self, copies)
        self.v[...] = v

    def trials():
        for seed in range(30):
            trial("float32", seed)

    monkeypatch.setattr(PagedKVCache, "copy", of_keys_alone)
    with pytest.raises(AssertionError):
        trials()


class HostArray(np.ndarray):
    """What stands in for a CuPy array."""

    device = nullcontext()


def memcpy(dst, dpitch, src, spitch, width, height, kind, stream):
    """CUDA's strided copy, of memory of the host."""
    assert (kind, stream) == ("default", 5)
    assert width <= min(dpitch, spitch) <= max(dpitch, spitch) <= max(width, storage.MOST_PITCH)
    COPIED.append(height)
    for row in range(height):
        ctypes.memmove(dst + row * dpitch, src + row * spitch, width)


COPIED: list[int] = []
PRETENDED = SimpleNamespace(
    __name__="cupy",
    zeros=lambda shape, dtype: np.zeros(shape, dtype).view(HostArray),
    cuda=SimpleNamespace(
        PinnedMemory=bytearray,
        PinnedMemoryPointer=lambda memory, offset: memory,
        get_current_stream=lambda: SimpleNamespace(ptr=5),
        runtime=SimpleNamespace(memcpyDefault="default", memcpy2DAsync=memcpy),
    ),
)
"""CuPy, as far as swapping goes."""


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize(
    ("side", "xp"),
    [(NUMPY, np), (NUMPY, PRETENDED), pytest.param(CUPY, None, marks=pytest.mark.gpu)],
    ids=["numpy", "pretended", "cupy"],
)
@pytest.mark.parametrize("pitch", [storage.MOST_PITCH, 0], ids=["all layers at once", "each layer"])
def test_blocks_come_back_from_host_memory_bit_for_bit(side, xp, dtype, pitch, monkeypatch):
    """Whatever the bits mean, NaNs with a payload among them; other blocks stay as they are."""
    monkeypatch.setattr(storage, "MOST_PITCH", pitch)
    rng = np.random.default_rng(0)
    COPIED.clear()
    cache = PagedKVCache(3, 5, 16, 2, 6, dtype=dtype, xp=xp or side.xp, num_host_blocks=4)
    arrays = {"k": cache.k, "v": cache.v, "k_scales": cache.k_scales, "v_scales": cache.v_scales}
    arrays = {name: each for name, each in arrays.items() if each is not None}
    before = {}
    for name, array in arrays.items():
        items = rng.integers(0, 256, array.nbytes, dtype=np.uint8).view(array.dtype)
        before[name] = items.reshape(array.shape)
        array[...] = side.put(before[name])
    there = [Copy(4, 0), Copy(0, 3), Copy(2, 1)]
    back = [Copy(3, 4), Copy(0, 1), Copy(1, 2)]
    cache.copy_to_host(there)
    for array in arrays.values():
        array[:, [4, 0, 2]] = 1
    cache.copy_from_host(back)
    for name, array in arrays.items():
        found, wanted = side.get(array), before[name]
        for block, source in ((4, 0), (1, 4), (2, 2), (3, 3)):
            assert found[:, block].tobytes() == wanted[:, source].tobytes(), (name, block)
        assert (found[:, 0] == 1).all()
    if xp is PRETENDED:
        assert ([1] * 3 if pitch == 0 else [3]) * len(arrays) * 6 == COPIED


def test_later_copies_may_write_what_earlier_ones_read():
    known = KnownCache("int4")
    cache = known.cache
    for block in range(4):
        for array in (cache.k, cache.v, cache.k_scales, cache.v_scales):
            array[:, block] = block + 1
    cache.copy((Copy(0, 1), Copy(1, 2), Copy(3, 0)))
    cache.copy(())
    for array in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        assert [np.unique(array[:, block]).tolist() for block in range(4)] == [[4], [1], [1], [4]]


@DTYPES
def test_the_arrays(dtype):
    cache = PagedKVCache(LAYERS, 5, 32, HEADS, 8, dtype=dtype, xp=np, num_host_blocks=2)
    last = 4 if dtype == "int4" else 8
    assert cache.k.shape == cache.v.shape == (LAYERS, 5, 32, HEADS, last)
    assert cache.k.dtype == cache.v.dtype == dtype_of("uint8" if dtype == "int4" else dtype)
    assert cache.dtype == dtype
    quantised = dtype.startswith("int")
    expected = 2 * cache.k.nbytes
    for scales in (cache.k_scales, cache.v_scales):
        assert (scales is not None) is quantised
        if quantised:
            assert (scales.shape, scales.dtype) == ((LAYERS, 5, 32, HEADS), np.float32)
            expected += scales.nbytes
    assert cache.nbytes == expected
    assert set(cache.scales(1)) == ({"k_scales", "v_scales"} if quantised else set())
    assert f"{dtype}, {expected:,} bytes" in repr(cache)
    assert (cache.allocator.num_host_blocks, cache.allocator.num_blocks) == (2, 5)


@pytest.mark.parametrize("layer", [-1, LAYERS, 1.0, None])
def test_layers_that_are_not_there_are_refused(layer):
    known = KnownCache("int8")
    tables = known.cache.step_tables([known.allocator.add([1])])
    k, q = np.zeros((1, HEADS, HEAD_DIM), np.float32), np.zeros((1, HEADS, HEAD_DIM), np.float32)
    kind = ValueError if isinstance(layer, int) else TypeError
    for call in (
        lambda: known.cache.append(layer, k, k, tables),
        lambda: known.cache.attend(layer, q, tables),
        lambda: known.cache.scales(layer),
    ):
        with pytest.raises(kind, match=rf"layer = {layer}.* 0 to {LAYERS - 1}"):
            call()


def test_numpy_dtypes_name_formats_too():
    for dtype in (np.float16, np.dtype(np.int8), dtype_of("bfloat16")):
        cache = PagedKVCache(1, 1, 16, 1, 2, dtype=dtype, xp=np)
        assert cache.k.dtype == dtype


def test_statistics():
    known = KnownCache("float32", num_blocks=10, prefix_caching=True)
    cache = known.cache
    assert cache.statistics() == (0, 10, 0, 0.0, 0.0)
    first = cache.allocator.add(range(40))
    assert cache.statistics() == (3, 7, 0, 8 / 48, 0.0)
    second = cache.allocator.add([*range(32), 7])
    assert cache.statistics() == (4, 6, 0, (8 + 15) / 64, 32 / 73)
    first.free()
    second.free()
    found = cache.statistics()
    assert found == (0, 8, 2, 0.0, 32 / 73)
    assert found.prefix_hit_rate == 32 / 73
    assert found.used + found.free + found.cached == 10


def test_a_full_cache_loses_nothing():
    known = KnownCache("float32", num_blocks=3)
    sequence = known.allocator.add(range(40))
    known.tokens[id(sequence)] = list(range(40))
    known.write([sequence], [40])
    for call in (lambda: known.allocator.add([1]), lambda: sequence.append(range(9))):
        with pytest.raises(OutOfBlocksError):
            call()
    known.allocator.check()
    known.require_contents([sequence])
    assert len(sequence) == 40


@pytest.mark.parametrize("room", [3, 5])
def test_packed_queries_of_one_token_each_are_decoded(room, monkeypatch):
    """As they are: the results, those given too, have the shape of q."""
    cache = PagedKVCache(**BASE)
    rng = np.random.default_rng(0)
    cache.k[...], cache.v[...] = rng.standard_normal((2, *cache.k.shape))
    sequences = [cache.allocator.add([0] * length) for length in (3, 20, 9)]
    tables = cache.step_tables(sequences, max_batch=room, max_tokens=room)
    q = rng.standard_normal((room, 4, 8)).astype(np.float16)
    calls = []
    attention = cupyattn.paged_attention

    def watching(q, *arrays, **options):
        calls.append(len(q.shape))
        return attention(q, *arrays, **options)

    monkeypatch.setattr(steps, "paged_attention", watching)
    out = cache.attend(1, q, tables, causal=True)
    given = np.empty_like(q)
    assert cache.attend(1, q, tables, causal=True, out=given) is given
    packed, lse = cache.attend(1, q, tables, causal=True, return_lse=True)
    assert calls == [4, 4, 4]
    assert out.shape == q.shape
    assert lse.shape == (4, room)
    np.testing.assert_array_equal(out, given)
    np.testing.assert_array_equal(out[:3], packed[:3])
    tables.update(sequences[:2], [1, 2])
    assert cache.attend(1, q[:3], tables, causal=True).shape == (3, 4, 8)
    assert calls.pop() == 3


def test_contents_differ():
    """Keys and values, layers, tokens and prefixes all give other numbers: what is read shows."""
    found = {
        keys_and_values(tokens, layer, "float32")[part, -1].tobytes()
        for tokens in ([1], [2], [1, 1], [2, 1])
        for layer in range(LAYERS)
        for part in range(2)
    }
    assert len(found) == 16
