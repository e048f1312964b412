"""Bugs planted in the kernels of sampling are found: in what they draw, or by the emulator."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from support.planted_bugs import Bug, PlantedDevice, plant, without_barrier

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Checks, KernelFault
from cupyattn.kernels.configs.layers.sampling import CANDIDATES, PART

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(0)


def normal(rows: int, tokens: int, spread: float, dtype: str = "float32") -> np.ndarray:
    return (spread * RNG.standard_normal((rows, tokens))).astype(dtype)


def ids(rows: int, tokens: int, width: int) -> np.ndarray:
    return RNG.integers(-1, tokens, (rows, width)).astype(np.int32)


def each(*values: float, dtype: str = "float32") -> np.ndarray:
    return np.resize(values, 36).astype(dtype)


PARTS = normal(36, PART + 500, 2.0)
"""Two parts a row."""
STEPS = np.floor(normal(36, PART + 500, 2.0)).astype(np.float16)
"""Many equal logits."""
SMALL = normal(120, 43, 1.0, "float16")
NEAR = normal(120, 43, 1e-5)
"""Scores that differ in the last digit alone."""
FLAT = normal(12, CANDIDATES + 200, 0.002)
"""More candidates than the list holds."""
HOT: dict[str, Any] = {"seed": 1, "temperature": 4.0}
"""All kept tokens are about as probable: one too many or too few is drawn soon."""
EACH = {
    "temperature": each(0, 4, 3, 5, 1),
    "top_k": each(5, 0, 3, 8, 0, 2, dtype="int32"),
    "top_p": each(1, 0.01, 1, 0.3, 0.5, 1, 0.1),
    "min_p": each(0, 0, 0.5, 0),
    "seed": np.arange(36)[::-1].copy(),
}
CALLS: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "all": (PARTS, {"seed": 2**40 + 5, "step": 2**33}),
    "three": (normal(20, 2 * PART + 3000, 2.0), {"seed": 2}),
    "greedy": (STEPS, {"seed": None, "temperature": 0}),
    "small": (SMALL, {"seed": 9}),
    "top-k": (PARTS, {**HOT, "top_k": 4}),
    "cut": (PARTS, {**HOT, "top_k": 12, "top_p": 0.4}),
    "top-p": (PARTS, {**HOT, "temperature": 0.5, "top_p": 0.3}),
    "each": (PARTS, EACH),
    "min-p": (PARTS, {**HOT, "min_p": 0.4}),
    "near": (NEAR, {**HOT, "temperature": 1.0, "top_k": 5}),
    "both": (SMALL / np.float16(100), {"seed": 1, "top_k": 30, "min_p": 0.99}),
    "previous": (SMALL, {"seed": 1, "repetition_penalty": 3.0, "previous": ids(120, 43, 9)}),
    "large": (np.full((36, 4), 1e8, np.float32), {"seed": 1}),
    "infinite": (np.full((36, 4), np.inf, np.float32), {"seed": 1}),
    "just kept": (
        np.log(np.tile(np.float32([0.5, 0.3, 0.1, 0.1]), (36, 1))),
        {"seed": 1, "min_p": 0.6},
    ),
    "just reached": (
        np.log(np.tile(np.float32([0.5, 0.3, 0.1, 0.1]), (36, 1))),
        {"seed": 1, "top_p": 0.8},
    ),
    "flat": (FLAT, {"seed": 1, "top_k": 5}),
    "flat, previous": (
        FLAT,
        {"seed": 1, "top_k": 5, "repetition_penalty": 1.2, "previous": ids(12, PART, 3000)},
    ),
}
SHARED, BINS_CUH = "layers/sampling.cuh", "layers/sampling_bins.cuh"
MAXIMA, COUNTS, DRAW = "layers/sample_maxima.cu", "layers/sample_bins.cu", "layers/sample.cu"
BUGS = {
    "a word of the noise": (
        "small", Bug(DRAW, "gumbel_log2(words.word[i])", "gumbel_log2(words.word[i ^ 1])"),
    ),
    "the upper half of a step": ("all", Bug(SHARED, "static_cast<uint32>(step >> 32)", "0u")),
    "the upper half of a seed": ("all", Bug(SHARED, "static_cast<uint32>(seed >> 32)", "0u")),
    "all rows one seed": ("all", Bug(DRAW, "seed + index, index)", "seed, index)")),
    "the last of equal logits": (
        "greedy", Bug(DRAW, "other_token < token)) key", "other_token > token)) key"),
    ),
    "the last token of a group": (
        "small", Bug(DRAW, "kept |= static_cast<uint32>(keep) << i;",
                     "kept |= static_cast<uint32>(keep && i < 7) << i;"),
    ),
    "the last tokens of a row": (
        "small", Bug(SHARED, "token + i < vocabulary ?", "token + i < vocabulary - 9 ?"),
    ),
    "groups in the wrong order": (
        "all", Bug(SHARED, "items[next - 1] = items[next]", "items[next - 1] = items[0]"),
    ),
    "the best of the first part": (
        "three", Bug(DRAW, "int other = threadIdx.x;", "int other = threadIdx.x + 1;"),
    ),
    "the best of this part alone": (
        "three", Bug(DRAW, "if (FILTERED || params.parts > 1) best = best_of_cta(best, smem_s);\n",
                     ""),
    ),
    "bins that are not zeroed": (
        "top-k", Bug(MAXIMA, "row_bins_g[i] = {};", "row_bins_g[i] = {1, 0, 0, 0};"),
    ),
    "counters that are not zeroed": ("cut", Bug(MAXIMA, "threadIdx.x < 2)", "threadIdx.x < 1)")),
    "the largest of a part but one": (
        "top-p", Bug(SHARED, "part < parts; part += kThreads",
                     "part < parts - 1; part += kThreads"),
    ),
    "bins half as wide": (
        "cut", Bug(COUNTS, "first_digit(distance), weight", "first_digit(2 * distance), weight"),
    ),
    "a rank one too low": (
        "each", Bug(BINS_CUH, "reached.of(measure) < wanted && wanted <=",
                    "reached.of(measure) <= wanted && wanted <"),
    ),
    "a limb that is lost": (
        "top-p", Bug(BINS_CUH, "limb < kSums - 1; limb++", "limb < kSums - 2; limb++"),
    ),
    "sums of other warps": (
        "top-p", Bug(BINS_CUH, "if (warp < warp_index()) before",
                     "if (warp <= warp_index()) before"),
    ),
    "bins of neighbours": (
        "top-p", Bug(BINS_CUH, "if (lane_index() >= distance)", "if (lane_index() > distance)"),
    ),
    "a cut in one bin less": (
        "top-p", Bug(DRAW, "(low <= bin && bin <= high)", "(low < bin && bin <= high)"),
    ),
    "top-p of all instead of top-k's": (
        "cut", Bug(DRAW, "share(min(weight, bins.total.weight))", "share(bins.total.weight)"),
    ),
    "the last digit of a cut": (
        "near", Bug(DRAW, "shift >= 0; shift -= kDigitBits", "shift > 0; shift -= kDigitBits"),
    ),
    "digits of other prefixes": (
        "top-k", Bug(DRAW, "if (distance >> (shift + kDigitBits) == found.bin) {", "if (true) {"),
    ),
    "candidates beyond the list": (
        "flat", Bug(DRAW, "|| slot >= CANDIDATES) continue",
                    "|| slot > CANDIDATES + 300000) continue"),
    ),
    "a full list taken for whole": (
        "flat", Bug(DRAW, "if (count <= CANDIDATES) {", "if (count > 0) {"),
    ),
    "infinity as the largest": (
        "infinite", Bug(SHARED, "largest, partial_s), kLargestFinite);",
                        "largest, partial_s), kInfinity);"),
    ),
    "logits for differences": (
        "large", Bug(SHARED, "__fsub_rn(x, largest)", "x"),
    ),
    "all of top-p or one token more": (
        "just reached", Bug(SHARED, "kReached = 0x1.ffff8p+63f", "kReached = 0x1p64f"),
    ),
    "min-p as it is rounded": (
        "just kept", Bug(SHARED, " + (1u << (kFractionBits - 18))", ""),
    ),
    "a greedy row that is drawn": (
        "each", Bug(SHARED, "return !(temperature >= kLeastTemperature);", "return false;"),
    ),
    "min-p from the other side": (
        "min-p", Bug(DRAW, "bin < cuts.kept && distance <= farthest",
                     "bin < cuts.kept && distance < farthest / 2"),
    ),
    "min-p without candidates": (
        "both", Bug(DRAW, "uint32 farthest = row.filters.farthest();\n  uint64",
                    "uint32 farthest = ~0u;\n  uint64"),
    ),
    "penalties of the next token": (
        "previous", Bug(SHARED, "bits[place / 32] >> place % 32 & 1u",
                        "bits[place / 32] >> (place + 1) % 32 & 1u"),
    ),
    "penalties that strengthen": (
        "previous", Bug(SHARED, "x > 0.f ? __fdiv_rn", "x <= 0.f ? __fdiv_rn"),
    ),
    "previous tokens of the part before": (
        "flat, previous", Bug(DRAW, "previous_s.gather(row.previous_g, params, row.index, first);",
                              ""),
    ),
    "bins before they are zero": ("flat", without_barrier(DRAW, "bins_s: zero")),
    "bins before they are written": ("flat", without_barrier(DRAW, "bins_s: written")),
    "sums before they are written": (
        "cut", without_barrier(BINS_CUH, "shared_s.of_warp: written by every warp"),
    ),
    "a place before it is found": (
        "cut",
        without_barrier(BINS_CUH,
            "shared_s.found: written by the one thread that has the bin"),
    ),
    "bins of a part before they are counted": (
        "cut", without_barrier(COUNTS, "smem_s.bins: every thread has counted"),
    ),
    "bits before they are zero": ("previous", without_barrier(SHARED, "bits: zero")),
    "bits before they are set": (
        "previous", without_barrier(SHARED, "bits: every thread has set its own"),
    ),
    "the best of a warp before it is written": (
        "all", without_barrier(DRAW, "smem_s.best: written by every warp"),
    ),
}  # fmt: skip


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Inside, calls run from sources with a bug."""

    def device(*bugs: Bug) -> None:
        plant(tmp_path / "cuda_src", *bugs)
        made = PlantedDevice(tmp_path / "cuda_src", Checks.all())
        module = import_module("cupyattn.functional.backend")  # whose name is a function's too
        monkeypatch.setattr(module, "_device", lambda *_: made)

    return device


def right(name: str) -> bool:
    logits, options = CALLS[name]
    with cupyattn.backend("emulator"):
        found = cupyattn.sample(logits, **options)
    return bool((found == reference.sample(logits, **options)).all())


@pytest.mark.deep  # test_sampling.py tries what was not copied
def test_clean_copies_are_right(planted):
    planted()
    assert all(map(right, CALLS))


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_found(name, planted):
    call, bug = BUGS[name]
    planted(bug)
    with suppress(KernelFault):  # which is as good
        assert not right(call)
