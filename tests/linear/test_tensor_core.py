"""Products on tensor cores: results within bounds, tiles, grids and memory accesses."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import linear_problems as problems
from support.devices import EMULATED, KERNELS, emulated
from support.linear_problems import (
    LinearProblem,
    backward_ratio,
    forward_ratio,
    forward_steps,
    linear_problems,
    tensor_core_alone,
)
from support.search import deep, examples

import cupyattn
from cupyattn import emulator
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_tensor_core as configs
from cupyattn.ops.linear.kernels_tensor_core import ArrayProduct
from cupyattn.ops.linear.problem import Matrix
from cupyattn.ops.linear.tiles import Tiling, tile_bytes
from cupyattn.runtime.arch import TURING, Arch, arch_of
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device import emulated as emulated_device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.spec import Specialisation

pytestmark = pytest.mark.nvrtc

T4 = DeviceTraits(75, 40)


def case(rows, outer, inner, activation=None, **options) -> LinearProblem:
    return LinearProblem((rows,), inner, outer, "float16", activation, **options)


# At the last row and column of a tile, before and after them; the sum in one k-tile, in several,
# with a ragged first one; loads and stores by vectors, by items, or one of each; rows that lie
# apart, and backwards.
FORWARD = [
    ("wide", case(257, 200, 72, "gelu_tanh", transposed=True, residual=True)),
    ("wide", case(255, 96, 104, "swiglu", residual=True)),
    ("narrow", case(255, 127, 31, "relu", transposed=True, view="sliced", residual=True)),
    ("small", case(260, 8, 8)),  # CTAs whose rows do not exist
    *deep(
        ("short", case(127, 192, 16, "relu", view="padded")),
        ("small", case(129, 136, 40, "gelu", transposed=True, biased=False)),
        ("wide", case(256, 193, 64, transposed=True, residual=True)),
        ("wide", case(3, 104, 24, "geglu", transposed=True, view="padded")),
        ("narrow", case(257, 129, 33, "silu", biased=False)),
        ("narrow", case(31, 33, 1, "swiglu", view="sliced")),
        ("small", case(127, 56, 96, "geglu", residual=True)),
        ("short", case(129, 200, 88, "silu", transposed=True, residual=True)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), FORWARD, ids=str)
def test_forward(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1


@pytest.mark.parametrize(
    "problem",
    [
        case(70, 72, 2048, "geglu", residual=True),
        *deep(case(65, 33, 2050, "silu", transposed=True)),
        *deep(case(130, 264, 2056, transposed=True, residual=True, biased=False)),
    ],
    ids=str,
)
def test_a_forward_of_few_results_and_a_long_sum_is_split(problem):
    with tensor_core_alone():
        assert len(forward_steps(*problem.arrays(), problem.activation, T4)) == 2
    with KERNELS.running(), tensor_core_alone():
        assert 0 < forward_ratio(problem)[0] <= 1


BACKWARD = [
    ("narrow", case(70, 129, 33, "silu", transposed=True, accumulate=True)),
    ("small", case(130, 136, 40, "swiglu", accumulate=True)),
    *deep(
        ("wide", case(64, 200, 264, "gelu", transposed=True)),
        ("wide", case(33, 264, 193, accumulate=True)),
        ("narrow", case(40, 128, 264, biased=False)),
        ("small", case(31, 33, 7, "geglu", transposed=True, view="sliced")),
        ("short", case(16, 136, 200, "gelu_tanh", view="padded")),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), BACKWARD, ids=str)
def test_backward(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < backward_ratio(problem) <= 1


@pytest.mark.parametrize("transposed", [False, *deep(True)])
@pytest.mark.parametrize(("rows", "columns"), [(2048, 40), *deep((4099, 33))])
def test_a_long_sum_is_split(rows, columns, transposed):
    """The parts are added in order."""
    problem = case(rows, columns, 72, "relu", transposed=transposed, accumulate=True)
    with KERNELS.running(), tensor_core_alone():
        assert 0 < backward_ratio(problem) <= 1


def test_sum_split_in_three_is_within_bounds():
    """Four places are reserved for three parts; the last stays empty."""
    problem = case(1536, 40, 72, accumulate=True)
    with KERNELS.running(), tensor_core_alone("small", splits=3):
        assert 0 < backward_ratio(problem) <= 1


@examples(4)
@given(st.sampled_from(("wide", "narrow", "small", "short")), st.data())
@pytest.mark.deep
def test_drawn_problems(shape, data):
    kinds = [("float16", name) for name in (None, "gelu_tanh", "swiglu")]
    problem = data.draw(linear_problems(kinds, rows=(1, 31, 65, 127, 129, 255, 257)))
    with KERNELS.running(), tensor_core_alone(shape):
        assert forward_ratio(problem)[0] <= 1
        assert backward_ratio(problem) <= 1


@pytest.mark.parametrize("name", ["x", "out", *deep("w", "residual")])
def test_reversed_rows_give_the_same_result(name):
    """Strides below zero: offsets are counted from the lowest address of a tile."""
    problem = case(130, 72, 40, residual=True)
    x, w, b = problem.arrays()
    arrays = {"x": x, "w": w, "residual": problem.normal("residual", 130, 72)}
    arrays["out"] = np.zeros((130, 72), np.float16)
    expected = _linear(arrays, b)
    arrays[name] = arrays[name][::-1].copy()[::-1]
    np.testing.assert_array_equal(_linear(arrays, b), expected)


def test_reversed_gated_columns_give_the_same_result():
    """The lowest address is in the half that comes second."""
    x, w, b = case(70, 72, 40, "swiglu", transposed=True).arrays()
    reversed_w = w.T[::-1].copy()[::-1].T
    with KERNELS.running(), tensor_core_alone("small"):
        expected, found = (
            KERNELS.get(cupyattn.linear(*map(KERNELS.put, (x, each, b)), activation="swiglu"))
            for each in (w, reversed_w)
        )
    np.testing.assert_array_equal(found, expected)


def _linear(arrays, b):
    placed = {name: KERNELS.put(array) for name, array in arrays.items()}
    with KERNELS.running(), tensor_core_alone("small"):
        cupyattn.linear(
            placed["x"], placed["w"], KERNELS.put(b), residual=placed["residual"], out=placed["out"]
        )
    return KERNELS.get(placed["out"])


def test_nan_affects_only_its_row_and_column():
    """NaN in the last row of x and the last column of w appears only there."""
    problem = case(130, 72, 40)
    x, w, b = problem.arrays()
    x[129], w[:, 71] = np.nan, np.nan
    arrays = {"x": x, "w": w, "residual": np.zeros((130, 72), np.float16)}
    found = np.isnan(_linear({**arrays, "out": np.zeros((130, 72), np.float16)}, b))
    expected = np.zeros((130, 72), bool)
    expected[129] = expected[:, 71] = True
    np.testing.assert_array_equal(found, expected)


# --- which tile, and which CTA computes what


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "shape"),
    [
        (8192, 16384, 4096, "wide"),
        (8192, 3072, 768, "wide"),
        (8192, 2560, 10240, "narrow"),
        (512, 10240, 2560, "narrow"),
        (128, 10240, 2560, "small"),
    ],
)
def test_the_tile_follows_from_the_sizes(rows, columns, inner, shape):
    x, w = Matrix(rows, inner, inner, 1, 2, 0), Matrix(inner, columns, 1, inner, 2, 0)
    assert ArrayProduct(configs.FORWARD, x, w).tiling(T4).shape == shape


def test_scalar_loads_use_the_narrow_tile():
    x, w = Matrix(8192, 4095, 4095, 1, 2, 0), Matrix(4095, 16384, 1, 4095, 2, 0)
    assert ArrayProduct(configs.FORWARD, x, w).tiling(T4).shape == "narrow"
    x, w = Matrix(8192, 4096, 4096, 1, 2, 0), Matrix(4096, 16384, 16384, 1, 2, 0)
    assert ArrayProduct(configs.FORWARD, x, w, out_vec=8).tiling(T4).shape == "wide"
    assert ArrayProduct(configs.FORWARD, x, w, out_vec=1).tiling(T4).shape != "wide"


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "multiprocessors", "splits"),
    [
        (768, 3072, 8192, 68, 4),
        (768, 768, 32768, 68, 16),
        (768, 768, 32768, 40, 3),
        (4096, 16384, 8192, 68, 1),
        (768, 768, 1000, 68, 1),
    ],
)
def test_long_sums_of_few_results_are_split(rows, columns, inner, multiprocessors, splits):
    x, dz = Matrix(rows, inner, 1, rows, 2, 0), Matrix(inner, columns, columns, 1, 2, 0)
    product = ArrayProduct(configs.PRODUCT, x, dz)
    tiling = product.tiling(DeviceTraits(75, multiprocessors), may_split=True)
    assert tiling.splits == splits
    assert product.part(splits) * (splits - 1) < inner, "a part has nothing"


@pytest.mark.parametrize("splits", [1, 3, 4])
@pytest.mark.parametrize("tiles", [(1, 1), (3, 1), (1, 7), (9, 5), (8, 86), (43, 670), (65, 3)])
def test_every_tile_has_one_cta(tiles, splits):
    """The computation is that of place_of_cta in params.cuh, in 32 bits."""
    x, w = Matrix(64, 64, 64, 1, 2, 0), Matrix(64, 64, 1, 64, 2, 0)
    x, w = x._replace(rows=tiles[0] * 256), w._replace(columns=tiles[1] * 192)
    product = ArrayProduct(configs.PRODUCT, x, w)
    ctas, params = product.geometry(75, Tiling("wide", splits))
    shift, splits_log2 = int(params["group_log2"]), int(params["splits_log2"])
    block = np.arange(ctas, dtype=np.uint64)
    column_of_group = block >> np.uint64(shift + splits_log2)
    reciprocal = np.uint64(params["column_tiles_reciprocal"])
    group = (2 * column_of_group + 1) * reciprocal >> np.uint64(32)
    row = (group << np.uint64(shift)) + (block & np.uint64((1 << shift) - 1))
    column = column_of_group - group * np.uint64(tiles[1])
    split = block >> np.uint64(shift) & np.uint64((1 << splits_log2) - 1)
    real = (row < tiles[0]) & (split < splits)
    found = set(zip(row[real].tolist(), column[real].tolist(), split[real].tolist(), strict=True))
    assert len(found) == real.sum() == tiles[0] * tiles[1] * splits
    assert max(place[1] for place in found) == tiles[1] - 1


def test_row_strides_beyond_32_bit_offsets_are_detected():
    """Offsets within the 256 rows of a tile, and between gated halves, fit in 32 bits."""
    near = Matrix(300, 64, 2**23 - 8, 1, 2, 0)
    assert tile_bytes(near, gated=False) < 2**32
    assert tile_bytes(near._replace(row_stride=-(2**23)), gated=False) >= 2**32
    assert tile_bytes(near._replace(row_stride=2**23), gated=True) >= 2**32


# --- newer GPUs


@pytest.mark.parametrize(("arch", "shape"), [(arch_of(80), "m16n8k16"), *deep((TURING, "m16n8k8"))])
@pytest.mark.parametrize("of_backward", [False, *deep(True)])
def test_products_use_m16n8k16_from_sm_80_on(of_backward, arch, shape, monkeypatch):
    """The emulator runs the loop over a k-tile, which has half the steps."""
    shapes: dict[str, set[str]] = {}

    def module(specialisation: Specialisation, target: Arch) -> emulator.Module:
        assert target is arch
        ptx = compile_ptx(specialisation, arch).code.decode()
        shapes[specialisation.spec.entry] = set(re.findall(r"mma\.sync\.aligned\.(m\w+)", ptx))
        return emulator.load(ptx)

    monkeypatch.setattr(emulated_device, "_module", module)
    monkeypatch.setattr(problems, "KERNELS", EMULATED)
    with emulated(arch.number), tensor_core_alone("wide"):
        if of_backward:
            assert 0 < backward_ratio(case(40, 72, 104)) <= 1
        else:
            assert 0 < forward_ratio(case(130, 72, 104, "silu", residual=True))[0] <= 1
    assert shapes["linear_product" if of_backward else "linear_forward"] == {shape}


def require_frugal(report: Report) -> None:
    """Require tensor cores, no bank conflicts, and whole sectors of 32 bytes."""
    assert report.instruction_mix["tensor"] > 0
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} == {1.0}
    assert report.sector_efficiency >= 0.98


@pytest.mark.parametrize(
    ("shape", "activation", "transposed"),
    [
        ("wide", "swiglu", False),
        *deep(
            ("wide", "swiglu", True),
            ("short", "gelu_tanh", False),
            ("wide", "gelu", False),
            ("narrow", "swiglu", True),
            ("narrow", "silu", False),
            ("small", "geglu", False),
            ("short", "relu", True),
        ),
    ],
)
def test_forward_wastes_no_memory_access(shape, activation, transposed):
    """The last tiles of a gated result are stored by 8 bytes a lane: whole sectors all the same."""
    case = LinearProblem((272,), 96, 192, "float16", activation, transposed, residual=True)
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone(shape):
        cupyattn.linear(
            *case.arrays(),
            residual=case.normal("residual", 272, 192),
            activation=activation,
            return_preactivation=True,
        )
    require_frugal(report)


@pytest.mark.parametrize(
    ("shape", "transposed"),
    [("small", False), *deep(("wide", False), ("wide", True), ("narrow", False), ("short", True))],
)
def test_backward_wastes_no_memory_access(shape, transposed):
    """dx, dw, the pass that forms dz, and the sums that become db.

    dw lies as w does. Either way round its memory is 256 rows of 192 items: whole tiles, as lanes
    beyond a tile's last row read a part of a sector.
    """
    inner, outer = (192, 256) if transposed else (256, 192)
    case = LinearProblem((96,), inner, outer, "float16", "silu", transposed)
    x, w, b = case.arrays()
    dout, z = (case.normal(name, 96, outer) for name in ("dout", "z"))
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone(shape):
        cupyattn.linear_backward(dout, x, w, b, activation="silu", preactivation=z)
    require_frugal(report)


def test_no_memory_access_is_wasted_by_parts_of_a_long_sum():
    case = LinearProblem((2048,), 64, 128, "float16", biased=False)
    x, w, _ = case.arrays()
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone():
        cupyattn.linear_backward(case.normal("dout", 2048, 128), x, w)
    require_frugal(report)
