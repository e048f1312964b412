"""Products with cp.async and m16n8k16, on the emulator: results, configurations, explanations."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import linear_problems as problems
from support.devices import EMULATED
from support.linear_problems import (
    LinearProblem,
    always,
    backward_ratio,
    forget_plans,
    forward_ratio,
    forward_steps,
    linear_problems,
    tensor_core_alone,
)
from support.quantised_weights import of_usual_size
from support.search import deep, examples

import cupyattn
from cupyattn import emulator, reference
from cupyattn.emulator import Report
from cupyattn.ops.linear import (
    kernels_int8,
    kernels_matmul,
    kernels_quantised_tile,
    kernels_tensor_core,
)
from cupyattn.ops.linear.api_matmul import described_matmul
from cupyattn.ops.linear.native_tiles import DECODING_TILES, NATIVE_TILES
from cupyattn.ops.linear.plan_matmul import MatmulArrays, matmul_plan
from cupyattn.ops.linear.tiles import TensorCoreProduct
from cupyattn.runtime.arch import ARCH_VARIABLE, ARCHS, Arch, arch_of
from cupyattn.runtime.arrays import adopt, dtype_of
from cupyattn.runtime.compile import compile_cubin, compile_ptx
from cupyattn.runtime.device import emulated
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.tables import rows_for
from cupyattn.runtime.tuning import Explained
from cupyattn.testing import MatmulCase, assert_within_bounds, expected

pytestmark = pytest.mark.nvrtc

H200, A100, T4 = DeviceTraits(90, 132), DeviceTraits(80, 108), DeviceTraits(75, 40)
RTX3080 = DeviceTraits(86, 68)


@pytest.fixture(scope="module")
def instructions():
    """Run kernels for sm_80 on the emulator; the result is the PTX instructions of each entry."""
    found: dict[str, set[str]] = {}

    def module(specialisation: Specialisation, arch: Arch) -> emulator.Module:
        ptx = compile_ptx(specialisation, arch).code.decode()
        names = re.findall(r"^\s*(?:@!?%p\d+ )?((?:mma|cp)\.[\w.]+)", ptx, re.MULTILINE)
        found.setdefault(specialisation.spec.entry, set()).update(names)
        return emulator.load(ptx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "_module", module)
        patch.setenv(ARCH_VARIABLE, "80")
        patch.setattr(problems, "KERNELS", EMULATED)
        yield found


def case(rows, outer, inner, dtype, activation=None, **options) -> LinearProblem:
    return LinearProblem((rows,), inner, outer, dtype, activation, **options)


def names_of(instructions: dict[str, set[str]], entry: str, kind: str) -> set[str]:
    return {name for name in instructions[entry] if name.startswith(kind)}


# Before, at and after the last row and column of a tile; the sum in one k-tile, in as many as are
# in flight, and in more, with a ragged first one; rows that are not aligned to 16 bytes.
FORWARD = [
    ("small", case(65, 136, 72, "bfloat16", "swiglu", residual=True)),
    ("short", case(129, 120, 264, "float16", "gelu_tanh", transposed=True)),
    *deep(
        ("wide", case(127, 264, 520, "float16", "silu", transposed=True, residual=True)),
        ("wide", case(128, 256, 64, "bfloat16")),
        ("wide", case(3, 257, 8, "bfloat16", "relu", view="padded")),
        ("narrow", case(257, 120, 136, "bfloat16", "gelu", transposed=True, residual=True)),
        ("narrow", case(255, 127, 31, "bfloat16", "relu", view="sliced", residual=True)),
        ("small", case(64, 128, 192, "float16", "geglu", transposed=True, view="padded")),
        ("short", case(260, 8, 8, "bfloat16", biased=False)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), FORWARD, ids=str)
def test_forward_is_within_bounds(shape, problem, instructions):
    instructions.clear()
    with EMULATED.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1
    items = {"float16": "f16", "bfloat16": "bf16"}[problem.dtype]
    assert names_of(instructions, "linear_forward", "mma") == {
        f"mma.sync.aligned.m16n8k16.row.col.f32.{items}.{items}.f32"
    }
    copies = names_of(instructions, "linear_forward", "cp.async.cg")
    lines = problem.K if problem.transposed else problem.N
    assert bool(copies) == (problem.K % 8 == lines % 8 == 0)


BACKWARD = [
    ("small", case(72, 136, 40, "bfloat16", "silu", transposed=True, accumulate=True)),
    *deep(
        ("small", case(33, 33, 7, "bfloat16", "geglu", transposed=True, view="sliced")),
        ("short", case(136, 136, 136, "float16", "swiglu", accumulate=True)),
        ("wide", case(40, 264, 264, "bfloat16", "gelu")),
        ("narrow", case(264, 128, 264, "float16", biased=False)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), BACKWARD, ids=str)
def test_backward_is_within_bounds(shape, problem, instructions):
    with EMULATED.running(), tensor_core_alone(shape):
        assert 0 < backward_ratio(problem) <= 1


@pytest.mark.deep
@examples(12)
@given(st.sampled_from(("wide", "narrow", "short", "small")), st.data())
def test_drawn_problems_are_within_bounds(instructions, shape, data):
    kinds = itertools.product(("float16", "bfloat16"), (None, "gelu_tanh", "swiglu"))
    problem = data.draw(linear_problems([*kinds], rows=(1, 31, 63, 65, 127, 129, 257)))
    with EMULATED.running(), tensor_core_alone(shape):
        assert forward_ratio(problem)[0] <= 1
        assert backward_ratio(problem) <= 1


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_of_a_long_sum_are_within_bounds(dtype, instructions):
    problem = case(70, 72, 1544, dtype, "geglu", residual=True)
    with EMULATED.running(), tensor_core_alone("small", splits=3):
        assert 0 < backward_ratio(problem) <= 1


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ("tiny", MatmulCase(65, 72, 136, (2,), (2,), "bfloat16", a_view="transposed")),
        *deep(
            ("skinny", MatmulCase(33, 104, 130, (2,), (2,), "bfloat16", b_view="transposed")),
            ("tiny", MatmulCase(64, 200, 64, (2,), (2,), "float16", b_view="transposed")),
            ("wide", MatmulCase(129, 72, 264, (2,), (2,), "bfloat16", a_view="padded")),
            ("small", MatmulCase(129, 31, 127, (2,), (2,), "bfloat16", b_view="strided")),
        ),
    ],
    ids=str,
)
def test_batches_are_within_bounds(shape, case, instructions, monkeypatch):
    monkeypatch.setattr(TensorCoreProduct, "tiling", always(shape))
    with EMULATED.running():
        arrays = case.arrays()
        assert_within_bounds(cupyattn.matmul(*arrays), *expected(cupyattn.matmul, *arrays))


@pytest.mark.parametrize("transposed", [False, *deep(True)])
def test_no_memory_access_is_wasted(transposed, instructions):
    """Copies and ldmatrix touch every bank once, and copies fetch whole sectors."""
    problem = case(128, 256, 128, "bfloat16", transposed=transposed, biased=False)
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone("wide"):
        cupyattn.linear(*problem.arrays()[:2])
    shared = [access for access in report.accesses if access.space == "shared"]
    assert shared
    assert {access.worst for access in shared} == {1.0}
    assert report.sector_efficiency >= 0.98


# --- few rows


FEW_ROWS = [
    case(5, 72, 136, "bfloat16", "swiglu", transposed=True, residual=True),
    case(16, 40, 72, "bfloat16", "gelu"),
    *deep(
        case(2, 33, 31, "bfloat16", "relu", view="sliced", residual=True),
        case(64, 104, 264, "bfloat16", transposed=True),
        case(33, 24, 2056, "bfloat16", "geglu", residual=True),
        case(17, 129, 4104, "bfloat16", "silu", biased=False),
    ),
]


@pytest.mark.parametrize("problem", FEW_ROWS, ids=str)
def test_few_rows_of_bfloat16_are_within_bounds(problem, instructions):
    instructions.clear()
    with EMULATED.running():
        assert 0 < forward_ratio(problem)[0] <= 1
    assert names_of(instructions, "linear_thin", "mma") == {
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
    }


# --- quantised weights


def quantised(rows, outer, inner, weights, activation=None, **options) -> LinearProblem:
    options = {"dtype": "float16"} | options
    return LinearProblem((rows,), inner, outer, activation=activation, weights=weights, **options)


# Of each format: one k-tile, as many as are in flight, and more; rows of codes along the sum and,
# transposed, across it.
QUANTISED = [
    ("few", quantised(65, 136, 192, "nf4", "swiglu", residual=True)),
    ("few", quantised(33, 128, 96, "int4", transposed=True, dtype="bfloat16")),
    *deep(
        ("narrow", quantised(130, 136, 192, "nf4", "swiglu", dtype="bfloat16", residual=True)),
        ("few", quantised(65, 256, 256, "q4_k", "gelu", transposed=True, dtype="bfloat16")),
        ("small", quantised(70, 128, 160, "int8", "relu", dtype="bfloat16")),
        ("narrow", quantised(257, 136, 160, "nf4", "gelu", residual=True)),
        ("narrow", quantised(70, 128, 64, "q4_1", "silu", transposed=True)),
        ("small", quantised(129, 136, 32, "int8", "relu")),
        ("small", quantised(130, 256, 512, "q4_k", "geglu")),
        ("few", quantised(1, 256, 256, "q4_k", transposed=True)),
        ("narrow", quantised(127, 192, 288, "int8", "gelu_tanh", transposed=True, biased=False)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), QUANTISED, ids=str)
def test_quantised_weights_are_within_bounds(shape, problem, instructions):
    """x is copied by cp.async, and codes are decoded on their way."""
    instructions.clear()
    with EMULATED.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1
        assert 0 < backward_ratio(problem) <= 1
    for entry in instructions.keys() & {"linear_forward_quantised", "linear_product_quantised"}:
        assert names_of(instructions, entry, "cp.async.cg")
    assert len(instructions) >= 2


@pytest.mark.parametrize(
    ("weights", "factor"),
    [
        ("nf4", 1e30),
        ("int8", 1e-25),
        *deep(
            *itertools.product(("nf4", "int8"), (1e-9, 7e4, 1e35)),
            *itertools.product(("int4", "q4_1", "q4_k"), (1e-5, 3e4)),
        ),
    ],
)
def test_bfloat16_holds_weights_that_float16_cannot(weights, factor, instructions):
    """Some blocks have weights times `factor`; the bounds of tiny weights are relative to them.

    Some rows of x have a single one: their results are weights.
    """
    x, w, _ = quantised(33, 64, 256, weights, dtype="bfloat16").arrays()
    x[16:] = np.eye(17, 256)
    above = w.scales if w.super_scales is None else w.super_scales
    first = above if weights in ("nf4", "int8") else above[..., :1]
    first[: 40 if factor > 1 else None] *= first.dtype.type(factor)
    dout = x[:, : w.shape[1]]
    exact = reference.linear(x.astype(np.float64), w)[0]
    exact_dx = reference.linear_backward(dout.astype(np.float64), x.astype(np.float64), w).dx
    with EMULATED.running(), tensor_core_alone("few"):
        out = cupyattn.linear(x, w)
        dx = cupyattn.linear_backward(dout, x, w).dx
    assert np.isfinite(exact).all() and np.isfinite(exact_dx).all()
    bounds = reference.linear_bound(x, w, dtype="bfloat16")[0]
    assert 0 < reference.error_ratio(out, exact, bounds) <= 1
    assert bounds.sum() <= np.abs(exact).sum() / 4
    bounds = reference.linear_backward_bound(dout, x, w, dtype="bfloat16").dx
    assert 0 < reference.error_ratio(dx, exact_dx, bounds) <= 1


# --- int8


INT8 = [
    ("small", LinearProblem((65,), 192, 136, "bfloat16", "swiglu", weights="int8", rotation=64)),
    *deep(
        ("wide", LinearProblem((130,), 352, 264, "float16", "gelu", weights="int8")),
        ("short", LinearProblem((127,), 96, 193, "float32", "geglu", weights="int8")),
        ("narrow", LinearProblem((257,), 320, 129, "bfloat16", weights="int8", rotation=64)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), INT8, ids=str)
def test_int8_rows_and_weights_are_within_bounds(shape, problem, instructions, monkeypatch):
    instructions.clear()
    monkeypatch.setattr(TensorCoreProduct, "tiling", always(shape))
    x, w, b = problem.arrays()
    rows = cupyattn.quantize_rows(x, rotation=w.rotation)
    options = {"activation": problem.activation}
    exact, _ = reference.linear(rows, w, b, **options)
    bound, _ = reference.linear_bound(rows, w, b, dtype=problem.dtype, **options)
    forget_plans()
    with EMULATED.running():
        found = cupyattn.linear(rows, w, b, **options)
    forget_plans()
    assert 0 < reference.error_ratio(found, exact, bound) <= 1
    assert names_of(instructions, "linear_forward_int8", "mma") == {
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    }


@pytest.mark.parametrize(
    ("shape", "case", "native"),
    [
        ("tiny", MatmulCase(65, 208, 72, (2,), (2,), "int8", b_view="transposed"), True),
        *deep(
            ("wide", MatmulCase(129, 144, 264, (2,), (2,), "int8", b_view="transposed"), True),
            ("skinny", MatmulCase(33, 400, 129, (2,), (2,), "int8", b_view="transposed"), True),
            ("small", MatmulCase(132, 144, 72, (2,), (2,), "int8", a_view="transposed"), False),
        ),
    ],
    ids=str,
)
def test_batches_of_int8_are_exact(shape, case, native, instructions, monkeypatch):
    """Operands that are not contiguous along the sum keep the instruction of Turing."""
    instructions.clear()
    monkeypatch.setattr(TensorCoreProduct, "tiling", always(shape))
    with EMULATED.running():
        arrays = case.arrays()
        assert_within_bounds(cupyattn.matmul(*arrays), *expected(cupyattn.matmul, *arrays))
    sizes = "m16n8k32" if native else "m8n8k16"
    assert names_of(instructions, "matmul_s8", "mma") == {
        f"mma.sync.aligned.{sizes}.row.col.s32.s8.s8.s32"
    }


# --- which kernels run


def zeros(dtype: str, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype_of(dtype))


def steps_of(traits: DeviceTraits, rows: int, inner: int, dtype: str, outer: int = 512) -> list:
    steps = forward_steps(zeros(dtype, rows, inner), zeros(dtype, inner, outer), None, None, traits)
    return [step.specialisation for step in steps]


@pytest.mark.parametrize(
    ("traits", "inner", "dtype", "native"),
    [
        (H200, 512, "float16", 1),
        (H200, 512, "bfloat16", 1),
        (A100, 511, "bfloat16", 0),
        (A100, 511, "float16", 0),
        (T4, 512, "float16", 0),
    ],
)
def test_aligned_lines_are_copied_by_newer_devices(traits, inner, dtype, native):
    """All these products run on tensor cores."""
    kernel = steps_of(traits, 512, inner, dtype)[0]
    macros = dict(kernel.macros)
    assert kernel.spec.entry in ("linear_forward", "linear_product")
    assert (macros["NATIVE"], macros["DTYPE"]) == (native, dtype)


@pytest.mark.parametrize(
    ("traits", "rows", "entry"),
    [
        (H200, 512, "linear_forward"),
        (H200, 16, "linear_thin"),
        (H200, 1, "linear_thin_f32"),
        (T4, 512, "linear_forward_f32"),
        (H200._replace(tensor_cores=False), 512, "linear_forward_f32"),
    ],
)
def test_bfloat16_runs_on_tensor_cores_of_newer_devices(traits, rows, entry):
    assert steps_of(traits, rows, 512, "bfloat16")[0].spec.entry == entry


def explained(traits: DeviceTraits, *arrays: Any) -> tuple[list[str], list[str]]:
    """Return the reasons for the kernels of a product, and those for their configurations."""
    choices = Explained()
    traits = traits._replace(choices=choices)
    x, w = arrays
    if x.ndim == 2:
        steps = forward_steps(x, w, None, None, traits)
    else:
        call = described_matmul(adopt(MatmulArrays(x, w)).description)
        steps = matmul_plan(call, traits).steps
    return choices.reasons, [step.specialisation.reason for step in steps]


SINGLY = "lines that are no whole aligned vectors are loaded item by item"
# Of one size of tile for arrays, and for codes that are decoded; and where cp.async does not copy.
REASONS = {
    "float16 at 90": (H200, "short", 512, None, "cp.async keeps 2 k-tiles of 64 in flight; for sh"),
    "nf4 at 90": (H200, "small", 512, "nf4", "cp.async keeps 2 k-tiles of 32 in flight; for small"),
    "float16 at 86": (
        RTX3080,
        "narrow",
        512,
        None,
        "cp.async keeps 3 k-tiles of 32 in flight; for",
    ),
    "nf4 at 86": (
        RTX3080,
        "narrow",
        512,
        "nf4",
        "cp.async keeps 3 k-tiles of 32 in flight; each w",
    ),
    "single items at 80": (A100, "narrow", 511, None, "single items pass registers"),
    "single items at 75": (T4, "narrow", 511, None, "models 0.88; "),
}


@pytest.mark.parametrize("kind", REASONS)
def test_reasons_name_the_path(kind):
    traits, shape, inner, weights, reason = REASONS[kind]
    w = of_usual_size(weights, 128, inner, 64) if weights else zeros("float16", inner, 128)
    with tensor_core_alone(shape):
        why, (found,) = explained(traits, zeros("float16", 300, inner), w)
    assert found.startswith(reason)
    item_by_item = f"{SINGLY}, not by cp.async" if traits.native else SINGLY
    assert why == ["forward: float16 runs on tensor cores", *[item_by_item] * (inner == 511)]


def test_reasons_of_batches_name_the_path():
    arrays = zeros("float16", 2, 200, 511), zeros("float16", 2, 511, 200)
    why, found = explained(A100, *arrays)
    assert why == [f"{SINGLY}, not by cp.async", "float16 runs on tensor cores"]
    assert found == ["single items pass registers"]


def test_reason_of_transposed_int8_has_no_utilisation_of_turing():
    arrays = zeros("int8", 2, 200, 512), zeros("int8", 2, 512, 200)
    for traits, begin in (
        (A100, "k-tiles pass registers: cp.async copies whole aligned vectors along the sum"),
        (T4, "models 0.68; "),
    ):
        _, (found,) = explained(traits, *arrays)
        assert found.startswith(begin)


# --- configurations


@pytest.mark.parametrize("number", [number for number in ARCHS if number >= 80])
def test_stages_fit_shared_memory(number):
    arch = arch_of(number)
    tables = (NATIVE_TILES, kernels_matmul.CONFIGURATIONS, kernels_int8.FORWARDS)
    rows = (rows_for(table, number) for table in tables)
    for config in itertools.chain(DECODING_TILES.values(), *(row.values() for row in rows)):
        assert config.native
        found = arch.resident_ctas(config.threads, 1, config.shared_bytes)
        assert found >= config.ctas_per_sm, config


FAMILIES = (kernels_tensor_core, kernels_matmul, kernels_int8, kernels_quantised_tile)


def require_no_spills(kernel: Specialisation, number: int) -> None:
    """Require registers for the CTAs that the configuration is chosen for."""
    arch = arch_of(number)
    found = compile_cubin(kernel, arch).resources
    assert found is not None
    shared = kernel.shared_bytes + kernel.static_shared_bytes
    ctas = arch.resident_ctas(kernel.threads, found.registers, shared)
    assert not found.spill_store_bytes + found.stack_bytes, kernel.label
    assert ctas >= dict(kernel.macros).get("MIN_CTAS", 1), kernel.label


@pytest.mark.parametrize("number", [80, *deep(86, 89, 90)])
def test_largest_tiles_do_not_spill(number):
    kernels = kernels_tensor_core
    for w_along in (True, False):
        kernel = kernels.forward(number, "wide", 8, 8, w_along=w_along, dtype="bfloat16")
        require_no_spills(kernel, number)


@pytest.mark.deep
@pytest.mark.parametrize("number", [80, 86, 89, 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_spills(family, number):
    for kernel in family.catalogue(number):
        if dict(kernel.macros).get("NATIVE"):
            require_no_spills(kernel, number)
