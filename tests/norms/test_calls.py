"""The norms' kernels: results within the bounds of the reference, and their memory accesses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray
from support.devices import KERNELS
from support.search import deep, examples, wider

import cupyattn
from cupyattn import LayerNormGrads, RMSNormGrads, reference
from cupyattn.emulator import Report
from cupyattn.ops.norms.kernels import BACKWARD_ROWS, FORWARD_ROWS
from cupyattn.testing import NormCase, expected

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

VIEWS = ("contiguous", "sliced", "transposed", "reversed", "broadcast")
Array = NDArray[Any]


@dataclass(frozen=True)
class NormProblem(NormCase):
    """A call of a norm and of its backward, run by the kernels."""

    def forward(self) -> tuple[Array, ...]:
        """Return the kernels' out, the sum or x, mean (None if not centred) and rstd."""
        put = {name: _put(self.array(name)) for name in ("x", "weight", "bias", "residual")}
        options = {"residual": put["residual"], "eps": self.eps, "return_stats": True}
        if self.centred:
            found = cupyattn.layer_norm(put["x"], put["weight"], put["bias"], **options)
        else:
            options["weight_offset"] = self.weight_offset
            out, *rest = cupyattn.rms_norm(put["x"], put["weight"], **options)
            found = (out, *rest[:-1], None, rest[-1])
        if put["residual"] is None:
            found = (found[0], put["x"], *found[1:])
        return tuple(None if array is None else KERNELS.get(array) for array in found)

    def backward(self, total: Array, mean: Array | None, rstd: Array, **options: Any) -> Any:
        """The gradients that the kernels give."""
        dout, weight, bias, more = map(self.array, ("dout", "weight", "bias", "dtotal"))
        options["dtotal"] = _put(more)
        start = _put(dout), _put(total), _put(weight)
        if self.centred:
            options["bias"] = _put(bias)
            return cupyattn.layer_norm_backward(*start, _put(mean), _put(rstd), **options)
        options["weight_offset"] = self.weight_offset
        return cupyattn.rms_norm_backward(*start, _put(rstd), **options)


def _put(array: Array | None) -> Any:
    return None if array is None else KERNELS.put(array)


def forward_ratios(problem: NormProblem, found: tuple[Array, ...]) -> dict[str, float]:
    """The largest error of each result of the forward, over its bound."""
    options = {**problem.keywords(), "return_stats": True}
    absent = {"total": "residual" not in problem.given, "mean": not problem.centred}
    x, *others = problem.arrays()
    x = found[1] if absent["total"] else x
    want = expected(problem.function, x, *others, **options)
    results = zip(("out", "total", "mean", "rstd"), found, strict=True)
    named = [each for each in results if not absent.get(each[0])]
    return {
        name: reference.error_ratio(result, *each)
        for (name, result), *each in zip(named, *want, strict=True)
    }


def backward_ratios(
    problem: NormProblem, total: Array, mean: Array | None, rstd: Array, found: Any
) -> dict[str, float]:
    """Return the error of each gradient divided by its bound, for the backward's arguments."""
    dout, dtotal, weight, bias = map(problem.array, ("dout", "dtotal", "weight", "bias"))
    if problem.centred:
        kind, backward = LayerNormGrads, cupyattn.layer_norm_backward
        want = expected(backward, dout, total, weight, mean, rstd, bias=bias, dtotal=dtotal)
    else:
        kind, backward = RMSNormGrads, cupyattn.rms_norm_backward
        offset = problem.weight_offset
        want = expected(backward, dout, total, weight, rstd, weight_offset=offset, dtotal=dtotal)
    assert type(found) is kind
    ratios = {}
    for name, gradient, right, bound in zip(kind._fields, found, *want, strict=True):
        assert (gradient is None) == (right is None), name
        if gradient is not None:
            ratios[name] = reference.error_ratio(KERNELS.get(gradient), right, bound)
    return ratios


def ratios(problem: NormProblem) -> dict[str, float]:
    """Return errors divided by bounds of forward and backward: at most 1 for correct kernels."""
    forward = problem.forward()
    gradients = problem.backward(*forward[1:])
    return forward_ratios(problem, forward) | backward_ratios(problem, *forward[1:], gradients)


