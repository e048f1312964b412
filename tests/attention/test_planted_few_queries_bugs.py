"""Bugs planted in the feed of dense keys are found: by the emulator's checks, or by the bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.few_queries import decoded, ratio
from support.planted_bugs import Bug, planted_device
from support.strategies import AttentionProblem

import cupyattn
from cupyattn.emulator import KernelFault, OutOfBoundsError

pytestmark = pytest.mark.nvrtc

FEED_CUH, FORWARD_CU = "attention/decode/dense_feed.cuh", "attention/decode/forward.cu"
SHARES_CUH, ROWS_CUH = "attention/decode/shares.cuh", "attention/decode/query_rows.cuh"
COMBINE_CU = "attention/decode/combine.cu"
# Keys that end within a tile, in use and not; several units a sequence and CTA.
HALF = AttentionProblem(
    B=2, Sq=3, Sk=301, H=8, G=2, D=64, Dv=64, dtype="float16",
    drawn=(("causal", True), ("seqused_k", (301, 294)), ("q_offset", (120, 310)),
           ("alibi_slopes", ((8,), "float32", 1)), ("softcap", 15.0), ("sinks", "float32")),
)  # fmt: skip
FLOAT = replace(HALF, dtype="float32", D=24, Dv=24)
PLAIN = replace(HALF, B=1, H=2, G=1, drawn=())


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its error over the bound."""

    def run(problem: AttentionProblem, *bugs: Bug) -> float:
        planted_device(monkeypatch, tmp_path / "cuda_src", *bugs)
        with decoded():
            out, lse = cupyattn.attention(*problem.arrays(), **problem.options(), return_lse=True)
        return ratio(problem, out, lse)

    return run


@pytest.mark.parametrize("problem", [HALF, PLAIN, FLOAT], ids=["half", "plain", "float"])
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem) <= 1


WRONG = [
    # What the last tile shares with the one before counts twice.
    (PLAIN, Bug(FORWARD_CU, "key < own_key || ", "")),
    (PLAIN, Bug(FORWARD_CU, "max(seen_by_all, own_key)", "seen_by_all")),
    (
        HALF,
        Bug(
            FORWARD_CU,
            "clear_v(slot, window.keys - first_key)",
            "clear_v(slot, window.keys - own_key)",
        ),
    ),
    (HALF, Bug(FEED_CUH, "return {batch, first_key(j)}", "return {0, first_key(j)}")),
    (HALF, Bug(SHARES_CUH, "lengths.q_offset_g, lengths.used_g", "lengths.used_g, lengths.used_g")),
    (FLOAT, Bug(FORWARD_CU, "key < own_key || ", "")),
    (
        FLOAT,
        Bug(
            FORWARD_CU,
            "caches.v(place), window.keys - first_key)",
            "caches.v(place), window.keys - own_key)",
        ),
    ),
    (PLAIN, Bug(FEED_CUH, "sk - kTileKeys)", "sk - kTileKeys - 1)")),
    (HALF, Bug(ROWS_CUH, "(rows.params, lengths.q_offset_g", "(rows.params, lengths.used_g")),
    (HALF, Bug(COMBINE_CU, "Lengths{seqlens_k_g, q_offset_g}", "Lengths{seqlens_k_g, nullptr}")),
]


@pytest.mark.parametrize(("problem", "bug"), WRONG)
def test_wrong_results_are_found(problem, bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert ratio_with(problem, bug) > 1


@pytest.mark.parametrize(
    "bug",
    [
        Bug(FEED_CUH, "min(tile(j) * kTileKeys, last_key)", "tile(j) * kTileKeys"),
        Bug(FEED_CUH, "sk - kTileKeys)", "sk - kTileKeys + 1)"),
    ],
)
def test_rows_behind_the_array_are_found(bug, ratio_with):
    """Of one sequence and head: of several the next one's lie there."""
    with pytest.raises(OutOfBoundsError):
        ratio_with(PLAIN, bug)
