"""`matmul`: results within bounds for any shapes and strides, gradients, and refusals."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS, emulated, has_mma, without_tensor_cores
from support.linear_problems import always
from support.search import deep, examples

import cupyattn
from cupyattn import emulator, reference
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_matmul as kernels
from cupyattn.ops.linear import plan_matmul as plans
from cupyattn.ops.linear.api_matmul import described_matmul, product_by
from cupyattn.ops.linear.plan_matmul import MatmulArrays, MatmulProblem, matmul_plan
from cupyattn.ops.linear.tiles import TensorCoreProduct
from cupyattn.runtime.arch import arch_of
from cupyattn.runtime.arrays import adopt, dtype_of
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device import emulated as emulated_device
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Plan
from cupyattn.testing import MatmulCase, assert_within_bounds, expected, matmul_cases
from cupyattn.testing.layers import MATRIX_VIEWS
from cupyattn.turing import memory_figures

T4 = DeviceTraits(75, 40)
BATCH: dict[str, Any] = {"a_batch": (2,), "b_batch": (2,)}


def within_bounds(case: MatmulCase) -> None:
    """Assert it of the kernels' result."""
    arrays = case.arrays()
    with KERNELS.running():
        want = expected(cupyattn.matmul, *arrays)
        found = cupyattn.matmul(*map(KERNELS.put, arrays))
    assert_within_bounds(KERNELS.get(found), *want)


def plan_of(*arrays: Any, out: Any = None, traits: DeviceTraits = T4) -> Plan:
    return matmul_plan(described_matmul(adopt(MatmulArrays(*arrays, out)).description), traits)


def entries(*arrays: Any, **options: Any) -> list[str]:
    """The kernels that a call launches on a T4."""
    return [step.specialisation.spec.entry for step in plan_of(*arrays, **options).steps]


@pytest.fixture
def tile(monkeypatch, request):
    """Use the tile of the test's parameter, whatever the sizes."""
    monkeypatch.setattr(TensorCoreProduct, "tiling", always(request.param))
    matmul_plan.cache_clear()
    yield request.param
    matmul_plan.cache_clear()


# --- kernels

# At the last row and column of a tile, before and after them; the sum in one k-tile and in several,
# with a ragged first one; lines in each pair of directions; loads and stores by vectors or items.
TILES = [
    ("tiny", MatmulCase(72, 40, 65, **BATCH, dtype="float16")),
    ("tiny", MatmulCase(64, 72, 136, **BATCH, dtype="float16", a_view="transposed")),
    ("skinny", MatmulCase(33, 72, 130, **BATCH, dtype="float16", b_view="transposed")),
    ("small", MatmulCase(129, 31, 127, **BATCH, dtype="float16", b_view="strided")),
    *deep(
        ("wide", MatmulCase(257, 72, 200, **BATCH, dtype="float16")),
        ("wide", MatmulCase(256, 40, 193, **BATCH, dtype="float16", a_view="transposed")),
        ("narrow", MatmulCase(255, 33, 129, **BATCH, dtype="float16", a_view="strided")),
        ("narrow", MatmulCase(264, 8, 127, **BATCH, dtype="float16", b_view="transposed")),
        ("small", MatmulCase(128, 64, 128, **BATCH, dtype="float16", a_view="padded")),
        ("short", MatmulCase(136, 56, 200, **BATCH, dtype="float16", a_view="transposed",
                             b_view="transposed")),
        ("skinny", MatmulCase(7, 104, 136, **BATCH, dtype="float16")),
        ("tiny", MatmulCase(8, 8, 8, **BATCH, dtype="float16", b_view="transposed")),
        ("tiny", MatmulCase(64, 136, 64, **BATCH, dtype="float16", a_view="transposed",
                            b_view="transposed")),
    ),
]  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize(("tile", "case"), TILES, ids=str, indirect=["tile"])
def test_every_tile_is_within_bounds(tile, case):
    assert set(entries(*case.arrays())) == {"matmul"}
    within_bounds(case)


