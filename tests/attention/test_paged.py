"""Paged attention of at most 16 queries a sequence, over caches of floats and of integers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS
from support.paged import PagedProblem, keys_shared, multiprocessors, on_emulator, on_kernels
from support.recording_device import device_array
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.paged import WHOLE_KEYS
from cupyattn.ops.attention.reference.cache_formats import dequantise, quantise
from cupyattn.ops.attention.reference.quantised import (
    BIAS,
    quantisation_error,
    quantised_operands,
)
from cupyattn.runtime.precision import U32
from cupyattn.testing.cache import CACHE_LENGTHS

pytestmark = pytest.mark.nvrtc


@st.composite
def paged_problems(
    draw: st.DrawFn, kernels: tuple[tuple[str, int, int, int], ...], bits: int | None = None
) -> PagedProblem:
    """Draw problems of these kernels: (dtype, D, most groups, most tokens)."""
    dtype, head_dim, most_group, most_tokens = draw(st.sampled_from(kernels))
    options: list[tuple[str, Any]] = []
    if draw(st.booleans()):
        options.append(("causal", True))
    if draw(st.booleans()):
        left = draw(st.sampled_from((0, 1, 15, 16, 40, 100, None)))
        options.append(("window_size", (left, draw(st.sampled_from((0, 2, None))))))
    return PagedProblem(
        lengths=tuple(draw(st.lists(st.sampled_from(CACHE_LENGTHS), min_size=1, max_size=5))),
        Sq=draw(st.integers(1, most_tokens)),
        G=draw(st.integers(1, 2)),
        group=draw(st.integers(1, most_group)),
        D=head_dim,
        dtype=dtype,
        block_size=draw(st.sampled_from((16, 32, 48, 256))),
        options=tuple(options),
        seed=draw(st.integers(0, 2**16)),
        bits=bits,
    )


# (dtype, head dim, most query heads of a key-value head, most tokens): tensor cores with 8 rows
# and with 16, vector loads without tensor cores, and loads of single items.
FLOATS = wider(
    (("float16", 64, 16, 16), ("float32", 24, 4, 1), ("float16", 33, 3, 1)),
    (
        ("float16", 33, 3, 5), ("float16", 128, 16, 16), ("float16", 256, 8, 3),
        ("float16", 80, 4, 2), ("bfloat16", 128, 8, 2), ("bfloat16", 1, 3, 3),
        ("float32", 256, 2, 3), ("float32", 128, 8, 1), ("float32", 61, 2, 2),
        ("float16", 512, 8, 3), ("float16", 320, 4, 1), ("float16", 384, 8, 1),
        ("float16", 448, 3, 1), ("float16", 500, 3, 2), ("float32", 512, 2, 3),
        ("bfloat16", 257, 2, 1),
    ),
)  # fmt: skip
INTEGERS = wider(
    (("float16", 64, 4, 2), ("float32", 24, 4, 1)),
    (
        ("float16", 64, 16, 16), ("float16", 128, 8, 2), ("float16", 128, 16, 16),
        ("float16", 256, 8, 3), ("float16", 80, 4, 2), ("float16", 34, 3, 5),
        ("bfloat16", 128, 8, 2), ("bfloat16", 2, 3, 3), ("float32", 256, 2, 3),
        ("float32", 128, 8, 1), ("float32", 62, 2, 2), ("float16", 512, 8, 3),
        ("float16", 384, 8, 3), ("float16", 264, 3, 2), ("float32", 512, 2, 1),
    ),
)  # fmt: skip
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


@pytest.mark.parametrize("bits", [None, 8, 4])
@given(data=st.data(), count=st.integers(1, 4))
@examples(4)
def test_results_are_within_their_bounds(bits, data, count):
    """For any lengths, block table and split of the keys. Unused slots and scales hold NaN."""
    problem = data.draw(paged_problems(INTEGERS if bits else FLOATS, bits))
    arrays = problem.arrays()
    with multiprocessors(count):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.usefixtures("whole_sequences")
@given(problem=paged_problems(FLOATS))
@examples(3)
def test_short_sequences_have_a_cta_for_each_head(problem):
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.usefixtures("whole_sequences")
@pytest.mark.parametrize("blocks", [WHOLE_KEYS // 16, WHOLE_KEYS // 16 + 1])
@pytest.mark.parametrize(("queries", "tiles"), [(1, 1), (5, 2)])
def test_the_width_of_the_block_table_decides_what_is_short(recorder, blocks, queries, tiles):
    """A plan does not know the lengths."""
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


@pytest.mark.parametrize(
    ("options", "dtype", "head_dim", "bits"),
    mostly_deep(
        [
            *((name, *kernel, None) for name in OPTIONS
              for kernel in (("float16", 64), ("float32", 24), ("bfloat16", 72))),
            *(("all", dtype, 64, bits) for dtype in ("float16", "float32") for bits in (8, 4)),
            *(("all", "float16", 512, bits) for bits in (None, 8, 4)),
            ("all", "float32", 512, None),
        ],
        [("all", "float16", 64, None), ("all", "float16", 64, 4)],
    ),
)  # fmt: skip
def test_options(options, dtype, head_dim, bits):
    options = (("causal", True), *OPTIONS[options].items())
    problem = replace(RAGGED, dtype=dtype, D=head_dim, bits=bits, options=options)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("head_dim", [257, 264, 320, 384, 500])
def test_one_token_of_wide_heads(head_dim):
    problem = PagedProblem(lengths=(9,), Sq=1, G=1, group=1, D=head_dim, dtype="float16")
    arrays = problem.arrays()
    with multiprocessors(1):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("bits", [None, *deep(8, 4)])
def test_heads_of_512_items_on_tensor_cores(bits):
    """Parts of the tiles of K and V are on the way, and the parts of the next tile after them."""
    problem = PagedProblem(
        lengths=(70, 0, 7), Sq=2, G=1, group=3, D=512, dtype="float16", bits=bits
    )
    arrays = problem.arrays()
    with multiprocessors(1):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), *deep(("float32", 24))])
def test_keys_are_split_over_any_number_of_ctas(dtype, head_dim):
    problem = replace(RAGGED, dtype=dtype, D=head_dim)
    arrays = problem.arrays()
    results = []
    for count in (1, 3, 40):
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


@pytest.mark.parametrize("count", [5, *deep(30)])
def test_more_than_32_sequences_find_their_splits(count):
    """Warps add up the work of 32 sequences at a time; some of the late ones are split."""
    lengths = tuple(300 if b in (3, 40, 69) else b % 3 for b in range(70))
    problem = replace(RAGGED, lengths=lengths, Sq=1, G=1)
    arrays = problem.arrays()
    with multiprocessors(count):
        assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_any_place_in_the_pool_gives_the_same_bits():
    first, again = (on_kernels(RAGGED, RAGGED.arrays(order)) for order in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not first[0][0].any() and np.isneginf(first[1][0]).all(), "a sequence without tokens"
    assert np.isfinite(first[1][1]).all()


def test_queries_before_the_first_token_give_zeros():
    problem = replace(RAGGED, lengths=(2, 1), Sq=3)
    out, lse = on_kernels(problem, problem.arrays())
    assert not out[0, 0].any()
    assert np.isneginf(lse[1, :, :2]).all()
    assert np.isfinite(lse[:, :, 2]).all()


@pytest.mark.parametrize("bits", [None, 4])
def test_views_of_a_pool_of_layers_are_used_without_copies(bits):
    """Layers, K and V share one array, heads before slots; q, the table and out are slices."""
    problem = replace(RAGGED, Sq=1, bits=bits)
    q, k, v, table, lengths, *scales = arrays = problem.arrays()
    expected = on_emulator(problem, arrays)
    blocks, size, heads, width = k.shape
    pool = np.full((2, blocks, 3, heads, size, width), 255 if bits else np.nan, k.dtype)
    pool[:, :, 1] = np.stack((k, v)).swapaxes(2, 3)
    views = pool[:, :, 1].swapaxes(2, 3)
    packed = np.full((*q.shape[:2], 3, *q.shape[2:]), np.nan, q.dtype)
    packed[:, :, 1] = q
    wide = np.full((2 * table.shape[0], table.shape[1] + 5), -7, np.int32)
    wide[::2, : table.shape[1]] = table
    out = np.zeros((*q.shape[:2], 2, *q.shape[2:]), q.dtype)
    given = out[:, :, 0], np.zeros(expected[1].shape, np.float32)
    arrays = packed[:, :, 1], *views, wide[::2, : table.shape[1]], lengths.astype(np.int64)
    found = on_emulator(problem, (*arrays, *map(np.ascontiguousarray, scales)), out=given)
    assert found[0].base is out and not out[:, :, 1].any()
    assert all(np.array_equal(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float16", 4), *deep(("float16", None), ("float16", 8), ("float32", 4))]
)
def test_rows_that_are_not_aligned_are_read_item_by_item(dtype, bits):
    problem = replace(RAGGED, dtype=dtype, bits=bits, Sq=1, G=1)
    q, k, *others = arrays = problem.arrays()
    odd = np.zeros(k.size + 1, k.dtype)[1:].reshape(k.shape)
    odd[...] = k
    assert problem.ratio(*on_kernels(problem, (q, odd, *others)), arrays) <= 1


def test_workspace_given_and_too_small():
    arrays = RAGGED.arrays()
    expected = on_emulator(RAGGED, arrays)
    with pytest.raises(ValueError, match=r"workspace has 8 bytes.*this call needs (\d+)") as found:
        on_emulator(RAGGED, arrays, workspace=np.empty(8, np.uint8))
    needed = int(str(found.value).partition("call needs ")[2].partition(",")[0])
    again = on_emulator(RAGGED, arrays, workspace=np.empty(needed, np.uint8))
    assert np.array_equal(again[0], expected[0])


@pytest.mark.parametrize(
    ("bits", "which", "value"), [(None, 2, np.nan), (4, 5, np.nan), (4, 6, np.nan), (4, 6, np.inf)]
)
def test_numbers_that_are_not_finite_stay_in_their_sequence(bits, which, value):
    problem = replace(RAGGED, bits=bits)
    arrays = problem.arrays()
    arrays[which][arrays[3][2, 0], 0] = value  # V, or a scale, of a token of sequence 2
    out, _ = on_kernels(problem, arrays)
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_the_bias_of_four_bits_shows_beside_a_value_that_is_0():
    """The other token's scale is 5,000 times as large, and eight times it is subtracted again."""
    problem = PagedProblem(lengths=(2,), Sq=1, G=2, group=4, D=64, dtype="float16", bits=4)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize(("bits", "least"), [(8, -40), (4, -40), *deep((8, -120), (4, -120))])