@st.composite
def norm_problems(
    draw: st.DrawFn,
    *,
    kinds: tuple[tuple[str, bool, tuple[str, ...]], ...],
    lengths: Any,
    views: tuple[str, ...] = VIEWS,
) -> NormProblem:
    """Problems of these kinds (dtype, centred, optional arrays), of few and many rows."""
    dtype, centred, arrays = draw(st.sampled_from(kinds))
    outer = draw(st.one_of(st.integers(0, 3), st.integers(0, 40)))
    return NormProblem(
        shape=(outer, draw(st.integers(0, 4)), draw(lengths)),
        dtype=dtype,
        centred=centred,
        given=arrays,
        view=draw(st.sampled_from(views if outer else ("contiguous",))),
        mean=draw(st.sampled_from((0.0, 100.0))),
        spread=draw(st.sampled_from((1.0, 8.0, 1e-3))),
        weight_offset=0.0 if centred else draw(st.sampled_from((0.0, 1.0))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


LAYER, RMS = True, False
ALL = ("weight", "bias", "residual")
KINDS = wider(
    (("float16", LAYER, ALL), ("float32", RMS, ("weight", "residual"))),
    (("float32", LAYER, ("weight",)), ("bfloat16", RMS, ())),
)

# Rows that fit a warp, a CTA, a CTA with several row segments, and rows that are read twice; with
# vector and scalar loads. There are enough rows for each CTA to process several.
CASES = [
    (70, 129, "bfloat16", LAYER, ALL),
    (37, 1000, "float32", RMS, ()),
    (11, 2048, "float16", LAYER, ALL),
    (3, 16_385, "float16", LAYER, ("weight",)),  # one item in the last row segment
]
# The other configurations of both tables.
OTHERS = [
    (11, 2056, "float16", LAYER, ("weight", "bias")),
    (150, 1, "float32", LAYER, ("weight", "bias")),
    (150, 24, "float16", RMS, ("weight", "residual")),
    (37, 768, "float16", LAYER, ("weight", "bias")),
    (19, 1032, "bfloat16", RMS, ("weight", "residual")),
    (11, 4100, "float32", LAYER, ALL),
    (5, 8200, "float16", RMS, ("weight", "bias")),
    (5, 16_400, "float32", LAYER, ALL),
]
LIMITS = sorted({limit for rows in (FORWARD_ROWS, BACKWARD_ROWS) for limit in rows[75] if limit})
STEPS = (-8, -1, 0, 8)
# Half of the kinds at each step, the other half there at the next limit.
AROUND = [
    (9, limit + step, dtype, centred, arrays)
    for i, limit in enumerate(LIMITS)
    for j, step in enumerate(STEPS)
    for dtype, centred, arrays in KINDS[(i + j) % 2 :: 2]
] + [(3, 65_536, "float16", LAYER, ALL), (2, 200_000, "float32", RMS, ALL)]


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "centred", "arrays"), [*CASES, *deep(*OTHERS, *AROUND)]
)
def test_each_configuration_is_within_bounds(rows, length, dtype, centred, arrays):
    arrays = arrays if centred else tuple(name for name in arrays if name != "bias")
    problem = NormProblem((rows, 1, length), dtype, centred, arrays, weight_offset=1.0 - centred)
    found = ratios(problem)
    assert max(found.values()) <= 1, found


@examples(4)
@given(norm_problems(kinds=KINDS, lengths=st.sampled_from((0, 1, 7, 24, 40))))
def test_within_bounds_of_the_reference(problem: NormProblem):
    found = ratios(problem)
    assert max(found.values()) <= 1, found


@examples(3)
@given(
    norm_problems(
        kinds=KINDS[:1], lengths=st.sampled_from((24, 40)), views=("transposed", "reversed")
    )
)
def test_views_give_what_copies_give(problem: NormProblem):
    """Bits are equal where rows are read in vectors."""
    copy = replace(problem, view="contiguous")
    for view_result, copy_result in zip(problem.forward(), copy.forward(), strict=True):
        assert_array_equal(view_result, copy_result)
    forward = copy.forward()[1:]
    for view_result, copy_result in zip(
        problem.backward(*forward), copy.backward(*forward), strict=True
    ):
        if view_result is not None and view_result.ndim > 1:  # sums are in another order
            assert_array_equal(KERNELS.get(view_result), KERNELS.get(copy_result))


@pytest.mark.parametrize("length", [100, 16_400, *deep(2056)])
def test_large_mean_with_small_variance_keeps_its_digits(length):
    """Mean 1e4, variance 1e-4: seven digits of x hold four of the deviations, and all count."""
    problem = NormProblem((5, 1, length), mean=1e4, spread=1e-2, eps=0.0)
    found = problem.forward()
    assert max(forward_ratios(problem, found).values()) <= 1
    x = problem.array("x").astype(np.float64)
    exact = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    assert np.abs(found[0] - exact).max() < 1e-4
    gradients = problem.backward(*found[1:])
    assert max(backward_ratios(problem, *found[1:], gradients).values()) <= 1
    statistics = {"mean": x.mean(-1), "rstd": 1 / x.std(-1)}  # not as float32 rounds them
    right, _, _ = reference.norm_backward(problem.array("dout"), x, **statistics)
    assert np.abs(KERNELS.get(gradients.dx) - right).max() < 1e-5 * np.abs(right).max()


