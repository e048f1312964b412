"""Bugs planted in the backward kernels are found: by the emulator's checks, or by the bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.planted_bugs import (
    Bug,
    PlantedDevice,
    found_by,
    plant,
    without_barrier,
)
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.emulator import Checks, OutOfBoundsError, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc

# Two query heads on one key-value head, two strips of keys, every option of the scores.
PROBLEM = AttentionProblem(
    B=1, Sq=37, Sk=133, H=2, G=1, D=24, Dv=16, dtype="float32",
    drawn=(("causal", True), ("mask", (37, 133)), ("bias", ((2, 37, 133), "float32")),
           ("alibi_slopes", ((2,), "float32", 1)), ("softcap", 2.0), ("sinks", "float32"),
           ("dropout_p", 0.5)),
)  # fmt: skip


@cache
def call() -> tuple[tuple[np.ndarray, ...], dict[str, object], AttentionGrads, AttentionGrads]:
    """The arrays and options of the problem's backward, its gradients and their bounds."""
    dout, dlse = PROBLEM.gradients()
    options = PROBLEM.options()
    out, lse = reference.attention(*PROBLEM.arrays(), **options)
    arrays = (dout, *PROBLEM.arrays(), out.astype(np.float32), lse.astype(np.float32))
    options["dlse"] = dlse
    exact = reference.attention_backward(*arrays, **options)
    bounds = reference.attention_backward_bound(
        *arrays, dtype="float32", float32_weights=True, **options
    )
    return arrays, options, exact, bounds


@pytest.fixture
def ratios_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a backward from sources with bugs in them; returns errors over bounds."""

    def run(*bugs: Bug) -> dict[str, float]:
        folder = tmp_path / "cuda_src"
        plant(folder, *bugs)
        module = sys.modules["cupyattn.functional.attention.backward"]  # the function has its name
        monkeypatch.setattr(module, "device_of", lambda _: PlantedDevice(folder, Checks.all()))
        arrays, options, exact, bounds = call()
        grads = cupyattn.attention_backward(*arrays, **options)
        return {
            name: reference.error_ratio(*triple)
            for name, *triple in zip(exact._fields, grads, exact, bounds, strict=True)
        }

    return run


def test_a_clean_copy_is_right(ratios_with: Callable[..., dict[str, float]]):
    ratios = ratios_with()
    assert 0 < max(ratios.values()) <= 1, ratios


DSINKS = "attention/float32/backward_dsinks.cu"
FLOAT_DKDV = "attention/float32/backward_dkdv.cuh"
FLOAT_SCORES, PRODUCTS = (
    "attention/float32/score_gradient.cuh",
    "attention/float32/backward_products.cuh",
)
STAGES = "attention/float32/backward_feed.cuh"

FAULTS = {
    "f32: between two stages": (
        without_barrier(STAGES, "buffers: this one has been read"), SharedMemoryRaceError
    ),
    "f32: after the first stage": (without_barrier(STAGES, "buffer: wr"), SharedMemoryRaceError),
    "f32: before P": (without_barrier(FLOAT_DKDV, "weights: the sums"), SharedMemoryRaceError),
    "f32: after P and after dS": (
        without_barrier(FLOAT_SCORES, "weights: written"), SharedMemoryRaceError
    ),
    "f32: one row too many is loaded": (
        Bug(STAGES, "row(i) < from.rows", "row(i) <= from.rows"),
        OutOfBoundsError,
    ),
    "f32: one row too many is stored": (
        Bug(PRODUCTS, "if (row >= rows) continue;", "if (row > rows) continue;"),
        OutOfBoundsError,
    ),
    "dsinks: one row too many": (
        Bug(DSINKS, "row < forward.sq", "row <= forward.sq"), OutOfBoundsError
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_is_found_by_a_check(name: str, ratios_with: Callable[..., dict[str, float]]):
    bug, fault = FAULTS[name]
    with found_by(fault):
        ratios_with(bug)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_missing_barrier_between_two_parts_of_the_weights_is_found(
    deterministic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only without options that take registers a tile of the float32 kernels has two parts."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 70, 1, 16), np.float32)
    out, lse = cupyattn.attention(q, k, v, return_lse=True)
    plant(tmp_path, without_barrier(FLOAT_SCORES, "weights: the next part"))
    module = sys.modules["cupyattn.functional.attention.backward"]
    monkeypatch.setattr(module, "device_of", lambda _: PlantedDevice(tmp_path, Checks.all()))
    with pytest.raises(SharedMemoryRaceError):
        cupyattn.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic)


# By the gradients that show them, and no others.
MISTAKES = {
    "the sink's weight without the row's sum": (
        Bug(DSINKS, "sums.weight(sink_log2) * sums.delta", "ex2_approx(sink_log2) * sums.delta"),
        {"dsinks"},
    ),
    "f32: delta is not subtracted": (
        Bug(FLOAT_SCORES, "p * (keep * dp.c[m][n] - delta)", "p * (keep * dp.c[m][n])"),
        {"dq", "dk", "dbias"},
    ),
    "f32: no dropout in p": (Bug(FLOAT_SCORES, "seen ? p * keep", "seen ? p"), {"dv"}),
    "f32: no slope of the softcap": (
        Bug(FLOAT_SCORES, "SOFTCAP ? ds * slope.c[m][n] : ds", "ds"), {"dq", "dk"}
    ),
    "f32: the second P in place of dS": (
        Bug(FLOAT_DKDV, "dp.store_by_row<", "s.store_by_row<"), {"dk"}
    ),
    "f32: dS of the neighbouring row": (
        Bug(PRODUCTS, "= c[m + i][n]", "= c[m + (i ^ 1)][n]"),
        {"dq"},
    ),
    "f32: dq without its scale": (Bug(FLOAT_DKDV, "params.scale * x", "x"), {"dq"}),
    "f32: the last columns of a stage are dropped": (
        Bug(PRODUCTS, "div_up(depth, kGroup),", "div_up(depth, kGroup) - 1,"),
        {"dq", "dk", "dv", "dbias"},
    ),
    "the sink adds": (Bug(DSINKS, "sum -= sums", "sum += sums"), {"dsinks"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_the_bounds(name: str, ratios_with: Callable[..., dict[str, float]]):
    bug, shown_by = MISTAKES[name]
    ratios = ratios_with(bug)
    assert {name for name, ratio in ratios.items() if not ratio <= 1} == shown_by, ratios
    assert all(not ratios[name] <= 10 for name in shown_by), ratios
