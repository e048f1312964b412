"""Bugs planted in quantize and dequantize are found, by results or by the emulator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.planted_bugs import Bug, PlantedDevice, found_by, plant, without_barrier
from support.quantised_weights import made_up, weights

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.emulator import Checks, KernelFault, OutOfBoundsError, SharedMemoryRaceError
from cupyattn.ops.linear import quantised

pytestmark = pytest.mark.nvrtc

FORMATS, QUANTIZE, DEQUANTIZE = (
    f"linear/quantised/{name}" for name in ("formats.cuh", "quantize.cu", "dequantize.cu")
)
NEST, EXPAND = "linear/quantised/nest_scales.cu", "linear/quantised/expand_scales.cu"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the functions run sources with bugs in them, without looking at values."""

    def run(*bugs: Bug) -> None:
        plant(tmp_path / "cuda_src", *bugs)
        device = PlantedDevice(tmp_path / "cuda_src", Checks.all())
        module = sys.modules["cupyattn.functional.linear.quantised"]
        monkeypatch.setattr(module, "device_of", lambda _: device)
        monkeypatch.setattr(quantised, "checks_values", lambda _: False)

    return run


def quantised_right(kind: str, *, along_k: bool = True) -> bool:
    """Rows that are no multiple of a warp's, and a block that is not finite."""
    w = weights(96, 33, along_k=along_k)
    w[40, 6] = np.inf
    w[64:, 7] = 0
    w[64:66, 7] = -6.501, 8.501  # of int4 steps of 1, from -7 to 9: one too many
    found = cupyattn.quantize(w, format=kind, block_size=32)
    codes, scales = reference.quantize(w.T, kind, 32)
    return np.array_equal(found.codes, codes) and np.array_equal(
        found.scales, scales, equal_nan=True
    )


def numbers_right(weight: QuantizedWeight, *, turned: bool = False) -> bool:
    arrays = (weight.codes, weight.scales, weight.super_scales, weight.block_size)
    out = np.zeros(weight.shape, np.float32) if turned else None
    found = cupyattn.dequantize(weight, out=out)
    return np.array_equal(found.T, reference.dequantize(weight.format, *arrays))


def weight_of(kind: str) -> QuantizedWeight:
    return made_up(kind, 33, 512, 512 if kind == "int8" else 32)


def test_clean_copies_are_right(planted):
    planted()
    for kind in ("nf4", "int4", "int8"):
        assert quantised_right(kind)
    assert quantised_right("nf4", along_k=False)
    for kind in ("nf4", "int4", "int8", "q4_1", "q4_k"):
        assert numbers_right(weight_of(kind))
    assert numbers_right(weight_of("nf4"), turned=True)
    assert nested_right()


def nested_right() -> bool:
    """69 blocks: a group, and five blocks of another, of which the last is no whole word."""
    w = np.random.default_rng(0).standard_normal((96, 23), np.float32)
    found = cupyattn.quantize(w, format="nf4_nested", block_size=32)
    _, absmax = reference.quantize(w.T, "nf4", 32)
    made = zip((found.scales, found.super_scales), reference.nest_scales(absmax), strict=False)
    with cupyattn.backend("reference"):
        exact = reference.dequantised_rows(found)
    return all(np.array_equal(*pair) for pair in made) and np.array_equal(
        cupyattn.dequantize(found).T, exact
    )


