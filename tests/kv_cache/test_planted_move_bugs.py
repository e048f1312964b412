"""Bugs planted in append_kv, copy_blocks and gather are found, by results or by the emulator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.appends import AppendProblem
from support.planted_bugs import Bug, PlantedDevice, plant

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Checks, KernelFault
from cupyattn.ops.kv_cache import append_problem, copies_problem, gather_problem

pytestmark = pytest.mark.nvrtc

APPEND_CU, FORMATS_CUH = "kv_cache/append.cu", "kv_cache/formats.cuh"
COPY_CU, GATHER_CU, ROTATION_CUH = (
    "kv_cache/copy_blocks.cu",
    "kv_cache/gather.cu",
    "layers/rotation.cuh",
)
HALF = AppendProblem((2, 7), H=5, G=3, D=64, dtype="float16", half=16, seed=3)
BYTES = replace(HALF, bits=8)
NIBBLES = AppendProblem((9,), H=3, G=3, D=34, dtype="float32", bits=4, half=15, seed=1)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the functions run sources with bugs in them, without looking at values."""

    def run(*bugs: Bug) -> None:
        folder = tmp_path / "cuda_src"
        plant(folder, *bugs)
        device = PlantedDevice(folder, Checks.all())
        for name in ("append", "copies", "gather"):
            module = sys.modules[f"cupyattn.functional.kv_cache.{name}"]
            monkeypatch.setattr(module, "device_of", lambda _: device)
        for module in (append_problem, copies_problem, gather_problem):
            monkeypatch.setattr(module, "checks_values", lambda _: False)

    return run


def append_ratio(problem: AppendProblem) -> float:
    """With slots that do not exist, which count as left out."""
    given = problem.memory()
    slots = given["slot_mapping"].reshape(-1)
    slots[1] = given["pool"].shape[0] * problem.block_size
    found = {name: array.copy() for name, array in given.items()}
    problem.call(found)
    slots[1] = -1
    return problem.ratio(found, given)


@pytest.mark.parametrize("problem", [HALF, BYTES, NIBBLES], ids=["half", "bytes", "nibbles"])
def test_clean_copies_are_right(problem, planted):
    planted()
    assert 0 < append_ratio(problem) <= 1
    assert copies_are_right()
    assert gather_is_right(8)
    assert gather_is_right(None)


APPENDS = [
    (HALF, Bug(APPEND_CU, "exists = slot >= 0 && slot < params.slots", "exists = slot >= 0")),
    (BYTES, Bug(APPEND_CU, "distance = LANES / 2", "distance = LANES / 4")),
    (NIBBLES, Bug(FORMATS_CUH, "return column * Cache::kBits / 8;", "return column;")),
    (HALF, Bug(APPEND_CU, "second ? sin : -sin", "second ? -sin : sin")),
    (NIBBLES, Bug(APPEND_CU, "load / kPerChunk * LANES", "load * LANES")),
    (HALF, Bug(APPEND_CU, "head + h < heads && column < dim", "column < dim")),
    (HALF, Bug(APPEND_CU, "exists = slot >= 0 && slot", "exists = slot")),
    (HALF, Bug(APPEND_CU, "role == Role::kQuery ? 2 * params.half : params.dim",
               "2 * params.half")),
    (HALF, Bug(APPEND_CU, "other = second ? column - half : column + half", "other = column")),
    (HALF, Bug(APPEND_CU, "pair = second ? other : column;", "pair = column;")),
    (HALF, Bug(APPEND_CU, "exists && head + h < heads", "exists")),
    (HALF, Bug(APPEND_CU, "batch * params.slots_batch + s * params.slots_seq", "s")),
    (HALF, Bug(APPEND_CU, "batch * params.positions_batch + s * params.positions_seq", "s")),
    (HALF, Bug(APPEND_CU, "role != Role::kValue;", "true;")),
    (HALF, Bug(APPEND_CU, "- block * params.block_size", "% params.block_size + 1")),
    (BYTES, Bug(APPEND_CU, "? k_scales_g : v_scales_g", "? v_scales_g : k_scales_g")),
    (BYTES, Bug(APPEND_CU, "column < 2 * half) {", "true) {")),
    (BYTES, Bug(FORMATS_CUH, "(q & kMask) << bit % 32", "(q & kMask) << bit % 16")),
    (NIBBLES, Bug(FORMATS_CUH, "kLargest = 7.f", "kLargest = 8.f")),
    (NIBBLES, Bug(FORMATS_CUH, "kOffset = 8", "kOffset = 7")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "bug"), APPENDS)
def test_tokens_in_wrong_places_are_found(problem, bug, planted):
    planted(bug)
    with suppress(KernelFault):  # which is as good
        assert append_ratio(problem) > 1


