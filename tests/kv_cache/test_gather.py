"""gather: the tokens of sequences, wherever their blocks are, and zeros behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, everywhere
from support.dtypes import dtype_of
from support.search import deep, examples, wider

import cupyattn
from cupyattn import reference
from cupyattn.ops.kv_cache import gather_problem as checks
from cupyattn.reference.kv_cache.quantisation import quantise

pytestmark = pytest.mark.nvrtc

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
@examples(17)
def test_tokens_come_back(kind, lengths, heads, block_size, seed):
    """Bit for bit, or within the bound of what was quantised; NaN beside them never leaks."""
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
    """By default as long as the table allows; zeros behind each sequence's tokens."""
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
    # K has strides of its own, and so have its scales.
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
    monkeypatch.setattr(checks, "checks_values", lambda _: False)
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


def test_append_then_gather_then_attention_is_paged_attention():
    rng = np.random.default_rng(0)
    caches = np.zeros((2, 5, 16, 2, 8), np.float32)
    k, v = rng.standard_normal((2, 1, 40, 2, 8), dtype=np.float32)
    table = np.array([[3, 0, 4]], np.int32)
    where = table[0, np.arange(40) // 16] * 16 + np.arange(40) % 16
    cupyattn.append_kv(caches[0], caches[1], k, v, where[None])
    q = rng.standard_normal((1, 1, 4, 8), dtype=np.float32)
    lengths = np.array([40], np.int32)
    dense = cupyattn.attention(q, *cupyattn.gather(*caches, table, lengths), seqused_k=lengths)
    assert_array_equal(cupyattn.paged_attention(q, *caches, table, lengths), dense)
