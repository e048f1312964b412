"""Costs of the emulator: how many operations a launch is, how they grow, and the CPU time.

Calls are counted, which gives the same number on every computer, however busy. The budgets of CPU
time are those of a 2-core virtual machine (2026-11-21), three times over: that holds on a slow
machine, and still finds an operation that falls back to a loop over lanes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.search import Search

import cupyattn
from cupyattn.emulator import Checks

pytestmark = pytest.mark.nvrtc

SIZES = ((1, 2, 64, 0.005), (1, 2, 128, 0.012), (2, 4, 256, 0.060))
"""Sequences, heads and tokens of a forward at head dim 64, and its budget in seconds."""
RANDOM_PROBLEMS, RANDOM_BUDGET_S = 25, 1.0
SLACK = 3
BATCH = 64  # blocks of 128 threads that the emulator runs at once


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
    batches = (1, 2, 3, 5) if Search.deep else (1, 3)
    counts = [calls_made(attention_call(n * BATCH, 1, 64)) for n in batches]
    expected = [n * counts[0] for n in batches]
    assert counts == pytest.approx(expected, rel=0.05)  # less: what a launch costs but once


@pytest.mark.deep
def test_time_grows_linearly_with_the_blocks():
    short, long = (cpu_seconds(attention_call(n * BATCH, 1, 64), 3) for n in (1, 4))
    assert long < SLACK * 4 * short


@pytest.mark.deep
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "-".join(map(str, size[:3])))
def test_cpu_time_of_the_forward(size):
    assert cpu_seconds(attention_call(*size[:3]), 7) < SLACK * size[3]


def random_problem(rng: np.random.Generator) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The arrays and the options of a small problem."""
    batch, kv_heads, group = rng.integers(1, 3, 3)
    sq, sk = rng.integers(1, 97, 2)
    head_dim = rng.choice((16, 32, 64, 128))  # few, because each is a compilation
    q_shape = (batch, sq, kv_heads * group, head_dim)
    kv_shape = (batch, sk, kv_heads, head_dim)
    arrays = [rng.standard_normal(s).astype(np.float16) for s in (q_shape, kv_shape, kv_shape)]
    window = (int(rng.integers(0, 64)), None) if rng.random() < 0.25 else None
    return arrays, {"causal": bool(rng.random() < 0.5), "window_size": window}


@pytest.mark.deep
def test_cpu_time_of_random_problems():
    rng = np.random.default_rng(0)
    problems = [random_problem(rng) for _ in range(RANDOM_PROBLEMS)]

    def call() -> None:
        for arrays, options in problems:
            cupyattn.attention(*arrays, **options)

    assert cpu_seconds(call, 2) < SLACK * RANDOM_BUDGET_S