@pytest.mark.parametrize("quotient", ["first", "rintf(first)", "second * 1.0000001f"])
def test_quotients_that_are_rounded_otherwise_are_found(quotient, planted):
    """Of numbers beside ties, of zeros, and of what is not finite."""
    planted(
        Bug(FORMATS_CUH, "__fmaf_rn(__fmaf_rn(-m, second, scaled), reciprocal, second)", quotient)
    )
    rng = np.random.default_rng(0)
    problem = AppendProblem((300,), H=0, G=4, D=24, dtype="float32", bits=8)
    given = problem.memory()
    (_, _, k, v, slots), _ = problem.views(given)
    slots[:] = rng.permutation(slots.size)
    k[0], k[1, 0, 0], k[2, 0, 0] = 0, np.inf, np.nan
    scale = np.abs(v).max(axis=-1, keepdims=True) / np.float32(127)
    v[..., 4:20] = (rng.integers(-60, 60, (300, 4, 16)) + 0.5).astype(np.float32) * scale
    problem.call(found := {name: array.copy() for name, array in given.items()})
    assert problem.ratio(found, given) > 1


def copies_are_right(as_array: bool = True) -> bool:
    """Chains within and across what is copied together, and rows that copy nothing."""
    caches = np.random.default_rng(0).standard_normal((2, 7, 2, 3, 8)).astype(np.float16)
    copies = [(i % 5, (3 * i + 1) % 5) for i in range(20)] + [(0, 5), (5, 6)]
    expected = [cache.copy() for cache in caches]
    reference.copy_blocks(expected, copies)
    given: Any = np.array([(-1, -1), (9, 0), (0, 9), *copies]) if as_array else copies
    cupyattn.copy_blocks(*caches, given)
    return all(np.array_equal(*pair) for pair in zip(caches, expected, strict=True))


COPIES = [
    Bug(COPY_CU, "wanted[earlier] && dst[earlier] == src[i]", "false"),
    Bug(COPY_CU, "block >= 0 && block < num_blocks", "block < num_blocks"),
    Bug(COPY_CU, "wanted[earlier] && dst[earlier] == src[i]", "dst[earlier] == src[i]"),
    Bug(COPY_CU, "block < num_blocks", "true"),
    Bug(COPY_CU, "first + i < params.copies", "true"),
    Bug(COPY_CU, "int earlier = 0; earlier < i", "int earlier = 1; earlier < i"),
    Bug(COPY_CU, "if (place.first_g == nullptr) return;", ""),
]


@pytest.mark.parametrize("bug", COPIES)
def test_copies_in_another_order_are_found(bug, planted):
    planted(bug)
    with suppress(KernelFault):
        assert not copies_are_right()


@pytest.mark.deep
def test_copies_that_are_passed_are_found(planted):
    planted(Bug(COPY_CU, "src[i] = params.src[first + i]", "src[i] = params.src[i]"))
    assert not copies_are_right(as_array=False)


def gather_is_right(bits: int | None) -> bool:
    """A wild id, one that is gone, a length beyond the table and one below 0."""
    shape = 2, 6, 4, 2, 6 if bits == 4 else 12  # single items, and vectors
    tokens = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    caches, scales, options = tokens, [None, None], {}
    if bits:
        caches, scales = reference.quantise(tokens, bits)
        options = {"k_scales": scales[0], "v_scales": scales[1], "dtype": "float32"}
    table = np.array([[4, 0, 9], [5, -1, 3], [1, 2, -3], [2, 2, 2]], np.int32)
    lengths = np.array([11, 10, 99, -4], np.int32)
    exact = [
        reference.gather(cache, table, lengths, 14, scale)
        for cache, scale in zip(caches, scales, strict=True)
    ]
    found = cupyattn.gather(*caches, table, lengths, max_seqlen_k=14, **options)
    bounds = [reference.gather_bound(each, "float32") if bits else 0.0 for each in exact]
    ratios = map(reference.error_ratio, found, exact, bounds)
    return max(ratios) <= 1


GATHERS = [
    (4, Bug(FORMATS_CUH, "word[0] >>= kBits", "word[0] >>= 0")),
    (8, Bug(FORMATS_CUH, "static_cast<signed char>(lowest)", "static_cast<int>(lowest & 255u)")),
    (8, Bug(GATHER_CU, "block >= 0 && block < params.num_blocks", "block >= 0")),
    (8, Bug(GATHER_CU, "t < length && table", "t <= length && table")),
    (8, Bug(GATHER_CU, "const int64 length", "const uint32 length")),
    (8, Bug(GATHER_CU, "table_column < static_cast<uint32>(params.max_blocks)", "true")),
    (None, Bug(GATHER_CU, "if (token >= params.tokens) return;", "")),
    (8, Bug(GATHER_CU, "v_scales_g + place_of(", "k_scales_g + place_of(")),
    (None, Bug(GATHER_CU, "t - table_column * params.block_size", "t % 2")),
]  # fmt: skip


@pytest.mark.parametrize(("bits", "bug"), GATHERS)
def test_tokens_from_elsewhere_are_found(bits, bug, planted):
    planted(bug)
    with suppress(KernelFault):
        assert not gather_is_right(bits)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("x, cos, other * turn", "x, cos, x * turn"), ("piece, source + first", "piece, source")],
)
def test_wrong_rotations_are_found(right, wrong, planted):
    planted(Bug(ROTATION_CUH, right, wrong))
    assert append_ratio(HALF) > 1