NESTED: dict[str, Bug] = {
    "the largest alone": Bug(NEST, "__fmul_rn(low, 0.5f)", "0.f"),
    "half of a group": Bug(NEST, "warp_reduce<Min>(low)", "warp_reduce<Min, 16>(low)"),
    "codes that are cut": Bug(NEST, "rintf(__fadd_rn", "floorf(__fadd_rn"),
    "a sum that rounds once": Bug(
        EXPAND, "__fadd_rn(__fmul_rn(table_s[codes >> 8 * i & 0xff], group.x), group.y)",
        "fmaf(table_s[codes >> 8 * i & 0xff], group.x, group.y)",
    ),
    "one group for all": Bug(EXPAND, "[first / GROUP]", "[0]"),
    "the first code of a word": Bug(EXPAND, "codes >> 8 * i", "codes"),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_a_mistake_gives_other_scales(name, planted):
    planted(NESTED[name])
    assert not nested_right()


@pytest.mark.parametrize(
    ("bug", "fault"),
    [
        (Bug(NEST, "place < count ? place : first", "place"), OutOfBoundsError),
        (Bug(NEST, "if (place < count) scales_g", "scales_g"), OutOfBoundsError),
        (Bug(EXPAND, "first + kItems <= count", "true"), OutOfBoundsError),
        (without_barrier(EXPAND, "table_s: filled"), SharedMemoryRaceError),
    ],
)
def test_a_fault_of_scales_is_found(bug, fault, planted):
    planted(bug)
    with found_by(fault):
        nested_right()


MISTAKES: dict[str, tuple[str, Bug]] = {
    "the largest weight alone": ("nf4", Bug(QUANTIZE, "fmaxf(high, 0.f - low)", "high")),
    "lanes that are not asked": (
        "nf4", Bug(QUANTIZE, "warp_reduce<Max, LANES>", "warp_reduce<Max, LANES / 2>"),
    ),
    "one threshold for all codes": ("nf4", Bug(QUANTIZE, "x > kThreshold", "x >= 0.f")),
    "nibbles the other way round": (
        "nf4", Bug(QUANTIZE, "(Format::kEvenHigh ? i ^ 1 : i)", "i"),
    ),
    "an infinity that is a number": (
        "int8", Bug(QUANTIZE, "__fdiv_rn(block.absmax(), kLargest) + block.nan",
                    "__fdiv_rn(block.absmax(), kLargest)"),
    ),
    "a sign that runs into its neighbour": ("int8", Bug(QUANTIZE, " & kMask) << bit", ") << bit")),
    "quotients by the scale that is not stored": (
        "int4", Bug(QUANTIZE, "scale(to_float(stored))",
                    "scale(__fdiv_rn(block.high - block.low, kMost))"),
    ),
    "a zero that is no integer": (
        "int4", Bug(QUANTIZE, "rintf(quotient_or_zero(0.f - block.low, scale))",
                    "quotient_or_zero(0.f - block.low, scale)"),
    ),
    "codes above 15": (
        "int4", Bug(QUANTIZE, "zero, 0.f), kMost)", "zero, 0.f), 16.f)"),
    ),
    "scales of the block before": (
        "nf4", Bug(QUANTIZE, "store(scales_g + number", "store(scales_g + (number ^ 1)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_other_codes(name, planted):
    kind, bug = MISTAKES[name]
    planted(bug)
    with suppress(KernelFault):
        assert not quantised_right(kind)


FAULTS: dict[str, tuple[bool, Bug]] = {
    "a row too many": (True, Bug(QUANTIZE, "column < params.outer && block", "block")),
    "a block too many": (
        False, Bug(QUANTIZE, "column < params.outer && block < params.blocks", "true"),
    ),
    "weights behind the block": (
        True, Bug(QUANTIZE, "exists ? lane * kUnit : params.block_size", "lane * kUnit"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_quantize_is_found(name, planted):
    along_k, bug = FAULTS[name]
    planted(bug)
    with found_by(OutOfBoundsError):
        quantised_right("nf4", along_k=along_k)


NUMBERS: dict[str, tuple[str, bool, Bug]] = {
    "the other nibble": (
        "int4", False, Bug(DEQUANTIZE, "(FORMAT::kEvenHigh ? i ^ 1 : i)", "(i ^ 1)"),
    ),
    "bytes without a sign": (
        "int8", False, Bug(DEQUANTIZE, "signed char>(lowest)", "unsigned char>(lowest)"),
    ),
    "a zero behind the product": (
        "int4", False, Bug(FORMATS, "(q - block.shift) * block.scale",
                           "q * block.scale - block.shift"),
    ),
    "an offset that is taken away": (
        "q4_1", False, Bug(FORMATS, "__fmaf_rn(q, block.scale, block.shift)",
                           "__fmaf_rn(q, block.scale, -block.shift)"),
    ),
    "a minimum that is added": (
        "q4_k", False, Bug(FORMATS, "-(to_float(above_g[1])", "(to_float(above_g[1])"),
    ),
    "one super-block for all": (
        "q4_k", True, Bug(DEQUANTIZE, "supers + k / max(FORMAT::kSuperBlock, 1)", "supers"),
    ),
    "one block for all": ("nf4", True, Bug(DEQUANTIZE, "blocks + k / params.block_size", "blocks")),
    "the first piece of codes twice": (
        "int8", True, Bug(DEQUANTIZE, "(unit_g)[piece]", "(unit_g)[0]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_mistake_gives_other_numbers(name, planted):
    kind, turned, bug = NUMBERS[name]
    planted(bug)
    assert not numbers_right(weight_of(kind), turned=turned)


def test_a_row_too_many_is_found(planted):
    planted(Bug(DEQUANTIZE, "row >= params.outer || unit", "unit"))
    with found_by(OutOfBoundsError):
        numbers_right(weight_of("q4_1"))


def test_a_barrier_dropped_is_found(planted):
    planted(without_barrier(DEQUANTIZE, "codebook_s: filled"))
    with found_by(SharedMemoryRaceError):
        numbers_right(weight_of("nf4"))
