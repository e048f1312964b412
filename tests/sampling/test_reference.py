"""The definition of sampling: which tokens are kept, and how often each is drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.search import deep

import cupyattn
from cupyattn import reference
from cupyattn.ops.sampling import reference as sampling

NEAR = 2.0**-18
"""In base 2: scores up to 32 are rounded by 2^-19, distances and weights by less."""
REACHED = 1 - 2.0**-18
"""The part of top_p that counts as all of it."""


def plain_filters(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, near: float
) -> np.ndarray:
    """Return the kept tokens in float64. A positive `near` raises every threshold."""
    scores, tokens = logits.astype(np.float64) * np.log2(np.e) / temperature, len(logits)
    kept = np.ones(len(scores), bool)
    if top_k and top_k < len(scores):
        kept &= scores >= np.sort(scores)[-top_k] + near
    weights = np.exp2(scores - scores.max())
    if top_p < 1:
        order = np.argsort(-scores, kind="stable")
        left = weights * (scores >= np.sort(scores)[-min(top_k or tokens, tokens)])
        before = np.concatenate([[0], np.cumsum(left[order])[:-1]])
        inside = before < REACHED * top_p * left.sum() * (1 - near * np.log(2))
        kept &= scores >= scores[order[inside]].min() + near
    if min_p:
        kept &= scores >= scores.max() + np.log2(min_p) - NEAR + near
    return kept


@given(
    tokens=st.integers(1, 300),
    spread=st.sampled_from((0.01, 1.0, 4.0)),
    temperature=st.sampled_from((0.3, 1.0, 2.0)),
    top_k=st.sampled_from((0, 1, 2, 10, 100)),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from((0.0, 0.001, 0.2)),
    seed=st.integers(0, 2**32),
)
def test_kept_tokens_match_the_plain_definition(
    tokens, spread, temperature, top_k, top_p, min_p, seed
):
    """Tokens above the thresholds by more than the rounding of scores are kept, and no others."""
    logits = (spread * np.random.default_rng(seed).standard_normal(tokens)).astype(np.float32)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = reference.sampling_probabilities(logits[None], **options)[0]
    kept = found > 0
    assert kept[logits.argmax()]
    at_least = plain_filters(logits, temperature, top_k, top_p, min_p, NEAR)
    at_most = plain_filters(logits, temperature, top_k, top_p, min_p, -NEAR)
    assert not (at_least & ~kept).any()
    assert not (kept & ~at_most).any()
    exact = np.where(kept, np.exp(logits.astype(np.float64) / temperature), 0)
    assert_allclose(found, exact / exact.sum(), rtol=1e-4)


def test_equal_scores_are_kept_both():
    logits = np.array([[3, 1, 2, 2, 2, 0]], np.float16)
    kept = reference.sampling_probabilities(logits, top_k=2)[0] > 0
    assert_array_equal(kept, [1, 0, 1, 1, 1, 0])
    kept = reference.sampling_probabilities(logits, top_p=0.5)[0] > 0
    assert_array_equal(kept, [1, 0, 1, 1, 1, 0])


@given(
    weights=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    kept=st.integers(1, 40),
    level=st.floats(-5, 5),
)
@example(weights=[5, 3, 1, 1], kept=2, level=0)
@example(weights=[1, 1, 2], kept=1, level=0)
def test_top_p_that_tokens_add_up_to_exactly_keeps_no_more(weights, kept, level):
    """The kept set is that of exact fractions, although logits and top_p are rounded."""
    ordered = np.sort(weights)[::-1]
    kept = min(kept, len(weights))
    top_p = ordered[:kept].sum() / ordered.sum()
    logits = (np.log(weights) + level).astype(np.float32)[None]
    found = reference.sampling_probabilities(logits, top_p=top_p)[0] > 0
    assert_array_equal(found, np.array(weights) >= ordered[kept - 1])


def test_top_p_above_a_sum_keeps_one_more():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    for top_p, kept in ((0.80001, 3), (0.8, 2), (0.79999, 2), (0.50001, 2), (0.5, 1), (0.9501, 4)):
        assert np.count_nonzero(reference.sampling_probabilities(logits, top_p=top_p)) == kept


@given(
    weights=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    last=st.integers(0, 39),
    level=st.floats(-5, 5),
)
@example(weights=[5, 3, 1, 1], last=1, level=0)
def test_min_p_that_a_token_has_exactly_keeps_it(weights, last, level):
    """This holds although logits and min_p are rounded."""
    least = weights[last % len(weights)]
    logits = (np.log(weights) + level).astype(np.float32)[None]
    found = reference.sampling_probabilities(logits, min_p=least / max(weights))[0] > 0
    assert_array_equal(found, np.array(weights) >= least)


def test_top_p_applies_after_top_k():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    both = reference.sampling_probabilities(logits, top_k=2, top_p=0.56)[0]
    assert_allclose(both, [1, 0, 0, 0])  # 0.4 / 0.7 is enough
    assert_allclose(reference.sampling_probabilities(logits, top_p=0.56)[0], [4 / 7, 3 / 7, 0, 0])


def test_previous_tokens_are_weakened_once():
    logits, previous = np.array([[2.0, -2.0, 1.0, 0.0]]), np.array([[0, 0, 1, -1, 99]], np.int32)
    x = np.array([1.0, -4.0, 1.0, 0.0])
    found = reference.sampling_probabilities(logits, repetition_penalty=2.0, previous=previous)
    assert_allclose(found[0], np.exp(x) / np.exp(x).sum(), rtol=1e-6)


def quantile(freedom: int, normal: float) -> float:
    """Return a chi-square quantile from a normal one (Wilson and Hilferty)."""
    ninth = 2 / (9 * freedom)
    return freedom * (1 - ninth + normal * math.sqrt(ninth)) ** 3


def chi_square(ids: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom. Rare tokens are merged."""
    expected = probabilities * len(ids)
    counts = np.bincount(ids, minlength=len(expected))
    assert not counts[probabilities == 0].any(), "what is not kept is not drawn"
    many = expected >= 5
    rare = expected[~many].sum()
    statistic = float(((counts - expected)[many] ** 2 / expected[many]).sum())
    if rare > 1:
        statistic += float((counts[~many].sum() - rare) ** 2 / rare)
    return statistic, int(many.sum()) + (rare > 1) - 1


