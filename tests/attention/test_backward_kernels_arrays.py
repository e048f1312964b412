"""Arrays and limits of the backward kernels: views, accumulation, empty arrays, large scores."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.backward_runs import (
    GRADIENTS,
    Arrays,
    check,
    check_accumulated,
    error_ratios,
    fetched,
    inputs,
    placed,
    run,
)
from support.devices import KERNELS, SENTINEL
from support.search import deep, examples, wider
from support.strategies import (
    ALL_AT_ONCE,
    FRUGAL,
    RUN_TIME_OPTIONS,
    attention_problems,
    every_option,
)

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.emulator import Report
from cupyattn.ops.attention import values
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

SETS = wider(ALL_AT_ONCE[:1], ({}, {"bias": "own", "sinks": "own"}))


@examples(3, deep=8)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=("float16", "float32"),
        options=("causal",),
        option_sets=SETS,
        largest=66,
        **FRUGAL,
    )
)
def test_the_same_bits_from_run_to_run(problem: AttentionCase):
    arrays, options = inputs(problem)
    first, second = (run(arrays, options, "flash", deterministic=True) for _ in range(2))
    for name, gradient in first.items():
        assert_array_equal(gradient.view(np.uint8), second[name].view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 136])
def test_the_same_bits_where_many_ctas_add_to_a_row(head_dim: int, dtype: str):
    """More tiles of keys than run at once in one order; a bias of a row sums over all queries."""
    problem = AttentionCase(
        B=2, Sq=1100, Sk=2100, H=4, G=2, D=head_dim, Dv=head_dim, dtype=dtype,
        options=(("bias", ((2100,), "float32")), ("sinks", "float32")),
    )  # fmt: skip
    arrays, options = inputs(problem)
    first, *others = (run(arrays, options, "flash", deterministic=True) for _ in range(6))
    for other in others:
        for name, gradient in first.items():
            assert_array_equal(gradient.view(np.uint8), other[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "deterministic", "atomic"),
    [
        *(("float16", False, True), ("float16", True, False)),
        *(("float32", False, True), ("float32", True, False)),
        *deep(("bfloat16", False, True), ("bfloat16", True, False)),
    ],
)
def test_deterministic_calls_add_nothing_atomically(dtype: str, deterministic: bool, atomic: bool):
    """All launches of a call together, with a bias summed over batch, heads and queries."""
    drawn = (("causal", True), *every_option(dtype, 4, 9, 41, bias=((41,), dtype)))
    problem = AttentionCase(2, 9, 41, 4, 2, 24, 40, dtype, option_view="strided", options=drawn)
    arrays, options = inputs(problem)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.attention_backward(*arrays, **options, deterministic=deterministic)
    assert (report.atomic_updates > 0) == atomic


@examples(3, deep=8)
@given(
    problem=attention_problems(
        head_dims=((24, 40),),
        dtypes=wider(["float16"], ["float32"]),
        options=RUN_TIME_OPTIONS,
        option_sets=wider([{}], ALL_AT_ONCE[:1]),
        option_views=("contiguous",),
        crowd=FRUGAL["crowd"],
        largest=66,
    )
)
def test_views_equal_copies(problem: AttentionCase):
    """Views of every kind of array: (B, S, H, D), (B, H, Sq), and arrays of options."""
    arrays, options = inputs(problem)
    options["deterministic"] = True
    *rows, lse = arrays
    views = {"lse": lse, "dlse": options["dlse"], "bias": options.get("bias")}
    views = {name: _reversed_and_strided(x) for name, x in views.items() if x is not None}
    if "sinks" in options:
        views["sinks"] = np.repeat(options["sinks"], 2)[::2]
    of_views = run((*rows, views.pop("lse")), {**options, **views}, "flash")
    options = {name: value for name, value in options.items() if name != "deterministic"}
    assert_as_good(of_views, arrays, options)


def assert_as_good(actual: dict[str, np.ndarray], arrays: Arrays, options: dict[str, Any]) -> None:
    """As near to the reference as gradients of copies.

    Scalar and vector loads are two programs, in which a multiplication and an addition may be
    fused or not: a dS half way between two float16 then rounds the other way.
    """
    ratios = error_ratios(actual, arrays, options)
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


@pytest.mark.parametrize("implementation", ["flash", "naive"])
@examples(3, deep=8)
@given(
    data=st.data(),
    accumulate=st.booleans(),
    given_names=st.sets(st.sampled_from(GRADIENTS), min_size=1),
)
def test_grads_are_written_into_any_strides(implementation, data, accumulate, given_names):
    """Every item written or added to, nothing next to them; added before the one rounding."""
    problem = data.draw(
        attention_problems(
            head_dims=((24, 40),), dtypes=("float16", "float32"), options=("causal",),
            option_sets=SETS if implementation == "flash" else ({},), largest=66, **FRUGAL,
        )
    )  # fmt: skip
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
        *map(KERNELS.put, arrays), **placed(options), grads=grads, accumulate=accumulate,
        deterministic=True, implementation=implementation,
    )  # fmt: skip
    replaced = {}
    for name, gradient in fetched(returned).items():
        if name in views:
            assert getattr(returned, name) is views[name]
        if not (accumulate and name in views):
            replaced[name] = gradient
    assert_as_good({**expected, **replaced}, arrays, options)
    if accumulate:
        check_accumulated(fetched(returned), before, arrays, options)
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


@pytest.mark.parametrize("implementation", ["flash", "naive"])
def test_accumulating_rounds_once(implementation: str):
    """An addend below half a unit of what is there would vanish if it were rounded first."""
    problem = AttentionCase(B=1, Sq=3, Sk=1, H=1, G=1, D=24, Dv=40, dtype="float16")
    (_, *arrays), _ = inputs(problem)
    dout = np.full_like(arrays[3], 2.0**-12)
    dv = KERNELS.put(np.ones((1, 1, 1, 40), np.float16))
    cupyattn.attention_backward(
        *map(KERNELS.put, (dout, *arrays)), accumulate=True, grads=AttentionGrads(dv=dv),
        implementation=implementation,
    )  # fmt: skip
    assert_array_equal(KERNELS.get(dv), np.full((1, 1, 1, 40), np.float16(1 + 3 * 2.0**-12)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "empty",
    [{"B": 0}, {"Sq": 0}, {"Sk": 0}, {"Sq": 0, "Sk": 0}, {"H": 0, "G": 0}, {"H": 0}],
    ids=str,
)
def test_empty_problems_have_gradients_of_zero(empty: dict[str, int], accumulate: bool):
    extents = {"B": 2, "Sq": 3, "Sk": 5, "H": 4, "G": 2, "D": 24, "Dv": 40, **empty}
    problem = AttentionCase(
        **extents,
        dtype="float16",
        options=(("causal", True), ("bias", ((extents["Sk"],), "float32"))),
    )
    arrays, options = inputs(problem)
    options["sinks"] = np.zeros(extents["H"], np.float32)
    of = shaped_like_inputs(arrays, options)
    grads = AttentionGrads(*(KERNELS.put(np.full_like(of[name], 0.5)) for name in GRADIENTS))
    found = run(arrays, options, "flash", grads=grads, accumulate=accumulate)
    for name, gradient in found.items():
        if name == "dsinks" and extents["B"] * extents["Sq"]:
            continue  # the sink is there without keys
        assert gradient.shape == of[name].shape
        assert (gradient == (0.5 if accumulate else 0)).all(), name


@pytest.mark.parametrize("deterministic", [*deep(False), True])
@pytest.mark.parametrize(
    "head_dims", [(64, 64), *deep(((40, 24),), ((80, 72),), ((136, 192),))], ids=str
)
@examples(3, deep=5)
@given(
    keys=st.sampled_from([132, 4, 20, 64, 100, 128]),  # the first is always tried
    data=st.data(),
    batches=st.sampled_from(wider([2], [1])),
    masked=st.sampled_from(wider([True], [False])),
    causal=st.booleans(),
    accumulate=st.booleans(),
)
def test_bias_and_mask_read_four_keys_at_a_time(
    head_dims: tuple[int, int],
    deterministic: bool,
    keys: int,
    data: st.DataObject,
    batches: int,
    masked: bool,
    causal: bool,
    accumulate: bool,
):
    """Keys beyond a tile, rows beyond Sq, a dbias that is stored, added to and summed."""
    head_dim, head_dim_v = head_dims
    kinds = wider(["float16"], ["float32", None])  # None: a mask alone
    bias_dtype = data.draw(st.sampled_from(kinds))
    drawn: dict[str, Any] = {"causal": causal}
    if bias_dtype is not None:
        drawn["bias"] = ((batches, 2, 70, keys), bias_dtype)
    if masked or bias_dtype is None:
        drawn["mask"] = (70, keys)
    problem = AttentionCase(
        B=2, Sq=70, Sk=keys, H=2, G=1, D=head_dim, Dv=head_dim_v, dtype="float16",
        options=tuple(drawn.items()),
    )  # fmt: skip
    if not accumulate or bias_dtype is None:
        check(problem, "flash", deterministic=deterministic)
        return
    arrays, options = inputs(problem)
    dbias = np.full_like(options["bias"], 0.5)
    before = {"dbias": dbias.astype(np.float64)}
    grads = AttentionGrads(None, None, None, KERNELS.put(dbias), None)
    found = run(arrays, options, "flash", grads=grads, accumulate=True, deterministic=deterministic)
    check_accumulated({"dbias": found["dbias"]}, before, arrays, options)


def without_digits() -> st.SearchStrategy[dict[str, Any]]:
    """Options of scores so large that a float32 lse cannot tell them apart."""
    sizes = st.floats(1e7, 2.0**127) | st.sampled_from([1e10, 2.0**60])
    rows = st.tuples(sizes, st.sampled_from([-1, 1])).map(np.prod)
    lowest = st.just(float(np.finfo(np.float32).min))
    bias = st.lists(rows | lowest | st.just(0.0), min_size=40, max_size=40)
    biases = bias.map(lambda x: np.repeat(np.array(x, np.float32)[:, None], 72, axis=1))
    sinks = st.just(np.array([1e10, -1e10], np.float32))
    slopes = st.just(np.array([0.5, 2], np.float32))
    offsets = st.sampled_from([-(2**60), -(2**40), 2**60])
    plain = [{"bias": biases}]
    others = [{"bias": biases, "sinks": sinks}, {"alibi_slopes": slopes, "q_offset": offsets}]
    return st.one_of(*map(st.fixed_dictionaries, wider(plain, others)))


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@examples(4)
@given(options=without_digits())
def test_no_weight_exceeds_one_where_lse_has_no_digits(dtype, deterministic, options):
    problem = AttentionCase(B=1, Sq=40, Sk=72, H=2, G=2, D=24, Dv=40, dtype=dtype)
    out, lse = reference.attention(*problem.arrays(), **options)
    results = out.astype(dtype), lse.astype(np.float32)
    dout, _ = problem.gradients()
    arrays = (dout, *problem.arrays(), *results)
    # On a GPU, where nobody reads values, slopes that are refused here reach the kernels.
    with mock.patch.object(values, "MAX_ALIBI", math.inf):
        grads = run(arrays, options, "flash", deterministic=deterministic)
    for name, gradient in grads.items():
        assert np.isfinite(gradient).all(), name
    assert (np.abs(grads["dv"]) <= 1.01 * np.abs(dout.astype(np.float64)).sum(1)[:, None]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_row_with_the_lowest_bias_on_every_key_gives_zero_gradients(dtype: str, broadcast: bool):
    """In log2 its lse is -inf, as that of a row without keys. A sink of -inf has weight 0 too."""
    problem = AttentionCase(B=1, Sq=5, Sk=9, H=2, G=2, D=24, Dv=40, dtype=dtype)
    bias = np.zeros((5, 1 if broadcast else 9), np.float32)
    bias[2] = np.finfo(np.float32).min
    options = {"bias": bias, "sinks": np.full(2, -np.inf, np.float32)}
    out, lse = reference.attention(*problem.arrays(), **options)
    dout, _ = problem.gradients()
    out[:, 2] = 0
    arrays = (dout, *problem.arrays(), out.astype(dtype), lse.astype(np.float32))
    grads = run(arrays, options, "flash")
    dout[:, 2] = 0
    others = run(arrays, options, "flash")
    assert not grads["dq"][:, 2].any()
    assert not grads["dbias"][2].any()
    assert not grads["dsinks"].any()
    assert_allclose(grads["dk"], others["dk"], rtol=2e-3, atol=1e-4)
    assert_allclose(grads["dv"], others["dv"], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_scores_up_to_the_largest_float16_and_beyond(deterministic: bool):
    """Two keys of weight 1/2: ds = +-32 dout, and dq a 2048th of it."""
    q, ones = np.zeros((1, 1, 1, 64), np.float16), np.ones((1, 1, 1, 64), np.float16)
    k, v = np.concatenate([ones * 2.0**-8, q], 1), np.concatenate([ones, -ones], 1)
    k, v = k.astype(np.float16), v.astype(np.float16)
    lse = np.full((1, 1, 1), np.log(2), np.float32)
    for dout in (2046, -2046, 2100, 65504):
        arrays = ((dout * ones).astype(np.float16), q, k, v, q, lse)
        dq = run(arrays, {}, "flash", deterministic=deterministic)["dq"]
        np.testing.assert_allclose(dq, 32 * dout / 2048, rtol=2e-3)


def test_more_rows_than_the_scratch_counts_raise_before_anything_is_allocated():
    """2^16 sequences of 2^10 heads of 64 rows, all of one row in memory."""
    one = KERNELS.put(np.zeros((1, 1, 1, 1), np.float16))
    rows, keys = (KERNELS.xp.broadcast_to(one, (2**16, n, h, 1)) for n, h in ((64, 2**10), (1, 1)))
    lse = KERNELS.put(np.zeros((1, 1, 64), np.float32))
    lse = KERNELS.xp.broadcast_to(lse, (2**16, 2**10, 64))
    with pytest.raises(ValueError, match="up to 4294967295 rows together"):
        cupyattn.attention_backward(rows, rows, keys, keys, rows, lse)