# How operands lie, and how they are loaded: contiguous along the sum in whole vectors; contiguous
# across it in whole words, transposed; by single items, with an odd number of them.
INT8 = [
    ("small", MatmulCase(129, 80, 132, **BATCH, b_view="transposed"), "PP"),
    ("small", MatmulCase(40, 65, 132, **BATCH), "IT"),
    ("small", MatmulCase(132, 144, 72, **BATCH, a_view="transposed"), "TT"),
    ("tiny", MatmulCase(72, 144, 65, **BATCH, b_view="transposed"), "PP"),
    *deep(
        ("small", MatmulCase(130, 144, 136, **BATCH), "PT"),
        ("small", MatmulCase(131, 72, 136, **BATCH), "IT"),
        ("small", MatmulCase(136, 144, 131, **BATCH, a_view="transposed", b_view="transposed"),
         "TP"),
        ("small", MatmulCase(136, 129, 131, **BATCH, a_view="transposed", b_view="strided"), "TI"),
        ("small", MatmulCase(3, 1, 2, **BATCH, a_view="sliced"), "II"),
        ("wide", MatmulCase(257, 112, 193, **BATCH, a_view="padded", b_view="transposed"), "PP"),
        ("narrow", MatmulCase(255, 16, 129, **BATCH, b_view="transposed"), "PP"),
        ("short", MatmulCase(127, 80, 192, **BATCH, b_view="transposed"), "PP"),
        ("skinny", MatmulCase(33, 208, 129, **BATCH, b_view="transposed"), "PP"),
    ),
]  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize(("tile", "case", "loaders"), INT8, ids=str, indirect=["tile"])
def test_int8_is_exact(tile, case, loaders):
    case = replace(case, dtype="int8")
    (step,) = plan_of(*case.arrays()).steps
    macros = dict(step.specialisation.macros)
    assert f"{macros['A_LOADER']}"[0] + f"{macros['B_LOADER']}"[0] == loaders
    within_bounds(case)


@pytest.mark.nvrtc
@examples(3, deep=60)
@given(matmul_cases(dtypes=["int8"], sizes=[0, 1, 16, 17, 36, 64], views=[
    "contiguous", "transposed"]))  # fmt: skip
def test_drawn_calls_of_int8_are_exact(case):
    within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.parametrize("a_view", ["contiguous", *deep("transposed", "strided")])
@pytest.mark.parametrize("b_view", ["contiguous", *deep("transposed", "strided")])
def test_int8_is_exact_without_tensor_cores(a_view, b_view):
    case = MatmulCase(72, 144, 72, **BATCH, dtype="int8", a_view=a_view, b_view=b_view)
    (step,) = plan_of(*case.arrays(), traits=T4._replace(tensor_cores=False)).steps
    assert not has_mma(step.specialisation)
    assert "dp4a" in compile_ptx(step.specialisation, arch_of(75)).code.decode()
    with without_tensor_cores():
        within_bounds(case)


@pytest.mark.nvrtc
def test_large_sums_of_int8_are_exact_on_kernels():
    a = np.full((1, 2**13), -128, np.int8)
    with KERNELS.running():
        found = KERNELS.get(cupyattn.matmul(KERNELS.put(a), KERNELS.put(a.T)))
    assert found[0, 0] == 2**27


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(65, 9, 72, **BATCH),
        MatmulCase(40, 33, 65, **BATCH, dtype="bfloat16", a_view="strided", b_view="transposed"),
        *deep(
            *(
                MatmulCase(63, 24, 129, **BATCH, dtype=dtype, a_view=a_view, b_view=b_view)
                for dtype in ("float32", "bfloat16")
                for a_view, b_view in itertools.product(MATRIX_VIEWS, MATRIX_VIEWS)
            )
        ),
    ],
    ids=str,
)
def test_float32_arithmetic_is_within_bounds(case):
    assert entries(*case.arrays()) in (["matmul_f32"], ["linear_forward_f32"])
    within_bounds(case)


