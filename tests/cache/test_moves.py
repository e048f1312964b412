"""copy_blocks and gather: blocks in any order, and the tokens of sequences wherever they lie.

In a CUDA graph they and append_kv wait for nothing, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, dtype_of, everywhere
from support.paged import AppendProblem
from support.search import deep, examples, wider

import cupyattn
from cupyattn import Copy, reference
from cupyattn.ops.attention.reference.cache_formats import quantise
from cupyattn.ops.cache import problems
from cupyattn.ops.cache.kernels import COPIES_PASSED

pytestmark = pytest.mark.nvrtc


BLOCKS = 6


def pools(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """K and V in one array (2, num_blocks, ...), every bit random."""
    row = shape[-1] * dtype_of(dtype).itemsize
    memory = np.random.default_rng(seed).integers(0, 255, (2, *shape[:-1], row))
    return memory.astype(np.uint8).view(dtype_of(dtype))


def in_order(array: np.ndarray, copies: list[tuple[int, int]], axis: int = 0) -> np.ndarray:
    """Return the array after the copies, which are made one by one along an axis of blocks."""
    blocks = np.moveaxis(array.copy(), axis, 0)
    for src, dst in copies:
        if src >= 0:
            blocks[dst] = blocks[src]
    return np.moveaxis(blocks, 0, axis)


def copied(caches: np.ndarray, copies: Any, scales: np.ndarray | None = None) -> list[np.ndarray]:
    """Return (K and V), and their scales, after the kernel's copies."""
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
@examples(10)
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
    """Chains within one batch of loads, across batches, and across launches."""
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
    """Words of 16 bytes down to one, as the arrays allow; kernels copy float64 too."""
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
    monkeypatch.setattr(problems, "checks_values", lambda _: False)
    caches = pools("float16", (BLOCKS, 2, 1, 8))
    wild = 2**40
    copies = [(BLOCKS, 0), (0, BLOCKS), (-1, 1), (1, -1), (wild, 2), (2, -wild), (3, 4)]
    found = copied(caches, np.array(copies, np.int64))
    assert_array_equal(bits(found[0]), bits(in_order(caches, [(3, 4)], 1)))


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


# dtype of the results, bits of a stored item, D: each is a kernel, or two.
KINDS = wider(
    (("float16", None, 16), ("float16", 8, 16), ("float32", 8, 12), ("float16", 4, 64),
     ("float16", 4, 6)),
    (("bfloat16", 8, 40), ("float32", None, 3), ("bfloat16", 4, 128), ("float16", 8, 5)),
)  # fmt: skip