def test_scales_of_any_size(bits, least):
    """V has scales from 2**least to 2**12, anywhere in a sequence: weights fit float16."""
    problem = replace(RAGGED, bits=bits)
    arrays = problem.arrays()
    powers = np.random.default_rng(3).integers(least, 12, arrays[6].shape)
    arrays = (*arrays[:6], arrays[6] * np.exp2(powers).astype(np.float32))
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


def test_integers_of_zero_scales_count_as_zero():
    problem = replace(RAGGED, bits=4)
    arrays = problem.arrays()
    for scales in arrays[5:]:
        scales[...] = 0
    out, lse = on_kernels(problem, arrays)
    assert not out.any()
    assert np.allclose(lse[1, :, -1], np.log(300))


def test_the_cpu_path_is_dense_attention():
    problem = replace(RAGGED, lengths=(65,), dtype="float32")
    q, k, v, table, lengths = problem.arrays()
    found = cupyattn.paged_attention(q, k, v, table, lengths, causal=True, return_lse=True)
    tokens = [cache[table[0, :5]].reshape(1, -1, *cache.shape[2:])[:, :65] for cache in (k, v)]
    expected = cupyattn.attention(q, *tokens, causal=True, return_lse=True)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    arrays = replace(RAGGED, dtype="float64").arrays()
    out, lse = cupyattn.paged_attention(*arrays, causal=True, return_lse=True)
    assert out.dtype == lse.dtype == np.float64