@pytest.mark.nvrtc
def test_large_tiles_in_float32_are_within_bounds():
    case = MatmulCase(120, 9, 72, a_batch=(41,), b_batch=(41,), b_view="transposed")
    (step,) = plan_of(*case.arrays()).steps
    assert dict(step.specialisation.macros)["TILE_M"] == 128
    within_bounds(case)


@pytest.mark.nvrtc
def test_float16_without_tensor_cores_runs_in_float32():
    with KERNELS.running(), without_tensor_cores():
        within_bounds(MatmulCase(40, 24, 72, **BATCH, dtype="float16"))


@pytest.mark.nvrtc
@examples(4, deep=60)
@given(matmul_cases(dtypes=["float16", "float32"], sizes=[0, 1, 8, 13, 24, 65], views=[
    "contiguous", "transposed", "strided"]))  # fmt: skip
def test_drawn_calls_are_within_bounds(case):
    within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.deep
@examples(60)
@given(matmul_cases(dtypes=["float16", "float32", "bfloat16", "int8"]))
def test_any_calls_are_within_bounds(case):
    within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("tile", "case"),
    [
        ("skinny", MatmulCase(33, 72, 130, **BATCH, dtype="float16")),
        *deep(("tiny", MatmulCase(65, 72, 72, **BATCH, dtype="float16", a_view="transposed"))),
        *deep(("small", MatmulCase(129, 40, 72, **BATCH, dtype="float16"))),
    ],
    indirect=["tile"],
    ids=str,
)
def test_tiles_of_newer_gpus_are_within_bounds(tile, case, monkeypatch):
    """From sm_80 on, an instruction has two steps; the emulator runs it."""
    found: set[str] = set()

    def module(specialisation, arch):
        ptx = compile_ptx(specialisation, arch).code.decode()
        found.update(re.findall(r"mma\.sync\.aligned\.(m\w+)", ptx))
        return emulator.load(ptx)

    monkeypatch.setattr(emulated_device, "_module", module)
    with emulated(80):
        arrays = case.arrays()
        assert_within_bounds(cupyattn.matmul(*arrays), *expected(cupyattn.matmul, *arrays))
    assert found == {"m16n8k16"}


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "int8", "float32"])
def test_three_broadcast_batch_axes(dtype):
    """Neither operand's axes merge: kernels divide the number of a member by each extent."""
    case = MatmulCase(5, 8, 7, (3, 1, 4), (1, 5, 4), dtype)
    assert len(plan_of(*case.arrays()).steps) == 1
    within_bounds(case)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "int8", "float32"])
def test_reversed_rows_and_columns_are_within_bounds(dtype):
    """Vector loads with strides below zero: offsets count from the lowest address of a tile."""
    case = MatmulCase(70, 64, 72, **BATCH, dtype=dtype, b_view="transposed")
    a, b = case.arrays()
    arrays = a[:, ::-1], b[::-1, :, ::-1]
    with KERNELS.running():
        want = expected(cupyattn.matmul, *arrays)
        found = cupyattn.matmul(*map(KERNELS.put, arrays))
    assert_within_bounds(KERNELS.get(found), *want)
    (step,) = plan_of(*arrays).steps
    assert dict(step.specialisation.macros)["VEC"] > 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("swapped", [False, True])
def test_out_of_any_batch_strides_and_either_contiguous_axis(swapped):
    """Memory between the items of out stays as it is."""
    case = MatmulCase(9, 24, 40, (2, 3), (2, 3), "float16")
    memory = np.full((3, 2, 16, 48), 7, np.float16)
    memory = memory.swapaxes(-1, -2) if swapped else memory
    out = memory.swapaxes(0, 1)[..., :9, : 16 if swapped else 40]
    case = replace(case, N=out.shape[-1])
    a, b = case.arrays()
    with KERNELS.running():
        want = expected(cupyattn.matmul, a, b)
        placed = KERNELS.put(out)
        assert cupyattn.matmul(KERNELS.put(a), KERNELS.put(b), out=placed) is placed
    assert_within_bounds(KERNELS.get(placed), *want)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("swapped", [False, True])