def test_outlier_with_small_variance_is_within_bounds():
    problem = NormProblem((3, 1, 768), spread=1e-3, eps=0.0)
    x = KERNELS.put(np.where(np.arange(768) == 0, 1e3, problem.array("x")).astype(np.float32))
    out, mean, rstd = map(KERNELS.get, cupyattn.layer_norm(x, eps=0.0, return_stats=True))
    found = forward_ratios(problem, (out, KERNELS.get(x), mean, rstd))
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("length", [24, *deep(1000, 20_000)])
def test_constant_zero_and_non_finite_rows(length):
    x = np.random.default_rng(0).standard_normal((6, length)).astype(np.float32)
    x[0], x[1] = 0, 1234.567
    x[2, length // 2], x[3, 0], x[4, -1] = np.nan, np.inf, -np.inf
    weight = np.full(length, 2, np.float32)
    placed = KERNELS.put(x), KERNELS.put(weight)
    out, mean, rstd = map(KERNELS.get, cupyattn.layer_norm(*placed, return_stats=True))
    assert not out[0].any()
    assert np.abs(out[1]).max() < 1e-3
    np.testing.assert_allclose(rstd[:2], 1e-5**-0.5, rtol=1e-5)
    np.testing.assert_allclose(mean[:2], [0, 1234.567], rtol=1e-6)
    for each in (out, mean, rstd):
        assert np.isnan(each[2:5]).all()
        assert np.isfinite(each[5]).all()
    out = KERNELS.get(cupyattn.rms_norm(*placed))
    assert not out[0].any()
    np.testing.assert_allclose(out[1], 2, rtol=1e-5)
    assert np.isnan(out[2]).all()
    assert [np.isnan(row).sum() for row in out[3:]] == [1, 1, 0]  # inf / inf, and 0 / inf


@pytest.mark.parametrize("norm", [cupyattn.layer_norm, cupyattn.rms_norm])
def test_squares_beyond_float32_give_the_documented_results(norm):
    """Too large squares give zeros; too small ones leave eps alone."""
    x = np.tile(np.array([[-1, 1]], np.float32), 32)
    with cupyattn.backend("emulator"):
        found = {size: norm(x * np.float32(size), eps=0.0) for size in (1e18, 1e-18, 3e19)}
        tiny = norm(x * np.float32(4e-20), eps=2e-38)
    for size in (1e18, 1e-18):
        np.testing.assert_allclose(found[size], norm(x, eps=0.0), rtol=1e-5)
    assert_array_equal(found[3e19], np.zeros((1, 64)))
    expected = x * (4e-20 / 2e-38**0.5)  # 4% less with the mean square, 1.6e-39
    np.testing.assert_allclose(tiny, expected, rtol=1e-2)


def test_sum_beyond_float32_gives_nan():
    """The documentation of layer_norm names this result."""
    x = KERNELS.put(np.full((1, 64), 1e38, np.float32))
    assert np.isnan(KERNELS.get(cupyattn.layer_norm(x))).all()


def test_empty_rows_and_no_rows():
    out, mean, rstd = cupyattn.layer_norm(
        KERNELS.put(np.zeros((3, 0), np.float32)), eps=0.25, return_stats=True
    )
    assert out.shape == (3, 0)
    assert_array_equal(KERNELS.get(mean), np.zeros(3))
    assert_array_equal(KERNELS.get(rstd), np.full(3, 2))
    none = KERNELS.put(np.zeros((0, 24), np.float32))
    weight, empty = KERNELS.put(np.ones(24, np.float32)), KERNELS.put(np.zeros(0, np.float32))
    grads = cupyattn.layer_norm_backward(none, none, weight, empty, empty, bias=weight)
    assert grads.dx.shape == (0, 24)
    assert not KERNELS.get(grads.dweight).any()
    assert not KERNELS.get(grads.dbias).any()


def test_gradients_repeat_their_bits_and_accumulate():
    problem = NormProblem((37, 1, 40), "float16", LAYER, ALL)
    _, *saved = problem.forward()
    first, second = (problem.backward(*saved) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert KERNELS.get(one).tobytes() == KERNELS.get(other).tobytes()
    there = LayerNormGrads(*(KERNELS.put(np.full(g.shape, 2, g.dtype)) for g in first))
    added = problem.backward(*saved, grads=there, accumulate=True)
    for one, other, given_array in zip(first, added, there, strict=True):
        assert other is given_array
        np.testing.assert_allclose(
            KERNELS.get(other).astype(np.float64), KERNELS.get(one) + 2.0, rtol=2e-3, atol=4e-3
        )
    anew = problem.backward(*saved, grads=LayerNormGrads(dweight=there.dweight), accumulate=True)
    assert_array_equal(KERNELS.get(anew.dx), KERNELS.get(first.dx))


def test_given_workspace_and_grads_are_used():
    problem = NormProblem((37, 1, 40), "float32", RMS, ("weight",))
    _, *saved = problem.forward()
    expected = problem.backward(*saved)
    grads = RMSNormGrads(*(KERNELS.put(np.full(g.shape, 7, g.dtype)) for g in expected))
    with pytest.raises(ValueError, match=r"workspace has 8 bytes; this call needs \d+"):
        problem.backward(*saved, grads=grads, workspace=KERNELS.put(np.zeros(8, np.uint8)))
    room = KERNELS.put(np.zeros(2**16, np.uint8))
    found = problem.backward(*saved, grads=grads, workspace=room)
    for one, other, given_array in zip(expected, found, grads, strict=True):
        assert other is given_array
        assert_array_equal(KERNELS.get(one), KERNELS.get(other))


@pytest.mark.parametrize("length", [40, 16_400])
def test_out_that_is_x_and_residual_gives_the_same_bits(length):
    """out may be x, and the sum may be the residual."""
    problem = NormProblem((5, 1, length), "float16", LAYER, ALL)
    expected = problem.forward()
    x, residual, weight, bias = (
        KERNELS.put(problem.array(name)) for name in ("x", "residual", "weight", "bias")
    )
    out, total = cupyattn.layer_norm(x, weight, bias, residual=residual, out=(x, residual))
    assert out is x
    assert total is residual
    assert_array_equal(KERNELS.get(x), expected[0])
    assert_array_equal(KERNELS.get(residual), expected[1])


def reported(problem: NormProblem) -> Report:
    """Run forward and backward, and return the emulator's report."""
    names = ("x", "weight", "bias", "residual", "dout")
    x, weight, bias, residual, dout = map(problem.array, names)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        _, total, mean, rstd = cupyattn.layer_norm(
            x, weight, bias, residual=residual, return_stats=True
        )
        cupyattn.layer_norm_backward(
            dout, total, weight, mean, rstd, bias=bias, dtotal=problem.array("dtotal")
        )
    return report


@pytest.mark.parametrize(
    ("rows", "length", "dtype"),
    [(11, 2048, "float16"), *deep((37, 768, "float16"), (37, 64, "float32"), (5, 8192, "float32"))],
)
def test_rows_in_registers_use_whole_sectors_without_bank_conflicts(rows, length, dtype):
    report = reported(NormProblem((rows, 1, length), dtype, given=ALL))
    assert report.sector_efficiency == 1.0
    assert report.bank_conflict_ways == 1.0
    wide = [
        a for a in report.accesses if a.space == "global" and a.instruction.opcode[-6:] == "v4.u32"
    ]
    assert len(wide) >= 8  # x, residual, weight, bias, out and total; dout, x, dtotal, weight, dx
    assert {access.worst for access in report.accesses if access.space == "shared"} == {1.0}


def test_rows_read_twice_use_half_sectors_for_column_sums_alone():
    """Column sums in global memory are read and written as eight neighbouring floats."""
    report = reported(NormProblem((5, 1, 20_480), "float16", given=ALL))
    assert report.bank_conflict_ways == 1.0
    wasteful = {a.efficiency for a in report.accesses if a.space == "global" and a.efficiency < 1}
    assert wasteful == {0.5}


def test_every_item_is_read_and_written_once():
    """x and residual are read, out and the sum are written, and nothing else."""
    problem = NormProblem((8, 1, 1024), "float16", given=("residual",))
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.layer_norm(problem.array("x"), residual=problem.array("residual"))
    sectors = sum(a.sectors for a in report.accesses if a.space == "global")
    assert sectors == 4 * 8 * 1024 * 2 / 32


def test_scalar_loads_where_rows_do_not_start_at_vectors():
    problem = NormProblem((5, 1, 40), "float16", given=("weight",), view="sliced")
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.rms_norm(problem.array("x"), np.ones(40, np.float16))
    opcodes = {a.instruction.opcode for a in report.accesses if a.space == "global"}
    assert not any("v4" in opcode for opcode in opcodes)


def test_options_that_equal_checked_ones_are_still_refused():
    """Checks of options are cached by value and type; an error has no other as its cause."""
    x = np.ones((2, 4), np.float32)
    cupyattn.rms_norm(x, eps=1.0, return_stats=True)
    for options in ({"return_stats": 1}, {"eps": [1.0]}, {"eps": True}, {"eps": "1"}):
        with pytest.raises(TypeError, match=f"^{next(iter(options))} ") as refused:
            cupyattn.rms_norm(x, **options)
        assert refused.value.__context__ is None


# Rows in registers, and those that need a second launch: long ones, rows that do not start at a
# vector, and blocks of 64 that would lie in several segments.
QUANTISED = (
    ("float16", 64, "contiguous"),
    ("float16", 1088, "contiguous"),
    ("float32", 64, "contiguous"),
    ("float16", 192, "sliced"),
    *deep(
        ("float16", 2112, "contiguous"),
        ("bfloat16", 4096, "transposed"),
        ("float32", 1024, "reversed"),
        ("float16", 16_448, "contiguous"),
        ("float32", 8192, "broadcast"),
        ("bfloat16", 96, "contiguous"),
    ),
)


@pytest.mark.parametrize(("dtype", "length", "view"), QUANTISED)
@pytest.mark.parametrize("centred", [True, False])
def test_quantised_norm_equals_the_norm_and_then_its_codes(dtype, length, view, centred):
    given = ("weight", "bias", "residual") if centred else ("weight",)
    case = NormProblem((3, 2, length), dtype, centred, given=given, view=view, mean=0.0)
    arrays = [_put(array) for array in case.arrays()]
    options = {**case.keywords(), "residual": _put(case.array("residual"))}
    rotation = 64 if length % 64 == 0 else None
    function = cupyattn.layer_norm if centred else cupyattn.rms_norm
    with KERNELS.running():
        want = function(*arrays, **options, return_stats=True)
        found = function(*arrays, **options, return_stats=True, quantize="int8", rotation=rotation)
        again = function(
            *arrays,
            **options,
            quantize="int8",
            rotation=rotation,
            out=(found[0], found[1]) if centred else found[0],
        )
    with cupyattn.backend("reference"):
        rows = cupyattn.quantize_rows(KERNELS.get(want[0]), rotation=rotation)
    assert (again[0] if centred else again) is found[0]
    assert (found[0].rotation, found[0].dtype) == (rotation, rows.dtype)
    assert_array_equal(KERNELS.get(found[0].codes), rows.codes)
    assert_array_equal(KERNELS.get(found[0].scales), rows.scales)
    for result, other in zip(found[1:], want[1:], strict=True):
        assert_array_equal(KERNELS.get(result), KERNELS.get(other))


def test_quantised_norm_is_one_launch_where_rows_fit():
    x = np.ones((4, 128), np.float16)
    one = cupyattn.explain(cupyattn.rms_norm, x, quantize="int8", rotation=64)
    two = cupyattn.explain(cupyattn.rms_norm, x.astype(np.float32), quantize="int8")
    assert [launch.kernel for launch in one.launches] == ["norm_forward"]
    assert [launch.kernel for launch in two.launches] == ["norm_forward", "quantize_rows"]


def test_vjp_refuses_a_quantised_norm():
    x = np.ones((2, 64), np.float32)
    with pytest.raises(TypeError, match="quantises the result of rms_norm"):
        cupyattn.vjp(lambda x: cupyattn.rms_norm(x, quantize="int8"), x)


def test_norm_of_a_row_that_is_not_finite_has_a_scale_that_is_nan():
    x = np.ones((3, 64), np.float16)
    x[1, 5] = np.nan
    with KERNELS.running():
        rows = cupyattn.rms_norm(KERNELS.put(x), quantize="int8", rotation=64)
    assert np.isnan(KERNELS.get(rows.scales)).tolist() == [False, True, False]
    assert KERNELS.get(rows.codes).any(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"quantize": "int4"}, ValueError, "quantize = 'int4'"),
        ({"quantize": 8}, TypeError, "quantize = 8"),
        ({"rotation": 64}, ValueError, "quantize = None, with a rotation"),
        ({"quantize": "int8", "rotation": 32}, ValueError, "rotation = 32"),
        ({"quantize": "int8", "rotation": 64}, ValueError, "rotation = 64 with K = 96"),
        ({"quantize": "int8", "out": np.ones((2, 96), np.float16)}, TypeError, "QuantizedRows"),
    ],
)
def test_refusals_of_quantised_norms(options, kind, says):
    with pytest.raises(kind, match=says):
        cupyattn.rms_norm(np.ones((2, 96), np.float16), **options)