def test_the_cpu_path_of_integers_is_that_of_dequantised_caches():
    arrays = replace(RAGGED, dtype="float32", bits=4).arrays()
    q, k, v, table, lengths, k_scales, v_scales = arrays
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    found = cupyattn.paged_attention(*arrays[:5], **scales, causal=True)
    caches = dequantise(k, k_scales), dequantise(v, v_scales)
    caches = tuple(cache.astype(np.float32) for cache in caches)
    expected = cupyattn.paged_attention(q, *caches, table, lengths, causal=True)
    assert np.array_equal(found, expected)


@given(
    bits=st.sampled_from((8, 4)),
    keys=st.integers(1, 80),
    options=st.sampled_from(
        ({}, {"sinks": np.array([0.3, -1.0])}, {"softcap": 2.0}, {"window_size": (20, 0)})
    ),
    size=st.sampled_from((0.1, 0.5, 1.0)),
    seed=st.integers(0, 2**16),
)
@examples(20)
def test_the_error_of_the_format_is_bounded(bits, keys, options, size, seed):
    """Compare exact attention over the stored integers with that over what was quantised."""
    rng = np.random.default_rng(seed)
    q = size * rng.standard_normal((2, 3, 2, 16))
    k, v = rng.standard_normal((2, 2, keys, 1, 16))
    stored = (dequantise(*quantise(x, bits)) for x in (k, v))
    found = reference.attention(q, *stored, **options)
    exact = reference.attention(q, k, v, **options)
    with np.errstate(invalid="ignore"):
        errors = [np.abs(a - b) for a, b in zip(found, exact, strict=True)]
    bounds = quantisation_error(q, k, v, bits, **options)
    for error, bound in zip(errors, bounds, strict=True):
        seen = ~np.isnan(error)  # rows without keys have a lse of -inf, twice
        assert (error[seen] <= bound[seen] + 1e-12).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 40), (4, 120)])
