"""Bugs planted in the way of a quantised weight to tensor cores are found."""

from __future__ import annotations

from typing import Any

import pytest
from support.linear_problems import LinearCase
from support.planted_bugs import Bug
from support.tensor_core_linear import tensor_core_alone

from cupyattn.emulator import KernelFault, OutOfBoundsError

pytestmark = pytest.mark.nvrtc

CODES, FEED, FORWARD, PRODUCT, TAIL = (
    *(
        f"linear/quantised/tile_{name}"
        for name in ("codes.cuh", "feed.cuh", "forward.cu", "product.cu")
    ),
    "linear/tensor_core/forward_tile.cuh",
)


@pytest.fixture
def small_ratio_with(ratio_with):
    """The largest error over its bound, by these kernels alone in their smallest tile."""

    def ratio(case: LinearCase, backward: bool, *bugs: Bug) -> float:
        with tensor_core_alone(None if case.K >= 2048 else "small"):
            return ratio_with(case, backward, *bugs)

    return ratio


def case(weights: str, activation: str | None = None, **more: Any) -> LinearCase:
    sizes = {"rows": 70, "inner": 256, "outer": 70, **more}
    rows, inner, outer = (sizes.pop(name) for name in ("rows", "inner", "outer"))
    return LinearCase((rows,), inner, outer, "float16", activation, weights=weights, **sizes)


NF4, INT4, INT8, Q4_1, Q4_K = (case(name) for name in ("nf4", "int4", "int8", "q4_1", "q4_k"))
GATED = case("nf4", "swiglu", outer=40)
ACROSS = case("nf4", turned=True, inner=70, outer=192, biased=False)
ACROSS_K = case("q4_k", turned=True, inner=70, outer=512, biased=False)
LONG = case("int4", inner=2080)


@pytest.mark.parametrize(
    "problem", [NF4, INT4, INT8, Q4_1, Q4_K, GATED, ACROSS, ACROSS_K, LONG],
    ids=["nf4", "int4", "int8", "q4_1", "q4_k", "gated", "across", "across super-blocks", "parts"],
)  # fmt: skip
def test_a_clean_copy_is_right(problem, small_ratio_with):
    assert 0 < small_ratio_with(problem, False) <= 1


FAULTS: dict[str, tuple[LinearCase, bool, Bug]] = {
    "a row of codes too many": (
        NF4, False, Bug(FEED, "min(kOuterItems, left) - 1", "min(kOuterItems, left)"),
    ),
    "runs of columns that do not exist": (
        ACROSS, False, Bug(FEED, "(left - 1) / kRunItems * kRunItems", "kOuterItems - kRunItems"),
    ),
    "the first k-tile has all rows of codes": (
        case("nf4", turned=True, inner=24, outer=192, biased=False), False,
        Bug(FEED, "Chunks::line(i)) < valid", "0) < valid"),
    ),
    "a bias too many": (
        NF4, False, Bug(TAIL, "&& column < columns;", "&& column <= columns;"),
    ),
    "tiles of rows that do not exist": (
        case("nf4", rows=260, inner=64, outer=8), False,
        Bug(FORWARD, "if (first_row >= shape.rows) return;", ""),
    ),
    "the last part is as long as the others": (
        LONG, False,
        Bug(PRODUCT, "min(shape.split_inner, shape.inner - first_inner)", "shape.split_inner"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_an_access_out_of_bounds_is_found(name, small_ratio_with):
    problem, backward, bug = FAULTS[name]
    with pytest.raises(OutOfBoundsError):
        small_ratio_with(problem, backward, bug)


def test_a_place_without_a_part_of_the_sum_is_found(ratio_with):
    long = case("int4", turned=True, inner=1600, outer=128, biased=False)
    bug = Bug(PRODUCT, "if (SPLIT && first_inner >= shape.inner) return;", "")
    with pytest.raises(OutOfBoundsError), tensor_core_alone("small", splits=3):
        ratio_with(long, False, bug)


MISTAKES: dict[str, tuple[LinearCase, bool, Bug]] = {
    "an even k in the other digit": (NF4, False, Bug(CODES, "high, 0x4051", "high, 0x5140")),
    "codes from 8 on are those below": (
        NF4, False, Bug(CODES, "above & upper | below & ~upper", "below"),
    ),
    "the sign of the second half's codes is the first's": (
        NF4, False, Bug(CODES, "i ? 0xbfae : 0x9d8c", "0x9d8c"),
    ),
    "k and k + 4 change places": (
        Q4_1, False,
        Bug(CODES, "return make_uint4(prmt(pairs[0], pairs[1], 0x5410)",
            "return make_uint4(prmt(pairs[0], pairs[1], 0x1054)"),
    ),
    "the upper digit counts sixteen": (
        INT4, False, Bug(CODES, "both(1.f / 16.f), minus_sixteenth", "both(1.f), minus_sixteenth"),
    ),
    "the zero point's fraction is lost": (
        INT4, False, Bug(CODES, "add_f16x2(whole, minus_zero), scale)", "0, scale)"),
    ),
    "codes are unsigned": (INT8, False, Bug(CODES, " ^ 0x80808080u;  // q + 128", ";")),
    "the offset is added": (
        Q4_K, False, Bug(CODES, "prmt(products, 0, 0x3232) ^ 0x80008000u", "products"),
    ),
    "the next block's scale": (
        case("int4", block_size=32), False,
        Bug(FEED, "inner + items >> block_log2", "inner + items + 32 >> block_log2"),
    ),
    "the first super-block's numbers": (
        case("q4_k", inner=512), False, Bug(FEED, "(inner + items) / Format::kSuperBlock", "0"),
    ),
    "a super-block of neighbouring rows": (
        ACROSS_K, False, Bug(FEED, "(kScaleBytes * kPerSuperBlock) * kAboveBytes", "kScaleBytes"),
    ),
    "the scales stay where they are": (
        ACROSS, False,
        Bug(FEED, "      scales_g += static_cast<int64>(items) * blocks * kScaleBytes;\n", ""),
    ),
    "columns have the first block's scale": (
        ACROSS, False, Bug(FEED, "(first_outer + place) >> block_log2", "0"),
    ),
    "halves of a gated weight are one": (
        GATED, False, Bug(FEED, " + Outer::half(outer) * outer_length", ""),
    ),
    "a run's second half is its first": (
        NF4, False, Bug(FEED, "eight_weights(run, i % kStores)", "eight_weights(run, 0)"),
    ),
    "each part is the first": (
        LONG, False, Bug(PRODUCT, "SPLIT ? cta.split * shape.split_inner : 0", "0"),
    ),
    "a thread's second run lies in its first": (
        case("int4", "silu"), True,
        Bug(FEED, "i * kPassRuns * kRunItems * int(sizeof(float16))", "0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_the_bound(name, small_ratio_with):
    problem, backward, bug = MISTAKES[name]
    try:
        ratio = small_ratio_with(problem, backward, bug)
    except KernelFault:
        return  # found even sooner
    assert not ratio <= 1.5
