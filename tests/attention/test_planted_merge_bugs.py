"""Bugs planted in the kernel that merges two results of attention are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.planted_bugs import Bug, PlantedDevice, found_by, plant

from cupyattn import reference
from cupyattn.arrays import adopt
from cupyattn.emulator import Checks, MisalignedAccessError, OutOfBoundsError
from cupyattn.ops.attention.merge import merge_problem, run_merge

pytestmark = pytest.mark.nvrtc

MERGE_CU = "attention/merge.cu"


def apart(array: np.ndarray, axis: int) -> np.ndarray:
    """The same with gaps of NaN along an axis: every second place is another array's."""
    wide = np.repeat(np.full_like(array, np.nan), 2, axis=axis)
    view = wide[tuple(slice(None, None, 2 if i == axis else None) for i in range(array.ndim))]
    view[...] = array
    return view


def ratio(folder: Path, *bugs: Bug, width: int = 136) -> float:
    """The largest error over its bound: nine rows, each part without keys in some, b's last too.

    All axes differ, a row is longer than a warp's vectors (39 columns: than a warp), and no two
    arrays lie alike.
    """
    plant(folder / "cuda_src", *bugs)
    rng = np.random.default_rng(0)
    out_a, out_b = rng.standard_normal((2, 1, 3, 3, width)).astype(np.float16)
    lse_a, lse_b = 2 * rng.standard_normal((2, 1, 3, 3)).astype(np.float32)
    lse_a[0, 0, 1] = lse_b[0, 1, 2] = lse_a[0, 2, 0] = lse_b[0, 2, 0] = -np.inf
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        out[np.isneginf(np.swapaxes(lse, 1, 2))] = np.nan
    arrays = {"out_a": out_a, "lse_a": apart(lse_a, 1), "out_b": apart(out_b, 2), "lse_b": lse_b}
    results = {"out": np.full((1, 3, 3, width + 8), 7, np.float16)[..., :width]}
    results["lse"] = np.full((1, 3, 6), 7, np.float32)[..., :3]
    operands = adopt(arrays | results)
    found = run_merge(
        PlantedDevice(folder / "cuda_src", Checks.all()), merge_problem(operands), operands
    )
    parts = tuple(arrays.values())
    return max(
        reference.error_ratio(found[name], exact, bound)
        for name, exact, bound in zip(
            ("out", "lse"),
            reference.merge_attention(*parts),
            reference.merge_attention_bound(*parts),
            strict=True,
        )
    )


@pytest.mark.parametrize("width", [136, 39])
def test_a_clean_copy_is_right(tmp_path, width):
    assert 0 < ratio(tmp_path, width=width) <= 1


MISTAKES = {
    "the weights change places": Bug(
        MERGE_CU,
        "weight_a = p_a * normaliser, weight_b = p_b * normaliser;",
        "weight_a = p_b * normaliser, weight_b = p_a * normaliser;",
    ),
    "weights are not normalised": Bug(MERGE_CU, "1.f / total;", "1.f;"),
    "a power of two for one of e": Bug(MERGE_CU, "(b - top) * kLog2E", "b - top"),
    "lse to the base 2": Bug(MERGE_CU, "lg2_approx(total) * kLn2", "lg2_approx(total)"),
    "lse of the larger part alone": Bug(MERGE_CU, "top + lg2_approx(total) * kLn2", "top"),
    "the smaller on top": Bug(MERGE_CU, "a > b ? a : b", "a > b ? b : a"),
    "a part without keys is read": Bug(MERGE_CU, "if (has_a) load_vec", "load_vec"),
    "b without keys has a weight": Bug(MERGE_CU, "p_b = has_b ?", "p_b = true ?"),
    "b replaces a": Bug(MERGE_CU, "weight_a * items_a[i]);", "0.f);"),
    "a lane's later columns": Bug(MERGE_CU, "column < params.dim;", "column < kWarpSize * VEC;"),
    "the last row is left out": Bug(MERGE_CU, "row >= params.rows)", "row >= params.rows - 1)"),
    "heads and tokens change places": Bug(
        MERGE_CU, "lse_g, params.lse, batch, head, token)", "lse_g, params.lse, batch, token, head)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_of_the_bound(name, tmp_path):
    assert not ratio(tmp_path, MISTAKES[name]) <= 10


FAULTS = {
    "warps beyond the last row": Bug(MERGE_CU, "if (row >= params.rows) return;", ""),
    "strides of another array": Bug(MERGE_CU, "lse_b_g, params.lse_b,", "lse_b_g, params.lse_a,"),
    "columns beyond the row": Bug(MERGE_CU, "column < params.dim;", "column <= params.dim;"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, tmp_path):
    with found_by(OutOfBoundsError):
        ratio(tmp_path, FAULTS[name])


@pytest.mark.deep
def test_a_misaligned_access_is_found(tmp_path):
    with found_by(MisalignedAccessError):
        ratio(tmp_path, Bug(MERGE_CU, "lane_index() * VEC;", "lane_index() * VEC + 1;"))
