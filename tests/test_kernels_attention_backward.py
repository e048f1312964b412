"""The attention backward kernels against the float64 reference, within its derived bounds.

Kernels and reference are given the same out and lse, those of the reference's forward, rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import KERNELS, GpuArrays, examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import AttentionProblem, attention_problems, dtype_of

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.functional.rounding import round_into
from cupyattn.kernels.configs.attention_backward import DQ, ONE_PASS
from cupyattn.kernels.configs.attention_backward_f32 import DKDV as DKDV_F32

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

OPTIONS = ("causal", "softmax_scale", "window_size", "q_offset", "seqused_k")
SCORE_OPTIONS = ("mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout_p")
DTYPES = ("float16", "bfloat16", "float32")
# More columns than threads, odd dims, D != Dv in both directions, the largest.
HEAD_DIMS = ((1, 1), (7, 33), (40, 24), (64, 64), (80, 136), (256, 256))
# Steps of 8 columns with tails of 1, 2 and 3 chunks, odd dims, D != Dv, every row of the tables.
FLASH_HEAD_DIMS = (
    (5, 8),
    (24, 40),
    (64, 64),
    (80, 72),
    (88, 96),
    (128, 128),
    (136, 192),
    (256, 249),
)
IMPLEMENTATIONS = ("naive", "flash")
# Columns that end within a group of four and within a stage of 16; every row of the tables.
FLOAT_HEAD_DIMS = ((1, 3), (24, 40), (64, 64), (65, 128), (136, 72))
FLOAT_DTYPES = ("float32", "bfloat16")
GRADIENTS = AttentionGrads._fields
SENTINEL = 77.0

Arrays = tuple[np.ndarray, ...]


def inputs(problem: AttentionProblem) -> tuple[Arrays, dict[str, Any]]:
    """(dout, q, k, v, out, lse) and the options, dlse among them, as NumPy arrays."""
    dout, dlse = problem.gradients()
    options = problem.options()
    out, lse = reference.attention(*problem.arrays(), **options)
    results = (
        round_into(None, out, dtype_of(problem.dtype)),
        round_into(None, lse, np.dtype(np.float32)),
    )
    return (dout, *problem.arrays(), *results), {**options, "dlse": dlse}


def placed(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def fetched(grads: AttentionGrads) -> dict[str, np.ndarray]:
    return {name: KERNELS.get(x) for name, x in grads._asdict().items() if x is not None}


def run(
    arrays: Arrays, options: dict[str, Any], implementation: str, **more: Any
) -> dict[str, np.ndarray]:
    """Gradients by name, as NumPy arrays."""
    grads = cupyattn.attention_backward(
        *map(KERNELS.put, arrays), **placed(options), implementation=implementation, **more
    )
    return fetched(grads)


def error_ratios(
    grads: dict[str, np.ndarray],
    arrays: Arrays,
    options: dict[str, Any],
    implementation: str = "naive",
) -> dict[str, float]:
    """Largest error over bound, of each gradient."""
    exact = reference.attention_backward(*arrays, **options)
    bounds = reference.attention_backward_bound(
        *arrays, dtype=arrays[1].dtype, float32_weights=implementation == "naive", **options
    )
    expected = {name: x for name, x in exact._asdict().items() if x is not None}
    assert grads.keys() == expected.keys()
    return {
        name: reference.error_ratio(grads[name], expected[name], getattr(bounds, name))
        for name in grads
    }


def check(problem: AttentionProblem, implementation: str, **more: Any) -> None:
    arrays, options = inputs(problem)
    grads = run(arrays, options, implementation, **more)
    ratios = error_ratios(grads, arrays, options, implementation)
    assert max(ratios.values()) <= 1, ratios


@examples(on_emulator=12)
@given(problem=attention_problems(head_dims=HEAD_DIMS, dtypes=DTYPES, options=OPTIONS))
def test_naive_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "naive")


@examples(on_emulator=15)
@given(
    problem=attention_problems(
        head_dims=((24, 40),), dtypes=DTYPES, options=(*OPTIONS, *SCORE_OPTIONS), largest=66
    )
)
def test_naive_options_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "naive")


@pytest.mark.parametrize("deterministic", [False, True])
@examples(on_emulator=12)
@given(problem=attention_problems(head_dims=FLASH_HEAD_DIMS, dtypes=("float16",), options=OPTIONS))
def test_flash_within_bounds_of_the_reference(deterministic: bool, problem: AttentionProblem):
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@examples(on_emulator=12)
@given(
    problem=attention_problems(
        head_dims=((64, 64),), dtypes=("float16",), options=(*OPTIONS, *SCORE_OPTIONS)
    )
)
def test_flash_options_within_bounds_of_the_reference(
    deterministic: bool, problem: AttentionProblem
):
    check(problem, "flash", deterministic=deterministic)


@examples(on_emulator=8)
@given(
    problem=attention_problems(
        head_dims=FLOAT_HEAD_DIMS, dtypes=FLOAT_DTYPES, options=OPTIONS, largest=100
    )
)
def test_float_flash_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "flash")


@examples(on_emulator=8)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=FLOAT_DTYPES,
        options=(*OPTIONS, *SCORE_OPTIONS),
        largest=100,
    )
)
def test_float_flash_options_within_bounds_of_the_reference(problem: AttentionProblem):
    check(problem, "flash")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("head_dim", DKDV_F32)
def test_every_row_of_the_float_tables(head_dim: int, dtype: str):
    problem = AttentionProblem(
        B=1, Sq=80, Sk=100, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype,
        drawn=(("causal", True),),
    )  # fmt: skip
    check(problem, "flash")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", sorted({*ONE_PASS, *DQ}))
def test_every_row_of_the_flash_tables(head_dim: int, deterministic: bool):
    problem = AttentionProblem(
        B=1, Sq=250, Sk=300, H=2, G=1, D=head_dim, Dv=head_dim, dtype="float16",
        drawn=(("causal", True),),
    )  # fmt: skip
    check(problem, "flash", deterministic=deterministic)


@pytest.mark.parametrize("shape", [(2, 4, 9, 41), (1, 1, 1, 1), (4, 1, 41), (9, 1), (41,)], ids=str)
@pytest.mark.parametrize("bias_dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("implementation", "dtype", "deterministic"),
    [
        ("naive", "float16", False),
        ("flash", "float16", False),
        ("flash", "float16", True),
        ("flash", "float32", False),
    ],
)
def test_dbias_of_every_broadcast(
    shape: tuple[int, ...],
    bias_dtype: str,
    implementation: str,
    dtype: str,
    deterministic: bool,
):
    problem = AttentionProblem(
        B=2, Sq=9, Sk=41, H=4, G=2, D=8, Dv=8, dtype=dtype,
        drawn=(("causal", True), ("bias", (shape, bias_dtype))),
    )  # fmt: skip
    check(problem, implementation, deterministic=deterministic)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [(implementation, dtype) for implementation in IMPLEMENTATIONS for dtype in DTYPES],
)
def test_long_sequences(implementation: str, dtype: str):
    """Sums of many terms, several strips of keys and of queries."""
    sq, sk = (1500, 2000) if isinstance(KERNELS, GpuArrays) else (150, 300)
    problem = AttentionProblem(
        B=1, Sq=sq, Sk=sk, H=2, G=1, D=64, Dv=64, dtype=dtype,
        drawn=(("causal", True), ("bias", ((sk,), "float32")), ("sinks", True)),
    )  # fmt: skip
    check(problem, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@examples(on_emulator=10)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=("float16", "float32"),
        options=("causal", "bias", "dropout_p", "sinks"),
        largest=66,
    )
)
def test_the_same_bits_from_run_to_run(implementation: str, problem: AttentionProblem):
    arrays, options = inputs(problem)
    first, second = (run(arrays, options, implementation, deterministic=True) for _ in range(2))
    for name, gradient in first.items():
        assert_array_equal(gradient.view(np.uint8), second[name].view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@examples(on_emulator=10)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=("float16", "float32"),
        options=(*OPTIONS, "bias", "sinks"),
        largest=66,
    )
)
def test_views_equal_copies(implementation: str, problem: AttentionProblem):
    """Of the arrays of all shapes: (B, S, H, D), (B, H, Sq) and the options'."""
    arrays, options = inputs(problem)
    options["deterministic"] = True
    of_copies = run(tuple(map(np.ascontiguousarray, arrays)), options, implementation)
    *rows, lse = arrays
    views = {"lse": lse, "dlse": options["dlse"], "bias": options.get("bias")}
    views = {name: _reversed_and_strided(x) for name, x in views.items() if x is not None}
    if "sinks" in options:
        views["sinks"] = np.repeat(options["sinks"], 2)[::2]
    of_views = run((*rows, views.pop("lse")), {**options, **views}, implementation)
    options = {name: value for name, value in options.items() if name != "deterministic"}
    assert_as_good(of_views, of_copies, arrays, options, implementation)


