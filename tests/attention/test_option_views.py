"""Options whose arrays are views with gaps, reversed and broadcast, through the kernels.

Their strides are arguments of the kernels. A stride taken for another, or for one, reads what lies
between: NaN, far positions, the opposite of the mask.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.backward_runs import check as check_backward
from support.forward_runs import check
from support.search import deep, mostly_deep
from support.strategies import AttentionProblem

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

B, H, SQ, SK = 2, 4, 37, 71
HEAD_DIMS = {"float16": (64, 64), "float32": (24, 40)}  # as of the searches with options
# Together: each has its own place among the kernels' arguments, and its own strides. Those that are
# compiled in are sets of `attention_options`, whose kernels are there; and the way of the backward.
OPTION_SETS = [
    (
        *(("bias", ((B, H, SQ, SK), "float32")), ("alibi_slopes", ((B, H), "float32", 1))),
        ("sinks", "float32"),
    ),
    (
        *(("mask", (B, H, SQ, SK)), ("softcap", 15.0)),
        *(("sinks", "own"), ("seqused_k", (50, 71))),
    ),
]
# The bias of every head, of a batch, of keys alone: strides of 0 among others.
BROADCAST = [(H, 1, SK), (B, 1, SQ, 1), (SK,)]


def strided(dtype: str, *drawn: tuple[str, Any]) -> AttentionProblem:
    drawn = tuple((name, dtype if value == "own" else value) for name, value in drawn)
    head_dim, head_dim_v = HEAD_DIMS[dtype]
    return AttentionProblem(
        B=B, Sq=SQ, Sk=SK, H=H, G=2, D=head_dim, Dv=head_dim_v, dtype=dtype, drawn=drawn,
        option_view="strided",
    )  # fmt: skip


def check_both_ways(problem: AttentionProblem, *, deterministic: bool) -> None:
    check(problem, "flash")
    check_backward(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize(
    ("drawn", "deterministic", "dtype"),
    mostly_deep(
        list(itertools.product(OPTION_SETS[:2], (False, True), ("float16", "float32"))),
        [(OPTION_SETS[0], False, "float16"), (OPTION_SETS[1], True, "float32")],
    ),
    ids=lambda drawn: "-".join(dict(drawn)) if isinstance(drawn, tuple) else None,
)
def test_views_of_options(drawn: tuple[tuple[str, Any], ...], deterministic: bool, dtype: str):
    check_both_ways(strided(dtype, *drawn), deterministic=deterministic)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_views_of_broadcast_biases(shape: tuple[int, ...], dtype: str):
    check_both_ways(strided(dtype, ("bias", (shape, "float32"))), deterministic=True)
