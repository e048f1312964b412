"""The flash backward within the reference's bounds, and how CTAs share the sums of dbias."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.backward_runs import check, check_accumulated, error_ratios, inputs, run
from support.devices import DTYPES, KERNELS, SENTINEL, GpuArrays
from support.search import deep, examples, mostly_deep, wider
from support.strategies import (
    EITHER_HALF,
    FRUGAL,
    LONGEST,
    RUN_TIME_OPTIONS,
    attention_problems,
    every_option,
)
from support.varlen import VarlenProblem

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.emulator import Report
from cupyattn.ops.attention import backward
from cupyattn.ops.attention import backward_tensor_core as dbias
from cupyattn.ops.attention.backward_tensor_core import shared_out
from cupyattn.ops.attention.kernels.float32.backward import DKDV as DKDV_F32
from cupyattn.ops.attention.kernels.tensor_core.backward_dkdv import ONE_PASS
from cupyattn.ops.attention.kernels.tensor_core.backward_dq import DQ
from cupyattn.ops.attention.kernels.tensor_core.backward_summed_dbias import SUMMED_DBIAS
from cupyattn.runtime.arrays import contiguous
from cupyattn.runtime.tables import pairs
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Steps of 8 columns with tails of 1, 2 and 3 chunks, odd dims, D != Dv, all configurations. A
# plain run needs one with tails, and one whose keys and values are kept by pairs of warps.
FLASH_HEAD_DIMS = [
    *((24, 40), (136, 192)),
    *deep(*((pair,) for pair in ((5, 8), (64, 64), (80, 72), (88, 96), (128, 128), (256, 249)))),
    *deep(((8, 256),), ((256, 8),)),
]
# Columns that end within a group of four and within a stage of 16; all configurations.
FLOAT_HEAD_DIMS = wider([(24, 40)], [(1, 3), (65, 128), (64, 64), (136, 72), (8, 256), (256, 8)])
# (D, Dv) of which one is above 256: columns of the results in parts, the last one shorter.
WIDE_HEAD_DIMS = ((257, 264), (264, 500), (320, 64), (24, 384), (512, 512))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dims", FLASH_HEAD_DIMS, ids=str)
@examples(3)
@given(data=st.data())
def test_flash_within_bounds_of_the_reference(head_dims, deterministic, data):
    problems = attention_problems(
        head_dims=(head_dims,), dtypes=("float16",), options=RUN_TIME_OPTIONS, largest=LONGEST,
        **FRUGAL,
    )  # fmt: skip
    check(data.draw(problems), "flash", deterministic=deterministic)


# More columns than the registers of a warp hold: all warps share them, in slices of 96 or 128.
_SHARED = ((257, 512), (320, 257), (384, 384), (500, 264), (512, 500), (8, 512))
SHARED_HEAD_DIMS = [(264, 320), *deep(*((pair,) for pair in _SHARED))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dims", SHARED_HEAD_DIMS, ids=str)
@examples(4, deep=12)
@given(data=st.data())
def test_columns_shared_by_warps_within_bounds_of_the_reference(head_dims, deterministic, data):
    problems = attention_problems(
        head_dims=(head_dims,), dtypes=("float16",), options=RUN_TIME_OPTIONS, largest=80, **FRUGAL
    )
    check(data.draw(problems), "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
@examples(5, deep=16)
@given(
    problem=attention_problems(
        head_dims=wider([(264, 320)], [(512, 384), (72, 512)]),
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=80,
        **FRUGAL,
    )
)
def test_options_with_columns_shared_by_warps_within_bounds(deterministic, problem):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@examples(4, deep=16)
@given(
    problem=attention_problems(
        head_dims=wider([(24, 40)], [(64, 64)]),
        dtypes=("float16",),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_flash_options_within_bounds_of_the_reference(deterministic, problem):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@examples(3, deep=16)
@given(
    problem=attention_problems(
        head_dims=FLOAT_HEAD_DIMS,
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        largest=100,
        **FRUGAL,
    )
)
def test_float_flash_within_bounds_of_the_reference(deterministic: bool, problem: AttentionCase):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("dims", [(257, 264), (320, 384), (500, 512)], ids=str)
def test_wide_heads_of_few_tokens(dims: tuple[int, int]):
    check(AttentionCase(1, 3, 5, 1, 1, *dims, dtype="float16"), "flash", deterministic=False)


def test_heads_of_more_than_256_items():
    problem = AttentionCase(B=1, Sq=19, Sk=35, H=2, G=1, D=264, Dv=300, dtype="float32")
    check(problem, "flash", deterministic=False)


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@examples(12)
@given(
    problem=attention_problems(
        head_dims=WIDE_HEAD_DIMS,
        dtypes=DTYPES,
        options=RUN_TIME_OPTIONS,
        largest=70,
        **FRUGAL,
    )
)
def test_wide_heads_within_bounds_of_the_reference(deterministic: bool, problem: AttentionCase):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@examples(12)
@given(
    problem=attention_problems(
        head_dims=WIDE_HEAD_DIMS,
        dtypes=DTYPES,
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=70,
        **FRUGAL,
    )
)
def test_options_of_wide_heads_within_bounds_of_the_reference(deterministic, problem):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@examples(3, deep=16)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=wider(["float32"], ["bfloat16"]),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=100,
        **FRUGAL,
    )
)
def test_float_flash_options_within_bounds_of_the_reference(deterministic, problem):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        *(("float16", head_dim) for head_dim in sorted({*ONE_PASS[75], *DQ[75]})),
        *itertools.product(("float32", "bfloat16"), DKDV_F32[75]),
    ],
)
def test_every_configuration_of_flash(dtype: str, head_dim: int, deterministic: bool):
    sq, sk = (250, 300) if isinstance(KERNELS, GpuArrays) else (150, 200)
    problem = AttentionCase(
        B=1, Sq=sq, Sk=sk, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype,
        options=(("causal", True),),
    )  # fmt: skip
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
@pytest.mark.parametrize("large", [1e10, *deep(1e7, 1e8, 1e9, 1e30)])
def test_float_weights_are_at_most_1_where_lse_has_no_digits(large: float, deterministic: bool):
    """Rows with a large finite bias on all keys have no exact gradients; other rows have."""
    problem = AttentionCase(B=1, Sq=70, Sk=70, H=1, G=1, D=24, Dv=40, dtype="float32")
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


def with_every_option(
    dtype: str, *, bias: tuple[tuple[int, ...], str] | None = None, **sizes: int
) -> AttentionCase:
    """A problem for the kernels with all options at once, which the searches above compile."""
    sizes = {"B": 1, "Sq": 9, "Sk": 41, "H": 4, "G": 2, **sizes}
    drawn = (("causal", True), *every_option(dtype, sizes["H"], sizes["Sq"], sizes["Sk"], bias))
    return AttentionCase(**sizes, D=24, Dv=40, dtype=dtype, option_view="strided", options=drawn)


SHAPES = (2, 4, 9, 41), (1, 1, 1, 1), (4, 1, 41), (9, 1), (41,)
CALLS = [(dtype, mode) for dtype in ("float16", "float32") for mode in (False, True)]
OF_OWN_DTYPE = [(call, shape, False) for call in CALLS for shape in SHAPES]
OTHERS = [each for each in pairs(CALLS, SHAPES, (False, True)) if each[2]]


@pytest.mark.parametrize(
    ("call", "shape", "other_dtype"),
    mostly_deep([*OF_OWN_DTYPE, *OTHERS], [OF_OWN_DTYPE[3], OF_OWN_DTYPE[12]]),
    ids=str,
)
def test_dbias_of_every_broadcast(call, shape, other_dtype):
    dtype, deterministic = call
    bias_dtype = {"float16": "float32", "float32": "float16"}[dtype] if other_dtype else dtype
    problem = with_every_option(dtype, bias=(shape, bias_dtype), B=2)
    check(problem, "flash", deterministic=deterministic)


def test_every_item_has_one_writer():
    """Two writers would add twice to what is there. Delta is stored as well."""
    problem = with_every_option("float32")
    arrays, options = inputs(problem)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        grads = cupyattn.attention_backward(*arrays, **options, deterministic=True)
    stored = sum(each.bytes for each in report.accesses if each.write and each.space == "global")
    assert stored == sum(gradient.nbytes for gradient in grads if gradient is not None) + 4 * 4 * 9


@pytest.mark.parametrize("dtype", ["float16", "float32", *deep("bfloat16")])
def test_long_sequences(dtype: str):
    """Sums of many terms, several tiles of keys and of queries; every option."""
    sq, sk = (1500, 2000) if isinstance(KERNELS, GpuArrays) else (150, 300)
    problem = with_every_option(dtype, bias=((sk,), dtype), Sq=sq, Sk=sk, H=2, G=1)
    check(problem, "flash")


@pytest.mark.parametrize(
    "options",
    [
        *({"causal": True, "q_offset": -3}, {"seqused_k": np.zeros(1, np.int32)}),
        *deep(
            {"bias": np.full((2, 1, 1), -np.inf, np.float32)},
            {"mask": np.zeros((1, 1), bool), "sinks": np.zeros(2, np.float32)},
            {"mask": np.zeros((1, 1), bool), "sinks": np.full(2, -np.inf, np.float32)},
        ),
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


@pytest.mark.deep
def test_dbias_of_no_axes_into_grads():
    problem = AttentionCase(B=1, Sq=4, Sk=5, H=1, G=1, D=24, Dv=40, dtype="float16")
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
    """The NaN is in an even query, then in an odd one: two neighbours are packed together."""
    problem = AttentionCase(B=1, Sq=4, Sk=4, H=1, G=1, D=24, Dv=40, dtype=dtype)
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


ROW = SUMMED_DBIAS[75][64]
ROWS, KEYS = ROW.tile_q, ROW.tile_k


@contextmanager
def enough(ctas: int) -> Iterator[None]:
    """So many CTAs are enough: with few of them each loops over many pairs."""
    plans = (backward._plan,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dbias, "_ENOUGH_CTAS", ctas)
        for each in plans:
            each.cache_clear()
        yield
    for each in plans:
        each.cache_clear()


def problem_with(bias: tuple[int, ...], dtype: str = "float16", **drawn: Any) -> AttentionCase:
    """Two tiles of queries and three of keys, the last of each with one row; the shape's H, Sq, Sk
    may be None for all of them."""
    sizes = (2, 2, ROWS + 1, 2 * KEYS + 1)
    shape = tuple(
        full if extent is None else extent
        for extent, full in zip(bias, sizes[4 - len(bias) :], strict=True)
    )
    options = (("bias", (shape, dtype)), *drawn.items())
    return AttentionCase(
        B=2, Sq=sizes[2], Sk=sizes[3], H=2, G=1, D=24, Dv=40, dtype="float16", options=options
    )


ALL = None
WALKS = {
    "all heads": ((1, 1, ALL, ALL), {}),
    "a head of every batch element": ((1, ALL, ALL, ALL), {"causal": True}),
    "every head of a batch element": ((2, 1, ALL, ALL), {"window_size": (KEYS, KEYS - 1)}),
    "a row of keys": ((ALL,), {"causal": True}),
    "a column of queries": ((ALL, 1), {"causal": True}),
    "one number": ((1, 1), {"causal": True}),
    "keys in use, none of one": ((ALL, ALL), {"seqused_k": (2 * KEYS + 1, 0)}),
    "positions": ((ALL, ALL), {"causal": True, "q_offset": (-3, KEYS - 1)}),
}


PLAIN = [*list(WALKS)[:2], "a column of queries"]


@pytest.mark.parametrize("name", mostly_deep(WALKS, PLAIN))
@pytest.mark.parametrize("ctas", [1, *deep(16)], ids=["one part", "some parts"])
def test_reduced_dbias_of_every_broadcast(name: str, ctas: int):
    shape, options = WALKS[name]
    with enough(ctas):
        check(problem_with(shape, **options), "flash")


# The window hides one score of the second tile of keys, on its left that of the last query, on its
# right that of the first; causal order leaves one score of it.
EDGES = {
    "left": (KEYS + 2, {"window_size": (KEYS, KEYS - 1), "q_offset": KEYS}),
    "right": (KEYS + 1, {"window_size": (KEYS, KEYS - 2), "q_offset": KEYS}),
    "one score": (KEYS + 1, {"causal": True, "q_offset": 0}),
}


@pytest.mark.parametrize("name", EDGES)
def test_masks_that_end_one_score_within_a_tile(name: str):
    rows, options = EDGES[name]
    drawn = (("bias", ((rows, 3 * KEYS - 1), "float16")), *options.items())
    problem = AttentionCase(1, rows, 3 * KEYS - 1, 2, 1, 24, 40, "float16", options=drawn)
    with enough(1):
        check(problem, "flash")


@examples(4, deep=30)
@given(
    sizes=st.tuples(
        st.integers(1, 3),
        st.sampled_from((1, 16, ROWS - 1, ROWS, ROWS + 1)),
        st.sampled_from(wider((1, KEYS + 1, 2 * KEYS + 1), (4, KEYS, 2 * KEYS + 4))),
        st.sampled_from(((1, 1), (4, 1), (4, 2), (2, 2))),
    ),
    head_dims=st.sampled_from(wider([(24, 40)], [(64, 64), (7, 40), (128, 80), (256, 160)])),
    broadcasts=st.tuples(*[st.booleans()] * 4),
    dtype=st.sampled_from(wider(("float16",), ("float32",))),
    options=st.sampled_from(
        wider(
            [{}, {"causal": True}, {"window_size": (20, 3)}],
            [
                {"mask": 1, "softcap": 2.0},
                {"dropout_p": 0.5},
                {"alibi_slopes": 1},
                {"seqused_k": 1, "causal": True},
            ],
        )
    ),
    ctas=st.sampled_from((1, 7, 512)),
)
def test_any_broadcast_is_within_the_bounds(sizes, head_dims, broadcasts, dtype, options, ctas):
    batch, sq, sk, (heads, kv_heads) = sizes
    extents = (batch, heads, sq, sk)
    shape = tuple(1 if one else n for one, n in zip(broadcasts, extents, strict=True))
    drawn = {**options, "bias": (shape, dtype)}
    drawn |= {"mask": (sq, sk)} if "mask" in options else {}
    drawn |= {"alibi_slopes": ((heads,), "float32", 1)} if "alibi_slopes" in options else {}
    drawn |= (
        {"seqused_k": tuple(sk // n for n in range(1, batch + 1))} if "seqused_k" in options else {}
    )
    problem = AttentionCase(
        B=batch, Sq=sq, Sk=sk, H=heads, G=kv_heads, D=head_dims[0], Dv=head_dims[1],
        dtype="float16", options=tuple(drawn.items()),
    )  # fmt: skip
    with enough(ctas):
        check(problem, "flash")


@pytest.mark.parametrize("shape", [(ALL, ALL), *deep(((ALL,),))], ids=["summed", "rows of it too"])
def test_reduced_dbias_is_added_to_what_is_there(shape: tuple[None, ...]):
    arrays, options = inputs(problem_with(shape, causal=True))
    before = np.full_like(options["bias"], 0.5)
    for ctas in (1, 512):  # dbias itself, and scratch
        grads = AttentionGrads(None, None, None, KERNELS.put(before.copy()), None)
        with enough(ctas):
            found = run(arrays, options, "flash", grads=grads, accumulate=True)
        start = {"dbias": before.astype(np.float64)}
        check_accumulated({"dbias": found["dbias"]}, start, arrays, options)


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
def test_reduced_dbias_has_the_same_bits_each_time(deterministic: bool):
    """No mode sums it with atomic additions."""
    arrays, options = inputs(problem_with((ALL, ALL)))
    found = [
        run(arrays, options, "flash", deterministic=way)["dbias"] for way in (deterministic, False)
    ]
    assert_array_equal(*found)


def test_packed_sequences_of_several_tiles():
    dense = AttentionCase(
        B=5, Sq=ROWS + 1, Sk=KEYS + 1, H=2, G=1, D=64, Dv=64, dtype="float16",
        options=(("causal", True), ("bias", ((ROWS + 1, KEYS + 1), "float32"))),
    )  # fmt: skip
    # In scratch memory rows of the second follow the few rows of the first, and they see keys.
    problem = VarlenProblem(
        dense, queries=(5, 33, ROWS + 1, 0, 9), keys=(KEYS + 1, KEYS, KEYS, 7, 0), spare=3
    )
    with enough(1):
        ratios = problem.backward_ratios(problem.run_backward())
    assert max(ratios.values()) <= 1, ratios


class Sizes:
    """The fields of a problem that `shared_out` reads."""

    def __init__(self, batch: int, heads: int, sq: int, sk: int) -> None:
        self.batch, self.heads, self.sq, self.sk = batch, heads, sq, sk


SHARES = {
    # Many tiles: no parts, no scratch.
    (8, 16, 4096, 4096): ((1, 16, 4096, 4096), (1, 16, 1, False, False), None),
    # 2 tiles: a CTA for each pair.
    (2, 4, 130, 100): ((130, 100), (1, 1, 8, False, False), (8, 1, 130, 100)),
    (8, 16, 1024, 1000): ((1, 16, 1024, 1000), (1, 16, 1, False, False), None),
    # 8 x 4 tiles of 512 CTAs that are enough: so many parts that there are as many.
    (8, 16, 1024, 500): ((8, 1, 1024, 500), (8, 1, 2, False, False), (8, 2, 1024, 500)),
    (9, 16, 1024, 500): ((1, 1, 1024, 500), (1, 1, 16, False, False), (16, 1, 1024, 500)),
    (9, 16, 1152, 500): ((1, 1, 1152, 500), (1, 1, 14, False, False), (14, 1, 1152, 500)),
    (2, 16, 300, 100): ((2, 1, 300, 100), (2, 1, 16, False, False), (2, 16, 300, 100)),
    # A row for each of a tile's 8 warps, a key for each tile.
    (2, 16, 300, 4000): ((2, 16, 1, 4000), (2, 16, 1, True, False), (2, 16, 24, 4000)),
    (2, 16, 300, 4001): ((2, 16, 300, 1), (2, 16, 1, False, True), (2, 16, 300, 32)),
    (1, 1, 300, 100): ((1,), (1, 1, 1, True, True), (1, 1, 24, 1)),
    (2, 3, 0, 100): ((100,), (1, 1, 6, True, False), (6, 1, 0, 100)),
}


@pytest.mark.parametrize("sizes", SHARES, ids=str)
def test_how_the_work_is_shared_out(sizes: tuple[int, int, int, int]):
    shape, shares, scratch = SHARES[sizes]
    target = contiguous(shape, np.dtype(np.float16))
    for accumulate in (False, True):
        found = shared_out(Sizes(*sizes), target, ROW, accumulate)
        assert found.shares == (*shares, accumulate and scratch is None)
        assert found.scratch == (scratch is not None)
        expected = target if scratch is None else contiguous(scratch, np.dtype(np.float32))
        assert found.target == expected
        batches, heads, parts, *_ = shares
        tiles = -(-sizes[2] // ROWS) * -(-sizes[3] // KEYS)
        assert found.ctas == batches * heads * parts * tiles
        # Of parts there are few more CTAs than are enough, and so little scratch.
        assert parts == 1 or found.ctas <= 512