def test_one_row_or_column_of_a_batch_is_written_with_any_stride(dtype, swapped):
    """Members with a shared factor are no product of more rows if their lines are then apart."""
    a, b = MatmulCase(1, 24, 8, (3,), (), dtype).arrays()
    arrays = (b.swapaxes(-1, -2), a.swapaxes(-1, -2)) if swapped else (a, b)
    memory = np.full((3, b.shape[-1], 4), 7, np.int32 if dtype == "int8" else a.dtype)
    with KERNELS.running():
        placed = KERNELS.put(memory)
        out = placed[..., :1] if swapped else placed[..., :1].swapaxes(-1, -2)
        want = expected(cupyattn.matmul, *arrays)
        found = cupyattn.matmul(*map(KERNELS.put, arrays), out=out)
        assert_within_bounds(KERNELS.get(found), *want)
        assert (KERNELS.get(placed)[..., 1:] == 7).all()


@pytest.mark.nvrtc
@pytest.mark.parametrize("backend", ["reference", "kernels"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_product_with_a_vector_fills_an_out_of_any_strides(backend, dtype):
    a, b = MatmulCase(9, 24, 40, (2, 3), (2, 3), dtype).arrays()
    kind = np.int32 if dtype == "int8" else a.dtype
    for arrays in ((a, b[0, 0, :, 0]), (a[0, 0, 0], b)):
        shape = np.matmul(*arrays).shape
        memory = np.full((*shape[:-1], 2 * shape[-1]), 7, kind)
        out = memory[..., ::2]
        want = expected(cupyattn.matmul, *arrays)
        if backend == "reference":
            with cupyattn.backend("reference"):
                found = cupyattn.matmul(*arrays, out=out)
        else:
            with KERNELS.running():
                placed = KERNELS.put(memory)
                found = cupyattn.matmul(*map(KERNELS.put, arrays), out=placed[..., ::2])
                found, memory = KERNELS.get(found), KERNELS.get(placed)
        assert_within_bounds(found, *want)
        assert (memory[..., 1::2] == 7).all()


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32", *deep("bfloat16")])
def test_a_sum_of_nothing_is_zero(dtype):
    a, b = np.ones((2, 3, 0), dtype_of(dtype)), np.ones((2, 0, 5), dtype_of(dtype))
    out = np.full((2, 3, 5), np.nan, dtype_of(dtype))
    with KERNELS.running():
        for given_out in (None, KERNELS.put(out)):
            found = cupyattn.matmul(KERNELS.put(a), KERNELS.put(b), out=given_out)
            np.testing.assert_array_equal(KERNELS.get(found), np.zeros((2, 3, 5)))


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(64, 64, 128, **BATCH, dtype="float16"),
        MatmulCase(128, 128, 128, **BATCH, dtype="int8"),
        *deep(
            MatmulCase(128, 128, 128, **BATCH, dtype="int8", a_view="transposed"),
            MatmulCase(64, 64, 64, **BATCH, dtype="int8", b_view="transposed"),
            MatmulCase(32, 64, 128, **BATCH, dtype="float16", b_view="transposed"),
        ),
    ],
    ids=str,
)
def test_aligned_batches_waste_no_memory_access(case):
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.matmul(*case.arrays())
    busy, cycles = ("integer_tensor", 4) if case.dtype == "int8" else ("tensor", 8)
    mix = report.instruction_mix
    assert {"integer_tensor", "tensor"} & mix.keys() == {busy}
    assert memory_figures(report, 1).cycles()["tensor"] == mix[busy] * cycles / 4
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} == {1.0}
    assert report.sector_efficiency >= 0.98


# --- plans


