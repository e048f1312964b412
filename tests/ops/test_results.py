"""Results of public functions: the reference rounded once, in the documented shapes and dtypes."""

from __future__ import annotations

import doctest
import pickle
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_array_equal
from support.devices import DTYPES, KERNELS, dtype_of, everywhere, unchanged
from support.search import deep
from support.strategies import attention_problems

import cupyattn
import cupyattn.functions
from cupyattn import attention, attention_backward, reference, softmax_backward
from cupyattn import softmax as softmax_forward
from cupyattn.ops.attention.bounds import cpu_attention_bound
from cupyattn.reference import error_ratio
from cupyattn.testing import AttentionCase, softmax_cases


def round_to(exact: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if np.dtype(dtype).name != "bfloat16":
            return exact.astype(dtype)
        # ml_dtypes rounds to float32 first. Of its result and both neighbours, the nearest.
        result = exact.astype(dtype)
        for direction in (-np.inf, np.inf):
            neighbour = np.nextafter(result, np.array(direction, dtype))
            nearer = np.abs(neighbour.astype(float) - exact) < np.abs(result.astype(float) - exact)
            result = np.where(nearer, neighbour, result)
        return result


@given(attention_problems(dtypes=DTYPES, largest=40))
def test_numpy_attention_is_within_its_bound_and_gradients_are_rounded_once(
    problem: AttentionCase,
):
    q, k, v = problem.arrays()
    options = problem.keywords()
    dout, dlse = problem.gradients()
    dtype = dtype_of(problem.dtype)
    exact_out, exact_lse = reference.attention(q, k, v, **options)
    with unchanged(dout, q, k, v, dlse, *options.values()):
        out, lse = attention(q, k, v, **options, return_lse=True)
        grads = attention_backward(dout, q, k, v, out, lse, **options, dlse=dlse)
    assert (out.dtype, lse.dtype) == (dtype, np.float32)
    out_bound, lse_bound = cpu_attention_bound(q, k, v, **options, dtype=dtype)
    assert error_ratio(out, exact_out, out_bound) <= 1
    assert error_ratio(lse, exact_lse, lse_bound) <= 1
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options, dlse=dlse)
    given_arrays = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias")}
    given_arrays["dsinks"] = options.get("sinks")
    for name, array in given_arrays.items():
        gradient = getattr(grads, name)
        if array is None:
            assert gradient is None
        else:
            assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
            assert_array_equal(gradient, round_to(getattr(exact, name), array.dtype))


@given(softmax_cases(dtypes=DTYPES))
def test_numpy_softmax_is_the_references_rounded_once(problem):
    (x,), dout = problem.arrays(), problem.dout()
    with unchanged(x, dout):
        out = softmax_forward(x)
        dx = softmax_backward(dout, out)
    assert (out.shape, out.dtype, dx.shape, dx.dtype) == (x.shape, x.dtype) * 2
    assert_array_equal(out, round_to(reference.softmax(x), x.dtype))
    assert_array_equal(dx, round_to(reference.softmax_backward(dout, out), x.dtype))


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("return_lse", [False, *deep(True)])
@pytest.mark.parametrize("dims", [(64, 64), *deep(((40, 24),), ((1, 3),))], ids=str)
def test_shapes_and_dtypes_of_results(side, dtype, return_lse, dims):
    problem = AttentionCase(B=2, Sq=5, Sk=7, H=6, G=2, D=dims[0], Dv=dims[1], dtype=dtype)
    arrays = [side.put(array) for array in problem.arrays()]
    with unchanged(*arrays):
        results = attention(*arrays, return_lse=return_lse, implementation="tiled")
    out, lse = results if return_lse else (results, None)
    assert type(out) is type(arrays[0])
    assert (out.shape, out.dtype) == ((2, 5, 6, dims[1]), dtype_of(dtype))
    assert out.flags.c_contiguous
    if return_lse:
        assert isinstance(results, tuple)
        assert type(lse) is type(arrays[0])
        assert (lse.shape, lse.dtype) == ((2, 6, 5), np.float32)
    y = softmax_forward(arrays[0])
    dx = softmax_backward(arrays[0], y)
    for result in (y, dx):
        assert type(result) is type(arrays[0])
        assert (result.shape, result.dtype) == (arrays[0].shape, arrays[0].dtype)


