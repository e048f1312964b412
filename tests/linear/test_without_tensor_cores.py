"""Linear of float16 on cards without tensor cores: float32 arithmetic, within its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from support.cards import without_tensor_cores
from support.linear_problems import LinearCase, backward_ratio, forward_ratio, linear_cases
from support.search import deep, examples

pytestmark = pytest.mark.nvrtc

KINDS = [("float16", name) for name in ("gelu_tanh", "swiglu", "relu", None)]


@pytest.fixture(scope="module", autouse=True)
def kernels_of_such_a_card():
    with without_tensor_cores():
        yield


TILES = LinearCase((70,), 24, 72, "float16", "gelu_tanh", residual=True)


@pytest.mark.parametrize("case", [TILES, *deep(replace(TILES, turned=True, activation="geglu"))])
def test_tiles(case: LinearCase):
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.deep
@examples(14)
@given(case=linear_cases(KINDS))
def test_within_bounds_of_the_reference(case: LinearCase):
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.parametrize("rows", [1, 3, *deep(16, 17, 200)])
@pytest.mark.parametrize("turned", [False, *deep(True)])
def test_few_rows(rows: int, turned: bool):
    """One row has a kernel that never uses tensor cores; it splits a long K."""
    case = LinearCase((rows,), 2056, 40, "float16", None, turned, residual=True)
    assert forward_ratio(case)[0] <= 1