def zeros(*shape: int, dtype: str = "float16") -> Any:
    return np.zeros(shape, dtype_of(dtype))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((64, 512, 512, 512), "small"),
        ((4, 4096, 3072, 1024), "wide"),
        ((2048, 128, 128, 128), "small"),
        ((2048, 64, 64, 64), "tiny"),
        ((512, 8, 512, 512), "skinny"),
    ],
)
def test_the_tile_follows_from_the_sizes(sizes, shape):
    members, m, n, k = sizes
    a = np.lib.stride_tricks.as_strided(zeros(1), (members, m, k), (2 * m * k, 2 * k, 2))
    b = np.lib.stride_tricks.as_strided(zeros(1), (members, k, n), (2 * n * k, 2 * n, 2))
    (step,) = plan_of(a, b).steps
    macros = dict(step.specialisation.macros)
    rows = {each.tile_rows: each.tile_columns for (name, _), each in
            kernels.CONFIGURATIONS[75].items() if name == shape}  # fmt: skip
    assert rows == {macros["TILE_ROWS"]: macros["TILE_COLUMNS"]}


def test_a_shared_factor_makes_one_product_of_more_rows():
    """It has the kernels of linear; so has a product whose out is that of the transpose."""
    a, w = zeros(4, 3, 5, 24), zeros(24, 40)
    assert entries(a, w) == entries(a.reshape(60, 24), w) == ["linear_thin"]
    assert entries(w.T, a.swapaxes(-1, -2)) == ["matmul"]
    assert entries(zeros(4, 1, 24), zeros(4, 24, 40)) == ["matmul"]
    assert entries(zeros(4000, 24), w) == ["linear_forward"]
    assert entries(zeros(24), zeros(24, 40)) == ["linear_thin_row"]
    assert entries(zeros(24, 4000).T, w) == ["matmul"]


@pytest.mark.parametrize(
    ("a", "b", "members"),
    [
        (zeros(3, 4, 5, 6), zeros(6, 7), 1),
        (zeros(4, 1, 3, 6).swapaxes(0, 2), zeros(6, 7), 3),
        (zeros(3, 4, 5, 6), zeros(4, 6, 7), 12),
        (zeros(4, 3, 5, 6).swapaxes(0, 1), zeros(4, 6, 7), 12),
        (zeros(5, 6), zeros(3, 4, 6, 7), 12),
        (zeros(3, 1, 5, 6), zeros(1, 4, 6, 7), 12),
        (zeros(3, 4, 5, 6), zeros(3, 1, 6, 7), 3),
    ],
)
def test_members_with_the_same_factor_are_folded(a, b, members):
    """A batch axis becomes rows where those of a and out continue each other."""
    call = described_matmul(adopt(MatmulArrays(a, b)).description)
    assert call.problem.folded.members == members


@given(st.integers(1, 2**31), st.integers(0, 2**31 - 1))
def test_division_by_multiplication_is_exact(divisor, number):
    _, multiplier, shift = plans._divisor(divisor)
    assert multiplier < 2**32
    assert (2 * number * multiplier >> 32) >> shift == number // divisor


def test_members_of_the_struct_are_those_of_the_arrays():
    """The computation is that of BatchParams::place in batch.cuh."""
    a, b = zeros(3, 1, 4, 5, 8), zeros(1, 6, 4, 8, 7)
    (step,) = plan_of(a, b).steps
    batch = step.values[0]["batch"]
    divisor = int(batch["ctas"]["divisor"])
    assert step.ctas == divisor * 72
    places = []
    for member in range(72):
        left, at = member, np.zeros(3, np.int64)
        for axis in reversed(range(kernels.BATCH_AXES)):
            extent = int(batch["extents"][axis]["divisor"])
            left, index = (left // extent, left % extent) if axis else (0, left)
            at += index * batch["strides"][axis]
        places.append(at.tolist())
    want = [
        [(i * 4 + k) * 40, (j * 4 + k) * 56, ((i * 6 + j) * 4 + k) * 35]
        for i, j, k in itertools.product(range(3), range(6), range(4))
    ]
    assert places == want


# --- NumPy


@examples(60)
@given(matmul_cases(dtypes=["float16", "float32", "bfloat16", "float64", "int8"], sizes=[
    0, 1, 2, 13, 40]))  # fmt: skip
def test_numpy_results_are_those_of_the_reference(case):
    a, b = case.arrays()
    found = cupyattn.matmul(a, b)
    if case.dtype == "int8":
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, np.matmul(a.astype(np.int64), b.astype(np.int64)))
    elif case.dtype == "float64":
        np.testing.assert_allclose(found, a @ b, rtol=1e-12, atol=1e-12)
    else:
        assert found.dtype == dtype_of(case.dtype)
        assert_within_bounds(found, *expected(cupyattn.matmul, a, b))
    assert found.shape == np.matmul(np.zeros(a.shape), np.zeros(b.shape)).shape


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_large_numpy_matrices_are_converted_one_member_at_a_time(dtype):
    case = MatmulCase(80, 60, 70, (2, 1), (3,), dtype, b_view="transposed")
    found = cupyattn.matmul(*case.arrays())
    assert found.shape == (2, 3, 80, 70)
    assert_within_bounds(found, *expected(cupyattn.matmul, *case.arrays()))


