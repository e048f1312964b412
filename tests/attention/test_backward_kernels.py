"""The attention backward kernels against the float64 reference, within its derived bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.attention_options import EITHER_HALF, RUN_TIME_OPTIONS
from support.backward_runs import check, error_ratios, inputs, run
from support.devices import KERNELS, SENTINEL, GpuArrays
from support.search import deep, examples, mostly_deep, wider
from support.strategies import FRUGAL, LONGEST, AttentionProblem, attention_problems

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.emulator import Report
from cupyattn.kernels.configs.attention.float32.backward import DKDV as DKDV_F32
from cupyattn.kernels.configs.attention.tensor_core.backward_dkdv import ONE_PASS
from cupyattn.kernels.configs.attention.tensor_core.backward_dq import DQ
from cupyattn.kernels.configs.tables import pairs

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Steps of 8 columns with tails of 1, 2 and 3 chunks, odd dims, D != Dv, every row of the tables.
FLASH_HEAD_DIMS = wider(
    [(5, 8), (136, 192)],
    [(24, 40), (64, 64), (80, 72), (88, 96), (128, 128), (256, 249), (8, 256), (256, 8)],
)
# Columns that end within a group of four and within a stage of 16; every row of the tables.
FLOAT_HEAD_DIMS = wider([(1, 3), (24, 40)], [(65, 128), (64, 64), (136, 72), (8, 256), (256, 8)])
# Either way of the backward has two of the sets, in which each option stands; --deep has all.
SETS_OF = {True: wider(*EITHER_HALF[0]), False: wider(*EITHER_HALF[1])}


@pytest.mark.parametrize("deterministic", [False, True])
@examples(7)
@given(
    problem=attention_problems(
        head_dims=FLASH_HEAD_DIMS,
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_flash_within_bounds_of_the_reference(deterministic: bool, problem: AttentionProblem):
    check(problem, "flash", deterministic=deterministic)


def problems_with_options(deterministic: bool, **sizes: Any) -> st.SearchStrategy[AttentionProblem]:
    return attention_problems(
        options=RUN_TIME_OPTIONS, option_sets=SETS_OF[deterministic], **sizes, **FRUGAL
    )


@pytest.mark.parametrize("deterministic", [False, True])
@examples(6, deep=16)
@given(data=st.data())
def test_flash_options_within_bounds_of_the_reference(deterministic: bool, data: st.DataObject):
    problem = data.draw(
        problems_with_options(
            deterministic, head_dims=((64, 64),), dtypes=("float16",), largest=LONGEST
        )
    )
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@examples(4, deep=16)
@given(
    problem=attention_problems(
        head_dims=FLOAT_HEAD_DIMS,
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        largest=100,
        **FRUGAL,
    )
)
def test_float_flash_within_bounds_of_the_reference(deterministic: bool, problem: AttentionProblem):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@examples(4, deep=16)
@given(data=st.data())
def test_float_flash_options_within_bounds_of_the_reference(
    deterministic: bool, data: st.DataObject
):
    problem = data.draw(
        problems_with_options(
            deterministic,
            head_dims=((24, 40),),
            dtypes=wider(["float32"], ["bfloat16"]),
            largest=100,
        )
    )
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize(
    ("dtype", "deterministic"), [("float32", False), *deep(("float32", True), ("bfloat16", True))]
)
@pytest.mark.parametrize("head_dim", mostly_deep(DKDV_F32[75], [256]))
def test_every_row_of_the_float_tables(head_dim: int, deterministic: bool, dtype: str):
    problem = AttentionProblem(
        B=1, Sq=80, Sk=100, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype,
        drawn=(("causal", True),),
    )  # fmt: skip
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
@pytest.mark.parametrize("large", [1e10, *deep(1e7, 1e8, 1e9, 1e30)])
def test_float_weights_are_at_most_1_where_lse_has_no_digits(large: float, deterministic: bool):
    """A finite bias on all keys of a row; its gradients mean nothing, those of other rows do."""
    problem = AttentionProblem(B=1, Sq=70, Sk=70, H=1, G=1, D=24, Dv=40, dtype="float32")
    hidden = np.arange(70) % 3 == 0
    bias = np.where(hidden, -large, 0.0).astype(np.float32)[:, None].repeat(70, axis=1)
    dout, (q, k, v) = problem.gradients()[0], problem.arrays()
    placed_rows = tuple(map(KERNELS.put, (q, k, v)))
    out, lse = map(
        KERNELS.get, cupyattn.attention(*placed_rows, bias=KERNELS.put(bias), return_lse=True)
    )
    arrays, options = (dout, q, k, v, out, lse), {"bias": bias, "deterministic": deterministic}
    grads = run(arrays, options, "flash")
    assert all(np.isfinite(gradient).all() for gradient in grads.values())
    assert (np.abs(grads["dv"]) <= 1.0001 * np.abs(dout).sum(axis=1, keepdims=True)).all()
    seen = (dout[:, ~hidden], q[:, ~hidden], k, v, out[:, ~hidden], lse[..., ~hidden])
    exact = reference.attention_backward(*seen)
    bounds = reference.attention_backward_bound(*seen, dtype="float32", float32_weights=False)
    assert reference.error_ratio(grads["dq"][:, ~hidden], exact.dq, bounds.dq) <= 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", mostly_deep(sorted({*ONE_PASS[75], *DQ[75]}), [64]))
def test_every_row_of_the_flash_tables(head_dim: int, deterministic: bool):
    sq, sk = (250, 300) if isinstance(KERNELS, GpuArrays) else (150, 200)
    problem = AttentionProblem(
        B=1, Sq=sq, Sk=sk, H=2, G=1, D=head_dim, Dv=head_dim, dtype="float16",
        drawn=(("causal", True),),
    )  # fmt: skip
    check(problem, "flash", deterministic=deterministic)


SHAPES = (2, 4, 9, 41), (1, 1, 1, 1), (4, 1, 41), (9, 1), (41,)
CALLS = [(dtype, mode) for dtype in ("float16", "float32") for mode in (False, True)]
OF_OWN_DTYPE = [(call, shape, False) for call in CALLS for shape in SHAPES]
OTHERS = [each for each in pairs(CALLS, SHAPES, (False, True)) if each[2]]


@pytest.mark.parametrize(
    ("call", "shape", "other_dtype"),
    mostly_deep([*OF_OWN_DTYPE, *OTHERS], [OF_OWN_DTYPE[i] for i in (*range(5), 6, 8, 11, 13)]),
    ids=str,
)
def test_dbias_of_every_broadcast(
    call: tuple[str, bool], shape: tuple[int, ...], other_dtype: bool
):
    dtype, deterministic = call
    bias_dtype = {"float16": "float32", "float32": "float16"}[dtype] if other_dtype else dtype
    problem = AttentionProblem(
        B=2, Sq=9, Sk=41, H=4, G=2, D=24, Dv=40, dtype=dtype,
        drawn=(("causal", True), ("bias", (shape, bias_dtype))),
    )  # fmt: skip
    check(problem, "flash", deterministic=deterministic)


def test_every_item_has_one_writer():
    """Two would store the same, but add it twice to what is there; delta is stored besides."""
    problem = AttentionProblem(
        B=1, Sq=9, Sk=41, H=4, G=2, D=24, Dv=40, dtype="float32",
        drawn=(("bias", ((9, 41), "float32")), ("sinks", "float32")),
    )  # fmt: skip
    arrays, options = inputs(problem)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        grads = cupyattn.attention_backward(*arrays, **options, deterministic=True)
    stored = sum(each.bytes for each in report.accesses if each.write and each.space == "global")
    assert stored == sum(gradient.nbytes for gradient in grads if gradient is not None) + 4 * 4 * 9


@pytest.mark.parametrize("dtype", ["float16", "float32", *deep("bfloat16")])
def test_long_sequences(dtype: str):
    """Sums of many terms, several strips of keys and of queries; options of the searches above."""
    sq, sk = (1500, 2000) if isinstance(KERNELS, GpuArrays) else (150, 300)
    bias, slopes = ((sk,), "float32"), ((2,), "float32", 1)
    head_dim, head_dim_v = (64, 64) if dtype == "float16" else (24, 40)
    problem = AttentionProblem(
        B=1, Sq=sq, Sk=sk, H=2, G=1, D=head_dim, Dv=head_dim_v, dtype=dtype, option_view="strided",
        drawn=(("causal", True), ("bias", bias), ("alibi_slopes", slopes), ("sinks", "float32")),
    )  # fmt: skip
    check(problem, "flash")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "q_offset": -3},
        {"bias": np.full((2, 1, 1), -np.inf, np.float32)},
        {"seqused_k": np.zeros(1, np.int32)},
        {"mask": np.zeros((1, 1), bool), "sinks": np.zeros(2, np.float32)},
        {"mask": np.zeros((1, 1), bool), "sinks": np.full(2, -np.inf, np.float32)},
    ],
    ids=lambda options: "-".join(options),
)
def test_rows_without_keys_have_no_gradient(options: dict[str, Any]):
    shapes = (1, 3, 2, 24), (1, 5, 1, 24), (1, 5, 1, 40)
    q, k, v = (np.ones(shape, np.float16) for shape in shapes)
    if "seqused_k" in options:
        k, v = k * np.nan, v * np.nan
    out, lse = reference.attention(q, k, v, **options)
    dout = np.ones(out.shape, np.float16)
    arrays = (dout, q, k, v, out.astype(np.float16), lse.astype(np.float32))
    for gradient in run(arrays, options, "flash").values():
        assert (gradient == 0).all()


def test_dbias_of_no_axes_into_grads():
    problem = AttentionProblem(B=1, Sq=4, Sk=5, H=1, G=1, D=24, Dv=40, dtype="float16")
    bias = np.array(0.5, np.float32)
    out, lse = reference.attention(*problem.arrays(), bias=bias)
    results = out.astype(np.float16), lse.astype(np.float32)
    arrays, options = (problem.gradients()[0], *problem.arrays(), *results), {"bias": bias}
    dbias = KERNELS.put(np.array(SENTINEL, np.float32))
    grads = AttentionGrads(None, None, None, dbias, None)
    results_by_name = run(arrays, options, "flash", grads=grads)
    assert_array_equal(KERNELS.get(dbias), results_by_name["dbias"])
    ratios = error_ratios(results_by_name, arrays, options)
    assert max(ratios.values()) <= 1, ratios


GPU_NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # which an emulated kernel hands on


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_nan_in_the_bias_reaches_the_keys_of_its_row_and_no_others(dtype: str):
    """Of an even query and an odd one: two neighbours are packed together."""
    problem = AttentionProblem(B=1, Sq=4, Sk=4, H=1, G=1, D=24, Dv=40, dtype=dtype)
    bias = np.zeros((4, 4), np.float32)
    bias[[1, 2], [0, 1]] = GPU_NAN
    options = {"window_size": (1, 0), "bias": bias}
    out, lse = reference.attention(*problem.arrays(), **options)
    results = out.astype(dtype), np.where(np.isnan(lse), GPU_NAN, lse.astype(np.float32))
    grads = run((problem.gradients()[0], *problem.arrays(), *results), options, "flash")
    seen = np.array([[True, True, False, False], [False, True, True, False]])
    assert_array_equal(np.isnan(grads["dq"][0, :, 0, 0]), [False, True, True, False])
    assert_array_equal(np.isnan(grads["dk"][0, :, 0, 0]), seen.any(axis=0))
    assert_array_equal(np.isnan(grads["dv"][0, :, 0, 0]), seen.any(axis=0))
    assert_array_equal(np.isnan(grads["dbias"][1:3]), seen)
    assert np.isfinite(grads["dbias"][[0, 3]]).all()


@examples(4)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=("float32",),
        options=("causal", "q_offset"),
        largest=66,
        **FRUGAL,
    )
)
def test_parts_of_the_keys_give_parts_of_the_gradients(problem: AttentionProblem):
    """Given the whole's out and lse, a part of the keys has its share of dq, and its own dk, dv."""
    (dout, q, k, v, out, lse), options = inputs(problem)
    options = {"q_offset": problem.Sk - problem.Sq, **options}
    whole = run((dout, q, k, v, out, lse), options, "flash")
    bounds = reference.attention_backward_bound(dout, q, k, v, out, lse, dtype="float32", **options)
    cut = problem.Sk // 3
    shares = []
    for keys, offset in ((slice(0, cut), 0), (slice(cut, None), cut)):
        part = {**options, "q_offset": options["q_offset"] - offset}
        shares.append(run((dout, q, k[:, keys], v[:, keys], out, lse), part, "flash"))
    together = {
        "dq": shares[0]["dq"].astype(np.float64) + shares[1]["dq"],
        **{n: np.concatenate([s[n] for s in shares], axis=1) for n in ("dk", "dv")},
    }
    for name, gradient in together.items():
        assert reference.error_ratio(gradient, whole[name], 3 * getattr(bounds, name)) <= 1, name


@pytest.mark.gpu
def test_more_heads_than_the_grid_has_rows():
    """B * H beyond 65,535, the limit of a grid's second axis."""
    problem = AttentionProblem(B=2, Sq=2, Sk=3, H=40_000, G=40_000, D=2, Dv=2, dtype="float16")
    check(problem, "flash")
