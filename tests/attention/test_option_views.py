"""Options whose arrays are views with gaps, reversed and broadcast, through the kernels.

Their strides are arguments of the kernels. A stride taken for another, or for one, reads what lies
between: NaN, far positions, the opposite of the mask.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.backward_runs import check as check_backward
from support.forward_runs import check
from support.search import deep
from support.strategies import AttentionProblem

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

B, H, SQ, SK = 2, 4, 37, 71
# Together: each has its own place among the kernels' arguments, and its own strides.
OPTION_SETS = [
    (("bias", ((B, H, SQ, SK), "float32")), ("alibi_slopes", ((B, H), "float32", 1))),
    (("mask", (B, H, SQ, SK)), ("sinks", "float32"), ("seqused_k", (50, 71))),
]
# The bias of every head, of a batch, of keys alone: strides of 0 among others.
BROADCAST = [(H, 1, SK), (B, 1, SQ, 1), (SK,)]


def strided(dtype: str, *drawn: tuple[str, Any]) -> AttentionProblem:
    return AttentionProblem(
        B=B, Sq=SQ, Sk=SK, H=H, G=2, D=24, Dv=40, dtype=dtype, drawn=drawn, option_view="strided"
    )


def check_both_ways(problem: AttentionProblem) -> None:
    check(problem, "flash")
    check_backward(problem, "flash", deterministic=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("drawn", OPTION_SETS, ids=lambda drawn: "-".join(dict(drawn)))
def test_views_of_options(drawn: tuple[tuple[str, Any], ...], dtype: str):
    check_both_ways(strided(dtype, *drawn))


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_views_of_broadcast_biases(shape: tuple[int, ...], dtype: str):
    check_both_ways(strided(dtype, ("bias", (shape, "float32"))))