def test_largest_sums_of_int8_are_exact():
    a = np.full((1, 2**17 - 1), -128, np.int8)
    assert cupyattn.matmul(a, a.T)[0, 0] == 2**31 - 2**14


# --- gradients


@examples(30)
@given(matmul_cases(dtypes=["float64"], sizes=[1, 2, 5], views=["contiguous", "transposed"]))
def test_gradients_are_those_of_numpys_operators(case):
    """The operator has its own rule, which sums after the products."""
    a, b = case.arrays()
    out, pullback = cupyattn.vjp(cupyattn.matmul, a, b)
    dout = np.random.default_rng(case.seed).standard_normal(out.shape)
    _, other = cupyattn.vjp(lambda a, b: a @ b, a, b)
    for found, want in zip(pullback(dout), other(dout), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batches", [((2,), (2,)), ((3, 1), (1, 2)), ((), (2,)), ((2,), ())])
def test_gradients_are_those_of_differences(batches):
    case = MatmulCase(2, 3, 2, *batches, dtype="float64")
    arrays = list(case.arrays())
    out, pullback = cupyattn.vjp(cupyattn.matmul, *arrays)
    dout = np.random.default_rng(1).standard_normal(out.shape)
    for position, gradient in enumerate(pullback(dout)):
        for index in np.ndindex(gradient.shape):
            change = np.zeros(gradient.shape)
            change[index] = 1e-6
            moved = [x + change if n == position else x for n, x in enumerate(arrays)]
            found = ((cupyattn.matmul(*moved) - out) * dout).sum() / 1e-6
            assert math.isclose(gradient[index], found, rel_tol=1e-5, abs_tol=1e-7)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("a_batch", "b_batch"), [((3,), ()), *deep(((2, 1), (3,)), ((), (3,)))])
def test_gradients_of_broadcast_factors_are_rounded_once(a_batch, b_batch):
    """The members that share a factor are a part of the sum of its gradient."""
    case = MatmulCase(9, 8, 24, a_batch, b_batch, "float16")
    a, b = case.arrays()
    with KERNELS.running():
        out, pullback = cupyattn.vjp(cupyattn.matmul, *map(KERNELS.put, (a, b)))
        dout = np.random.default_rng(0).standard_normal(out.shape).astype(np.float16)
        gradients = [KERNELS.get(each) for each in pullback(KERNELS.put(dout))]
    wide = [each.astype(np.float64) for each in (a, b)]
    _, exact_pullback = cupyattn.vjp(lambda a, b: a @ b, *wide)
    absolute = [np.abs(each) for each in wide]
    _, sizes_pullback = cupyattn.vjp(lambda a, b: a @ b, *absolute)
    terms = max(out.size, 24)
    for found, exact, size in zip(
        gradients, exact_pullback(dout.astype(np.float64)),
        sizes_pullback(np.abs(dout.astype(np.float64))), strict=True,
    ):  # fmt: skip
        bound = 2 * (terms + 8) * 2.0**-24 * size + 2.0**-11 * np.abs(exact) + 2.0**-25
        assert 0 < reference.error_ratio(found, exact, bound) <= 1


