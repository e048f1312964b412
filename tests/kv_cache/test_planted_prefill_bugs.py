"""Bugs planted in the paged feed of the forward kernels are found: by checks, or by the bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.packed import PackedProblem
from support.planted_bugs import Bug, PlantedDevice, plant

from cupyattn.emulator import Checks, KernelFault

pytestmark = pytest.mark.nvrtc

PARAMS_CUH, KEYS_CUH = "attention/paged_params.cuh", "attention/paged_keys.cuh"
TENSOR_CUH, FLOAT_CUH = (
    "attention/tensor_core/paged_feed.cuh",
    "attention/float32/paged_feed.cuh",
)
STORED_CUH, QUAD_CUH = "attention/stored_items.cuh", "attention/float32/stored_quad.cuh"
FORWARD_CUH, PLACES_CUH = "attention/tensor_core/forward.cuh", "attention/params.cuh"
# Blocks of three groups; a window that leaves blocks behind and hides a tile in part; a sequence
# without queries.
HALF = PackedProblem(
    lengths=(330, 50, 147), Sq=140, queries=(140, 0, 33), G=2, group=2, D=64, dtype="float16",
    block_size=48, options=(("causal", True), ("window_size", (70, 0))), spare=2,
)  # fmt: skip
ODD = replace(HALF, D=40)  # passes that cross groups
ONE = replace(HALF, D=128)  # one group a tile
FLOAT = replace(HALF, dtype="float32", D=24)
INT8, INT4 = replace(HALF, bits=8), replace(HALF, bits=4)
ODD_INT8, FLOAT_INT4 = replace(ODD, bits=8), replace(FLOAT, bits=4)


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its error over the bound."""

    def run(problem: PackedProblem, *bugs: Bug) -> float:
        folder = tmp_path / "cuda_src"
        plant(folder, *bugs)
        device = PlantedDevice(folder, Checks.all())
        module = sys.modules["cupyattn.functional.attention.paged"]
        monkeypatch.setattr(module, "device_of", lambda _: device)
        arrays = problem.arrays()
        return problem.ratio(*problem.on_arrays(arrays), arrays)

    return run


@pytest.mark.parametrize(
    "problem", [HALF, ODD, INT8, INT4, FLOAT_INT4, FLOAT, ODD_INT8],
    ids=["half", "odd", "int8", "int4", "float int4", "float", "odd int8"],
)  # fmt: skip
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem) <= 1


WRONG = [
    (HALF, Bug(KEYS_CUH, "- column * params.block_span", "")),
    (HALF, Bug(KEYS_CUH, "return kGroups > 1 ? __shfl_sync(kFullWarp, place, group) : place;",
               "return place;")),
    (HALF, Bug(KEYS_CUH, "static_cast<uint32>(keys - 1 - key) < static_cast<uint32>(seen_keys)",
               "key < keys")),
    (HALF, Bug(PARAMS_CUH, "place.begin = __shfl_sync(kFullWarp, span.begin, lane);",
               "place.begin = 0;")),
    (ODD, Bug(TENSOR_CUH, "own -= lane_index() * units.group;", ";")),
    (FLOAT, Bug(FLOAT_CUH, "(places, (own + further) / kGroupKeys",
                "(places, further / kGroupKeys")),
    (INT8, Bug(KEYS_CUH, "- column * params.scales.block_groups", "")),
    (INT8, Bug(TENSOR_CUH, "+ first_row() * all.scales.token", "")),
    (FLOAT_INT4, Bug(FLOAT_CUH, "mad_wide((own + further) % kGroupKeys, paged.scales",
                     "mad_wide(further % kGroupKeys, paged.scales")),
    (INT4, Bug(STORED_CUH, "1.f / 16.f, -18.f", "1.f / 16.f, -17.f")),
    (INT4, Bug(TENSOR_CUH, "quads.scales[pass] = 0.f", "quads.scales[pass] = __int_as_float(-1)")),
    (INT8, Bug(STORED_CUH, "0x4140 : 0x4342", "0x4140 : 0x4243")),
    (HALF, Bug(PARAMS_CUH, "(own_tiles - 1 - turn.tile)", "(turn.tile + 1)")),
    (HALF, Bug(PARAMS_CUH, "count = min(end - begin, params.attention.sq);",
               "count = params.attention.sq;")),
    (HALF, Bug(PARAMS_CUH, "place.batch) - place.sq;", "place.batch) - params.attention.sq;")),
    (HALF, Bug(PARAMS_CUH, "if (lane_index() >= distance) up_to += other;", "up_to += other;")),
    (HALF, Bug(PLACES_CUH, "place.head, place.begin + row)", "place.head, row)")),
    (HALF, Bug(TENSOR_CUH, "kEven ? k_feed.row % kGroupKeys : k_feed.row;", "0;")),
    (HALF, Bug(FORWARD_CUH, "feed.keep(next, ahead);", "")),
    (ONE, Bug(FORWARD_CUH, "const auto behind_next = walk.after(next_tile);",
              "const auto behind_next = next_tile + 1;")),
    (FLOAT, Bug(FLOAT_CUH, "further % kGroupKeys * paged", "0 * paged")),
    (FLOAT, Bug(FLOAT_CUH, "&& groups.exists(0, keys - first_key)", "")),
    (INT8, Bug(TENSOR_CUH, "place.kv_head * all.scales.head", "0")),
    (INT8, Bug(STORED_CUH, "^ 0x80808080u;\n      halves", ";\n      halves")),
    (INT8, Bug(STORED_CUH, "scale * HalfPairs<Item>::kUnit", "scale")),
    (INT4, Bug(STORED_CUH, "halves[2 + x] =", "halves[3 - x] =")),
    (INT4, Bug(TENSOR_CUH, "fetch<kRagged>(quads, v_feed, v_g, v_scales_g",
               "fetch<kRagged>(quads, v_feed, v_g, k_scales_g")),
    (ODD_INT8, Bug(TENSOR_CUH, "scale_bytes + pass * kPassRows * params.scales.token",
                   "scale_bytes")),
    (ODD_INT8, Bug(TENSOR_CUH, "from.scale_places);", "from.places);")),
    (FLOAT_INT4, Bug(FLOAT_CUH, "next.place(paged.scales.units)", "next.place(paged.units)")),
    (FLOAT_INT4, Bug(QUAD_CUH, "quad.items.item(2) * quad.scale", "quad.items.item(2)")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "bug"), WRONG)
def test_wrong_results_are_found(problem, bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert not ratio_with(problem, bug) <= 1  # NaN too


@pytest.mark.parametrize("problem", [HALF, FLOAT], ids=lambda problem: problem.dtype)
def test_an_entry_read_past_a_sequence_is_found(problem, ratio_with):
    """It is wild: the block that it names lies outside of the cache."""
    bugs = (
        Bug(KEYS_CUH, "lane_index() : 0), last)", "lane_index() : 0), last + 1)"),
        Bug(KEYS_CUH, "static_cast<uint32>(keys - 1 - key) < static_cast<uint32>(seen_keys)",
            "true"),
    )  # fmt: skip
    with pytest.raises(KernelFault):
        ratio_with(problem, *bugs)