def assert_as_good(
    actual: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    arrays: Arrays,
    options: dict[str, Any],
    implementation: str,
) -> None:
    """The same bits; of the flash kernels as near to the reference.

    Their scalar and vector loads are two programs, in which a multiplication and an addition may be
    fused or not: a dS half way between two float16 then rounds the other way.
    """
    if implementation == "naive":
        for name, gradient in expected.items():
            assert_array_equal(actual[name], gradient)
    else:
        ratios = error_ratios(actual, arrays, options, implementation)
        assert max(ratios.values()) <= 1, ratios


def _reversed_and_strided(x: np.ndarray) -> np.ndarray:
    """x with its first axis backwards in memory and its last with gaps (lse, dlse: rows apart)."""
    if x.ndim == 3 and x.dtype == np.float32:
        wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)[::-1, ..., 1:-2]
    else:
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)[::-1, ..., ::2]
    wide[...] = x
    return wide


def shaped_like_inputs(arrays: Arrays, options: dict[str, Any]) -> dict[str, np.ndarray]:
    of = {"dq": arrays[1], "dk": arrays[2], "dv": arrays[3]}
    of |= {f"d{name}": options[name] for name in ("bias", "sinks") if name in options}
    return of


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@examples(on_emulator=10)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=("float16", "float32"),
        options=("causal", "bias", "sinks"),
        largest=66,
    ),
    accumulate=st.booleans(),
    given_names=st.sets(st.sampled_from(GRADIENTS), min_size=1),
)
def test_grads_are_written_into_any_strides(
    implementation: str, problem: AttentionProblem, accumulate: bool, given_names: set[str]
):
    """Every item written or added to, nothing beside them; added before the one rounding."""
    arrays, options = inputs(problem)
    expected = run(arrays, options, implementation, deterministic=True)
    memories, views = {}, {}
    for name, of in shaped_like_inputs(arrays, options).items():
        if name in given_names:
            memories[name], views[name] = _memory_with_view(of)
            views[name][...] = 0.5
    before = {name: KERNELS.get(view).astype(np.float64) for name, view in views.items()}
    if accumulate and not views:
        return
    grads = AttentionGrads(*(views.get(name) for name in GRADIENTS))
    returned = cupyattn.attention_backward(
        *map(KERNELS.put, arrays), **placed(options), implementation=implementation, grads=grads,
        accumulate=accumulate, deterministic=True,
    )  # fmt: skip
    replaced = {}
    for name, gradient in fetched(returned).items():
        if name in views:
            assert getattr(returned, name) is views[name]
        if not (accumulate and name in views):
            replaced[name] = gradient
    assert_as_good({**expected, **replaced}, expected, arrays, options, implementation)
    if accumulate:
        _check_accumulated(fetched(returned), before, arrays, options)
    for name, view in views.items():
        view[...] = SENTINEL
        assert (memories[name] == SENTINEL).all()


