"""What the emulator costs: how many operations a launch is, how they grow, and the CPU time.

Calls are counted, which gives the same number on every machine, however busy. The budgets of CPU
time are those of ``python -m cupyattn.benchmark emulator``, three times over: that holds on a slow
machine, and still finds an operation that falls back to a loop over lanes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.benchmark import emulator as benchmark
from cupyattn.emulator import Checks

pytestmark = pytest.mark.nvrtc

SLACK = 3
BATCH = 64  # blocks of 128 threads that the emulator runs together


def attention_call(batch: int, heads: int, seqlen: int) -> Callable[[], Any]:
    """The tensor-core forward; the sequences of the batch are the same, so they branch alike."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal((3, 1, seqlen, heads, 64)).astype(np.float16)
    q, k, v = (np.repeat(x, batch, axis=0) for x in one)
    return lambda: cupyattn.attention(q, k, v)


def calls_made(call: Callable[[], Any]) -> int:
    """Count the functions, NumPy's and Python's, that a second call of `call` calls."""
    count = 0

    def profiler(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with cupyattn.backend("emulator", checks=Checks.fast()):
        call()
        before = sys.getprofile()
        sys.setprofile(profiler)
        try:
            call()
        finally:
            sys.setprofile(before)
    return count


def cpu_seconds(call: Callable[[], Any], calls: int) -> float:
    """The least CPU time of some calls after the first: others only disturb it."""
    seconds = []
    with cupyattn.backend("emulator", checks=Checks.fast()):
        call()
        for _ in range(calls):
            began = time.process_time()
            call()
            seconds.append(time.process_time() - began)
    return min(seconds)


def test_operations_of_a_small_launch():
    # 7,400 when the limit was set
    assert calls_made(attention_call(1, 2, 64)) < 12_000


def test_blocks_of_a_batch_share_their_operations():
    one, full = (calls_made(attention_call(batch, 1, 64)) for batch in (1, BATCH))
    assert full < 4 * one  # more, because so many lanes are not stacked


def test_operations_grow_linearly_with_the_blocks():
    counts = [calls_made(attention_call(n * BATCH, 1, 64)) for n in (1, 2, 3, 5)]
    expected = [n * counts[0] for n in (1, 2, 3, 5)]
    assert counts == pytest.approx(expected, rel=0.05)  # less: what a launch costs but once


def test_time_grows_linearly_with_the_blocks():
    short, long = (cpu_seconds(attention_call(n * BATCH, 1, 64), 3) for n in (1, 4))
    assert long < SLACK * 4 * short


@pytest.mark.parametrize("size", benchmark.SIZES, ids=lambda size: "-".join(map(str, size[:3])))
def test_cpu_time_of_the_forward(size):
    assert cpu_seconds(attention_call(*size[:3]), 7) < SLACK * size.budget_s


def test_cpu_time_of_random_problems():
    rng = np.random.default_rng(0)
    count = benchmark.RANDOM_PROBLEMS // 4
    problems = [benchmark.random_problem(rng) for _ in range(count)]

    def call() -> None:
        for arrays, options in problems:
            cupyattn.attention(*arrays, **options)

    budget = benchmark.RANDOM_BUDGET_S * count / benchmark.RANDOM_PROBLEMS
    assert cpu_seconds(call, 2) < SLACK * budget
