"""copy_blocks: the result of one copy after the other, whichever way copies come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, everywhere
from support.dtypes import dtype_of
from support.search import examples

import cupyattn
from cupyattn import BlockAllocator, Copy
from cupyattn.kernels.structs.kv_cache import COPIES_PASSED
from cupyattn.ops.kv_cache import copies_problem as checks

pytestmark = pytest.mark.nvrtc

BLOCKS = 6


def pools(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """K and V in one array (2, num_blocks, ...), every bit random."""
    row = shape[-1] * dtype_of(dtype).itemsize
    memory = np.random.default_rng(seed).integers(0, 255, (2, *shape[:-1], row))
    return memory.astype(np.uint8).view(dtype_of(dtype))


def in_order(array: np.ndarray, copies: list[tuple[int, int]], axis: int = 0) -> np.ndarray:
    """What the copies leave, of an array with that axis of blocks."""
    blocks = np.moveaxis(array.copy(), axis, 0)
    for src, dst in copies:
        if src >= 0:
            blocks[dst] = blocks[src]
    return np.moveaxis(blocks, 0, axis)


def copied(caches: np.ndarray, copies: Any, scales: np.ndarray | None = None) -> list[np.ndarray]:
    """What the kernel leaves of (K and V), and of their scales."""
    placed = [KERNELS.put(array) for array in (caches, scales) if array is not None]
    options = dict(zip(("k_scales", "v_scales"), placed[1], strict=True)) if len(placed) > 1 else {}
    if isinstance(copies, np.ndarray):
        copies = KERNELS.put(copies)
    with KERNELS.running():
        assert cupyattn.copy_blocks(placed[0][0], placed[0][1], copies, **options) is None
    return [KERNELS.get(array) for array in placed]


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@given(
    copies=st.lists(st.tuples(*[st.integers(0, BLOCKS - 1)] * 2), max_size=20),
    array=st.sampled_from((None, "int32", "int64")),
    scaled=st.booleans(),
)
@examples(27)
def test_copies_are_made_in_their_order(copies, array, scaled):
    """Chains, swaps, blocks that are copied onto themselves: as one after the other."""
    caches = pools("int8" if scaled else "float16", (BLOCKS, 2, 3, 16))
    scales = pools("float32", (BLOCKS, 2, 3)) if scaled else None
    given = copies if array is None else np.array(copies, array).reshape(-1, 2)
    found = copied(caches, given, scales)
    assert_array_equal(bits(found[0]), bits(in_order(caches, copies, 1)))
    if scales is not None:
        assert_array_equal(bits(found[1]), bits(in_order(scales, copies, 1)))


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 1), (1, 2), (2, 3)],  # a later source is an earlier target
        [(2, 3), (1, 2), (0, 1)],  # a later target is an earlier source
        [(0, 1), (1, 0), (0, 2)],
        [(0, 3), (1, 3), (3, 4), (2, 3)],
        [(i % 5, (i * 3 + 1) % 5) for i in range(3 * COPIES_PASSED + 5)],
    ],
)
@pytest.mark.parametrize("kind", [list, np.array])
def test_chains(copies, kind):
    """Within what is copied together, across it, and across launches."""
    caches = pools("float32", (5, 3, 1, 8))
    found = copied(caches, kind(copies))
    assert_array_equal(bits(found[0]), bits(in_order(caches, copies, 1)))


@pytest.mark.parametrize(
    ("dtype", "shape", "margin"),
    [
        ("float16", (4, 3, 2, 5), 0),
        ("bfloat16", (4, 1, 1, 1), 0),
        ("float16", (4, 2, 2, 8), 1),
        ("float64", (4, 2, 1, 3), 0),
        ("uint8", (4, 1, 3, 7), 0),
        ("uint8", (3, 1, 1, 1), 0),
        ("int8", (4, 256, 2, 64), 0),
    ],
)
def test_words_of_every_size(dtype, shape, margin):
    """Of 16 bytes down to one, as the arrays allow; float64 is copied by kernels, too."""
    size = int(np.prod(shape))
    memory = np.zeros(margin + 2 * size, dtype_of(dtype))
    memory[margin:] = pools(dtype, shape).ravel()
    copies = [(0, 1), (1, 2)]
    scaled = dtype in ("int8", "uint8")
    scales = pools("float32", shape[:3]) if scaled else None
    placed = KERNELS.put(memory)
    caches = placed[margin:].reshape(2, *shape)
    options = {}
    if scales is not None:
        scales = KERNELS.put(scales)
        options = {"k_scales": scales[0], "v_scales": scales[1]}
    with KERNELS.running():
        cupyattn.copy_blocks(caches[0], caches[1], copies, **options)
    expected = in_order(memory[margin:].reshape(2, *shape), copies, 1)
    found = KERNELS.get(placed)
    assert_array_equal(bits(found[margin:]), bits(expected.ravel()))
    assert not found[:margin].any()


@everywhere
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (2, 0, 1, 3, 4, 5), (1, 0, 4, 2, 3, 5)])
def test_all_layers_of_a_pool_at_once(side, order):
    """(num_layers, 2, num_blocks, block_size, G, D), laid out in memory in other orders too."""
    pool = pools("float16", (3, BLOCKS, 2, 2, 8)).swapaxes(0, 1)
    pool = np.ascontiguousarray(pool.transpose(order)).transpose(np.argsort(order))
    copies = [(0, 1), (1, 5), (4, 0)]
    placed = side.put(pool.copy(order="K"))
    with side.running():
        cupyattn.copy_blocks(placed[:, 0], placed[:, 1], [Copy(*copy) for copy in copies])
    assert_array_equal(bits(side.get(placed)), bits(in_order(pool, copies, 2)))


@everywhere
def test_one_layer_leaves_the_others(side):
    pool = pools("float32", (3, BLOCKS, 2, 2, 4)).swapaxes(0, 1)
    placed = side.put(pool.copy(order="K"))
    copies = np.array([[0, 9, 2], [3, 9, 4]])[:, ::2]
    with side.running():
        cupyattn.copy_blocks(placed[1, 0], placed[1, 1], side.put(copies))
    expected = pool.copy()
    expected[1] = in_order(pool[1], copies.tolist(), 1)
    assert_array_equal(bits(side.get(placed)), bits(expected))


@everywhere
def test_every_array_has_strides_of_its_own(side):
    """K within a pool, V and its scales with heads padded, K's scales with layers in between."""
    caches, scales = pools("int8", (BLOCKS, 2, 3, 16)), pools("float32", (BLOCKS, 2, 3))
    wide = [
        np.zeros((BLOCKS, 2, 2, 3, 16), np.int8),
        np.zeros((BLOCKS, 2, 4, 16), np.int8),
        np.zeros((BLOCKS, 3, 2, 3), np.float32),
        np.zeros((BLOCKS, 2, 5), np.float32),
    ]
    cuts = [(slice(None), 1), (..., slice(3), slice(None)), (slice(None), 2), (..., slice(3))]
    arrays = (*caches, *scales)
    for array, cut, values in zip(wide, cuts, arrays, strict=True):
        array[cut] = values
    placed = [side.put(array) for array in wide]
    views = [array[cut] for array, cut in zip(placed, cuts, strict=True)]
    copies = [(0, 1), (1, 5), (4, 0)]
    with side.running():
        cupyattn.copy_blocks(*views[:2], copies, k_scales=views[2], v_scales=views[3])
    for array, cut, values in zip(placed, cuts, arrays, strict=True):
        assert_array_equal(bits(side.get(array)[cut]), bits(in_order(values, copies)))