RNG = np.random.default_rng(0)


def arrays() -> list[np.ndarray]:
    shapes = ((2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 3))
    return [RNG.standard_normal(shape) for shape in shapes]


def test_results_and_gradients_are_float64():
    q, k, v = arrays()
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    grads = cupyattn.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    assert {grads.dq.dtype, grads.dk.dtype, grads.dv.dtype} == {np.dtype(np.float64)}
    x = RNG.standard_normal((3, 9))
    assert cupyattn.softmax(x).dtype == np.float64


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_gradients_are_those_of_finite_differences(name):
    """To 1e-8, which float32 results could not show."""
    options = {"bias": RNG.standard_normal((4, 5, 7)), "sinks": RNG.standard_normal(4)}
    given = dict(zip("qkv", arrays(), strict=True)) | options
    dout = RNG.standard_normal((2, 5, 4, 3))

    def loss(**changed: np.ndarray) -> float:
        q, k, v, *others = (given | changed).values()
        named = dict(zip(options, others, strict=True))
        return float((dout * cupyattn.attention(q, k, v, causal=True, **named)).sum())

    q, k, v = given["q"], given["k"], given["v"]
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True, **options)
    grads = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True, **options)
    direction = RNG.standard_normal(given[name].shape)
    step = 1e-5
    ahead = loss(**{name: given[name] + step * direction})
    after = loss(**{name: given[name] - step * direction})
    slope = (getattr(grads, f"d{name}") * direction).sum()
    assert abs((ahead - after) / (2 * step) - slope) <= 1e-8 * (1 + abs(slope))


def test_softmaxs_gradient_is_that_of_finite_differences():
    x, dout, direction = RNG.standard_normal((3, 4, 9))
    dx = cupyattn.softmax_backward(dout, cupyattn.softmax(x))
    step = 1e-5
    moved = cupyattn.softmax(x + step * direction) - cupyattn.softmax(x - step * direction)
    assert abs((dout * moved).sum() / (2 * step) - (dx * direction).sum()) <= 1e-9


def test_an_option_may_be_float64_only_beside_float64_arrays():
    q, k, v = (array.astype(np.float32) for array in arrays())
    with pytest.raises(TypeError, match=r"bias has dtype float64; allowed are float16, float32"):
        cupyattn.attention(q, k, v, bias=np.zeros((5, 7)))


@pytest.mark.nvrtc
def test_kernels_refuse_and_say_what_to_do():
    q, k, v = map(KERNELS.put, arrays())
    with KERNELS.running():
        with pytest.raises(TypeError, match=r"q has dtype float64 on a GPU.*astype\('float32'\)"):
            cupyattn.attention(q, k, v)
        with pytest.raises(TypeError, match=r"x has dtype float64 on a GPU.*NumPy arrays"):
            cupyattn.softmax(KERNELS.put(RNG.standard_normal((3, 9))))


CLASSES = [
    value
    for name in cupyattn.__all__
    if isinstance(value := getattr(cupyattn, name), type) and hasattr(cupyattn.functions, name)
]

DIFFERENTIABLE = [
    value
    for name in cupyattn.__all__
    if hasattr(value := getattr(cupyattn, name), "__wrapped__")
    and value.__globals__["__name__"] == "cupyattn.runtime.differentiable"
]


@pytest.mark.parametrize("public", CLASSES, ids=lambda public: public.__name__)
def test_public_classes_report_the_package_and_are_pickled(public):
    assert public.__module__ == "cupyattn"
    assert pickle.loads(pickle.dumps(public)) is public
    assert get_type_hints(public).keys() >= set(getattr(public, "_fields", ()))
    # Collected here: a class is not where its module's doctests are looked for.
    assert _failed_examples(public) == 0


@pytest.mark.parametrize("public", DIFFERENTIABLE, ids=lambda public: public.__name__)
def test_examples_of_differentiable_functions_run(public):
    """pytest does not collect them: the decorator's function is of another module."""
    assert _failed_examples(public) == 0


def _failed_examples(public: Any) -> int:
    examples = doctest.DocTestParser().get_doctest(public.__doc__, {}, public.__name__, None, None)
    ignored = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    return doctest.DocTestRunner(optionflags=ignored).run(examples).failed