MANY = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


@pytest.mark.parametrize(
    ("over", "options"),
    [
        ("seeds", MANY),
        ("steps", {"top_p": 0.8}),
        ("seeds far apart", {"min_p": 0.1}),
        *deep(("seeds", {}), ("seeds", {"temperature": 0.5}), ("seeds", {"top_k": 8})),
        *deep(("steps", MANY), ("seeds far apart", MANY)),
    ],
    ids=str,
)
def test_draws_follow_the_softmax(over, options):
    """The chi-square statistic of 2000 draws is below its quantile of 1 - 3e-5."""
    count, tokens = 2000, 41
    logits = (1.5 * np.random.default_rng(1).standard_normal(tokens)).astype(np.float32)
    numbers: dict[str, Any] = {"seed": 12345}
    if over == "steps":
        numbers = {"seed": np.full(count, 7), "step": np.arange(count)}
    elif over == "seeds far apart":
        numbers = {"seed": np.random.default_rng(2).integers(0, 2**63, count)}
    ids = cupyattn.sample(np.tile(logits, (count, 1)), **numbers, **options)
    probabilities = reference.sampling_probabilities(logits[None], **options)[0]
    statistic, freedom = chi_square(ids, probabilities)
    assert statistic < quantile(freedom, 4.0)


@pytest.mark.parametrize("largest", [-3e38, *deep(1e7, 3e6, -1e7, 1e8, 1e16, 3e38)])
def test_equal_logits_of_any_size_are_drawn_equally_often(largest):
    ids = cupyattn.sample(np.full((2000, 4), largest, np.float32), seed=12345)
    statistic, freedom = chi_square(ids, np.full(4, 0.25))
    assert statistic < quantile(freedom, 4.0)


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, *deep({"top_k": 4}, {"min_p": 0.3})], ids=str
)
def test_differences_of_large_logits_count_in_full(options):
    """Next to 1e8 float32 numbers are 8 apart, and their scores in base 2 would be 8 or 16."""
    logits = np.float32(1e8) - 8 * np.arange(6, dtype=np.float32)
    same = np.float32(-8) * np.arange(6, dtype=np.float32)
    options = {"temperature": 16.0, **options}
    large = reference.sampling_probabilities(logits[None], **options)
    assert_array_equal(large, reference.sampling_probabilities(same[None], **options))
    ids = cupyattn.sample(np.tile(logits, (500, 1)), seed=1, **options)
    assert_array_equal(ids, cupyattn.sample(np.tile(same, (500, 1)), seed=1, **options))


def test_chi_square_rejects_a_wrong_temperature():
    """The draws of temperature 1 are rejected for temperature 1.2."""
    logits = (1.5 * np.random.default_rng(1).standard_normal(41)).astype(np.float32)
    ids = cupyattn.sample(np.tile(logits, (2000, 1)), seed=12345)
    wrong = reference.sampling_probabilities(logits[None], temperature=1.2)[0]
    statistic, freedom = chi_square(ids, wrong)
    assert statistic > quantile(freedom, 4.0)


def test_neighbouring_seeds_and_steps_are_independent():
    """Pairs of draws of neighbouring rows, and of steps, follow the product distribution."""
    count = 2000
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    both = np.outer(*[reference.sampling_probabilities(logits[None])[0]] * 2).ravel()
    rows = np.tile(logits, (count, 1))
    first = cupyattn.sample(rows, seed=100)
    for second in (np.roll(first, 1), cupyattn.sample(rows, seed=100, step=1)):
        statistic, freedom = chi_square(4 * first + second, both)
        assert statistic < quantile(freedom, 4.0)


def test_noise_is_gumbel_distributed():
    """Noise is within 2e-6 of the float64 formula for all magnitudes of u."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 200_000, dtype=np.uint32) >> rng.integers(0, 32, 200_000, "u4")
    edges = np.array([0, 1, 2, 3, 0xB504F333, 0xB504F334, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    words = np.concatenate([words, ~words, edges])
    u = (words | np.uint32(1)) / 2.0**32
    exact = -np.log2(-np.log2(u))
    assert_allclose(sampling.gumbel_log2(words), exact, rtol=2e-6, atol=1e-6)


def test_weights_are_powers_of_two():
    distances = np.concatenate([np.arange(0, 2**24, 9973), np.arange(0, 30) << 24])
    found = sampling._weights(distances) / 2.0**41
    assert_allclose(found, np.exp2(-distances / 2.0**24), rtol=1e-6, atol=2.0**-41)
    assert sampling._weights(np.array([0])) == [2**41]
    assert int(sampling._weights(np.arange(2**16)).max()) < 2**42
