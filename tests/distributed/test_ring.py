"""Ring attention on NumPy ranks against one device: every option, placement and number of ranks."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import DTYPES, NUMPY
from support.ring import Case, assert_same, case, case_ratios, on_ranks
from support.search import Search, examples, mostly_deep

from cupyattn import Rotary, ScoreMod, block_mask, rope_tables
from cupyattn.distributed.placement import PLACEMENTS, Placement


def tables(length: int, dim: int, interleaved: bool) -> Rotary:
    return Rotary(*rope_tables(length, dim, dtype="float64"), interleaved)


def of_scores(draw: Any, rng: Any, batch: int, heads: int, length: int) -> dict[str, Any]:
    """A mask and a bias that broadcast in any of their axes, and expressions of positions."""

    def shape() -> tuple[int, ...]:
        varies = draw(st.tuples(*[st.booleans()] * 4))
        axes = [
            extent if each else 1
            for extent, each in zip((batch, heads, length, length), varies, strict=True)
        ]
        return tuple(axes[draw(st.integers(0, 2)) :])

    bias = rng.standard_normal(shape())
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    return {"mask": rng.random(shape()) < 0.7, "bias": bias}


def expressions(rng: Any, batch: int, heads: int, length: int) -> dict[str, Any]:
    table = rng.standard_normal((batch, length))
    return {
        "score_mod": ScoreMod(
            "unused",
            gradient="unused",
            python=(
                lambda s, b, h, q, k, t: s * (1.5 + np.sin(q - 2 * k + h)) + t[b, k],
                lambda s, ds, b, h, q, k, t: ds * (1.5 + np.sin(q - 2 * k + h)),
            ),
            t=table,
        ),
        "mask_mod": lambda b, h, q, k: (3 * q + 5 * k + h + b) % 7 != 0,
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 8 if Search.deep else 4))
    placement = draw(st.sampled_from(PLACEMENTS))
    side = st.one_of(st.none(), st.integers(0, 50))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window_size"] = (draw(side), draw(side))
    heads = draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    sizes = draw(st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple))
    size = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    unit = Placement(placement, ranks).pieces * ranks
    lengths = [unit * each for each in (sizes or (size, size))]
    for name, value in {
        "softmax_scale": 0.4,
        "softcap": 1.5,
        "sinks": rng.standard_normal(heads[0]),
        "alibi_slopes": rng.random(heads[0]),
        "rotary": tables(8 * 16 * 5, 6, draw(st.booleans())),
        "seqused_k": rng.integers(0, np.array(lengths) + 1),
        **({} if sizes else of_scores(draw, rng, 2, heads[0], size * unit)),
        **expressions(rng, len(lengths), heads[0], max(lengths)),
    }.items():
        if draw(st.booleans()) and not (name == "alibi_slopes" and placement == "striped"):
            options[name] = value
    if size == 1 and placement != "zigzag":  # one row: that of the rank's query, or of all
        options.pop("bias", None)
    return case(
        ranks, placement, size, heads=heads, sizes=sizes, draw=draw(st.integers(0, 99)), **options
    )


@examples(15, deep=120)
@given(cases())
def test_ranks_give_what_one_device_gives(case):
    assert_same(case)


@pytest.mark.parametrize(
    ("ranks", "placement"),
    mostly_deep(
        every := [*product(range(1, 9), PLACEMENTS)],
        [each for each in every if each[0] in (2, 3) or each == (8, "zigzag")],
    ),
)
def test_causal_on_any_number_of_ranks(ranks, placement):
    assert_same(case(ranks, placement, causal=True))


@pytest.mark.parametrize("dtype", mostly_deep(DTYPES, ["float16"]))
@pytest.mark.parametrize(
    ("ranks", "placement", "sizes", "options"),
    [
        (1, "zigzag", None, {"causal": True, "sinks": np.arange(4.0)}),
        (3, "zigzag", None, {"causal": True, "softcap": 1.5, "sinks": np.arange(4.0)}),
        (4, "contiguous", None, {"alibi_slopes": np.linspace(0.1, 0.5, 4), "window_size": (9, 2)}),
        (3, "striped", (2, 0, 3), {"causal": True, "rotary": Rotary(*rope_tables(80, 6))}),
        (2, "zigzag", (32,), {"dropout_p": 0.3, "seed": 5}),
        (4, "zigzag", (3, 1), {"causal": True, "seqused_k": np.array([17, 3])}),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_numbers_of_fewer_bits_keep_their_bounds(ranks, placement, sizes, options, dtype):
    """Parts and shares are rounded to them, sums are not."""
    options = {
        name: x.astype(np.float32) if name in ("sinks", "alibi_slopes") else x
        for name, x in options.items()
    }
    problem = case(ranks, placement, 4, sizes=sizes, batch=1, dtype=dtype, **options)
    ratios = case_ratios(problem, *on_ranks(problem), dtype, side=NUMPY)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("side", "placement"),
    mostly_deep(
        sides := [*product((11, 12, sys.maxsize - 5, sys.maxsize, 2**70), PLACEMENTS)],
        [each for each in sides if each[1] == "zigzag" or each[0] in (11, 2**70)],
    ),
    ids=str,
)
def test_a_window_however_large(side, placement):
    """A side of 11 sees all of 12 tokens; a larger one is no larger in the sums of the plan."""
    for window in ((side, 0), (3, side)):
        assert_same(case(3, placement, 2 if placement == "zigzag" else 4, window_size=window))


@examples(8, deep=50)
@given(
    ranks=st.integers(1, 4 if Search.deep else 3),
    placement=st.sampled_from(["zigzag", "contiguous"]),
    sizes=st.sampled_from([None, (32, 0, 64), (32,)]),
    heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    options=st.fixed_dictionaries(
        {"causal": st.booleans(), "dropout_p": st.sampled_from([0.3, 0.7]), "seed": st.just(5)},
        optional={
            "window_size": st.tuples(
                st.none() | st.integers(0, 200), st.none() | st.integers(0, 100)
            ),
            "softcap": st.just(1.5),
            "alibi_slopes": st.just(True),
            "rotary": st.just(True),
            "seqused_k": st.just(True),
            "mask": st.just(True),
            "mods": st.just(True),
        },
    ),
)
def test_dropout_is_that_of_one_device(ranks, placement, sizes, heads, options):
    """With windows, grouped heads, packed sequences and what else depends on positions."""
    if "alibi_slopes" in options:
        options["alibi_slopes"] = np.linspace(0.1, 0.5, heads[0])
    if "rotary" in options:
        options["rotary"] = tables(2 * 4 * 64, 6, interleaved=False)
    unit = Placement(placement, ranks).pieces * ranks
    lengths = [unit * each for each in (sizes or (32,))]
    rng = np.random.default_rng(0)
    if options.pop("mods", False):
        options |= expressions(rng, len(lengths), heads[0], max(lengths))
    if options.pop("mask", False) and not sizes:
        options["mask"] = rng.random((1, heads[0], lengths[0], lengths[0])) < 0.7
    if options.pop("seqused_k", False):
        options["seqused_k"] = rng.integers(0, np.array(lengths) + 1)
    assert_same(case(ranks, placement, 32, heads=heads, sizes=sizes, batch=1, **options))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("length", [32, 33, 96])
def test_one_rank_takes_what_attention_takes(length, placement):
    """It holds all tokens in order: there are no pieces that would have to be even."""
    options = {"causal": True, "dropout_p": 0.5, "seed": 3, "alibi_slopes": np.full(4, 0.1)}
    whole = case(1, "contiguous", length, batch=1, **options)
    assert_same(whole._replace(placement=placement))


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "seed": 5}], ids=["", "dropout"])
def test_slopes_of_each_packed_sequence(dropout):
    slopes = np.random.default_rng(0).random((3, 4))
    options = {"causal": True, "alibi_slopes": slopes, **dropout}
    assert_same(case(2, "zigzag", sizes=(32, 0, 64), **options))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_block_mask_of_whole_sequences(placement):
    """NumPy arrays take one of a Python function too."""
    blocks = block_mask(lambda b, h, q, k: (3 * q + 5 * k + h) % 7 != 0, 32, 32, H=4)
    size = 8 if placement == "zigzag" else 16
    assert_same(case(2, placement, size, mask_mod=blocks, causal=True))