class OtherLibrary:
    """An array library in place of CuPy."""

    @staticmethod
    def matmul(x, y):
        return "another library's product"


@pytest.mark.parametrize(
    ("a", "b", "own"),
    [
        (zeros(2, 3, 4), zeros(4, 5), True),
        (zeros(3, 4), zeros(2, 4, 5, dtype="float16"), True),
        (zeros(2, 3, 4, dtype="bfloat16"), zeros(4, dtype="bfloat16"), True),
        (zeros(3, 4), zeros(4, 5), False),
        (zeros(2, 3, 4), zeros(4, 5, dtype="float32"), False),
        (zeros(2, 3, 4, dtype="float32"), zeros(4, 5, dtype="float32"), False),
    ],
)
def test_operators_of_traced_arrays_multiply_batches_of_16_bits_here(a, b, own):
    """Only where arrays are not NumPy's: CuPy has no fast product of those."""
    assert isinstance(product_by(OtherLibrary, a, b), np.ndarray) == own
    np.testing.assert_array_equal(product_by(np, a, b), np.matmul(a, b))


# --- refusals

A, B = np.zeros((2, 3, 4), np.float32), np.zeros((2, 4, 5), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "kind", "message"),
    [
        ((A, B.astype(np.float16)), {}, TypeError, "share one dtype"),
        ((A.astype(int), B.astype(int)), {}, TypeError, "a has dtype int64"),
        ((np.float32(1), B), {}, TypeError, "a has type"),
        ((np.zeros((), np.float32), B), {}, ValueError, "a has no axes"),
        ((A, B.swapaxes(1, 2)), {}, ValueError, r"pass b.swapaxes\(-1, -2\)"),
        ((A, B[:, :3]), {}, ValueError, "with K = 4 and 3"),
        ((A, np.zeros((3, 4, 5), np.float32)), {}, ValueError, "broadcast, here"),
        ((A, B), {"out": np.zeros((2, 3, 5))}, TypeError, "the result is float32"),
        ((A, B), {"out": np.zeros((3, 5), np.float32)}, ValueError, "the result is float32"),
        ((A, B), {"out": np.zeros((2, 6, 10), np.float32)[:, ::2, ::2]}, ValueError,
         "one of its last two axes is contiguous"),
        ((A, B), {"out": np.broadcast_to(np.float32(0), (2, 3, 5))}, ValueError, "one item in"),
        ((A, A.swapaxes(1, 2)), {"out": A[:, :, :3]}, ValueError, "out overlaps a"),
        ((np.zeros((1, 2**17), np.int8), np.zeros((2**17, 1), np.int8)), {}, ValueError,
         "K is at most 131071"),
    ],
)  # fmt: skip
def test_calls_that_are_not_as_documented_are_refused(arrays, options, kind, message):
    with pytest.raises(kind, match=message):
        cupyattn.matmul(*arrays, **options)


def test_kernels_refuse_float64_and_six_batch_axes():
    with cupyattn.backend("emulator"):
        with pytest.raises(TypeError, match="float64 is for NumPy arrays on the CPU"):
            cupyattn.matmul(np.zeros((2, 2)), np.zeros((2, 2)))
        a = zeros(2, 1, 2, 1, 2, 1, 8, 8, dtype="float32")
        b = zeros(1, 2, 1, 2, 1, 2, 8, 8, dtype="float32")
        with pytest.raises(ValueError, match="leave 6 batch axes apart; at most 4"):
            cupyattn.matmul(a, b)
    assert cupyattn.matmul(a, b).shape == (2, 2, 2, 2, 2, 2, 8, 8)


def test_a_problem_exchanges_its_factors():
    call = described_matmul(adopt(MatmulArrays(A, B)).description)
    exchanged = call.problem.exchanged
    assert isinstance(exchanged, MatmulProblem)
    assert (exchanged.a.rows, exchanged.a.columns, exchanged.b.columns) == (5, 4, 3)
    assert exchanged.exchanged == call.problem
