"""The error bounds against simulated float32 kernels: right ones stay within, mistakes do not.

The simulation of float16 kernels rounds P and dS to float16, as tensor cores have it; those of
float32 and bfloat16 keep float32.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from support.devices import DTYPES, dtype_of
from support.search import examples
from support.simulated_kernel import TILE, SimulatedKernel, precise_tanh
from support.strategies import AttentionProblem, attention_problems, softmax_problems

from cupyattn.reference import (
    attention,
    attention_backward,
    attention_backward_bound,
    attention_bound,
    error_ratio,
    softmax,
    softmax_backward,
    softmax_backward_bound,
    softmax_bound,
)


def forward_ratios(problem, kernel):
    """Largest error / bound of the kernel's out and lse."""
    arrays, options = problem.arrays(), problem.options()
    exact = attention(*arrays, **options)
    bounds = attention_bound(*arrays, dtype=problem.dtype, tile_k=TILE, **options)
    return dict(zip(("out", "lse"), map(error_ratio, kernel.forward(), exact, bounds), strict=True))


def backward_ratios(problem, kernel, ignore_dlse=False):
    """Largest error / bound of each of the kernel's gradients, from a rounded out and lse."""
    arrays, options = problem.arrays(), problem.options()
    dout, dlse = problem.gradients()
    out, lse = attention(*arrays, **options)
    results = out.astype(dtype_of(problem.dtype)), lse.astype(np.float32)
    exact = attention_backward(dout, *arrays, *results, dlse=dlse, **options)
    bounds = attention_backward_bound(
        dout, *arrays, *results, dtype=problem.dtype, dlse=dlse, **options
    )
    actual = kernel.backward(dout, *results, 0 * dlse if ignore_dlse else dlse)
    return {
        name: error_ratio(*triple)
        for name, *triple in zip(exact._fields, actual, exact, bounds, strict=True)
        if triple[1] is not None
    }


def check_within(ratios):
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


