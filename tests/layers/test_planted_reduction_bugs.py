"""Bugs planted in the norm of gradients, log-sum-exp and the ids of an embedding are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from support.planted_bugs import Bug, PlantedDevice, plant

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Checks, KernelFault

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal(shape).astype(np.float16) for shape in ((33, 40), (4099,), (1,))]
ROWS = RNG.standard_normal((5, 2056)).astype(np.float32)
IDS = np.array([[3, 0, 7, 3], [7, 7, 1, 2]], np.int32)
DOUT = RNG.standard_normal((*IDS.shape, 24)).astype(np.float32)


def norm() -> tuple[Any, Any]:
    exact = np.sqrt(sum((array.astype(float) ** 2).sum() for array in ARRAYS))
    return cupyattn.global_norm(*ARRAYS), exact


def sums() -> tuple[Any, Any]:
    return cupyattn.logsumexp(ROWS, scale=0.5), reference.logsumexp(ROWS, scale=0.5)


def rows() -> tuple[Any, Any]:
    table = np.zeros((9, 24), np.float32)
    np.add.at(table, IDS, DOUT)
    return cupyattn.embedding_backward(DOUT, np.zeros_like(table), IDS), table


CALLS = {"norm": norm, "sums": sums, "rows": rows}
PARTIALS, IDS_CU, SUM = "layers/norm_partials.cu", "layers/embedding_ids.cu", "layers/logsumexp.cu"
BUGS = {
    "a norm's vectors begin one late": (
        norm, Bug(PARTIALS, "THREADS + threadIdx.x) * VEC", "THREADS + threadIdx.x + 1) * VEC"),
    ),
    "items behind a norm's last vector": (
        norm, Bug(PARTIALS, "threadIdx.x < ragged", "threadIdx.x + 1 < ragged"),
    ),
    "half of a sum": (
        sums, Bug(SUM, "batch < Rows::batches(row", "batch < -1 + Rows::batches(row"),
    ),
    "a row that is not merged": (sums, Bug(SUM, "  merge_row<Rows>(softmax, partial_s);\n", "")),
    "an id beside its own": (
        rows, Bug(IDS_CU, "static_cast<int>(id) : rows", "static_cast<int>(id ^ 1) : rows"),
    ),
    "the first row is none": (rows, Bug(IDS_CU, "id >= 0 &&", "id > 0 &&")),
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


def right(call: Callable[[], tuple[Any, Any]]) -> bool:
    with cupyattn.backend("emulator"):
        found, exact = call()
    return np.allclose(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_a_clean_copy_is_right(name, planted):
    planted()
    assert right(CALLS[name])


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_found(name, planted):
    call, bug = BUGS[name]
    planted(bug)
    with suppress(KernelFault):  # which is as good
        assert not right(call)