def test_the_bound_of_the_format_is_not_far_from_the_error(bits, most):
    """Errors of D items cancel where the bound adds them up, and it is an exponential of these."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 200, 4, 32))
    found, _ = reference.attention(q, *(dequantise(*quantise(x, bits)) for x in (k, v)))
    error = np.abs(found - reference.attention(q, k, v)[0]).max()
    bound = quantisation_error(q, k, v, bits)[0].max()
    assert error <= bound <= most * error


class CentredCase:
    """Sequences whose keys are int8 codes of differences from a large centre, in a cache."""

    def __init__(self, head_dim: int, lengths: tuple[int, ...], sq: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        heads = 1, max(lengths), 2, head_dim
        k = rng.standard_normal((len(lengths), *heads[1:])) + 3 * rng.standard_normal(heads)
        v = rng.standard_normal(k.shape)
        self.k, self.v = k.astype(np.float16), v.astype(np.float16)
        self.q = rng.standard_normal((len(lengths), sq, 6, head_dim)).astype(np.float16)
        self.lengths = np.array(lengths, np.int32)
        self.cache = cupyattn.PagedKVCache(
            1, 40, 16, 2, head_dim, dtype="float16", int8_keys=True, xp=KERNELS.xp
        )
        assert self.cache.k_centre is not None
        self.cache.k_centre[0] = KERNELS.put(cupyattn.quantize_keys(self.k).centre[0])
        if self.cache.k_scales is not None:  # slots that hold no token
            self.cache.k_scales[:], self.cache.v[:] = np.nan, np.nan
        sequences = [self.cache.allocator.add(range(n)) for n in lengths]
        tables = self.cache.step_tables(sequences, list(lengths))
        packed = [[x[b, :n] for b, n in enumerate(lengths)] for x in (self.k, self.v)]
        with KERNELS.running():
            self.cache.append(0, *(KERNELS.put(np.concatenate(x)) for x in packed), tables)
        self.tables = self.cache.step_tables(sequences, [min(sq, n) for n in lengths])

    def exact_and_bounds(self, options: dict[str, Any]) -> tuple[Any, Any]:
        """Exact attention of q and the stored keys, and the bounds of decoding."""
        keys = cupyattn.quantize_keys(self.k, centre=KERNELS.get(self.cache.k_centre)[0])
        options = {"causal": True, "seqused_k": self.lengths, **options}
        options["softmax_scale"] = self.q.shape[-1] ** -0.5
        pieces: tuple[Any, ...] = (keys.codes, keys.scales, keys.centre)
        q, k = quantised_operands(self.q, *pieces, exact_q=True)
        bounds = reference.attention_bound(q, k, self.v, dtype="float16", tile_k=16, **options)
        # Integers of keys: as stored_attention_bound.
        largest = (np.abs(keys.codes.astype(float)) + 2 * BIAS["int8"]) * keys.scales[..., None]
        reach = np.einsum("bihd,bjhd->bhij", np.abs(q[..., : self.q.shape[-1]]),
                          np.repeat(largest, 3, axis=2))  # fmt: skip
        ds = (self.q.shape[-1] + 4) * U32 * options["softmax_scale"] * reach.max(axis=-1)
        weighted, _ = reference.attention(q, k, np.abs(self.v), **options)
        more = 4 * ds.swapaxes(1, 2)[..., None] * weighted, 2 * ds
        exact = reference.attention(q, k, self.v, **options)
        return exact, [bound + each for bound, each in zip(bounds, more, strict=True)]


@pytest.mark.nvrtc
@examples(6, deep=60)
@given(
    head_dim=st.sampled_from(wider((64, 40), (128, 256, 20))),
    lengths=st.sampled_from(((5, 20), (33, 16, 7), (150,))),
    options=st.sampled_from(({}, {"softcap": 4.0}, {"window_size": (9, None)}, {"sinks": 1})),
    sq=st.sampled_from((1, 3)),
    split=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_few_queries_of_centred_keys_are_decoded(head_dim, lengths, options, sq, split, seed):
    """Their centre reaches softcap, sinks and lse; q is not quantised."""
    case, given_options = CentredCase(head_dim, lengths, sq, seed), dict(options)
    if "sinks" in options:
        given_options["sinks"] = np.random.default_rng(seed).standard_normal(6).astype(np.float32)
    placed = {name: KERNELS.put(x) if name == "sinks" else x for name, x in given_options.items()}
    with KERNELS.running(), keys_shared() if split else nullcontext():
        found = case.cache.attend(
            0, KERNELS.put(case.q), case.tables, causal=True, return_lse=True, **placed
        )
    exact, bounds = case.exact_and_bounds(given_options)
    ratios = [reference.error_ratio(KERNELS.get(x), *each)
              for x, *each in zip(found, exact, bounds, strict=True)]  # fmt: skip
    assert max(ratios) <= 1, ratios


def test_explain_names_the_decoding_of_centred_keys():
    case = CentredCase(64, (20,), 2, 0)
    arrays = case.cache.keys(0), case.cache.v[0], case.tables.block_table, case.tables.seqlens_k
    for sq, kernel in ((16, "attention_decode_centred"), (17, "attention_forward_int8_paged")):
        q = ((1, sq, 6, 64), "float16")
        explained = cupyattn.explain(cupyattn.paged_attention, q, *arrays)
        assert explained.launches[0].kernel == kernel
        assert "gained: " in str(explained)
        assert "lost: " in str(explained)
