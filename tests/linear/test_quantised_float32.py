"""A quantised weight in float32 arithmetic: products within their bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cards import without_tensor_cores
from support.devices import KERNELS
from support.linear_problems import LinearCase, backward_ratio, forward_ratio
from support.search import deep, examples

import cupyattn
from cupyattn.emulator import Report
from cupyattn.ops.linear import backward, choice, forward, quantised_float32
from cupyattn.weight_formats import FORMATS

pytestmark = pytest.mark.nvrtc


@pytest.fixture(autouse=True)
def float32_alone(monkeypatch):
    """Few rows too go to these kernels."""
    monkeypatch.setattr(choice, "QUANTISED_PLANS", quantised_float32.PLANS)
    for module in (forward, backward):
        module._plan.cache_clear()
    yield
    for module in (forward, backward):
        module._plan.cache_clear()


def case(
    rows: int, outer: int, inner: int, weights: str, activation: str | None = None, **options: Any
) -> LinearCase:
    dtype = options.pop("dtype", "float32")
    return LinearCase((rows,), inner, outer, dtype, activation, weights=weights, **options)


PROBLEMS = [
    case(70, 65, 64, "nf4", "gelu", residual=True),
    case(33, 40, 96, "int4", "swiglu", dtype="bfloat16"),
    case(1, 64, 35, "int8", turned=True, biased=False),
    case(65, 128, 31, "nf4", "swiglu", turned=True, view="odd"),
    case(64, 33, 256, "q4_k", accumulate=True),
    # A second group of eight tiles of rows, and whole tiles of columns.
    case(530, 64, 64, "int4", block_size=32, accumulate=True),
    *deep(
        case(129, 72, 32, "q4_1", "relu", view="odd", residual=True),
        case(16, 129, 576, "int8", "gelu", dtype="bfloat16", residual=True),
        case(70, 512, 33, "q4_k", "gelu", turned=True, dtype="bfloat16"),
        case(40, 160, 7, "q4_1", turned=True, accumulate=True),
        case(31, 96, 65, "int4", "relu", turned=True, given=False),
    ),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_and_backward(problem):
    with KERNELS.running():
        assert 0 < forward_ratio(problem)[0] <= 1
        assert 0 < backward_ratio(problem) <= 1


@pytest.mark.parametrize("weights", ["int4", *deep("nf4", "int8", "q4_1", "q4_k")])
def test_float16_without_tensor_cores(weights):
    with without_tensor_cores():
        problem = case(70, 72, 256, weights, "gelu", dtype="float16", residual=True)
        assert 0 < forward_ratio(problem)[0] <= 1
        assert 0 < backward_ratio(problem) <= 1


@examples(4)
@given(st.data())
@pytest.mark.deep
def test_drawn_problems(data):
    weights = data.draw(st.sampled_from([*FORMATS]))
    unit = 256 if weights == "q4_k" else 32
    lines, codes = data.draw(st.integers(1, 140)), unit * data.draw(st.integers(1, 5))
    activation = data.draw(st.sampled_from((None, "gelu", "swiglu")))
    turned = data.draw(st.booleans())
    outer, inner = (codes, lines) if turned else (lines, codes)
    halves = 2 if activation == "swiglu" and turned else 1
    problem = case(
        data.draw(st.integers(1, 140)), outer // halves, inner, weights, activation, turned=turned,
        dtype=data.draw(st.sampled_from(("float32", "bfloat16"))),
        view=data.draw(st.sampled_from(("contiguous", "padded", "odd"))),
        residual=data.draw(st.booleans()), biased=data.draw(st.booleans()),
        accumulate=data.draw(st.booleans()), seed=data.draw(st.integers(0, 9)),
    )  # fmt: skip
    with KERNELS.running():
        assert forward_ratio(problem)[0] <= 1
        assert backward_ratio(problem) <= 1


@pytest.mark.parametrize("turned", [False, *deep(True)])
def test_no_bank_conflicts(turned):
    """But for the codebook's, which lanes look up where their codes say: an entry a bank."""
    inner, outer = (64, 256) if turned else (256, 64)
    problem = case(128, outer, inner, "nf4", turned=turned, biased=False)
    x, w, _ = problem.inputs()
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w)
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} == {1.0}
