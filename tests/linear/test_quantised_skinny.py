"""Few rows and a quantised weight: within bounds, with memory accesses and launches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, without_tensor_cores
from support.linear_problems import LinearProblem, forward_ratio, forward_steps, put
from support.quantised_weights import of_usual_size
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_quantised_skinny as quantised_skinny
from cupyattn.ops.linear.weight_formats import FORMATS as ALL_FORMATS
from cupyattn.reference import error_ratio
from cupyattn.registry import catalogue
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.traits import DeviceTraits

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Those that the kernels read; of others scales are expanded before.
FORMATS = {name: form for name, form in ALL_FORMATS.items() if form.group is None}

# A span of codes has several blocks, one, or is a part of one.
OTHER_BLOCKS = (
    ("nf4", 32), ("nf4", 128), ("nf4", 512), ("int4", 32), ("int4", 64), ("int8", 32), ("int8", 64),
    ("int8", 256),
)  # fmt: skip
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)
# One activation for each kernel: every other one would be a kernel to compile.
ACTIVATIONS = {1: "swiglu", 2: "gelu", 4: "relu", 8: "geglu", 16: "silu", 32: "gelu_tanh"}


def case(
    rows: int, outer: int, inner: int, weights: str, activation: str | None = None, **options: Any
) -> LinearProblem:
    dtype = options.pop("dtype", "float16")
    return LinearProblem((rows,), inner, outer, dtype, activation, weights=weights, **options)


def steps_of(problem: LinearProblem, traits: DeviceTraits) -> tuple[str, ...]:
    """Return the kernels of a call."""
    steps = forward_steps(*problem.arrays(), problem.activation, traits)
    return tuple(step.specialisation.spec.entry for step in steps)


def require_right(problem: LinearProblem) -> None:
    assert forward_ratio(problem)[0] <= 1


@pytest.mark.parametrize(
    ("rows", "weights"),
    mostly_deep(
        itertools.product(ROWS, FORMATS), [*((1, weights) for weights in FORMATS), (5, "nf4")]
    ),
)
def test_every_format(rows, weights):
    """K takes several iterations and ends within a span; N has a tail; all options are on."""
    inner = 2048 + (256 if weights == "q4_k" else FORMATS[weights].block_size or 32)
    activation = next(kind for limit, kind in ACTIVATIONS.items() if rows <= limit)
    view = "sliced" if rows == 5 else "contiguous"  # scalar loads
    problem = case(rows, 37, inner, weights, activation, residual=True, view=view)
    assert steps_of(problem, DeviceTraits(75, 2))[0] == "linear_quantised_thin"
    require_right(problem)


@pytest.mark.parametrize(
    ("weights", "block_size"), mostly_deep(OTHER_BLOCKS, [("nf4", 512), ("int4", 32)])
)
@pytest.mark.parametrize("rows", [2, *deep(1, 6, 20)])
def test_blocks_of_every_size(rows, weights, block_size):
    require_right(
        case(rows, 40, -(-576 // block_size) * block_size, weights, block_size=block_size)
    )


@pytest.mark.parametrize("weights", ["nf4", *deep("int4", "int8", "q4_1")])
@pytest.mark.parametrize("rows", [1, *deep(3, 16)])
def test_a_short_sum(rows, weights):
    """K is one block of 32, and 576, which is no multiple of 128."""
    require_right(case(rows, 1, 32, weights, block_size=32))
    block_size = {"nf4": 64, "int4": 64, "int8": 576, "q4_1": 32}[weights]
    require_right(case(rows, 70, 576, weights, "gelu", block_size=block_size, residual=True))


@examples(3)
@given(st.data())
def test_drawn_problems(data):
    weights = data.draw(st.sampled_from(wider(("int8", "q4_1"), FORMATS)))
    unit = 256 if weights == "q4_k" else 32
    problem = case(
        data.draw(st.sampled_from(wider((4,), ROWS))),
        data.draw(st.integers(1, 90)),
        unit * data.draw(st.sampled_from((1, 2, 3, 4, 5, 9))),
        weights,
        view=data.draw(st.sampled_from(("contiguous", "padded", "sliced"))),
        biased=data.draw(st.booleans()),
        residual=data.draw(st.booleans()),
        block_size=None if weights == "q4_k" else data.draw(st.sampled_from((None, 32))),
        seed=data.draw(st.integers(0, 9)),
    )
    require_right(problem)


@pytest.mark.parametrize(
    "problem",
    [case(3, 24, 16_448, "nf4", "gelu"), *deep(case(1, 5, 65_536 + 4096, "int8", "swiglu"))],
    ids=str,
)
def test_long_k_is_split_and_repeats_its_bits(problem):
    """There are two multiprocessors without a GPU: few columns leave one of them idle."""
    traits = KERNELS.device.traits
    assert steps_of(problem, traits) == ("linear_quantised_thin", "linear_thin_merge")
    require_right(problem)
    arrays = tuple(map(put, problem.arrays()))
    first, second = (
        KERNELS.get(cupyattn.linear(*arrays, activation=problem.activation)) for _ in range(2)
    )
    assert_array_equal(first, second)


@pytest.mark.parametrize("weights", mostly_deep(FORMATS, ["nf4", "q4_k"]))
@pytest.mark.parametrize(
    ("rows", "dtype"), [(9, "float32"), *deep((1, "bfloat16"), (2, "float32"), (3, "float32"))]
)
def test_float32_arithmetic(rows, dtype, weights):
    """K takes two iterations and has a tail; the tile of rows is not full."""
    inner = 1024 + (256 if weights == "q4_k" else FORMATS[weights].block_size or 96)
    problem = case(rows, 37, inner, weights, "swiglu", dtype=dtype, residual=True, view="padded")
    assert steps_of(problem, DeviceTraits(75, 2)) == ("linear_quantised_thin_f32",)
    require_right(problem)


@pytest.mark.parametrize(("weights", "block_size"), [OTHER_BLOCKS[0], *deep(*OTHER_BLOCKS[1:])])
@pytest.mark.parametrize("view", ["sliced", *deep("contiguous")])
def test_float16_without_tensor_cores(view, weights, block_size):
    inner = -(-576 // block_size) * block_size
    problem = case(1, 35, inner, weights, "gelu", view=view, block_size=block_size)
    assert steps_of(problem, DeviceTraits(75, 2, tensor_cores=False)) == (
        "linear_quantised_thin_f32",
    )
    with without_tensor_cores():
        require_right(problem)


def test_more_rows_go_to_other_kernels():
    def first(rows: int, dtype: str) -> str:
        return steps_of(case(rows, 40, 64, "nf4", dtype=dtype), DeviceTraits(75, 40))[0]

    limits = {"float16": quantised_skinny.MAX_ROWS, "float32": quantised_skinny.MAX_FLOAT_ROWS}
    for dtype, most in limits.items():
        assert "thin" in first(most, dtype)
        assert "thin" not in first(most + 1, dtype)


def product(x: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    return KERNELS.get(cupyattn.linear(put(x), put(w)))


def ratio_of(x: np.ndarray, w: QuantizedWeight) -> float:
    """The error of their product over its bound."""
    exact = reference.linear(x.astype(np.float64), w)[0]
    return error_ratio(product(x, w), exact, reference.linear_bound(x, w, dtype=x.dtype.name)[0])


def usual(weights: str, outer: int, inner: int) -> QuantizedWeight:
    return of_usual_size(weights, outer, inner, FORMATS[weights].block_size or inner)


def normal(rows: int, inner: int, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, inner)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("weights", ["nf4", *deep("int4", "int8", "q4_1", "q4_k")])
def test_slices_of_rows(weights, dtype):
    """A slice starts at any row. Rows around it hold NaN, which stays out."""
    rows = usual(weights, 60, 768).T
    place = rows.scales if rows.super_scales is None else rows.super_scales
    place[12], place[50] = np.nan, np.nan
    assert 0 < ratio_of(normal(3, 768, dtype), rows[13:50].T) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("weights", ["nf4", *deep("q4_1", "int4", "int8", "q4_k")])
def test_nan_affects_only_its_row_and_column(weights, dtype):
    x, w = normal(3, 768, dtype), usual(weights, 40, 768)
    clean = product(x, w)
    place = w.scales if w.super_scales is None else w.super_scales
    place[33, -1], x[2, 7] = np.nan, np.nan
    found = product(x, w)
    assert np.isnan(found[2]).all() and np.isnan(found[:, 33]).all()
    assert_array_equal(np.delete(found[:2], 33, 1), np.delete(clean[:2], 33, 1))


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("scale", [1e-7, 6e4])
@pytest.mark.parametrize("weights", ["nf4", *deep("int8", "int4", "q4_1")])
def test_scales_of_all_sizes(weights, scale, dtype):
    """Weights with float32 scales may be beyond the range of float16."""
    x, w = normal(3, 256, dtype), usual(weights, 40, 256)
    first = w.scales[..., 0] if w.scales.ndim == 3 else w.scales
    first[...] = scale
    x *= x.dtype.type(2.0**-12 if scale > 1 else 1)
    if weights == "int8":
        x /= x.dtype.type(128)
    assert ratio_of(x, w) <= 1


@pytest.mark.parametrize("rows", [1, *deep(6)])
def test_codes_of_the_zero_point_give_nearly_zero(rows):
    """Two sums cancel to the last bits."""
    for weights, zero in (("int4", 7), ("q4_1", 3)):
        w = usual(weights, 24, 512)
        w.codes[...] = zero * 17
        w.scales[..., 0] = 2.0
        w.scales[..., 1] = zero if weights == "int4" else -2 * zero
        assert (np.abs(product(normal(rows, 512), w)) <= 1e-2).all()
        assert ratio_of(normal(rows, 512), w) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_least_and_largest_codes_are_within_bounds(dtype):
    for weights in ("int8", "nf4"):
        w = usual(weights, 16, 128)
        w.scales[...] = 1 / 128
        least, largest = (-128, 127) if weights == "int8" else (0, 255)
        w.codes[::2], w.codes[1::2] = least, largest
        assert ratio_of(np.ones((1, 128), dtype), w) <= 1


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("rows", "weights", "dtype"),
    [
        (1, "nf4", "float16"),
        (3, "int4", "float16"),
        (8, "q4_k", "float16"),
        (1, "int8", "float32"),
        *deep(
            (1, "int4", "float16"),
            (1, "int8", "float16"),
            (2, "nf4", "float16"),
            (16, "q4_1", "float16"),
            (32, "int8", "float16"),
            (32, "nf4", "float16"),
            (2, "nf4", "float32"),
            (8, "q4_k", "float32"),
        ),
    ],
)
def test_codes_are_read_once_in_vectors_without_bank_conflicts(rows, weights, dtype):
    x, w, b = case(rows, 192, 1024, weights, dtype=dtype).arrays()
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w, b)
    assert report.bank_conflict_ways == 1.0
    streamed = [a for a in report.accesses if "no_allocate" in a.instruction.opcode]
    assert {access.instruction.opcode.split(".")[-2:][0] for access in streamed} == {"v4"}
    times = -(-rows // 32)  # more rows than 32 find the codes in L2
    assert sum(access.sectors for access in streamed) * 32 == times * w.codes.nbytes


def test_tables_are_sorted_and_cover_every_size():
    for by_rows in quantised_skinny.CONFIGURATIONS[75].values():
        assert list(by_rows) == sorted(by_rows)
        assert quantised_skinny.MAX_ROWS % max(by_rows) == 0
        for by_columns in by_rows.values():
            *limits, last = by_columns
            assert limits == sorted(limits)
            assert last is None


SHAPES = [(16384, 4096), (2560, 2560), (576, 1536), (2048, 8192), (128256, 2048), (1, 256)]
LAUNCHED_FORMATS = (
    ("nf4", 64), ("int4", 128), ("int4", 32), ("int8", 0), ("int8", 32), ("q4_k", 32),
)  # fmt: skip


def launch(weights: str, block_size: int, rows: int, inner: int, outer: int, gated: bool = False):
    sizes = {"rows": rows, "inner": inner, "outer": outer, "gated": gated}
    return quantised_skinny.skinny_launch(
        75, 40, weights, block_size or inner, 8, vec_scales=True, **sizes
    )


@pytest.mark.parametrize(("weights", "block_size"), LAUNCHED_FORMATS)
def test_a_launch_fits_turing(weights, block_size):
    """Its CTAs per SM fit in shared memory and threads, and its groups cover all tiles."""
    for rows in (1, 2, 4, 8, 16, 32):
        for outer, inner in SHAPES:
            for gated in (False, True):
                found = launch(weights, block_size, rows, inner, outer, gated)
                specialisation = quantised_skinny.skinny(found.kernel, ("silu", gated, "float16"))
                shared, often = specialisation.static_shared_bytes, found.kernel.config.ctas_per_sm
                assert found.kernel.config.reason.strip()
                assert specialisation.threads * often <= TURING.threads_per_sm
                assert shared * often <= TURING.shared_bytes_per_sm
                work = found.tiles * found.splits * -(-rows // 32)
                if weights == "nf4":
                    assert found.ctas <= 40 * often
                else:
                    assert found.ctas == -(-work // found.kernel.groups)


@pytest.mark.parametrize(
    ("inner", "rows", "k_warps"),
    [(4096, 1, 2), (2560, 1, 3), (576, 1, 1), (8192, 1, 4), (10_240, 1, 5), (768, 8, 3)],
)
def test_warps_along_k_leave_few_idle(inner, rows, k_warps):
    assert launch("nf4", 64, rows, inner, 16384).kernel.k_warps == k_warps


@pytest.mark.parametrize(
    ("outer", "inner", "splits"),
    [(16384, 4096, 1), (2560, 10_240, 1), (256, 2048, 1), (256, 16_384, 8), (16, 2**18, 80)],
)
def test_k_is_split_for_few_tiles_and_long_k(outer, inner, splits):
    assert launch("int4", 128, 8, inner, outer).splits == splits


def test_little_work_uses_all_multiprocessors():
    found = launch("nf4", 64, 1, 576, 576)
    assert found.ctas * 2 > 40


def test_every_format_is_compiled_ahead():
    labels = [each.label for each in catalogue() if "quantised_thin" in each.spec.entry]
    for name in ("Nf4", "Int4", "Int8", "Q4_1", "Q4_K"):
        for entry in ("linear_quantised_thin[", "linear_quantised_thin_f32["):
            assert any(label.startswith(entry) and f"={name}," in label for label in labels)