def sequences(
    lengths: tuple[int, ...], heads: int, head_dim: int, dtype: str, *,
    bits: int | None = None, block_size: int = 4, seed: int = 0, spare: int = 1,
) -> tuple[list[np.ndarray], dict[str, np.ndarray], np.ndarray]:  # fmt: skip
    """Arguments of gather and its scales, and the tokens (2, B, capacity, G, D) in float64.

    Blocks lie anywhere; what is in no sequence is NaN, and no entry that may not be read is an id.
    """
    rng = np.random.default_rng(seed)
    columns = max(1, *(-(-length // block_size) for length in lengths)) + spare
    num_blocks = len(lengths) * columns + 1
    capacity = columns * block_size
    tokens = np.zeros((2, len(lengths), capacity, heads, head_dim))
    table = np.full((len(lengths), columns), 2**30, np.int32)
    slots = np.full((2, num_blocks, block_size, heads, head_dim), np.nan)
    ids = rng.permutation(num_blocks)
    kept = np.float32 if bits else dtype_of(dtype)
    for b, length in enumerate(lengths):
        used = -(-length // block_size)
        table[b, :used] = ids[b * columns : b * columns + used]
        tokens[:, b, :length] = rng.standard_normal((2, length, heads, head_dim)).astype(kept)
        parts = tokens[:, b].reshape(2, columns, block_size, heads, head_dim)
        slots[:, table[b, :used]] = parts[:, :used]
        if length % block_size:
            slots[:, table[b, used - 1], length % block_size :] = np.nan
    scales: dict[str, np.ndarray] = {}
    if bits:
        stored, all_scales = quantise(slots, bits)
        scales = dict(zip(("k_scales", "v_scales"), all_scales, strict=True))
        caches: Any = stored
    else:
        caches = slots.astype(kept)
    return [*caches, table, np.array(lengths, np.int32)], scales, tokens


def gathered(arguments: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    """Run the kernel."""
    placed = {n: KERNELS.put(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
    with KERNELS.running():
        return [KERNELS.get(a) for a in cupyattn.gather(*map(KERNELS.put, arguments), **placed)]


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.sampled_from((0, 1, 3, 4, 5, 13)), min_size=1, max_size=4),
    heads=st.sampled_from((1, 3)),
    block_size=st.sampled_from((1, 4, 16)),
    seed=st.integers(0, 2**16),
)
@examples(10)
def test_tokens_come_back(kind, lengths, heads, block_size, seed):
    """Bit for bit, or within the bound of what was quantised; NaN in other slots never leaks."""
    dtype, bits, head_dim = kind
    arguments, scales, tokens = sequences(
        tuple(lengths), heads, head_dim, dtype, bits=bits, block_size=block_size, seed=seed
    )
    found = gathered(arguments, **scales, **({"dtype": dtype} if bits else {}))
    for result, cache, name, exact in zip(found, arguments, ("k", "v"), tokens, strict=False):
        assert result.dtype == dtype_of(dtype)
        if bits is None:
            assert_array_equal(result.astype(float), exact)
            continue
        table, counts = arguments[2:]
        kept = scales[f"{name}_scales"]
        values = reference.gather(cache, table, counts, result.shape[1], kept)
        assert reference.error_ratio(result, values, reference.gather_bound(values, dtype)) <= 1
        off = reference.quantisation_bound(exact, bits)[0]
        assert reference.error_ratio(values, exact, off) <= 1


@everywhere
@pytest.mark.parametrize("length", [None, 7, 40])
def test_how_long_the_results_are(side, length):
    """By default as long as the table allows; zeros after each sequence's tokens."""
    arguments, _, tokens = sequences((7, 2), 2, 8, "float32")
    capacity = tokens.shape[2]
    assert capacity == 12
    with side.running():
        k, v = cupyattn.gather(*map(side.put, arguments), max_seqlen_k=length)
    for found, exact in zip((k, v), tokens, strict=True):
        assert found.shape == (2, length or capacity, 2, 8)
        common = min(length or capacity, capacity)
        assert_array_equal(side.get(found)[:, :common], exact[:, :common])
        assert not side.get(found)[:, common:].any()


@everywhere
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_views_and_results_that_are_given(side, bits):
    """A layer of a pool, a slice of a table, results that are slices; nothing else is written."""
    arguments, scales, _ = sequences((9, 2), 2, 16, "float16", bits=bits)
    with side.running():
        plain = cupyattn.gather(
            *map(side.put, arguments), **{n: side.put(s) for n, s in scales.items()}
        )
    k_cache, v_cache, table, lengths = arguments
    pool = np.zeros((k_cache.shape[0], 3, *k_cache.shape[1:]), k_cache.dtype)
    pool[:, 1] = k_cache
    pool = side.put(pool)
    wide = np.full((4, 2 * table.shape[1] + 3), -7, np.int32)
    wide[::2, 1:-2:2] = table
    out = side.put(np.full((2, table.shape[1] * 4, 3, 2, 16), 77, np.float16))
    # K and its scales have other strides than V.
    by_head = {n: side.put(s.copy()) for n, s in scales.items()}
    if bits:
        by_head["k_scales"] = side.put(np.repeat(scales["k_scales"], 2, axis=2))[:, :, ::2]
    with side.running():
        found = cupyattn.gather(
            pool[:, 1], side.put(v_cache), side.put(wide)[::2, 1:-2:2],
            side.put(np.repeat(lengths.astype(np.int64), 2))[::2],
            **by_head, out=(out[:, :, 1], side.put(np.zeros((2, 16, 2, 16), np.float16))),
        )  # fmt: skip
    for result, expected in zip(found, plain, strict=True):
        assert_array_equal(side.get(result), side.get(expected))
    assert_array_equal(side.get(out)[:, :, 1], side.get(plain[0]))
    assert (side.get(out)[:, :, ::2] == 77).all()


@everywhere
def test_blocks_that_a_window_has_left_behind_are_zeros(side):
    arguments, _, tokens = sequences((11,), 2, 8, "float32")
    arguments[2][0, 1] = -1
    tokens[:, :, 4:8] = 0
    with side.running():
        found = cupyattn.gather(*map(side.put, arguments))
    assert_array_equal(np.stack([side.get(array) for array in found]), tokens)


@pytest.mark.parametrize("bits", [None, *deep(4)])
def test_wild_ids_and_lengths_are_not_followed(bits, monkeypatch):
    """Where values are not checked, as on a GPU."""
    monkeypatch.setattr(problems, "checks_values", lambda _: False)
    arguments, scales, tokens = sequences((11, 4, 4), 2, 8, "float16", bits=bits, spare=0)
    plain = gathered(arguments, **scales)
    arguments[2][0, 1] = arguments[0].shape[0]
    arguments[2][0, 2] = -(2**31)
    arguments[2][1:, 1:] = -1
    arguments[3][:] = (2**31 - 1, 4, -5)
    found = gathered(arguments, **scales, max_seqlen_k=20)
    for result, before in zip(found, plain, strict=True):
        expected = np.zeros_like(result)
        expected[:2, :4] = before[:2, :4]
        assert_array_equal(result, expected)
    assert tokens.shape[2] == 12


@everywhere
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_gather(side, shape):
    caches = side.put(np.zeros((2, 3, 4, 2, 8), np.float16))
    table = side.put(np.zeros(shape, np.int32))
    with side.running():
        k, v = cupyattn.gather(caches[0], caches[1], table, side.put(np.zeros(shape[0], np.int32)))
    assert k.shape == v.shape == (shape[0], 4 * shape[1], 2, 8)


def test_the_dtype_of_dequantised_results():
    arguments, scales, _ = sequences((5,), 1, 8, "float32", bits=8)
    assert cupyattn.gather(*arguments, **scales)[0].dtype == np.float16
    out = tuple(np.zeros((1, 12, 1, 8), np.float32) for _ in range(2))
    assert cupyattn.gather(*arguments, **scales, out=out)[0] is out[0]
    assert cupyattn.gather(*arguments, **scales, dtype="float64")[1].dtype == np.float64
    assert cupyattn.gather(*arguments, **scales, dtype="bfloat16")[1].dtype == dtype_of("bfloat16")


PROBLEM = AppendProblem((9,), H=5, G=3, D=64, dtype="float16", bits=8, half=32)


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    """Capture a call that was made before; return what replays it and waits."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()

    def replay() -> None:
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

    return replay


def on_gpu(memory: dict[str, np.ndarray]) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(array) for name, array in memory.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_append_kv_is_replayed_with_new_contents(bits):
    problem = AppendProblem(**{**vars(PROBLEM), "bits": bits})
    placed = on_gpu(problem.memory())
    problem.call(placed)
    replay = replayed(lambda: problem.call(placed))
    for seed in (1, 2):
        given = AppendProblem(**{**vars(problem), "seed": seed}).memory()
        for name, array in placed.items():
            array.set(given[name])
        replay()
        assert problem.ratio({name: array.get() for name, array in placed.items()}, given) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("as_array", [True, False])
def test_copy_blocks_is_replayed(as_array):
    """The pairs of a sequence are those of the capture, an array's those of the replay."""
    import cupy

    rng = np.random.default_rng(0)
    caches = cupy.zeros((2, 6, 4, 2, 8), np.float16)
    copies = cupy.asarray(np.array([(0, 1), (1, 2)], np.int32)) if as_array else [(0, 1), (1, 2)]
    cupyattn.copy_blocks(caches[0], caches[1], copies)
    replay = replayed(lambda: cupyattn.copy_blocks(caches[0], caches[1], copies))
    for pairs in ([(0, 1), (1, 2)], [(3, 4), (4, 0)] if as_array else [(0, 1), (1, 2)]):
        expected = rng.standard_normal(caches.shape).astype(np.float16)
        caches.set(expected)
        if as_array:
            copies.set(np.array(pairs, np.int32))
        for src, dst in pairs:
            expected[:, dst] = expected[:, src]
        replay()
        assert_array_equal(caches.get(), expected)


@pytest.mark.gpu
def test_gather_is_replayed_into_given_results():
    import cupy

    rng = np.random.default_rng(0)
    caches = cupy.asarray(rng.standard_normal((2, 6, 4, 2, 8)).astype(np.float16))
    table = cupy.zeros((2, 3), np.int32)
    lengths = cupy.zeros(2, np.int32)
    out = tuple(cupy.empty((2, 12, 2, 8), np.float16) for _ in range(2))

    def call() -> None:
        cupyattn.gather(caches[0], caches[1], table, lengths, out=out)

    call()
    replay = replayed(call)
    for ids, counts in (([[1, 2, 3], [4, 5, -1]], [12, 5]), ([[5, -1, -1], [0, 1, 2]], [3, 9])):
        table.set(np.array(ids, np.int32))
        lengths.set(np.array(counts, np.int32))
        replay()
        expected = cupyattn.gather(*caches.get(), table.get(), lengths.get())
        for found, exact in zip(out, expected, strict=True):
            assert_array_equal(found.get(), exact)


@pytest.mark.gpu
def test_nothing_is_allocated():
    import cupy

    placed = on_gpu(PROBLEM.memory())
    PROBLEM.call(placed)
    caches = cupy.zeros((2, 6, 4, 2, 8), np.float16)
    cupyattn.copy_blocks(caches[0], caches[1], [(0, 1)])
    sizes: list[int] = []

    class Count(cupy.cuda.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **kwargs: Any) -> None:
            sizes.append(kwargs["size"])

    with Count():
        PROBLEM.call(placed)
        cupyattn.copy_blocks(caches[0], caches[1], [(1, 2), (2, 3)])
    assert sizes == []
