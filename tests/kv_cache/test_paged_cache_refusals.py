"""What a paged cache refuses, and that nothing of it changes then."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.cache_contents import BASE

from cupyattn import Copy, PagedKVCache


@pytest.mark.parametrize(
    ("changes", "kind", "passed"),
    [
        ({"dtype": "float64"}, TypeError, "dtype = 'float64'; a cache holds 'float16'"),
        ({"dtype": np.uint8}, TypeError, "dtype = .*'int4' is two numbers in a byte"),
        ({"dtype": None}, TypeError, "dtype = None"),
        ({"dtype": np}, TypeError, "dtype = <module 'numpy'"),
        ({"xp": "numpy"}, TypeError, "xp = 'numpy'; it is the module numpy"),
        ({"xp": random}, TypeError, "xp = <module 'random'"),
        ({"num_layers": 0}, ValueError, "num_layers = 0"),
        ({"num_layers": True}, TypeError, "num_layers = True"),
        ({"num_blocks": 0}, ValueError, "num_blocks = 0"),
        (
            {"num_blocks": 2**27},
            ValueError,
            "num_blocks = 134217728 of 16 tokens; allowed is 1 to 134217727 of that size",
        ),
        (
            {"num_blocks": 10, "block_size": 2**40},
            ValueError,
            "block_size = 1099511627776; allowed is 16 to 2147483632",
        ),
        (
            {"num_blocks": 10, "block_size": 2**30},
            ValueError,
            "num_blocks = 10 of 1073741824 tokens; allowed is 1 to 1 of that size: a cache has at "
            "most 2147483647 slots; pass fewer blocks, or smaller ones",
        ),
        ({"block_size": 8}, ValueError, "block_size = 8"),
        ({"block_size": 24}, ValueError, "block_size = 24 .*multiple of 16; pass 32"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads = 0"),
        ({"head_dim": 257}, ValueError, "head_dim = 257"),
        ({"head_dim": 7, "dtype": "int4"}, ValueError, "head_dim = 7 for dtype 'int4'; .*pass 8"),
        ({"watermark": 4}, ValueError, "watermark = 4"),
        ({"num_host_blocks": -1}, ValueError, "num_host_blocks = -1"),
        ({"prefix_caching": 1}, TypeError, "prefix_caching = 1"),
    ],
)
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
    assert not cache.k.any()
    assert not cache.v.any()
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
    with pytest.raises(TypeError, match="k is a builtins"):
        cache.append(0, wrong, wrong, tables)
    with pytest.raises(TypeError, match="q is a builtins"):
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