def _memory_with_view(of: np.ndarray) -> tuple[Any, Any]:
    """Memory full of sentinels, and within it a view of a shape and dtype, with own items."""
    if of.ndim == 4:
        b, s, h, d = of.shape
        memory = KERNELS.xp.full((b, h, s, d + 5), SENTINEL, of.dtype)
        return memory, memory.transpose(0, 2, 1, 3)[:, ::-1, :, 2:-3]
    memory = KERNELS.xp.full((2, *of.shape[:-1], of.shape[-1] + 2), SENTINEL, of.dtype)
    return memory, memory[1, ..., 1:-1]


def _check_accumulated(
    grads: dict[str, np.ndarray],
    before: dict[str, np.ndarray],
    arrays: Arrays,
    options: dict[str, Any],
) -> None:
    exact = reference.attention_backward(*arrays, **options)
    bounds = reference.attention_backward_bound(*arrays, dtype=arrays[1].dtype, **options)
    for name, start in before.items():
        total = getattr(exact, name) + start
        unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(grads[name].dtype.name, 2.0**-24)
        # The sum rounds once to float32 and once to the dtype, the bound's own store comes on top.
        bound = getattr(bounds, name) + 2 * unit * (np.abs(total) + np.abs(start))
        assert reference.error_ratio(grads[name], total, bound) <= 1, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_accumulating_rounds_once(implementation: str):
    """An addend below half a unit of what is there would vanish if it were rounded first."""
    problem = AttentionProblem(B=1, Sq=3, Sk=1, H=1, G=1, D=2, Dv=2, dtype="float16")
    (_, *arrays), _ = inputs(problem)
    dout = np.full_like(arrays[3], 2.0**-12)
    dv = KERNELS.put(np.ones((1, 1, 1, 2), np.float16))
    cupyattn.attention_backward(
        *map(KERNELS.put, (dout, *arrays)), implementation=implementation, accumulate=True,
        grads=AttentionGrads(None, None, dv, None, None),
    )  # fmt: skip
    assert_array_equal(KERNELS.get(dv), np.full((1, 1, 1, 2), np.float16(1 + 3 * 2.0**-12)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "empty",
    [{"B": 0}, {"Sq": 0}, {"Sk": 0}, {"Sq": 0, "Sk": 0}, {"H": 0, "G": 0}, {"H": 0}],
    ids=str,
)
def test_empty_problems_have_gradients_of_zero(
    implementation: str, empty: dict[str, int], accumulate: bool
):
    extents = {"B": 2, "Sq": 3, "Sk": 5, "H": 4, "G": 2, "D": 8, "Dv": 6, **empty}
    problem = AttentionProblem(
        **extents,
        dtype="float16",
        drawn=(("causal", True), ("bias", ((extents["Sk"],), "float32"))),
    )
    arrays, options = inputs(problem)
    options["sinks"] = np.zeros(extents["H"], np.float32)
    of = shaped_like_inputs(arrays, options)
    grads = AttentionGrads(*(KERNELS.put(np.full_like(of[name], 0.5)) for name in GRADIENTS))
    found = run(arrays, options, implementation, grads=grads, accumulate=accumulate)
    for name, gradient in found.items():
        if name == "dsinks" and extents["B"] * extents["Sq"]:
            continue  # the sink is there without keys
        assert gradient.shape == of[name].shape
        assert (gradient == (0.5 if accumulate else 0)).all(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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
def test_rows_without_keys_have_no_gradient(implementation: str, options: dict[str, Any]):
    q, k, v = (np.ones((1, n, h, d), np.float16) for n, h, d in ((3, 2, 4), (5, 1, 4), (5, 1, 2)))
    if "seqused_k" in options:
        k, v = k * np.nan, v * np.nan
    out, lse = reference.attention(q, k, v, **options)
    dout = np.ones(out.shape, np.float16)
    arrays = (dout, q, k, v, out.astype(np.float16), lse.astype(np.float32))
    for gradient in run(arrays, options, implementation).values():
        assert (gradient == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dbias_of_no_axes_into_grads(implementation: str):
    problem = AttentionProblem(B=1, Sq=4, Sk=5, H=1, G=1, D=8, Dv=8, dtype="float16")
    bias = np.array(0.5, np.float32)
    out, lse = reference.attention(*problem.arrays(), bias=bias)
    results = out.astype(np.float16), lse.astype(np.float32)
    arrays, options = (problem.gradients()[0], *problem.arrays(), *results), {"bias": bias}
    dbias = KERNELS.put(np.array(SENTINEL, np.float32))
    grads = AttentionGrads(None, None, None, dbias, None)
    results_by_name = run(arrays, options, implementation, grads=grads)
    assert_array_equal(KERNELS.get(dbias), results_by_name["dbias"])
    ratios = error_ratios(results_by_name, arrays, options, implementation)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_in_the_bias_reaches_the_keys_of_its_row_and_no_others(implementation: str):
    problem = AttentionProblem(B=1, Sq=4, Sk=4, H=1, G=1, D=8, Dv=8, dtype="float16")
    bias = np.zeros((4, 4), np.float32)
    bias[2, 1] = np.nan
    options = {"causal": True, "bias": bias}
    out, lse = reference.attention(*problem.arrays(), **options)
    results = out.astype(np.float16), lse.astype(np.float32)
    grads = run((problem.gradients()[0], *problem.arrays(), *results), options, implementation)
    seen = [True, True, True, False]
    assert_array_equal(np.isnan(grads["dq"][0, :, 0, 0]), [False, False, True, False])
    assert_array_equal(np.isnan(grads["dk"][0, :, 0, 0]), seen)
    assert_array_equal(np.isnan(grads["dv"][0, :, 0, 0]), seen)
    assert_array_equal(np.isnan(grads["dbias"][2]), seen)
    assert np.isfinite(grads["dbias"][[0, 1, 3]]).all()


@examples(on_emulator=5)
@given(
    problem=attention_problems(
        head_dims=((24, 40),), dtypes=("float32",), options=("causal", "q_offset"), largest=66
    )
)
def test_parts_of_the_keys_give_parts_of_the_gradients(problem: AttentionProblem):
    """Given the whole's out and lse, a part of the keys has its share of dq, and its own dk, dv."""
    (dout, q, k, v, out, lse), options = inputs(problem)
    options = {"q_offset": problem.Sk - problem.Sq, **options}
    whole = run((dout, q, k, v, out, lse), options, "naive")
    bounds = reference.attention_backward_bound(dout, q, k, v, out, lse, dtype="float32", **options)
    cut = problem.Sk // 3
    shares = []
    for keys, offset in ((slice(0, cut), 0), (slice(cut, None), cut)):
        part = {**options, "q_offset": options["q_offset"] - offset}
        shares.append(run((dout, q, k[:, keys], v[:, keys], out, lse), part, "naive"))
    together = {
        "dq": shares[0]["dq"].astype(np.float64) + shares[1]["dq"],
        **{n: np.concatenate([s[n] for s in shares], axis=1) for n in ("dk", "dv")},
    }
    for name, gradient in together.items():
        assert reference.error_ratio(gradient, whole[name], 3 * getattr(bounds, name)) <= 1, name


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_heads_than_the_grid_has_rows(implementation: str):
    """B * H beyond 65,535, the limit of a grid's second axis."""
    problem = AttentionProblem(B=2, Sq=2, Sk=3, H=40_000, G=40_000, D=2, Dv=2, dtype="float16")
    check(problem, implementation)
