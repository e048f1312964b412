"""Attention over int8 keys: within bounds of exact attention of the quantised q and k."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS, emulated, placed
from support.search import deep, examples, wider
from support.strategies import FRUGAL, LONGEST, RUN_TIME_OPTIONS, attention_problems
from support.varlen import VarlenProblem, varlen_problems

import cupyattn
from cupyattn import QuantizedKeys, autodiff, reference
from cupyattn.kv_cache import paged
from cupyattn.ops.attention.choice import MAX_QUERIES
from cupyattn.ops.attention.kernels.int8 import INT8, INT8_HALF_SUMS, int8_row
from cupyattn.ops.attention.options import MAX_INT8_HEAD_DIM
from cupyattn.ops.attention.quantized_keys import NO_GRADIENTS
from cupyattn.ops.attention.reference.quantised import (
    int8_attention_estimate,
    key_centres,
    quantised_operands,
    quantize_keys,
)
from cupyattn.testing import AttentionCase, assert_within_bounds, expected

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

LEAST_TILE = min(row.tile_k for rows in (INT8, INT8_HALF_SUMS) for row in rows.values())
# Whole chunks, tails of chunks, D != Dv, each configuration.
HEAD_DIMS = wider(
    [(64, 64), (24, 40)], [(128, 128), (18, 5), (2, 3), (96, 80), (192, 136), (256, 256)]
)


def quantised(k: np.ndarray) -> QuantizedKeys:
    """Return the keys that `cupyattn.quantize_keys` makes, by its definition in NumPy."""
    centre = key_centres(k)
    return QuantizedKeys(*quantize_keys(k, centre), centre)


def placed_keys(keys: QuantizedKeys) -> QuantizedKeys:
    return QuantizedKeys(*map(KERNELS.put, (keys.codes, keys.scales, keys.centre)))


def run(
    q: np.ndarray, keys: QuantizedKeys, v: np.ndarray, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel; returns out and lse as NumPy arrays."""
    on_device = {name: placed(KERNELS, value) for name, value in options.items()}
    out, lse = cupyattn.attention(
        KERNELS.put(q), placed_keys(keys), KERNELS.put(v), return_lse=True, **on_device
    )
    return KERNELS.get(out), KERNELS.get(lse)


