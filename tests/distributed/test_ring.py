"""Ring attention on NumPy ranks against one device: every option, every placement, 1 to 8 ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ring import Case, assert_same, case

from cupyattn import Rotary, rope_tables
from cupyattn.distributed.placement import PLACEMENTS


def tables(length: int, dim: int, interleaved: bool) -> Rotary:
    return Rotary(*rope_tables(length, dim, dtype="float64"), interleaved)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 8))
    placement = draw(st.sampled_from(PLACEMENTS))
    side = st.one_of(st.none(), st.integers(0, 50))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window_size"] = (draw(side), draw(side))
    heads = draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    for name, value in {
        "softmax_scale": 0.4,
        "softcap": 1.5,
        "sinks": rng.standard_normal(heads[0]),
        "alibi_slopes": rng.random(heads[0]),
        "rotary": tables(8 * 16 * 5, 6, draw(st.booleans())),
    }.items():
        if draw(st.booleans()) and not (name == "alibi_slopes" and placement == "striped"):
            options[name] = value
    sizes = draw(st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple))
    return case(
        ranks, placement, draw(st.integers(1, 5)), heads=heads, sizes=sizes,
        draw=draw(st.integers(0, 99)), **options,
    )  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(cases())
def test_ranks_give_what_one_device_gives(case):
    assert_same(case)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_causal_on_any_number_of_ranks(ranks, placement):
    assert_same(case(ranks, placement, causal=True))


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
@pytest.mark.parametrize("sizes", [None, (32, 0, 64)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dropout_is_that_of_one_device(ranks, placement, sizes):
    assert_same(case(ranks, placement, 32, sizes=sizes, causal=True, dropout_p=0.3, seed=5))
