"""Bugs planted in the kernels of decoding are found: by the emulator's checks, or by the bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.paged import PagedProblem, scales_of
from support.planted_bugs import Bug, PlantedDevice, plant, without_barrier

import cupyattn
from cupyattn.emulator import Checks, KernelFault, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc

FORWARD_CU, COMBINE_CU = "attention/decode/forward.cu", "attention/decode/combine.cu"
SHARES_CUH, FEED_CUH = "attention/decode/shares.cuh", "attention/decode/block_feed.cuh"
ROWS_CUH, END_CUH = "attention/decode/query_rows.cuh", "attention/row_sum.cuh"
TENSOR_CUH, FLOAT_CUH = (
    "attention/decode/tensor_core_rows.cuh",
    "attention/decode/float_rows.cuh",
)
ITEMS_CUH = "attention/decode/cache_items.cuh"
STORED_CUH = "attention/stored_items.cuh"
# Several units a sequence and CTA; rows of a second tile; every option.
HALF = PagedProblem(
    lengths=(0, 700, 37, 130), Sq=3, G=1, group=6, D=64, dtype="float16", block_size=32,
    options=(("causal", True), ("window_size", (600, 0)), ("alibi_slopes", True),
             ("softcap", 3.0), ("sinks", True)),
)  # fmt: skip
FLOAT = replace(HALF, dtype="float32", D=24, group=4, lengths=(0, 300, 37, 130))
# More than two times the 32 tiles whose blocks a warp looks up at once, in each of four CTAs.
LONG = PagedProblem(lengths=(17_000,), Sq=1, G=1, group=8, D=24, dtype="float32")
INT8 = PagedProblem(lengths=(0, 700, 37, 130), Sq=1, G=2, group=3, D=64, dtype="float16", bits=8)
INT4 = replace(INT8, bits=4)
FLOAT_INT4 = replace(INT8, bits=4, D=24, dtype="float32", lengths=(0, 300, 37, 130))
# More parts of a row than its warps load at once: a CTA for each unit of 64 keys.
MANY = replace(LONG, lengths=(4_700,), group=2)
MULTIPROCESSORS = {MANY: 40}
"""Otherwise 2."""


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its error over the bound."""

    def run(problem: PagedProblem, *bugs: Bug) -> float:
        folder = tmp_path / "cuda_src"
        plant(folder, *bugs)
        device = PlantedDevice(folder, Checks.all())
        module = sys.modules["cupyattn.functional.attention.paged"]
        monkeypatch.setattr(module, "device_of", lambda _: device)
        monkeypatch.setattr(PlantedDevice, "multiprocessors", MULTIPROCESSORS.get(problem, 2))
        arrays = problem.arrays()
        keywords = problem.keywords() | scales_of(arrays)
        out, lse = cupyattn.paged_attention(*arrays[:5], **keywords, return_lse=True)
        return problem.ratio(out, lse, arrays)

    return run


CLEAN = {
    "half": HALF,
    "float": FLOAT,
    "long": LONG,
    "many": MANY,
    "int8": INT8,
    "int4": INT4,
    "lanes": FLOAT_INT4,
}


@pytest.mark.parametrize("problem", CLEAN.values(), ids=CLEAN)
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem) <= 1


