"""The paged cache: sequences read what was written, whatever is shared, copied and swapped."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.block_model import content
from support.devices import CUPY, EMULATED, KERNELS, NUMPY, dtype_of
from support.search import examples, mostly_deep

import cupyattn
from cupyattn import BlockAllocator, Copy, OutOfBlocksError, PagedKVCache, quantize_keys, reference
from cupyattn.kv_cache import storage
from cupyattn.ops.attention.reference.cache_formats import STORED_BITS

LAYERS, HEADS, HEAD_DIM = 2, 3, 6
ALIKE, MIXED = ((HEADS, HEAD_DIM),) * LAYERS, ((HEADS, HEAD_DIM), (2, 8))  # (G, D) of each layer
CACHE_DTYPES = ("float16", "bfloat16", "float32", "int8", "int4")
BASE: dict[str, Any] = {
    "num_layers": 2, "num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_dim": 8,
    "dtype": "float16", "xp": np,
}  # fmt: skip
"""The arguments of a small cache."""


def token_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of keys and values that such a cache takes."""
    return dtype_of("float32" if dtype.startswith("int") else dtype)


def keys_and_values(tokens: Sequence[int], layer: int, dtype: str, sizes: Any) -> np.ndarray:
    """Return (2, tokens, *sizes); a token's depend on all tokens before it."""
    before, seeds = 0, []
    for token in tokens:
        before = content(before, token)
        seeds.append(before % 100_003)
    at = np.array(seeds, np.float64)[:, None, None]
    heads, items = np.arange(sizes[0])[:, None], np.arange(sizes[1])
    both = [np.sin(at * (1 + layer + 2 * part) + 7 * heads + items) for part in range(2)]
    return np.stack(both).astype(token_dtype(dtype))


class KnownCache:
    """A cache, and the tokens of its sequences: `write` appends, `require_contents` reads."""

    def __init__(self, dtype: str, *, side: Any = NUMPY, xp: Any = np, **options: Any) -> None:
        self.of_layers = options.pop("of_layers", ALIKE)
        sizes = {"num_blocks": 24, "block_size": 16, **options}
        heads, dims = zip(*self.of_layers, strict=True)
        self.cache = PagedKVCache(
            LAYERS, num_kv_heads=heads, head_dim=dims, dtype=dtype, xp=xp, **sizes
        )
        self.allocator = self.cache.allocator
        self.side = side
        self.tokens: dict[int, list[int]] = {}

    def write(self, sequences: Sequence[cupyattn.Sequence], counts: Iterable[int]) -> None:
        """Compute the last tokens of sequences, whose tokens `self.tokens` has by id."""
        counts = list(counts)
        tables = self.cache.step_tables(sequences, counts)
        for layer in range(LAYERS):
            new = [
                self.known(each, layer)[:, len(each) - count :]
                for each, count in zip(sequences, counts, strict=True)
            ]
            if new:
                k, v = (self.side.put(part) for part in np.concatenate(new, axis=1))
                self.cache.append(layer, k, v, tables)

    def known(self, sequence: cupyattn.Sequence, layer: int) -> np.ndarray:
        """Return all keys and values of a sequence in a layer."""
        given = self.tokens[id(sequence)], layer, self.cache.dtype, self.of_layers[layer]
        return keys_and_values(*given)

    def require_contents(self, sequences: Sequence[cupyattn.Sequence]) -> None:
        """Every block of every sequence holds its tokens, bit for bit."""
        arrays = {"k": self.cache.k, "v": self.cache.v}
        arrays |= {"k_scales": self.cache.k_scales, "v_scales": self.cache.v_scales}
        found = {name: [*map(self.side.get, of)] for name, of in arrays.items() if of is not None}
        size = self.allocator.block_size
        for sequence in sequences:
            for layer in range(LAYERS):
                expected = self.known(sequence, layer)
                for part, stored in zip("kv", expected, strict=True):
                    wanted = {part: stored}
                    if self.cache.dtype.startswith("int"):
                        bits = STORED_BITS[self.cache.k[layer].dtype.name]
                        quantised = reference.quantise(stored, bits)
                        wanted = dict(zip((part, f"{part}_scales"), quantised, strict=True))
                    for name, items in wanted.items():
                        for place, block in enumerate(sequence.block_ids):
                            of_block = items[place * size : (place + 1) * size]
                            there = found[name][layer][block, : len(of_block)]
                            assert block < 0 or there.tobytes() == of_block.tobytes()


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
    options = {"num_host_blocks": rng.choice((2, 30)), "of_layers": rng.choice((ALIKE, MIXED))}
    known = KnownCache(dtype, prefix_caching=rng.random() < 0.7, **options, **where)
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