@everywhere
def test_rows_of_minus_one_copy_nothing(side):
    """So that a captured call has room for more copies."""
    caches = pools("float16", (BLOCKS, 2, 1, 8))
    copies = [(-1, -1), (2, 1), (-1, -1), (1, 0)]
    placed = side.put(caches.copy())
    with side.running():
        cupyattn.copy_blocks(placed[0], placed[1], side.put(np.array(copies, np.int32)))
    assert_array_equal(bits(side.get(placed)), bits(in_order(caches, copies, 1)))


def test_blocks_that_do_not_exist_are_skipped(monkeypatch):
    """Where values are not checked, as on a GPU: nothing outside of the caches is touched."""
    monkeypatch.setattr(checks, "checks_values", lambda _: False)
    caches = pools("float16", (BLOCKS, 2, 1, 8))
    wild = 2**40
    copies = [(BLOCKS, 0), (0, BLOCKS), (-1, 1), (1, -1), (wild, 2), (2, -wild), (3, 4)]
    found = copied(caches, np.array(copies, np.int64))
    assert_array_equal(bits(found[0]), bits(in_order(caches, [(3, 4)], 1)))


def test_what_append_asks_for():
    """A fork writes into a shared block: the copy keeps what the other sequence reads."""
    allocator = BlockAllocator(8, 4)
    first = allocator.add(range(6))
    caches = pools("float16", (8, 4, 2, 8))
    before = caches[:, list(first.block_ids)].copy()
    second = first.fork()
    copies = second.append([6])
    assert len(copies) == 1
    found = copied(caches, copies)[0]
    assert_array_equal(bits(found[:, list(second.block_ids)]), bits(before))


@everywhere
def test_no_copies(side):
    caches = side.put(pools("float16", (BLOCKS, 2, 1, 8)))
    with side.running():
        for none in ([], (), side.put(np.zeros((0, 2), np.int32))):
            cupyattn.copy_blocks(caches[0], caches[1], none)


@everywhere
def test_caches_without_heads(side):
    caches = side.put(np.zeros((2, BLOCKS, 2, 0, 8), np.float16))
    with side.running():
        cupyattn.copy_blocks(caches[0], caches[1], [(0, 1)])
