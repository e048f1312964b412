"""Bugs planted in what rounds the float32 dQ of other dtypes are found: by checks, or bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.backward_runs import inputs
from support.planted_bugs import Bug, PlantedDevice, found_by, plant
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.emulator import Checks, OutOfBoundsError

pytestmark = pytest.mark.nvrtc

CONVERT = "attention/float32/backward_convert.cu"
# 44 rows, of which a CTA takes 8.
PROBLEM = AttentionProblem(B=2, Sq=11, Sk=20, H=2, G=1, D=24, Dv=40, dtype="float16")


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a backward of float16 without tensor cores, with bugs; returns dq's error over bound."""

    def run(*bugs: Bug, accumulate: bool = False) -> float:
        plant(tmp_path, *bugs)
        device = PlantedDevice(tmp_path, Checks.all())
        device.tensor_cores = False
        module = sys.modules["cupyattn.functional.attention.backward"]  # the function has its name
        monkeypatch.setattr(module, "device_of", lambda _: device)
        arrays, options = inputs(PROBLEM)
        start = np.float16(2**12 if accumulate else 0)
        grads = AttentionGrads(*(np.full(x.shape, start) for x in arrays[1:4]), None, None)
        found = cupyattn.attention_backward(*arrays, **options, grads=grads, accumulate=accumulate)
        exact = reference.attention_backward(*arrays, **options).dq
        bound = reference.attention_backward_bound(*arrays, dtype="float16", **options).dq
        return reference.error_ratio(found.dq, exact + start, bound + 2**-10 * float(start))

    return run


def test_a_clean_copy_is_right(ratio_with):
    assert 0 < ratio_with() <= 1
    assert 0 < ratio_with(accumulate=True) <= 1


def test_a_warp_too_many_is_found(ratio_with):
    with found_by(OutOfBoundsError):
        ratio_with(Bug(CONVERT, "batch >= params.batch", "batch > params.batch"))


MISTAKES = {
    "rows of another head": Bug(
        CONVERT, "flat / forward.sq % forward.heads", "flat % forward.heads"
    ),
    "a column too few": Bug(CONVERT, "d < HEAD_DIM;", "d + 1 < HEAD_DIM;"),
    "another sequence": Bug(CONVERT, "params.dq, batch, head, row", "params.dq, 0, head, row"),
}


@pytest.mark.parametrize("name", ["rows of another head", *list(MISTAKES)[1:]])
def test_a_mistake_is_out_of_bounds(name, ratio_with):
    assert not ratio_with(MISTAKES[name]) <= 1


def test_gradients_that_are_not_added_to_are_found(ratio_with):
    forgotten = Bug(
        CONVERT, "store_gradient(row_g + d, row_acc_g[d], params)",
        "row_g[d] = from_float<DTYPE>(row_acc_g[d])",
    )  # fmt: skip
    assert ratio_with(forgotten, accumulate=True) > 1