@examples(20, deep=60)
@given(attention_problems(head_dims=((8, 8), (4, 6)), largest=40, spreads=(1.0,)))
def test_in_float64_the_simulation_is_the_reference(problem):
    q, k, v = problem.arrays()
    dout, dlse = problem.gradients()
    options = problem.options()
    kernel = SimulatedKernel(problem, options, work=np.float64)
    out, lse = attention(q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for simulated, exact in zip(
        (*kernel.forward(), *kernel.backward(dout, out, lse, dlse)),
        (out, lse, *grads),
        strict=True,
    ):
        assert (simulated is None) == (exact is None)
        if exact is not None:
            np.testing.assert_allclose(simulated, exact, rtol=1e-9, atol=1e-10)


@examples(40, deep=200)
@given(attention_problems(dtypes=DTYPES))
def test_right_kernels_stay_within_their_bounds(problem):
    kernel = SimulatedKernel(problem, problem.options())
    check_within(forward_ratios(problem, kernel))
    check_within(backward_ratios(problem, kernel))


# (Sq, options). Mostly long enough for sums to matter; the worst case of a sum over queries of sums
# over features, dsinks, is far from the usual one when both are long.
USUAL = (
    (60, ()),
    (60, (("causal", True), ("softcap", 15.0))),
    (60, (("bias", ((4, 60, 150), "float32")),)),
    (60, (("dropout_p", 0.1), ("alibi_slopes", ((4,), "float32", 1)), ("window_size", (90, 30)))),
    (8, (("sinks", "float32"),)),
)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_bounds_are_near_the_errors_of_right_kernels(dtype, spread):
    """No result's largest error is beyond its bound, or below a 500th of it."""
    largest = {}
    for seed, (sq, drawn) in enumerate(USUAL):
        problem = AttentionProblem(
            1, sq, 150, 4, 2, 64, 64, dtype, spread=spread, seed=seed, drawn=drawn
        )
        kernel = SimulatedKernel(problem, problem.options())
        for ratios in (forward_ratios(problem, kernel), backward_ratios(problem, kernel)):
            for name, ratio in ratios.items():
                largest[name] = max(largest.get(name, 0.0), ratio)
    assert largest.keys() == {"out", "lse", "dq", "dk", "dv", "dbias", "dsinks"}
    for name, ratio in largest.items():
        assert 1 / 500 < ratio <= 1, (name, ratio)


def shifted_mask(kernel):
    offset = kernel.options.get("q_offset", kernel.problem.Sk - kernel.problem.Sq)
    kernel.options["q_offset"] = offset + 1


def dropped_tail_key(kernel):
    kernel.options.setdefault("q_offset", kernel.problem.Sk - kernel.problem.Sq)
    kernel.options["seqused_k"] = np.full(kernel.problem.B, kernel.problem.Sk - 1)


def missing_rescale(kernel):
    kernel.rescale = False


def wrong_scale(kernel):
    kernel.options["softmax_scale"] = kernel.problem.D**-0.5 * 1.01


def coarse_p(kernel):
    """P, and in the backward dS, with three bits less than the kernel's dtype, or thirteen."""
    kernel.p_dtype = ml_dtypes.bfloat16 if kernel.p_dtype == np.float16 else np.float16


def coarse_tanh(kernel):
    """tanh.approx: a relative error of 2**-11."""
    kernel.tanh = lambda x: precise_tanh(x) * np.float32(1 + 2.0**-11)


def ignored(name):
    def plant(kernel):
        neutral = {"bias": np.zeros_like, "sinks": lambda x: np.full_like(x, -np.inf)}
        value = kernel.options.pop(name)
        if name in neutral:
            kernel.options[name] = neutral[name](value)

    plant.__name__ = f"ignored_{name}"
    return plant


def other_seed(kernel):
    kernel.options["seed"] += 1


def missing_dropout_scale(kernel):
    replace_of_head(kernel, lambda head: {"kept": head.kept != 0})


def other_kv_head(kernel):
    q, k, v = kernel.arrays
    kernel.arrays = q, k[:, :, ::-1], v


def next_slope(kernel):
    kernel.options["alibi_slopes"] = np.roll(kernel.options["alibi_slopes"], 1)


def late_softcap_slope(kernel):
    """The backward forgets that the softcap has a slope."""
    replace_of_head(kernel, lambda head: {"slope": np.ones_like(head.slope)})


def dropped_delta(kernel):
    kernel.subtract_delta = False


def one_head_of_the_group(kernel):
    kernel.heads_summed = 1


def replace_of_head(kernel, change):
    head = kernel.head
    kernel.head = lambda b, h: head(b, h)._replace(**change(head(b, h)))


CAUSAL = ("causal", True)
DROPOUT = ("dropout_p", 0.2)
SOFTCAP = ("softcap", 50.0)
SINKS = ("sinks", "float32")
ALIBI = ("alibi_slopes", ((4,), "float32", 1))
BIAS = ("bias", ((2, 4, 50, 70), "float32"))

# The bug, and the options that let it show.
BUGS_OF_BOTH = (
    (shifted_mask, CAUSAL),
    (shifted_mask, ("window_size", (20, 9))),
    (dropped_tail_key,),
    (wrong_scale,),
    (coarse_p,),
    (coarse_tanh, SOFTCAP),
    (ignored("softcap"), SOFTCAP),
    (ignored("sinks"), SINKS),
    (ignored("bias"), BIAS),
    (ignored("rotary"), ("rotary", (70, 8))),
    (other_seed, DROPOUT),
    (missing_dropout_scale, DROPOUT),
    (other_kv_head,),
    (next_slope, ALIBI),
)
FORWARD_BUGS = (*BUGS_OF_BOTH, (missing_rescale,), (missing_rescale, CAUSAL))
BACKWARD_BUGS = (
    *BUGS_OF_BOTH,
    (dropped_delta,),
    (one_head_of_the_group,),
    (late_softcap_slope, SOFTCAP),
)


def with_bug(dtype, bug, *drawn):
    problem = AttentionProblem(2, 50, 70, 4, 2, 64, 64, dtype, seed=3, drawn=drawn)
    right, wrong = (SimulatedKernel(problem, problem.options()) for _ in range(2))
    bug(wrong)
    return problem, right, wrong


def name_of(case):
    return "-".join([case[0].__name__, *(name for name, _ in case[1:])])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", FORWARD_BUGS, ids=name_of)
def test_forward_bugs_are_rejected(dtype, case):
    problem, right, wrong = with_bug(dtype, *case)
    check_within(forward_ratios(problem, right))
    assert max(forward_ratios(problem, wrong).values()) > 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", BACKWARD_BUGS, ids=name_of)
def test_backward_bugs_are_rejected(dtype, case):
    problem, right, wrong = with_bug(dtype, *case)
    check_within(backward_ratios(problem, right))
    with np.errstate(over="ignore", invalid="ignore"):  # a wrong P may be beyond float16
        assert max(backward_ratios(problem, wrong).values()) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_dlse_is_rejected(dtype):
    problem, right, _ = with_bug(dtype, lambda kernel: None)
    assert backward_ratios(problem, right, ignore_dlse=True)["dq"] > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bug_in_one_element_is_rejected(dtype):
    """Each bound is of an element: one out of all that is off by twice its bound is found."""
    problem = AttentionProblem(1, 5, 6, 2, 1, 8, 8, dtype)
    arrays = problem.arrays()
    out, lse = attention(*arrays)
    out_bound, lse_bound = attention_bound(*arrays, dtype=dtype, tile_k=TILE)
    for exact, bound in ((out, out_bound), (lse, lse_bound)):
        assert (bound > 0).all()
        actual = exact.copy()
        index = tuple(n // 2 for n in exact.shape)
        actual[index] += 2 * bound[index]
        assert error_ratio(actual, exact, bound) == pytest.approx(2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("least", [-1e4, -65504.0, -3e38])
def test_masks_written_as_a_large_bias_do_not_blunt_the_bound(dtype, least):
    problem = AttentionProblem(1, 20, 40, 2, 1, 64, 64, dtype)
    q, k, v = problem.arrays()
    bias = np.where(np.arange(40) < 30, 0, least).astype(np.float32)
    dout, dlse = problem.gradients()
    out, lse = attention(q, k, v, bias=bias, sinks=[-np.inf, -1e30])
    out_bound, lse_bound = attention_bound(
        q, k, v, dtype=dtype, tile_k=TILE, bias=bias, sinks=[-np.inf, -1e30]
    )
    plain_out, plain_lse = attention_bound(q, k, v, dtype=dtype, tile_k=TILE, seqused_k=[30])
    assert (out_bound <= 1.1 * plain_out).all()
    assert (lse_bound <= 1.5 * plain_lse).all()
    given_results = out.astype(dtype), lse.astype(np.float32)
    grads = [
        attention_backward_bound(dout, q, k, v, *given_results, dtype=dtype, dlse=dlse, **options)
        for options in ({"bias": bias, "sinks": [-np.inf, -1e30]}, {"seqused_k": [30]})
    ]
    for bound, plain in zip(grads[0][:3], grads[1][:3], strict=True):
        assert (bound[:, :20] <= 1.1 * plain[:, :20]).all()
    assert np.isfinite(grads[0].dbias).all()
    assert np.isfinite(grads[0].dsinks).all()


@examples(20, deep=60)
@given(softmax_problems(dtypes=DTYPES))
def test_softmax_stays_within_its_bounds(problem):
    x, dout = problem.x(), problem.dout()
    m = x.astype(np.float32).max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(x.astype(np.float32) - np.where(np.isinf(m), 0, m))
    total = p.sum(axis=-1, keepdims=True)
    out = (p / np.where(total == 0, 1, total)).astype(x.dtype)
    assert error_ratio(out, softmax(x), softmax_bound(x, dtype=problem.dtype)) <= 1

    g, y = dout.astype(np.float32), out.astype(np.float32)
    dx = (y * (g - (g * y).sum(axis=-1, keepdims=True))).astype(x.dtype)
    bound = softmax_backward_bound(dout, out, dtype=problem.dtype)
    assert error_ratio(dx, softmax_backward(dout, out), bound) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_softmax_bugs_are_rejected(dtype):
    rng = np.random.default_rng(0)
    x, dout = (rng.standard_normal((50, 300)).astype(dtype) for _ in range(2))
    exact, bound = softmax(x), softmax_bound(x, dtype=dtype)
    no_tail = softmax(np.where(np.arange(300) == 299, -np.inf, x.astype(np.float64)))
    assert error_ratio(no_tail, exact, bound) > 1
    coarser = np.float16 if dtype == "float32" else ml_dtypes.bfloat16
    assert error_ratio(exact.astype(coarser), exact, bound) > 1
    out = exact.astype(dtype)
    exact, bound = softmax_backward(dout, out), softmax_backward_bound(dout, out, dtype=dtype)
    assert error_ratio(out * dout, exact, bound) > 1


def test_rows_without_keys_have_to_be_exact():
    problem = AttentionProblem(1, 3, 2, 2, 1, 8, 8, drawn=(CAUSAL,))
    arrays = problem.arrays()
    _, lse = attention(*arrays, causal=True)
    out_bound, lse_bound = attention_bound(*arrays, dtype="float32", tile_k=TILE, causal=True)
    assert (out_bound[0, 0] <= 2.0**-126).all()
    assert error_ratio(np.where(np.isinf(lse), -1e30, lse), lse, lse_bound) == np.inf
    assert error_ratio(lse, lse, lse_bound) == 0


def test_error_ratio_of_special_values():
    nan, inf = np.nan, np.inf
    assert error_ratio([nan, inf, 1.0], [nan, inf, 1.0], [nan, nan, 0.0]) == 0
    for wrong in ([0.0, inf, 1.0], [nan, -inf, 1.0], [nan, nan, 1.0], [nan, inf, nan]):
        assert error_ratio(wrong, [nan, inf, 1.0], [1.0, 1.0, 1.0]) == inf
    assert error_ratio([2.0], [1.0], [0.0]) == inf
    assert error_ratio([], [], []) == 0
    with pytest.raises(ValueError, match="pass arrays of one shape"):
        error_ratio([1.0, 1.0], [1.0], [1.0])


def test_unknown_dtype():
    q = np.ones((1, 1, 1, 1))
    with pytest.raises(ValueError, match="no error bounds for dtype 'float64'"):
        attention_bound(q, q, q, dtype=q.dtype, tile_k=8)
