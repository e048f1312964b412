"""Paged attention against the dense reference and its bounds: the emulator runs all checks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paged import PagedProblem, multiprocessors, on_emulator, on_kernels, paged_problems
from support.recording_device import device_array
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn.ops.attention.decode import WHOLE_KEYS

pytestmark = pytest.mark.nvrtc

KERNELS = wider(
    # One tile of 8 rows on tensor cores, two; lanes that load ahead, and single items.
    (("float16", 64, 4, 2), ("float16", 128, 16, 16), ("float32", 24, 4, 1), ("float16", 33, 3, 5)),
    (
        ("float16", 256, 8, 3), ("float16", 64, 16, 16), ("float16", 80, 4, 2),
        ("bfloat16", 128, 8, 2), ("bfloat16", 1, 3, 3), ("float32", 256, 2, 3),
        ("float32", 128, 8, 1), ("float32", 61, 2, 2),
    ),
)  # fmt: skip


@given(problem=paged_problems(KERNELS), count=st.integers(1, 4))
@examples(7)
def test_paged_is_dense(problem: PagedProblem, count: int):
    """Whatever the lengths are, wherever blocks lie and shares cut: within the dense bounds."""
    arrays = problem.arrays()
    with multiprocessors(count):
        out, lse = on_kernels(problem, arrays)
    assert problem.ratio(out, lse, arrays) <= 1


@pytest.mark.usefixtures("whole_sequences")
@given(problem=paged_problems(KERNELS))
@examples(6)
def test_short_sequences_have_a_cta_for_each_head(problem: PagedProblem):
    arrays = problem.arrays()
    out, lse = on_kernels(problem, arrays)
    assert problem.ratio(out, lse, arrays) <= 1


@pytest.mark.usefixtures("whole_sequences")
@pytest.mark.parametrize("blocks", [WHOLE_KEYS // 16, WHOLE_KEYS // 16 + 1])
@pytest.mark.parametrize(("queries", "tiles"), [(1, 1), (5, 2)])
def test_what_short_is(recorder, blocks, queries, tiles):
    """Of as many tokens as the table has room for: a plan does not know the lengths."""
    q, cache = device_array((3, queries, 8, 64)), device_array((99, 16, 2, 64))
    table, lengths = device_array((3, blocks), np.int32), device_array((3,), np.int32)
    cupyattn.paged_attention(q, cache, cache, table, lengths)
    entries = [launch.specialisation.spec.entry for launch in recorder.started]
    if blocks * 16 > WHOLE_KEYS:
        assert entries == ["attention_decode", "attention_decode_combine"]
    else:
        assert entries == ["attention_decode"]
        assert recorder.started[0].grid == (3 * 2 * tiles, 1, 1)
        assert len(recorder.allocated) == 1  # out


RAGGED = PagedProblem(
    lengths=(0, 300, 7, 64, 129), Sq=3, G=2, group=2, D=64, dtype="float16",
    options=(("causal", True),),
)  # fmt: skip
OPTIONS = {
    "alibi": {"alibi_slopes": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"alibi_slopes": True, "softcap": 5.0, "sinks": True, "window_size": (37, None)},
}


@pytest.mark.parametrize("options", mostly_deep([*OPTIONS], ["alibi", "all"]))
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    mostly_deep([("float16", 64), ("float32", 24), ("bfloat16", 72)], [("float16", 64)]),
)
def test_options(options, dtype, head_dim):
    options = (("causal", True), *OPTIONS[options].items())
    problem = replace(RAGGED, dtype=dtype, D=head_dim, options=options)
    arrays = problem.arrays()
    out, lse = on_kernels(problem, arrays)
    assert problem.ratio(out, lse, arrays) <= 1


def test_every_option_at_once_in_float32():
    options = (("causal", True), *OPTIONS["all"].items())
    problem = replace(RAGGED, dtype="float32", D=24, options=options)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shares_cut_sequences_anywhere(dtype):
    """Of any number of CTAs, from one that has all to one for each unit and more."""
    problem = replace(RAGGED, dtype=dtype, D=64 if dtype == "float16" else 24)
    arrays = problem.arrays()
    results = []
    for count in (1, 2, 3, 5, 40):
        with multiprocessors(count):
            results.append(on_kernels(problem, arrays))
        assert problem.ratio(*results[-1], arrays) <= 1, count
    assert any(not np.array_equal(out, results[0][0]) for out, _ in results), "nothing was split"


def test_a_warp_of_more_than_64_tiles_looks_up_the_next_blocks():
    problem = replace(RAGGED, lengths=(17_000,), Sq=1, G=1)
    arrays = problem.arrays()
    with multiprocessors(1):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_a_row_has_more_parts_than_its_warps_add_up_at_once():
    """A CTA for each 64 of 4,700 keys."""
    problem = PagedProblem(lengths=(4_700,), Sq=1, G=1, group=2, D=24, dtype="float32")
    arrays = problem.arrays()
    with multiprocessors(40):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("count", [5, 30])
def test_more_than_32_sequences_find_their_shares(count):
    """Warps add up the work 32 sequences at a time; some of the late ones are cut."""
    lengths = tuple(300 if b in (3, 40, 69) else b % 3 for b in range(70))
    problem = replace(RAGGED, lengths=lengths, Sq=1, G=1)
    arrays = problem.arrays()
    with multiprocessors(count):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_any_place_in_the_pool_gives_the_same_bits():
    first = on_kernels(RAGGED, RAGGED.arrays())
    for order in (1, 2):
        again = on_kernels(RAGGED, RAGGED.arrays(order))
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_sequence_without_tokens_gives_zeros():
    out, lse = on_kernels(RAGGED, RAGGED.arrays())
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_queries_before_the_first_token_see_nothing():
    """More queries than tokens: the first ones stand before the sequence."""
    problem = replace(RAGGED, lengths=(2, 1), Sq=3)
    out, lse = on_kernels(problem, problem.arrays())
    assert not out[0, 0].any()
    assert np.isneginf(lse[1, :, :2]).all()
    assert np.isfinite(lse[:, :, 2]).all()


def test_views_of_a_pool_of_layers_without_copies():
    """Layers, K and V in one array, q a slice of packed qkv, the table a slice of a wider one."""
    problem = replace(RAGGED, Sq=1)
    q, k, v, table, lengths = problem.arrays()
    expected = on_emulator(problem, (q, k, v, table, lengths))
    pool = np.full((k.shape[0], 3, 2, *k.shape[1:]), np.nan, k.dtype)
    pool[:, 1, 0], pool[:, 1, 1] = k, v
    packed = np.full((*q.shape[:2], 3, *q.shape[2:]), np.nan, q.dtype)
    packed[:, :, 1] = q
    wide = np.full((2 * table.shape[0], table.shape[1] + 5), -7, np.int32)
    wide[::2, : table.shape[1]] = table
    out = np.zeros((*q.shape[:2], 2, *q.shape[2:]), q.dtype)
    arrays = packed[:, :, 1], pool[:, 1, 0], pool[:, 1, 1], wide[::2, : table.shape[1]]
    lse = np.zeros(expected[1].shape, np.float32)
    found = on_emulator(problem, (*arrays, lengths.astype(np.int64)), out=(out[:, :, 0], lse))
    assert found[0].base is out
    assert np.array_equal(out[:, :, 0], expected[0])
    assert np.array_equal(lse, expected[1])
    assert not out[:, :, 1].any()


def test_rows_that_are_not_aligned_are_read_item_by_item():
    problem = replace(RAGGED, Sq=1, G=1)
    q, k, v, table, lengths = problem.arrays()
    odd = np.zeros(k.size + 1, k.dtype)[1:].reshape(k.shape)
    odd[...] = k
    out, lse = on_kernels(problem, (q, odd, v, table, lengths))
    assert problem.ratio(out, lse, (q, k, v, table, lengths)) <= 1


def test_workspace_given_and_too_small():
    arrays = RAGGED.arrays()
    expected = on_emulator(RAGGED, arrays)
    with pytest.raises(ValueError, match=r"workspace has 8 bytes.*this call needs (\d+)") as found:
        on_emulator(RAGGED, arrays, workspace=np.empty(8, np.uint8))
    needed = int(str(found.value).partition("call needs ")[2].partition(",")[0])
    again = on_emulator(RAGGED, arrays, workspace=np.empty(needed, np.uint8))
    assert np.array_equal(again[0], expected[0])


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_nan_in_use_stays_in_its_sequence(dtype):
    problem = replace(RAGGED, dtype=dtype)
    q, k, v, table, lengths = problem.arrays()
    v[table[2, 0], 0] = np.nan  # a token of sequence 2
    out, _ = on_kernels(problem, (q, k, v, table, lengths))
    assert np.isnan(out[2]).all()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_the_cpu_path_is_dense_attention():
    problem = replace(RAGGED, lengths=(65,), dtype="float32")
    q, k, v, table, lengths = problem.arrays()
    out, lse = cupyattn.paged_attention(q, k, v, table, lengths, causal=True, return_lse=True)
    tokens = [cache[table[0, :5]].reshape(1, -1, *cache.shape[2:])[:, :65] for cache in (k, v)]
    dense, dense_lse = cupyattn.attention(q, *tokens, causal=True, return_lse=True)
    assert np.array_equal(out, dense)
    assert np.array_equal(lse, dense_lse)


def test_float64_on_the_cpu():
    problem = replace(RAGGED, dtype="float64")
    arrays = problem.arrays()
    out, lse = cupyattn.paged_attention(*arrays, causal=True, return_lse=True)
    assert out.dtype == lse.dtype == np.float64