WRONG = [
    (HALF, Bug(FORWARD_CU, "first_key + kTileKeys > seen_to", "first_key > seen_to")),
    (HALF, Bug(SHARES_CUH, "cta * each + min(cta, longer)", "cta * each + min(cta, longer - 1)")),
    (HALF, Bug(SHARES_CUH, "2 * cta + (cta == first_cta)", "2 * cta")),
    (HALF, Bug(END_CUH, "l = __fmaf_rn(weight, parts[p].l, l)", "l += parts[p].l")),
    (LONG, Bug(FEED_CUH, "if (j + kWarpSize < count) ahead", "if (j < 0) ahead")),
    (HALF, Bug(FORWARD_CU, "if (edge) warp.rows.clear_v", "if (first_key < 0) warp.rows.clear_v")),
    (HALF, Bug(ITEMS_CUH, "__byte_perm(x, y, 0x7632)", "__byte_perm(y, x, 0x7632)")),
    (INT8, Bug(ITEMS_CUH, "^ 0x00800080u", "^ 0x00000080u")),
    (INT4, Bug(TENSOR_CUH, "+ value_bias[n][e]) * Format", "+ 0.f) * Format")),
    (INT4, Bug(TENSOR_CUH, "if (key_of(half) >= keys) v_scales", "if (keys < 0) v_scales")),
    (INT4, Bug(TENSOR_CUH, "    rescale(factor);\n    unit", "    unit")),
    (INT4, Bug(FORWARD_CU, "load_v(j, caches.v(place))", "load_v(0, caches.v(place))")),
    (FLOAT_INT4, Bug(FLOAT_CUH, "if (key_of(0) >= keys) v_scale", "if (keys < 0) v_scale")),
    (INT4, Bug(TENSOR_CUH, "value_bias[n][e] *= factor[2 * n + e % 2]", "value_bias[n][e] *= 1.f")),
    (HALF, Bug(SHARES_CUH, "(params, lengths, next.batch)", "(params, lengths, 0)")),
    (HALF, Bug(END_CUH, "if (part > last) continue;", "if (part >= last) continue;")),
    (MANY, Bug(COMBINE_CU, "    part = Row();\n", "")),
    (MANY, Bug(END_CUH, "begin += step * kTogether", "begin += kTogether")),
    (HALF, Bug(FEED_CUH, "mine % block_tiles * kTileKeys", "0")),
    (HALF, Bug(ROWS_CUH, "return (first + row) / params.group", "return row / params.group")),
    (HALF, Bug(END_CUH, "total = l * scale + ex2", "total = l + ex2")),
    (HALF, Bug(FORWARD_CU, "l[i] *= factor[i];", "")),
    (HALF, Bug(TENSOR_CUH, "movmatrix_trans(pack_halves(s[n][2 * half], s[n][2 * half + 1]))",
               "pack_halves(s[n][2 * half], s[n][2 * half + 1])")),
    (FLOAT, Bug(FLOAT_CUH, "row_factor = __shfl_sync(kFullWarp, own, holder(0, r))",
                "row_factor = own")),
    (FLOAT, Bug(FLOAT_CUH, "distance = kLanes; distance", "distance = 2 * kLanes; distance")),
    (INT8, Bug(ITEMS_CUH, "^ 0x64806480u", "^ 0x64006480u")),
    (INT8, Bug(TENSOR_CUH, "k_scales[slot][half] = tile.scale(8 * half)",
               "k_scales[slot][half] = tile.scale(0)")),
    (INT8, Bug(TENSOR_CUH, "even[n][e] = kScaled ? bias[n][e % 2] : 0.f", "even[n][e] = 0.f")),
    (INT8, Bug(TENSOR_CUH, "if constexpr (kScaled) sum *= unit;", "")),
    (INT4, Bug(TENSOR_CUH, "tile[0][e + 2] * Format::kOdd", "tile[0][e + 2]")),
    (INT4, Bug(TENSOR_CUH, "top >= 2.f * unit", "top < 0.f")),
    (INT4, Bug(ITEMS_CUH, "items[2 + x / 2]", "items[3 - x / 2]")),
    (FLOAT_INT4, Bug(STORED_CUH, "- (8388608.f + 8.f)", "- 8388608.f")),
    (FLOAT_INT4, Bug(FLOAT_CUH, "sums[group][i] * k_scale", "sums[group][i] * v_scale")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "bug"), WRONG)
def test_wrong_results_are_found(problem, bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert ratio_with(problem, bug) > 1


SHORT = replace(HALF, lengths=(0, 300, 37, 130))
WRONG_WHOLE = [
    Bug(SHARES_CUH, "cta % segments_of_sequence(params), 0", "0, 0"),
    Bug(
        SHARES_CUH, "const int batch = cta / segments_of_sequence(params);", "const int batch = 0;"
    ),
    Bug(FORWARD_CU, "params.ctas == 0 ? segment.units : shares", "params.ctas == 0 ? 1 : shares"),
    Bug(FORWARD_CU, "Shares(segment.units, 1)", "Shares(segment.units, 2)"),
]


@pytest.mark.usefixtures("whole_sequences")
@pytest.mark.parametrize("bug", [WRONG_WHOLE[0], None, *WRONG_WHOLE[1:]])
def test_wrong_results_of_short_sequences_are_found(bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert (ratio_with(SHORT, *([bug] if bug else [])) <= 1) == (bug is None)


@pytest.mark.parametrize(
    ("problem", "file", "comment"),
    [
        (HALF, FORWARD_CU, "smem: written by every warp"),
        (HALF, FORWARD_CU, "smem: read by every warp, before the next pass or segment writes"),
        (MANY, COMBINE_CU, "smem: written by every warp"),
    ],
)
def test_barriers_that_are_missing_are_found(problem, file, comment, ratio_with):
    with pytest.raises(SharedMemoryRaceError):
        ratio_with(problem, without_barrier(file, comment))


def test_an_entry_read_past_a_sequence_is_found(ratio_with):
    """It is wild: the block that it names lies outside of the cache."""
    bug = Bug(FEED_CUH, "min(j + lane_index(), count - 1)", "j + lane_index()")
    problem = replace(HALF, lengths=(16,), Sq=1)
    arrays = problem.arrays()
    assert np.count_nonzero(arrays[3] == 2**30) == arrays[3].size - 1
    with pytest.raises(KernelFault):
        ratio_with(problem, bug)