def exact_and_bounds(
    q: np.ndarray, keys: QuantizedKeys, v: np.ndarray, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Return exact attention of the quantised q and k, and the bounds of a float16 kernel."""
    options = {"softmax_scale": q.shape[-1] ** -0.5, **options}
    half_sums, steps = 0, 1
    if options.pop("accumulator", "float32") == "float16":
        row = int8_row(q.shape[-1], v.shape[-1], accumulator="float16")
        half_sums, steps = row.tile_k, row.steps
    pieces: tuple[Any, ...] = (keys.codes, keys.scales, keys.centre)
    operands = (*quantised_operands(q, *pieces), v)
    how: dict[str, Any] = {"dtype": "float16", "tile_k": LEAST_TILE}
    sums = {"half_sums": half_sums, "steps": steps}
    bounds = reference.attention_bound(*operands, **how, **sums, **options)
    return reference.attention(*operands, **options), bounds


def check(problem: AttentionCase, **more: str) -> None:
    q, k, v = problem.arrays()
    keys, options = quantised(k), {**problem.keywords(), **more}
    exact, bounds = exact_and_bounds(q, keys, v, options)
    found = run(q, keys, v, options)
    ratios = [reference.error_ratio(*each) for each in zip(found, exact, bounds, strict=True)]
    assert max(ratios) <= 1, ratios


@examples(6, deep=40)
@given(data=st.data())
def test_within_bounds_of_exact_attention_of_quantised_arrays(data: st.DataObject):
    problems = attention_problems(
        head_dims=HEAD_DIMS,
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        largest=LONGEST,
        **FRUGAL,
    )
    check(data.draw(problems))


@examples(3, deep=24)
@given(data=st.data())
def test_float16_accumulators_within_bounds(data: st.DataObject):
    problems = attention_problems(
        head_dims=HEAD_DIMS,
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        largest=LONGEST,
        **FRUGAL,
    )
    check(data.draw(problems), accumulator="float16")


@pytest.mark.parametrize("head_dim", [128, *deep((64,), (96,))])
def test_float16_accumulators_follow_rising_scores(head_dim: int):
    """Maxima rise within tiles: P of earlier softmaxes of a tile shrink before its products."""
    q, k, v = (
        normal(0, 1, 40, 1, head_dim),
        normal(1, 1, 100, 1, head_dim),
        normal(2, 1, 100, 1, 64),
    )
    q[..., 0] = 20
    k[0, :, 0, 0] = np.linspace(-20, 20, 100)
    options: dict[str, Any] = {"softmax_scale": 0.02, "accumulator": "float16"}
    keys = quantised(k)
    exact, bounds = exact_and_bounds(q, keys, v, {**options})
    found = run(q, keys, v, options)
    ratios = [reference.error_ratio(*each) for each in zip(found, exact, bounds, strict=True)]
    assert max(ratios) <= 1, ratios


def test_p_of_an_earlier_softmax_shrinks_key_by_key():
    """Each 16 keys weigh exp(3) times as much as those before, which still show in the result."""
    q, k, v = normal(0, 1, 40, 1, 128), normal(1, 1, 128, 1, 128), normal(2, 1, 128, 1, 128)
    scale = 128**-0.5
    q[..., 0], k[0, :, 0, 0] = 8, 3 * (np.arange(128) // 16) / (8 * scale)
    keys, options = quantised(k), {"accumulator": "float16"}
    exact, bounds = exact_and_bounds(q, keys, v, options)
    found = run(q, keys, v, options)
    ratios = [reference.error_ratio(*each) for each in zip(found, exact, bounds, strict=True)]
    assert max(ratios) <= 1, ratios


# Options of the scores see products with the centre's part, sinks and lse the whole score.
OPTION_SETS: tuple[dict[str, str], ...] = wider(
    [{"mask": "", "bias": "own", "alibi_slopes": "float32", "softcap": "", "sinks": "own"}],
    [{"sinks": "float32"}, {"softcap": ""}, {"mask": ""}, {"alibi_slopes": "own"}, {"bias": "own"}],
)


@examples(4, deep=24)
@given(
    problem=attention_problems(
        head_dims=[(64, 64)],
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        option_sets=OPTION_SETS,
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_options_within_bounds(problem: AttentionCase):
    check(problem)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def with_offset(k: np.ndarray, size: float) -> np.ndarray:
    """Return keys that have a large vector in common."""
    common = np.random.default_rng(9).standard_normal(k.shape[-2:])
    return (k + size * common).astype(np.float16)


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=["plain", "softcap"])
def test_scores_of_a_large_centre_reach_options_sinks_and_lse(options: dict[str, Any]):
    q, k, v = (
        normal(0, 1, 9, 2, 64),
        with_offset(normal(1, 1, 70, 2, 64), 8),
        normal(2, 1, 70, 2, 64),
    )
    keys = quantised(k)
    options = {**options, "sinks": np.float32([10.0, -3.0])}
    exact, bounds = exact_and_bounds(q, keys, v, options)
    out, lse = run(q, keys, v, options)
    assert reference.error_ratio(lse, exact[1], bounds[1]) <= 1
    assert reference.error_ratio(out, exact[0], bounds[0]) <= 1
    assert np.abs(exact[1] - reference.attention(q, k - keys.centre, v, **options)[1]).max() > 1


def test_nan_and_infinity_give_nan_rows():
    q, k, v = normal(0, 1, 40, 2, 64), normal(1, 1, 40, 2, 64), normal(2, 1, 40, 2, 64)
    q[0, 3, 0, 5], q[0, 7, 1, 0], k[0, 20, 0, 1] = np.nan, np.inf, -np.inf
    keys = quantised(k)
    for sinks in ({}, {"sinks": np.zeros(2, np.float32)}):
        out, lse = run(q, keys, v, {"causal": True, **sinks})
        expected = np.zeros((40, 2), bool)
        expected[3, 0] = expected[7, 1] = True
        expected[20:, 0] = True
        assert (np.isnan(out[0]).all(axis=-1) == expected).all()
        assert (np.isnan(out[0]).any(axis=-1) == expected).all()
        assert (np.isnan(lse[0].T) == expected).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_queries_without_keys_see_nothing_of_a_query_that_is_not_finite(value: float):
    q, k, v = normal(0, 1, 9, 1, 64), normal(1, 1, 9, 1, 64), normal(2, 1, 9, 1, 64)
    q[0, 2] = value
    options = {"seqused_k": np.int32([0]), "sinks": np.float32([1.5])}
    out, lse = run(q, quantised(k), v, options)
    assert not out.any()
    assert (lse == 1.5).all()


def test_rows_of_zeros():
    q, k, v = normal(0, 1, 9, 1, 64), normal(1, 1, 70, 1, 64), normal(2, 1, 70, 1, 64)
    q[0, 4], k[0, 33] = 0, 0
    keys = QuantizedKeys(*quantize_keys(k, np.zeros((1, 64), np.float32)), np.zeros((1, 64), "f4"))
    out, lse = run(q, keys, v, {})
    assert lse[0, 0, 4] == pytest.approx(np.log(70), abs=1e-5)
    assert np.allclose(out[0, 4, 0], v[0].mean(axis=0)[0], atol=2e-3)


def test_codes_and_scales_of_any_strides():
    q, k, v = normal(0, 2, 17, 4, 64), normal(1, 2, 80, 2, 64), normal(2, 2, 80, 2, 64)
    keys, expected = quantised(k), None
    codes = keys.codes.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    scales = keys.scales[:, ::-1].copy()[:, ::-1]
    for each in (keys.codes, codes, keys.codes[:, ::-1].copy()[:, ::-1]):
        found = run(q, QuantizedKeys(each, scales, keys.centre), v, {"causal": True})
        expected = expected or found
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_numpy_arrays_get_what_the_kernel_computes(shared: bool):
    q, k, v = (
        normal(0, 2, 9, 4, 24),
        with_offset(normal(1, 2, 70, 2, 24), 3),
        normal(2, 2, 70, 2, 24),
    )
    centre = key_centres(k)
    centre = centre.mean(axis=0) if shared else centre
    keys = QuantizedKeys(*quantize_keys(k, centre), centre)
    exact, bounds = exact_and_bounds(q, keys, v, {"causal": True})
    for results in (
        cupyattn.attention(q, keys, v, causal=True, return_lse=True),
        run(q, keys, v, {"causal": True}),
    ):
        ratios = [reference.error_ratio(*each) for each in zip(results, exact, bounds, strict=True)]
        assert max(ratios) <= 1, ratios


@pytest.mark.parametrize("in_numpy", [False, True])
def test_implementation_int8_quantises_keys_first(in_numpy: bool):
    arrays = (
        normal(0, 2, 20, 4, 64),
        with_offset(normal(1, 2, 70, 2, 64), 4),
        normal(2, 2, 70, 2, 64),
    )
    q, k, v = arrays if in_numpy else map(KERNELS.put, arrays)
    results = cupyattn.attention(q, k, v, causal=True, return_lse=True, implementation="int8")
    keys = cupyattn.quantize_keys(k)
    expected = cupyattn.attention(q, keys, v, causal=True, return_lse=True)
    assert all((a == b).all() for a, b in zip(results, expected, strict=True))
    exact, _ = reference.attention(*arrays, causal=True)
    estimate, _ = int8_attention_estimate(*arrays, KERNELS.get(keys.centre), causal=True)
    assert (np.abs(KERNELS.get(results[0]) - exact) <= estimate + 2e-3).all()


@pytest.mark.parametrize("implementation", ["flash", "int8"])
def test_expected_results_are_those_of_int8_keys(implementation: str):
    arrays = normal(0, 1, 20, 2, 64), normal(1, 1, 70, 2, 64), normal(2, 1, 70, 2, 64)
    q, k, v = map(KERNELS.put, arrays)
    options: Any = {"causal": True, "implementation": implementation}
    keys = cupyattn.quantize_keys(k) if implementation == "flash" else k
    with KERNELS.running():
        out = cupyattn.attention(q, keys, v, **options)
        want = expected(cupyattn.attention, q, keys, v, **options)
    assert_within_bounds(out, *want)
    exact, _ = reference.attention(*arrays, causal=True)
    assert (np.abs(want.result - exact) > want.bound).any()


@pytest.mark.parametrize("padding", [np.nan, np.inf, 60_000])
@pytest.mark.parametrize("in_numpy", [False, True])
def test_padding_does_not_change_attention(padding: float, in_numpy: bool):
    """Only the first keys of each sequence are in use."""
    q, k, v = normal(0, 3, 20, 2, 64), normal(1, 3, 300, 1, 64), normal(2, 3, 300, 1, 64)
    used, results = np.int32([1, 290, 5]), []
    for value in (0, padding):
        for x in (k, v):
            for b, count in enumerate(used):
                x[b, count:] = value
        put = np.asarray if in_numpy else KERNELS.put
        with cupyattn.backend("reference") if in_numpy else KERNELS.running():
            out = cupyattn.attention(
                *map(put, (q, k, v)), seqused_k=put(used), implementation="int8"
            )
        results.append(np.asarray(out) if in_numpy else KERNELS.get(out))
    assert (results[0] == results[1]).all()
    exact, _ = reference.attention(q, k, v, seqused_k=used)
    centre = key_centres(k, None, used)
    estimate, _ = int8_attention_estimate(q, k, v, centre, seqused_k=used)
    assert (np.abs(results[1] - exact) <= estimate + 2e-3).all()


def test_explain_says_what_is_gained_and_lost():
    q, k, v = map(KERNELS.put, (normal(i, 1, 20, 1, 64) for i in range(3)))
    text = str(cupyattn.explain(cupyattn.attention, q, k, v, implementation="int8"))
    assert "attention_forward_int8" in text
    assert "gained: " in text
    assert "lost: " in text
    shapes = [((1, 20, 1, 64), "float16")] * 3
    with emulated(90):
        on_newer = str(cupyattn.explain(cupyattn.attention, *shapes, implementation="int8"))
    assert "not faster here" in on_newer


@dataclass(frozen=True)
class Int8VarlenProblem(VarlenProblem):
    """A call of attention_varlen over int8 keys, each sequence with a centre of its own."""

    def arrays(self) -> tuple[Any, ...]:
        q, k, v, *bounds = super().arrays()
        keys = cupyattn.quantize_keys(k, cu_seqlens=bounds[1])
        return q, keys, v, *bounds


@examples(4, deep=30)
@given(
    problem=varlen_problems(
        head_dims=HEAD_DIMS,
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        option_views=FRUGAL["option_views"],
    )
)
def test_packed_sequences_within_bounds(problem: VarlenProblem):
    packed = Int8VarlenProblem(problem.dense, problem.queries, problem.keys, problem.spare)
    q, keys, *others = packed.arrays()
    options = {name: placed(KERNELS, value) for name, value in packed.keywords().items()}
    with KERNELS.running():
        arrays = KERNELS.put(q), placed_keys(keys), *map(KERNELS.put, others)
        results = cupyattn.attention_varlen(*arrays, *packed.longest, return_lse=True, **options)
    assert packed.ratio(*map(KERNELS.get, results)) <= 1


@examples(5, deep=40)
@given(
    problem=attention_problems(
        head_dims=wider([(64, 64)], [(24, 24), (96, 96), (128, 128), (256, 256)]),
        dtypes=("float16",),
        options=("causal", "softmax_scale", "window_size"),
        option_sets=wider([{}], [{"sinks": "own", "softcap": "", "alibi_slopes": "float32"}]),
        largest=LONGEST,
        **FRUGAL,
    ),
    block_size=st.sampled_from([16, 48]),
    packed=st.booleans(),
)
def test_paged_caches_within_bounds(problem: AttentionCase, block_size: int, packed: bool):
    q, k, v = problem.arrays()
    packed = packed or q.shape[1] <= MAX_QUERIES  # others are decoded, and not quantised
    batch, length = k.shape[:2]
    rng = np.random.default_rng(problem.seed)
    columns = -(-max(length, 1) // block_size)
    lengths = rng.integers(0, length + 1, batch, dtype=np.int32)
    table = rng.permutation(batch * columns + 1)[: batch * columns].reshape(batch, columns)
    pools = [np.full((batch * columns + 1, block_size, *x.shape[2:]), 7, x.dtype) for x in (k, v)]
    for b, own in enumerate(lengths):
        for at in range(own):
            slot = table[b, at // block_size], at % block_size
            pools[0][slot], pools[1][slot] = k[b, at], v[b, at]
    centre = rng.standard_normal(k.shape[2:]).astype(np.float32)
    cache = QuantizedKeys(*quantize_keys(pools[0], centre), centre)
    arrays = q, cache, pools[1], table.astype(np.int32), lengths
    keys = QuantizedKeys(*quantize_keys(k, centre), centre)
    options = problem.keywords()
    exact, bounds = exact_and_bounds(q, keys, v, {**options, "seqused_k": lengths})
    if packed:
        rows = (batch * q.shape[1], *q.shape[2:])
        arrays = q.reshape(rows), *arrays[1:]
        counts = np.arange(batch + 1, dtype=np.int32) * q.shape[1]
        options |= {"cu_seqlens_q": counts, "max_seqlen_q": q.shape[1]}
        exact, bounds = (
            (out.reshape(rows), lse.swapaxes(0, 1).reshape(q.shape[2], -1))
            for out, lse in (exact, bounds)
        )
    placed_options = {name: placed(KERNELS, value) for name, value in options.items()}
    q_given, _, *others = arrays
    on_device = KERNELS.put(q_given), placed_keys(cache), *map(KERNELS.put, others)
    results = cupyattn.paged_attention(*on_device, return_lse=True, **placed_options)
    in_numpy = cupyattn.paged_attention(*arrays, return_lse=True, **options)
    for found in (tuple(map(KERNELS.get, results)), in_numpy):
        ratios = [reference.error_ratio(*each) for each in zip(found, exact, bounds, strict=True)]
        assert max(ratios) <= 1, ratios


def test_packed_and_paged_float16_accumulators_give_the_dense_result():
    q, k, v = (normal(seed, 1, 48, 2, 64) for seed in range(3))
    keys = cupyattn.quantize_keys(k)
    bounds, table = np.array([0, 48], np.int32), np.arange(3, dtype=np.int32)[None]
    codes, scales = keys.codes.reshape(3, 16, 2, 64), keys.scales.reshape(3, 16, 2)
    cache = QuantizedKeys(codes, scales, keys.centre[0])
    packed_keys = QuantizedKeys(keys.codes[0], keys.scales[0], keys.centre)
    options: dict[str, Any] = {"causal": True, "accumulator": "float16"}
    with cupyattn.backend("emulator"):
        dense = cupyattn.attention(q, keys, v, **options)
        sizes = bounds, bounds, 48, 48
        packed = cupyattn.attention_varlen(q[0], packed_keys, v[0], *sizes, **options)
        pool = v.reshape(3, 16, 2, 64)
        paged = cupyattn.paged_attention(q, cache, pool, table, bounds[1:], **options)
        plain = cupyattn.attention(q, keys, v, causal=True)
    assert (packed == dense[0]).all()
    assert (paged == dense).all()
    assert (plain != dense).any(), "the same sums"


def data_of(kind: str, seed: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Return q, k and v with the features of real models: (1, 48, 1, D), (1, 400, 1, D)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, rows, 1, head_dim)) for rows in (48, 400, 400))
    if kind == "outlier channels":
        channels = rng.permutation(head_dim)[:4]
        q[..., channels], k[..., channels] = 2 * q[..., channels], 8 * k[..., channels]
    if kind == "common offset":
        k += 5 * rng.standard_normal(head_dim)
    if kind == "peaked":
        q *= 4
    if kind == "rotated":
        angles = np.arange(400)[:, None] * 1e4 ** (-np.arange(head_dim // 2) * 2 / head_dim)
        turn = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)[None, :, None]
        q, k = q + turn[:, -48:], k + 4 * turn
    return tuple(x.astype(np.float16) for x in (q, k, v))


KINDS = ("normal", "outlier channels", "common offset", "peaked", "rotated")


@pytest.mark.parametrize("kind", KINDS)
@examples(3, deep=40)
@given(seed=st.integers(0, 2**32 - 1), head_dim=st.sampled_from([32, 64]), causal=st.booleans())
def test_distance_to_attention_of_the_given_arrays_is_as_estimated(
    kind: str, seed: int, head_dim: int, causal: bool
):
    q, k, v = data_of(kind, seed, head_dim)
    keys, options = quantised(k), {"causal": causal}
    estimates = int8_attention_estimate(q, k, v, keys.centre, **options)
    (out, lse), bounds = exact_and_bounds(q, keys, v, options)
    for found, exact, estimate, bound in zip(
        (out, lse), reference.attention(q, k, v, **options), estimates, bounds, strict=True
    ):
        off = np.abs(found - exact)
        assert (off <= estimate + bound).all(), float((off / (estimate + bound)).max())
        # And no more is promised than that: the errors are of this size.
        assert np.sqrt((off**2).mean()) >= np.sqrt((estimate**2).mean()) / 6 / 3


def test_the_largest_head_dim_is_that_of_the_rows_and_of_caches():
    assert {max(INT8), max(INT8_HALF_SUMS), paged.MOST_INT8_HEAD_DIM} == {MAX_INT8_HEAD_DIM}


def test_smoothing_takes_out_what_keys_have_in_common():
    q, k, v = data_of("normal", 0, 64)
    k = with_offset(k, 20)
    exact, _ = reference.attention(q, k, v)
    found = {}
    for name, centre in (("centre", key_centres(k)), ("none", np.zeros((1, 64), np.float32))):
        keys = QuantizedKeys(*quantize_keys(k, centre), centre)
        out = cupyattn.attention(q, keys, v)
        found[name] = float(np.sqrt(((out - exact) ** 2).mean()))
    assert found["centre"] * 4 < found["none"]


def refused(**changes: Any) -> str:
    arrays = {"q": normal(0, 1, 4, 1, 16), "k": normal(1, 1, 4, 1, 16), "v": normal(2, 1, 4, 1, 16)}
    arrays |= {name: changes.pop(name) for name in [*arrays] if name in changes}
    arguments = (
        KERNELS.put(arrays["q"]),
        placed_keys(quantised(arrays["k"])),
        KERNELS.put(arrays["v"]),
    )
    with pytest.raises((NotImplementedError, TypeError, ValueError)) as failure:
        cupyattn.attention(*arguments, **changes)
    return str(failure.value)


def test_what_the_kernel_does_not_have_is_refused():
    cos = KERNELS.put(np.ones((4, 8), np.float32))
    assert "dropout_p" in refused(dropout_p=0.5, seed=1)
    assert "rotary" in refused(rotary=(cos, cos))
    assert "float16" in refused(
        q=np.zeros((1, 4, 1, 16), np.float32), v=np.zeros((1, 4, 1, 16), "f4")
    )
    assert "implementation='int8'" in refused(implementation="tiled")
    odd = {name: normal(1, 1, 4, 1, 15) for name in "qkv"}
    assert "D = 15" in refused(**odd)
    blocks = cupyattn.block_mask(cupyattn.MaskMod("q_idx >= k_idx"), 4, 4)
    assert "BlockMask" in refused(mask_mod=blocks)


def test_what_int8_keys_do_not_have_is_refused_of_numpy_arrays_too():
    q, k, v = normal(0, 1, 4, 1, 16), normal(1, 1, 4, 1, 16), normal(2, 1, 4, 1, 16)
    bounds, cos = np.array([0, 4], np.int32), np.ones((4, 8), np.float32)
    with cupyattn.backend("reference"):
        keys = cupyattn.quantize_keys(k)
        packed = cupyattn.quantize_keys(k[0])
        for name, options in (
            ("rotary", {"rotary": (cos, cos)}), ("dropout_p = 0.5", {"dropout_p": 0.5, "seed": 1}),
        ):  # fmt: skip
            for given, implementation in ((keys, "flash"), (k, "int8")):
                with pytest.raises(NotImplementedError, match=f"^{name} with int8 keys"):
                    cupyattn.attention(q, given, v, implementation=implementation, **options)
            with pytest.raises(NotImplementedError, match=f"^{name} with int8 keys"):
                cupyattn.attention_varlen(q[0], packed, v[0], bounds, bounds, 4, 4, **options)


def test_weights_no_longer_add_up_to_1_as_the_refusal_of_gradients_says():
    medians, largest = [], 0.0
    for kind in KINDS:
        off = []
        for head_dim, seed in ((64, 0), (64, 1), (128, 0)):
            q, k, v = data_of(kind, seed, head_dim)
            (_, lse), _ = exact_and_bounds(q, quantised(k), v, {})
            off.append(np.abs(np.expm1(reference.attention(q, k, v)[1] - lse)))
        medians.append(float(np.median(off)))
        largest = max(largest, float(np.max(off)))
    says = re.search(r"by (.*) to (.*) % in the median, by up to (.*) %", NO_GRADIENTS)
    assert says is not None
    least, most, worst = (float(x) / 100 for x in says.groups())
    assert 0.5 * least < min(medians) < 1.5 * least, medians
    assert 0.7 * most < max(medians) < 1.3 * most, medians
    assert 0.6 * worst < largest < 1.1 * worst


def test_gradients_are_refused_with_the_reason():
    q, k, v = normal(0, 1, 4, 1, 16), normal(1, 1, 4, 1, 16), normal(2, 1, 4, 1, 16)
    keys = quantised(k)
    out, lse = cupyattn.attention(q, keys, v, return_lse=True)
    for k_given, options in ((keys, {}), (k, {"implementation": "int8"})):
        with pytest.raises(NotImplementedError, match="no longer add up to 1"):
            cupyattn.attention_backward(out, q, k_given, v, out, lse, **options)
        with pytest.raises(TypeError, match="no longer add up to 1"):
            autodiff.vjp(lambda q, k=k_given, o=options: cupyattn.attention(q, k, v, **o), q)