class HostArray(np.ndarray):
    """A fake CuPy array."""

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
        PinnedMemory=bytearray, PinnedMemoryPointer=lambda memory, offset: memory,
        get_current_stream=lambda: SimpleNamespace(ptr=5),
        runtime=SimpleNamespace(memcpyDefault="default", memcpy2DAsync=memcpy),
    ),
)  # fmt: skip
"""CuPy, as far as swapping goes."""


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize(
    ("side", "xp"),
    [(NUMPY, np), (NUMPY, PRETENDED), pytest.param(CUPY, None, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("pitch", [storage.MOST_PITCH, 0], ids=["all layers at once", "each layer"])
def test_blocks_come_back_from_host_memory_bit_for_bit(side, xp, dtype, pitch, monkeypatch):
    """All bits are kept, also NaNs with a payload; other blocks do not change."""
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


@pytest.mark.nvrtc
@pytest.mark.parametrize("side", [NUMPY, EMULATED], ids=["numpy", "emulator"])
def test_int8_keys_and_float_values(side):
    """Codes of what is appended, with each layer's centre; copies and host memory have them too."""
    options = {"dtype": "float16", "int8_keys": True, "num_host_blocks": 3, "xp": np}
    cache = PagedKVCache(LAYERS, 6, 16, HEADS, 8, **options)
    assert "float16 with int8 keys" in repr(cache)
    assert (cache.k.dtype, cache.v.dtype, cache.v_scales) == (np.int8, np.float16, None)
    assert cache.nbytes == LAYERS * 6 * 16 * HEADS * (8 + 16 + 4)
    k, v = np.random.default_rng(0).standard_normal((2, 20, HEADS, 8)).astype(np.float16) + 3
    sequence = cache.allocator.add(range(20))
    assert cache.k_centre is not None
    for layer in range(LAYERS):
        cache.k_centre[layer] = (layer + 1) * quantize_keys(k).centre
    tables = cache.step_tables([sequence], 20)
    fork = sequence.fork()
    copies = fork.append([1])
    with side.running():
        for layer in range(LAYERS):
            cache.append(layer, k, v, tables)
        cache.copy(copies)
    for back in range(2):
        for each in (sequence, fork):
            for layer in range(LAYERS):
                keys, blocks = cache.keys(layer), list(each.block_ids)
                want = quantize_keys(k, centre=keys.centre)
                codes = keys.codes[blocks].reshape(-1, HEADS, 8)[:20]
                assert np.array_equal(codes, want.codes)
                assert np.array_equal(keys.scales[blocks].reshape(-1, HEADS)[:20], want.scales)
                assert np.array_equal(cache.v[layer][blocks].reshape(-1, HEADS, 8)[:20], v)
        if not back:
            fork.free()
            out = sequence.swap_out()
            cache.copy_to_host(out)
            cache.k[:] = cache.v[:] = 0
            cache.copy_from_host(sequence.swap_in())
            fork = sequence


def test_layers_of_other_sizes_have_arrays_of_their_own():
    cache = PagedKVCache(**{**BASE, "num_kv_heads": (2, 1), "int8_keys": True})
    assert [k.shape for k in cache.k] == [(4, 16, 2, 8), (4, 16, 1, 8)]
    assert [centre.shape for centre in cache.k_centre] == [(2, 8), (1, 8)]
    assert (cache.v_scales, cache.nbytes) == (None, 4 * 16 * 3 * (8 + 16 + 4))
    assert "2 or 1 heads" in repr(cache) and "2 or 1 heads" in cache._repr_html_()


def test_other_caches_have_no_int8_keys():
    with pytest.raises(ValueError, match="int8_keys=True"):
        PagedKVCache(**BASE).keys(0)


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


@pytest.mark.parametrize(
    ("changes", "kind", "passed"),
    [
        ({"dtype": "float64"}, TypeError, "dtype = 'float64'; allowed are 'float16'"),
        ({"dtype": np.uint8}, TypeError, "dtype = .*'int4' is two numbers in a byte"),
        ({"dtype": None}, TypeError, "dtype = None"),
        ({"dtype": np}, TypeError, "dtype = <module 'numpy'"),
        ({"xp": "numpy"}, TypeError, "xp = 'numpy'; it is the module numpy"),
        ({"xp": random}, TypeError, "xp = <module 'random'"),
        ({"num_layers": 0}, ValueError, "num_layers = 0"),
        ({"num_layers": True}, TypeError, "num_layers = True"),
        ({"num_blocks": 0}, ValueError, "num_blocks = 0"),
        ({"num_blocks": 2**27}, ValueError,
         "num_blocks = 134217728 of 16 tokens; allowed is 1 to 134217727 of that size"),
        ({"num_blocks": 10, "block_size": 2**40}, ValueError,
         "block_size = 1099511627776; allowed is 16 to 2147483632"),
        ({"num_blocks": 10, "block_size": 2**30}, ValueError,
         "num_blocks = 10 of 1073741824 tokens; allowed is 1 to 1 of that size: a cache has at "
         "most 2147483647 slots; pass fewer blocks, or smaller ones"),
        ({"block_size": 8}, ValueError, "block_size = 8"),
        ({"block_size": 24}, ValueError, "block_size = 24 .*multiple of 16; pass 32"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads = 0"),
        ({"head_dim": 513}, ValueError, "head_dim = 513"),
        ({"head_dim": (8, 513)}, ValueError, r"head_dim\[1\] = 513; allowed is 1 to 512"),
        ({"num_kv_heads": [2] * 3}, ValueError, "got 3 values of num_kv_heads; the cache has 2"),
        ({"head_dim": 7, "dtype": "int4"}, ValueError, "head_dim = 7 for dtype 'int4'; .*pass 8"),
        ({"watermark": 4}, ValueError, "watermark = 4"),
        ({"num_host_blocks": -1}, ValueError, "num_host_blocks = -1"),
        ({"prefix_caching": 1}, TypeError, "prefix_caching = 1"),
        ({"int8_keys": 1}, TypeError, "int8_keys = 1"),
        ({"int8_keys": True, "dtype": "int8"}, ValueError, "int8_keys=True with dtype = 'int8'"),
        ({"int8_keys": True, "dtype": "float32"}, ValueError, "takes values in float16"),
        ({"int8_keys": True, "head_dim": 258}, ValueError, "head_dim = 258; allowed is 1 to 256"),
        ({"int8_keys": True, "head_dim": 15}, ValueError, "head_dim = 15 with int8_keys=True"),
    ],
)  # fmt: skip
def test_bad_caches_are_refused(changes, kind, passed):
    with pytest.raises(kind, match=passed):
        PagedKVCache(**{**BASE, **changes})
    PagedKVCache(**BASE)


@pytest.mark.parametrize("method", ["copy", "copy_to_host", "copy_from_host"])
@pytest.mark.parametrize("wrong", [(-1, 0), (0, -1), (4, 0), (0, 4)])
def test_copies_of_blocks_that_are_not_there_are_refused(method, wrong):
    """All of them, before the first is made."""
    cache = PagedKVCache(**BASE, num_host_blocks=4)
    cache.k[...] = np.arange(4)[None, :, None, None, None]
    before = cache.k.tobytes()
    with pytest.raises(ValueError, match=r"-1|4"):
        getattr(cache, method)([Copy(0, 1), Copy(*wrong)])
    assert cache.k.tobytes() == before


@pytest.mark.parametrize("method", ["copy", "copy_to_host", "copy_from_host"])
@pytest.mark.parametrize(
    ("wrong", "passed"),
    [
        (None, "copies None; they are a list of Copy"),
        (3, "copies 3; "),
        (Copy(0, 1), r"copies Copy\(src=0, dst=1\); .*; pass .*\[copy\] for one"),
        ([(0, 1), (2, 3, 0)], r"copies \["),
        ([(0, 1), None], r"copies \["),
        ([(0, 1), (0.5, 2)], r"src of copies\[1\] = 0.5; it is an integer, 0 to 3"),
        ([(0, 1), (0, True)], r"dst of copies\[1\] = True; "),
        (["ab"], r"src of copies\[0\] = 'a'; "),
        (np.array([[0.0, 1.0]]), r"src of copies\[0\] = 0.0; "),
        (np.array([0, 1]), "copies <array"),
    ],
)
def test_what_is_no_list_of_copies_is_refused(method, wrong, passed):
    cache = PagedKVCache(**BASE, num_host_blocks=4)
    cache.k[...] = np.arange(4)[None, :, None, None, None]
    before = cache.k.tobytes()
    with pytest.raises(TypeError, match=passed):
        getattr(cache, method)(wrong)
    assert cache.k.tobytes() == before


@pytest.mark.parametrize("method", ["copy_to_host", "copy_from_host"])
def test_a_cache_without_host_blocks_says_how_to_have_them(method):
    cache = PagedKVCache(**BASE)
    with pytest.raises(ValueError, match=r"got 1 copies; the cache has no .*num_host_blocks"):
        getattr(cache, method)([(0, 0)])
    getattr(cache, method)([])


@pytest.mark.parametrize("method", ["copy", "copy_to_host", "copy_from_host"])
@pytest.mark.parametrize("kind", [tuple, iter, np.array])
def test_copies_come_as_any_sequence(method, kind):
    cache = PagedKVCache(**BASE, num_host_blocks=4)
    cache.k[...] = np.arange(1, 5)[None, :, None, None, None]
    getattr(cache, method)(kind([(0, 2), (1, 3)]))
    if method == "copy_to_host":
        cache.copy_from_host([Copy(2, 2), Copy(3, 3)])
    assert cache.k[0, 2:, 0, 0, 0].tolist() == [*([0, 0] if method == "copy_from_host" else [1, 2])]


def drawn(*shape):
    return np.ones(shape, np.float16)


@pytest.mark.parametrize(
    ("k", "v", "kind", "passed"),
    [
        (drawn(3, 2, 8), drawn(3, 2, 8).astype("f4"), TypeError, "float32"),
        (drawn(3, 2, 8).astype("f4"), drawn(3, 2, 8).astype("f4"), TypeError, "float32"),
        (drawn(3, 4, 8), drawn(3, 4, 8), ValueError, r"k .*\(3, 4, 8\)"),
        (drawn(3, 2, 6), drawn(3, 2, 6), ValueError, r"k .*\(3, 2, 6\)"),
        (drawn(2, 2, 8), drawn(2, 2, 8), ValueError, "has 2 tokens; .*tables have 3"),
        (drawn(4, 2, 8), drawn(4, 2, 8), ValueError, "has 4 tokens; .*tables have 3"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(k, v, kind, passed):
    """The cache is as before, and takes what fits."""
    cache = PagedKVCache(**BASE)
    sequence = cache.allocator.add([1, 2, 3])
    tables = cache.step_tables([sequence], 3)
    with pytest.raises(kind, match=passed):
        cache.append(0, k, v, tables)
    assert not (cache.k.any() or cache.v.any())
    cache.append(0, drawn(3, 2, 8), drawn(3, 2, 8), tables)
    assert cache.k[0].sum() == 3 * 16


@pytest.mark.parametrize("heads", [3, 5])
def test_queries_of_mismatched_heads_are_refused(heads):
    cache = PagedKVCache(**BASE)
    tables = cache.step_tables([cache.allocator.add([1, 2])], 1)
    with pytest.raises(ValueError, match=f"H = {heads} heads, the caches have G = 2"):
        cache.attend(0, drawn(1, 1, heads, 8), tables)


@pytest.mark.parametrize("wrong", [None, 7, [[[1.0]]]])
def test_what_is_no_array_is_refused(wrong):
    cache = PagedKVCache(**BASE)
    tables = cache.step_tables([cache.allocator.add([1])])
    with pytest.raises(TypeError, match="k has type builtins"):
        cache.append(0, wrong, wrong, tables)
    with pytest.raises(TypeError, match="q has type builtins"):
        cache.attend(0, wrong, tables)


@pytest.mark.parametrize("wrong", [None, [[0, 1]]])
def test_what_is_no_tables_is_refused(wrong):
    cache = PagedKVCache(**BASE)
    for call in (
        lambda: cache.append(0, drawn(1, 2, 8), drawn(1, 2, 8), wrong),
        lambda: cache.attend(0, drawn(1, 4, 8), wrong),
    ):
        with pytest.raises(TypeError, match="as the tables of a step; they are StepTables"):
            call()


def picture_of(cache, *arguments, **options):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    axes = cache.picture(*arguments, **options)
    plt.close(axes.figure)
    return axes


def cells(axes) -> list[str]:
    """The colours that are drawn at each block's place."""
    found = {}
    for patch in axes.patches:
        if patch.get_width():
            place = int(patch.get_y()) * int(axes.get_xlim()[1]) + int(patch.get_x())
            found.setdefault(place, []).append(patch)
    return [found[place] for place in sorted(found)]


def test_the_picture():
    from matplotlib.colors import to_rgb

    known = KnownCache("float32", num_blocks=10, prefix_caching=True, num_host_blocks=5)
    cache = known.cache
    first = cache.allocator.add(range(40))
    fork = first.fork()
    cache.copy(fork.append([7]))
    gone = cache.allocator.add([9] * 17)
    gone.free()
    cache.allocator.allocate()
    away = cache.allocator.add([1] * 5)
    cache.copy_to_host(away.swap_out())
    names = {"first": first, "fork": fork, "gone": gone, "away": away}
    axes = picture_of(cache, names, columns=4)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "first: 40 tokens", "fork: 41 tokens", "gone: finished", "away: 5 tokens, swapped out"
    ]  # fmt: skip
    places = cells(axes)
    assert len(places) == 10
    blue, orange = to_rgb("C0"), to_rgb("C1")
    shared = [patch for patch in places[0] if patch.get_facecolor()[3] == 1]
    assert [patch.get_facecolor()[:3] for patch in shared] == [blue, orange]
    assert len(places[0]) == 5, "two sharers, faint and full, and the edge"
    (faint, full, _), own = places[2], places[3]
    assert full.get_width() / faint.get_width() == pytest.approx(8 / 16)
    assert own[1].get_facecolor()[:3] == orange
    assert own[1].get_width() / own[0].get_width() == pytest.approx(9 / 16)
    states = [cache.allocator.state(block) for block in range(10)]
    assert sorted(states) == ["cached"] + ["free"] * 4 + ["used"] * 5
    greys = {"cached": 0.85, "free": 1.0, "used": 0.4}
    for place, state in list(zip(places, states, strict=True))[4:]:
        (edge,) = place
        assert edge.get_facecolor()[0] == pytest.approx(greys[state])
    assert picture_of(cache, axes=axes) is axes
    (text,) = picture_of(cache, [first]).get_legend().get_texts()
    assert text.get_text() == "sequence 0: 40 tokens"
    assert picture_of(PagedKVCache(**BASE)).get_legend() is None


def test_pictures_refuse_what_is_not_the_caches():
    cache = PagedKVCache(**BASE)
    foreign = BlockAllocator(4, 16).add([1])
    with pytest.raises(ValueError, match="sequence 0, <Sequence of 1 tokens"):
        picture_of(cache, [foreign])
    with pytest.raises(TypeError, match="got sequence 0, 7; a picture is of Sequences"):
        picture_of(cache, [7])
    for wrong in (7, cache.allocator.add([1])):
        with pytest.raises(TypeError, match=r"got sequences, .*; pass .*\[sequence\] for one"):
            picture_of(cache, wrong)
    with pytest.raises(TypeError, match="axes = 3; it is an Axes of matplotlib"):
        picture_of(cache, axes=3)
    with pytest.raises(ValueError, match="columns = 0"):
        picture_of(cache, columns=0)


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.patches", None)
    with pytest.raises(RuntimeError, match=r"draws the picture; .*; pip install matplotlib"):
        PagedKVCache(**BASE).picture()
